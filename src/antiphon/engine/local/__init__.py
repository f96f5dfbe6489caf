"""antiphon's own engine: one model in this process, stepped by one thread, over paged KV."""

from __future__ import annotations

from antiphon.engine.api import Capabilities

# The capabilities of a LocalEngine. GRAMMAR needs a tokenizer.
CAPABILITIES = ~Capabilities(0)
