"""A client that stops reading: what it is told is bounded, and after a while it is not attached any more."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import anyio
import pytest

from antiphon.protocols.resume.journal import Journal, ResumeToken
from antiphon.transports.attachment import Attachment
from antiphon.transports.outbox import Outbox

STALL_S, GRACE_S, MOST = 0.05, 0.1, 3


class Stalled:
    """A transport whose client keeps its connection and reads nothing after the first frame."""

    playback = None

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def send(self, frame: str) -> None:
        if self.sent:
            await anyio.sleep_forever()
        self.sent.append(frame)

    async def receive(self) -> str | None:
        await anyio.sleep_forever()
        return None

    async def close(self, code: int, reason: str) -> None:
        await anyio.sleep_forever()


class Talking:
    """A session that never stops talking."""

    id, ending, idle_s = "sess", False, None

    def __init__(self, outbox: Outbox) -> None:
        self.outbox, self.said = outbox, 0

    async def talk(self) -> None:
        while True:
            self.outbox.put(f"frame {self.said}")
            self.said += 1
            await self.outbox.wait_for_room()
            await anyio.lowlevel.checkpoint()

    async def wind_up(self) -> None:
        return


@pytest.mark.parametrize("resumes", [False, True])
def test_a_client_that_stops_reading_is_given_up_and_costs_what_is_bounded(resumes: bool) -> None:
    async def main() -> tuple[Talking, Stalled, list[str]]:
        overflowed: list[str] = []

        def overflow() -> None:
            overflowed.append("overflow")
            attachment.over.set()

        journal = Journal(time.monotonic, resumes, max_bytes=2000, max_s=60.0)
        outbox = Outbox(journal, MOST, on_overflow=overflow)
        session, transport = Talking(outbox), Stalled()
        token = ResumeToken() if resumes else None
        if token:
            token.renew()
        attachment = Attachment(session, outbox, token, GRACE_S, stall_s=STALL_S)  # type: ignore[arg-type]
        async with anyio.create_task_group() as group:
            group.start_soon(session.talk)
            await attachment.serve(transport, group)  # type: ignore[arg-type]
            group.cancel_scope.cancel()
        return session, transport, overflowed

    async def bounded() -> Any:
        return await asyncio.wait_for(main(), 10)

    session, transport, overflowed = asyncio.run(bounded())
    assert len(transport.sent) == 1
    if resumes:
        # It might have come back: what was said meanwhile is kept up to the bound, then it ends by name.
        assert overflowed == ["overflow"]
        assert session.said < 400
    else:
        assert not overflowed
        # As many as may wait, and a few in the moment in which it is let go.
        assert session.said <= 20
