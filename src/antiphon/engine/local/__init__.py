"""antiphon's own engine: one model in this process, stepped by one thread, over paged KV."""
