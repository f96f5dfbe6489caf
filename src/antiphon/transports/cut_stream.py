"""A response whose body may fail under way."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Mapping

from starlette.background import BackgroundTask
from starlette.responses import StreamingResponse
from starlette.types import Send


class CutStream(StreamingResponse):
    """A streamed response that is cut off where its body fails: its end is not sent, so the client sees that it is not
    whole.

    `failures`: the exceptions with which the body may fail; others are raised. `on_failure` is called with each.
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
        """Send the head and the body. Without the body's end, the server closes the connection."""
        try:
            await super().stream_response(send)
        except self._failures as error:
            self._on_failure(error)
