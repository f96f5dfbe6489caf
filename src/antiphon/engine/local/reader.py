"""The event loop's side of a generation: it receives the tokens that the model's thread delivers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from antiphon.engine.api import Finish, Sampling, Token
from antiphon.engine.generation import Generation
from antiphon.engine.local.step import MAX_UNREAD_TOKENS
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import ModelLost


class TokenReader:
    """Reads the tokens of one generation in the event loop in which it is created.

    `thread`: the model's thread. `params`, `start`, `group`: as in Generation. `kept`: the number of tokens that stay
    rows of the session, however the generation ends; the session sets it. `reason`: why the generation ended; None
    before its last tokens are read. `failed`: whether an error has ended it.
    """

    def __init__(self, thread: ModelThread, params: Sampling, start: int, group: int) -> None:
        self._thread, self._loop = thread, asyncio.get_running_loop()
        # Bound: a generation runs at most MAX_UNREAD_TOKENS and a group ahead of the reader. Without groups, all its
        # tokens come at once.
        self._queue: asyncio.Queue[tuple[Sequence[Token], Finish | Exception | None]] = asyncio.Queue()
        self.generation = Generation(params, self._deliver, start, group)
        self.kept, self.failed = 0, False
        self.reason: Finish | None = None

    async def next(self) -> Sequence[Token]:
        """Return the next tokens. Raises the error that ended the generation."""
        tokens, reason = await self._queue.get()
        if isinstance(reason, Exception):
            self.failed = True
            raise reason
        self.reason = reason
        generation = self.generation
        generation.consumed += len(tokens)
        if generation.delivered - generation.consumed + len(tokens) >= MAX_UNREAD_TOKENS:
            # The engine was waiting for this reader.
            self._thread.wake()
        return tokens

    def lost(self, error: ModelLost) -> None:
        """End the reading with an error, because the model's thread is lost. May be called from any thread."""
        call_in(self._loop, lambda: self._receive((), error))

    def _deliver(self, tokens: Sequence[Token], reason: Finish | Exception | None) -> None:
        self._thread.deliver(self._loop, self._receive, tokens, reason)

    def _receive(self, tokens: Sequence[Token], reason: Finish | Exception | None) -> None:
        self._queue.put_nowait((tokens, reason))


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Run `function` in a loop, from any thread. A no-op if the loop was closed meanwhile: nothing waits in it."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function)
