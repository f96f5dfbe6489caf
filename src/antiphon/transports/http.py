"""HTTP code that hosts and doors share: body timeouts, responses that can be cut off, and a limit on log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import anyio
from starlette.background import BackgroundTask
from starlette.responses import StreamingResponse
from starlette.types import Send

# Minimum rate at which a body has to arrive.
MIN_BYTES_PER_S = 4096
# Maximum number of log lines in a window, and the window's length in seconds. Without a limit, a client without a key
# could fill the log.
REFUSED_LINES, REFUSED_WINDOW_S = 20, 60.0
AsgiMessage = MutableMapping[str, Any]


def in_time(receive: Callable[[], Awaitable[AsgiMessage]], timeout_s: float) -> Callable[[], Awaitable[AsgiMessage]]:
    """Return an ASGI `receive` that raises TimeoutError if its body takes too long.

    The timeout is `timeout_s`, plus a second for each MIN_BYTES_PER_S bytes that have arrived. Only the time spent
    waiting for the body counts, not the time that the reader spends on it.
    """
    num_bytes, waited_s = 0, 0.0

    async def received() -> AsgiMessage:
        nonlocal num_bytes, waited_s
        begun_s = time.monotonic()
        with anyio.fail_after(max(0.0, timeout_s + num_bytes / MIN_BYTES_PER_S - waited_s)):
            message = await receive()
        waited_s += time.monotonic() - begun_s
        num_bytes += len(message.get("body", b""))
        return message

    return received


class CutStream(StreamingResponse):
    """A streamed response that is cut off if its body fails. The client then sees that the response is incomplete.

    `failures`: the exceptions of the body that cut off the response. Other exceptions are raised. `on_failure` is
    called with each exception in `failures`.
    """

    def __init__(
        self,
        body: AsyncIterable[bytes],
        failures: type[Exception] | tuple[type[Exception], ...],
        on_failure: Callable[[Exception], None],
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
        background: BackgroundTask | None = None,
    ) -> None:
        super().__init__(body, status_code, headers, media_type, background)
        self._failures, self._on_failure = failures, on_failure

    async def stream_response(self, send: Send) -> None:
        """Send the head and the body. If the body fails, its end is not sent, and the server closes the connection."""
        try:
            await super().stream_response(send)
        except self._failures as error:
            self._on_failure(error)


class LineLimit:
    """Admits REFUSED_LINES log lines in each window of REFUSED_WINDOW_S, and counts the omitted lines."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._window_s = clock()
        self._admitted = self._unlogged = 0

    def admit(self) -> int | None:
        """Return how many lines were omitted since the last admitted line, or None if this line is omitted too."""
        if self._clock() >= self._window_s + REFUSED_WINDOW_S:
            self._window_s, self._admitted = self._clock(), 0
        if self._admitted >= REFUSED_LINES:
            self._unlogged += 1
            return None
        self._admitted += 1
        unlogged, self._unlogged = self._unlogged, 0
        return unlogged

    def warn(self, log: logging.Logger, text: str, *values: object) -> None:
        """Log a warning if it is admitted. It reports how many lines were omitted before it."""
        if (unlogged := self.admit()) is not None:
            log.warning(f"{text}%s", *values, f" unlogged={unlogged}" if unlogged else "")
