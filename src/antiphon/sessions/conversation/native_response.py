"""One turn that a native model speaks, as the source of a response, and an answer that is due from the model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import anyio

from antiphon.contracts import ResponseChunk
from antiphon.errors import ModelError
from antiphon.events.conversation import CreateResponse

# Maximum units of silence fed after a commit or a request. In the last of them the model has to speak.
ANSWER_UNITS = 8
# Chunks of a response that may wait for its reader. At the limit, the model waits.
MAX_WAITING_CHUNKS = 64


@dataclass(eq=False, slots=True)
class DueResponse:
    """An answer that is due to the user.

    - `request`: the client's request. None if the answer is due because the user's turn was committed.
    - `answers`: whether the model has to speak. If false, only the open unit is padded.
    - `is_padded`: whether the unit that was open when the answer became due has been padded.
    - `units_left`: the number of silent units still to be fed after that unit.
    - `is_paced`: audio has arrived again, so silence is fed only when the clock says that a unit is due.
    """

    request: CreateResponse | None = None
    answers: bool = True
    is_padded: bool = False
    units_left: int = ANSWER_UNITS
    is_paced: bool = False


class NativeResponse:
    """One turn that a native model speaks: a `ResponseSource` that may begin without a request.

    `NativeTurns` puts chunks in while the model steps, and a response task reads them. `on_dropped` is called if the
    reader stops before the model has finished, and interrupts the model. `due` is the due answer that this turn gives,
    None if the model began to speak by itself.
    """

    def __init__(self, on_dropped: Callable[[], None], due: DueResponse | None = None) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[ResponseChunk](MAX_WAITING_CHUNKS)
        self._on_dropped = on_dropped
        self.due = due
        self._is_finished = False
        # Why the turn was interrupted, "" if it was not. If no request asked for the turn, and it was interrupted
        # before its response began, the client never gets it.
        self.cut_reason = ""
        self._failure: ModelError | None = None
        self.audio_s = 0.0
        self.num_units = 0

    @property
    def is_cut(self) -> bool:
        """Whether the turn was interrupted, by the user or by its reader."""
        return bool(self.cut_reason)

    async def put(self, chunk: ResponseChunk) -> None:
        """Add a chunk. Waits while 64 chunks wait for the reader. After the reader has stopped, the chunk is discarded
        without an error, so that the model's task continues.
        """
        try:
            await self._send.send(chunk)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            self._is_finished = True

    def end(self) -> None:
        """Mark the turn as finished by the model. The reader's stream ends after the waiting chunks, and a later `drop`
        does not interrupt the model. Idempotent.
        """
        self._is_finished = True
        self._send.close()

    def fail(self, message: str) -> None:
        """End the turn as failed: `stream` raises ModelError with this message after the waiting chunks."""
        self._failure = ModelError(message)
        self.end()

    async def stream(self) -> AsyncGenerator[ResponseChunk, None]:
        """Yield the turn's chunks in order, as the model produces them, until `end` is called. For one reader. Raises
        ModelError after `fail`. Any other failure of the model ends the session, through `NativeTurns.run`.
        """
        async for chunk in self._receive:
            yield chunk
        if self._failure:
            raise self._failure

    async def drop(self) -> None:
        """Stop reading. Discards waiting chunks, and interrupts an unfinished turn. Does not wait for the model, which
        ends the turn with its current step.
        """
        self._receive.close()
        if not self._is_finished:
            self._is_finished = True
            self._on_dropped()
