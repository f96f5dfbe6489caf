"""An engine on another server: vLLM, or SGLang. The rows are kept here, their KV is kept there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from antiphon.engine.api import Capabilities

# What a VllmEngine can do. Its server finds the rows that it has computed before by their tokens, a block at a time.
CAPABILITIES = Capabilities.FORK | Capabilities.GRAMMAR | Capabilities.PREFILL_AHEAD

ServerKind = Literal["vllm", "sglang"]


@dataclass(frozen=True, slots=True)
class EngineServers:
    """The servers that an engine asks.

    - `kind`: what they speak. `urls`: their roots, as in `http://127.0.0.1:8000`; each serves the same model.
    - `key`: sent as a bearer token, "" for none. It is in no representation of this value.
    - `first_token_s`, `token_s`: seconds in which a generation's first token, and each further one, has to come.
    """

    kind: ServerKind
    urls: tuple[str, ...]
    key: str = field(default="", repr=False)
    first_token_s: float = 10.0
    token_s: float = 10.0
