"""An engine on another server: vLLM, or SGLang. The rows are kept here, their KV is kept there."""

from __future__ import annotations

from antiphon.engine.api import Capabilities

# What a VllmEngine can do. Its server finds the rows that it has computed before by their tokens, a block at a time.
CAPABILITIES = Capabilities.FORK | Capabilities.GRAMMAR | Capabilities.PREFILL_AHEAD
