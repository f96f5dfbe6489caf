"""Resources shared equally between owners, which are API keys: places, threads and cache entries."""
