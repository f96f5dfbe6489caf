"""The frames that wait in an outbox because their client does not read."""

from __future__ import annotations

import asyncio
import time

import pytest

from antiphon.protocols.wire import message
from antiphon.transports.journal import Journal
from antiphon.transports.outbox import MAX_WAITING_BYTES, Outbox

LARGE = 1 << 20


@pytest.mark.parametrize("resumes", [False, True])
def test_when_large_frames_are_not_read_then_their_session_waits_after_a_few(resumes: bool) -> None:
    """A short message can have a large answer, so a few frames can hold many bytes."""

    async def main() -> tuple[int, int]:
        outbox = Outbox(Journal(time.monotonic, resumes), 256)
        outbox.set_attached(True)
        said = 0

        async def talk() -> None:
            nonlocal said
            while True:
                outbox.put(message(text="x" * LARGE))
                said += 1
                await outbox.wait_for_room()

        talking = asyncio.create_task(talk())
        # The client does not read, so the task runs until it has to wait for room.
        await asyncio.sleep(0)
        unread = said
        await outbox.get()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        talking.cancel()
        return unread, said

    unread, after = asyncio.run(main())
    assert unread == MAX_WAITING_BYTES // LARGE
    # One frame was read, so there is room for one more.
    assert after == unread + 1
