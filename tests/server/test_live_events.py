"""Server-sent events with long pauses: their head and comments. The test ends each pause itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from antiphon.errors import AntiphonError, ModelError
from antiphon.server.http.disconnect import COMMENT, HEAD_S, SILENT_S, LiveEvents

SAID = b"data: 1\n\n"


class Scene:
    """One response. `sent` has the bodies that were sent, and `head` their head. `pauses` has the started pauses."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[object] = []
        self.pauses: list[tuple[float, asyncio.Future[None]]] = []
        self.closed = False
        self.task = asyncio.ensure_future(
            LiveEvents(self._read(), self._told, pause=self._pause)({}, self.incoming.get, self._send)
        )

    async def _read(self) -> AsyncGenerator[bytes, None]:
        try:
            while (event := await self.events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.closed = True

    def _told(self, error: AntiphonError | HTTPException) -> bytes:
        return b"failed"

    async def _pause(self, seconds: float) -> None:
        self.pauses.append((seconds, asyncio.get_running_loop().create_future()))
        await self.pauses[-1][1]

    async def _send(self, message: Any) -> None:
        self.sent.append("head" if message["type"] == "http.response.start" else message["body"])

    async def settle(self) -> list[object]:
        """Wait until all tasks are blocked, and return the bodies that were sent."""
        for _ in range(20):
            await asyncio.sleep(0)
        return self.sent

    async def passes(self, seconds: float) -> list[object]:
        """End the pause under way, which has to be one of `seconds`."""
        await self.settle()
        assert self.pauses[-1][0] == seconds
        self.pauses[-1][1].set_result(None)
        return await self.settle()


def test_the_head_and_comments_are_sent_while_nothing_comes() -> None:
    async def main() -> None:
        scene = Scene()
        assert await scene.settle() == []
        assert await scene.passes(HEAD_S) == ["head", COMMENT]
        assert await scene.passes(SILENT_S) == ["head", COMMENT, COMMENT]
        scene.events.put_nowait(SAID)
        assert await scene.passes(SILENT_S) == ["head", COMMENT, COMMENT, SAID]
        assert await scene.passes(SILENT_S) == ["head", COMMENT, COMMENT, SAID, COMMENT]
        scene.events.put_nowait(None)
        await scene.task
        assert scene.sent[-1] == b""
        assert scene.closed

    asyncio.run(main())


def test_events_that_come_at_once_have_no_comments() -> None:
    async def main() -> None:
        scene = Scene()
        for event in (SAID, SAID, None):
            scene.events.put_nowait(event)
        await scene.task
        assert scene.sent == ["head", SAID, SAID, b""]

    asyncio.run(main())


def test_a_failure_before_the_head_is_raised_and_one_after_it_is_the_last_event() -> None:
    async def main() -> None:
        early, late = Scene(), Scene()
        await late.passes(HEAD_S)
        for scene in (early, late):
            scene.events.put_nowait(ModelError("boom"))
        with pytest.raises(ModelError, match="boom"):
            await early.task
        await late.task
        assert (early.sent, late.sent) == ([], ["head", COMMENT, b"failed", b""])

    asyncio.run(main())


def test_a_client_that_leaves_ends_the_events() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.passes(HEAD_S)
        scene.incoming.put_nowait({"type": "http.disconnect"})
        await scene.task
        assert scene.closed
        assert scene.sent == ["head", COMMENT]

    asyncio.run(main())
