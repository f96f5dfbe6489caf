"""Engines on other servers (vLLM, SGLang). This process keeps the rows, and the servers keep their KV."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from antiphon.engine.api import Capabilities

# The capabilities of a VllmEngine. Its server finds previously computed rows by their tokens, one block at a time.
CAPABILITIES = Capabilities.FORK | Capabilities.GRAMMAR | Capabilities.PREFILL_AHEAD

ServerKind = Literal["vllm", "sglang"]


@dataclass(frozen=True, slots=True)
class EngineServers:
    """The servers of an engine.

    - `kind`: the software of the servers.
    - `urls`: their roots, such as `http://127.0.0.1:8000`. All serve the same model.
    - `key`: sent as a bearer token; "" for none. The `repr` omits it.
    - `first_token_s`, `token_s`: timeouts of a generation's first token and of each further token, in seconds.
    """

    kind: ServerKind
    urls: tuple[str, ...]
    key: str = field(default="", repr=False)
    first_token_s: float = 10.0
    token_s: float = 10.0
