"""How long the body of a request may take to arrive, at a host and at a door."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import anyio

# Every byte that arrives gives its body more time: at this rate and above, a body may take as long as its size asks.
MIN_BYTES_PER_S = 4096
Message = MutableMapping[str, Any]


def in_time(receive: Callable[[], Awaitable[Message]], timeout_s: float) -> Callable[[], Awaitable[Message]]:
    """Return an ASGI `receive` that raises TimeoutError once its body was waited for too long.

    That is `timeout_s`, and a second more for each MIN_BYTES_PER_S that have arrived. The time in which nobody waits
    for the body, as whatever reads it is busy, is not its sender's.
    """
    num_bytes, waited_s = 0, 0.0

    async def received() -> Message:
        nonlocal num_bytes, waited_s
        begun_s = time.monotonic()
        with anyio.fail_after(max(0.0, timeout_s + num_bytes / MIN_BYTES_PER_S - waited_s)):
            message = await receive()
        waited_s += time.monotonic() - begun_s
        num_bytes += len(message.get("body", b""))
        return message

    return received
