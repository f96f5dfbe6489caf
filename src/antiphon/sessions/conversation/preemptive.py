"""The preemptive response: begun when a turn may have ended, and hidden from the client until it is asked for."""

from __future__ import annotations

from collections import deque

import anyio.abc

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import ConversationStream
from antiphon.sessions.conversation.response import ResponseGeneration, ResponseRequest

MINUTE = 60 * SAMPLE_RATE_HZ


class PreemptiveBudget:
    """How many responses a conversation may begin in a minute before they are asked for; None: any number. Pure."""

    def __init__(self, max_per_minute: int | None) -> None:
        self._max = max_per_minute
        # When the last ones were begun, in samples of the microphone.
        self._begun: deque[int] = deque(maxlen=max_per_minute)

    def take(self, now: int) -> bool:
        """Return whether one may be begun at `now`, a number of samples at 16 kHz, and count it if so."""
        if self._max is None:
            return True
        if self._max == 0 or (len(self._begun) == self._max and now - self._begun[0] < MINUTE):
            return False
        self._begun.append(now)
        return True


class PreemptiveResponse:
    """Holds at most one response that is generated before it is asked for.

    It is true while it holds one, finished or not. What is held is used only for a request equal to its own, so a
    response that was begun on a wrong guess costs computation and is never heard.
    """

    def __init__(self) -> None:
        self._generation: ResponseGeneration | None = None

    def __bool__(self) -> bool:
        return self._generation is not None

    async def begin(self, stream: ConversationStream, request: ResponseRequest, group: anyio.abc.TaskGroup) -> None:
        """Begin to generate the response to `request` in a task of `group`. One that was begun before is ended first,
        and its end is waited for, because `stream` gives one response at a time.
        """
        await self.drop()
        self._generation = ResponseGeneration(stream, *request)
        group.start_soon(self._generation.run)

    async def claim(self, request: ResponseRequest) -> ResponseGeneration | None:
        """Hand over the response that was begun, where its request equals `request` and it was not cancelled; the
        caller then owns it. Otherwise end what was begun, wait for its end and return None.
        """
        generation = self._generation
        if generation and generation.request == request and not generation.cancelled:
            self._generation = None
            return generation
        await self.drop()
        return None

    def cancel(self) -> None:
        """Cancel what was begun, and return at once. It ends within one step of the model; the next `begin`, `claim` or
        `drop` waits for that.
        """
        if self._generation:
            self._generation.cancel()

    async def drop(self) -> None:
        """End what was begun and wait for its end, also when the caller is cancelled: the model's stream is free
        afterwards. Does nothing where nothing was begun.
        """
        generation, self._generation = self._generation, None
        if generation:
            await generation.drop()
