"""The answer to a turn that has not ended yet: begun on the chance that it will be asked for, heard of by nobody before."""

from __future__ import annotations

import anyio.abc

from antiphon.contracts import ConversationStream
from antiphon.sessions.conversation.response import ResponseGeneration, ResponseRequest


class PreemptiveResponse:
    """At most one answer under way that nobody has asked for."""

    def __init__(self) -> None:
        self._making: ResponseGeneration | None = None

    def __bool__(self) -> bool:
        return self._making is not None

    async def begin(self, talk: ConversationStream, wanted: ResponseRequest, group: anyio.abc.TaskGroup) -> None:
        """Begin what would answer `wanted`; what was begun before is dropped."""
        await self.drop()
        self._making = ResponseGeneration(talk, *wanted)
        group.start_soon(self._making.run)

    async def take(self, wanted: ResponseRequest) -> ResponseGeneration | None:
        """What was begun, if it is what is wanted now; anything else is dropped."""
        making = self._making
        if making and making.asked == wanted and not making.cancelled:
            self._making = None
            return making
        await self.drop()
        return None

    def forget(self) -> None:
        """It is not wanted. It ends within a step; who begins the next answer waits for that."""
        if self._making:
            self._making.cancel()

    async def drop(self) -> None:
        """End it, and wait for its end."""
        making, self._making = self._making, None
        if making:
            await making.drop()
