"""Clients that stop reading, and clients that are idle too long: what each still receives, and what they cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from antiphon.protocols.wire import Frame, message
from antiphon.transports.attachment import Attachment
from antiphon.transports.journal import Journal, ResumeToken
from antiphon.transports.lifecycle import LifecycleEvent, LifecycleMachine, new_lifecycle
from antiphon.transports.outbox import Outbox
from tests.transports.scripted import ScriptedSession

STALL_S, GRACE_S, MAX_WAITING = 0.05, 0.1, 3
# Seconds; longer than any test. The assertions must hold before this time, even on a slow machine.
NO_END_S = 600.0


class Stalled:
    """A transport whose client stays connected, but reads nothing after the first frame."""

    playback = None

    def __init__(self) -> None:
        self.sent: list[str | bytes] = []

    async def send(self, data: str | bytes) -> None:
        if self.sent:
            await anyio.sleep_forever()
        self.sent.append(data)

    async def receive(self) -> str | None:
        await anyio.sleep_forever()
        return None

    async def close(self, code: int, reason: str) -> None:
        await anyio.sleep_forever()


class Talking(ScriptedSession):
    """A session that never stops sending frames."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox, self.said = outbox, 0

    async def talk(self) -> None:
        while True:
            self.outbox.put(message(said=self.said))
            self.said += 1
            await self.outbox.wait_for_room()
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("resumes", [False, True])
def test_when_a_client_stops_reading_then_it_is_detached_and_costs_bounded_memory(resumes: bool) -> None:
    async def main() -> tuple[Talking, Stalled, list[str]]:
        overflowed: list[str] = []

        def overflow() -> None:
            overflowed.append("overflow")
            attachment.abandon()

        journal = Journal(time.monotonic, resumes, max_bytes=2000, max_s=60.0)
        outbox = Outbox(journal, MAX_WAITING, on_overflow=overflow)
        session, transport = Talking(outbox), Stalled()
        token = ResumeToken() if resumes else None
        if token:
            token.renew()
        attachment = Attachment(session, outbox, new_lifecycle(), token, NO_END_S, stall_s=STALL_S)
        async with anyio.create_task_group() as group:
            group.start_soon(session.talk)
            await attachment.serve(transport, group)
            group.cancel_scope.cancel()
        return session, transport, overflowed

    async def bounded() -> Any:
        return await asyncio.wait_for(main(), 10)

    session, transport, overflowed = asyncio.run(bounded())
    assert len(transport.sent) == 1
    if resumes:
        # The client might resume, so frames are kept up to the bound. At the bound, the session ends with a reason.
        assert overflowed == ["overflow"]
        assert session.said < 400
    else:
        assert not overflowed
        # The session fills the bound, and says a few frames more while the client is being detached.
        assert session.said <= 20


class Waiting:
    """A transport of a client that sends nothing, and whose every send takes several steps of the event loop."""

    playback = None

    def __init__(self) -> None:
        self.sent: list[str | bytes] = []
        self.closed: tuple[int, str] | None = None

    async def send(self, data: str | bytes) -> None:
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        self.sent.append(data)

    async def receive(self) -> str | None:
        await anyio.sleep_forever()
        return None

    async def close(self, code: int, reason: str) -> None:
        await anyio.lowlevel.checkpoint()
        self.closed = code, reason


class Idle(ScriptedSession):
    """A session that ends after an idle timeout. As speech and video streams do, it ends without draining."""

    idle_s = 0.0

    def __init__(self, outbox: Outbox, lifecycle: LifecycleMachine) -> None:
        self.outbox, self.lifecycle = outbox, lifecycle

    async def end_if_idle(self) -> None:
        self.outbox.put(Frame(b"an error"))
        self.outbox.put(Frame(b"the end"))
        self.outbox.end(1000, "timeout")
        self.lifecycle.apply(LifecycleEvent.FINISHED)


@pytest.mark.parametrize("resumes", [False, True])
def test_when_a_client_is_given_up_as_idle_then_it_gets_its_last_frames_before_the_close(resumes: bool) -> None:
    async def main() -> Waiting:
        journal = Journal(time.monotonic, False, max_bytes=2000, max_s=60.0)
        outbox = Outbox(journal, MAX_WAITING)
        transport = Waiting()
        token = ResumeToken() if resumes else None
        lifecycle = new_lifecycle()
        session = Idle(outbox, lifecycle)
        attachment = Attachment(session, outbox, lifecycle, token, GRACE_S)
        async with anyio.create_task_group() as group:
            await attachment.serve(transport, group)
            group.cancel_scope.cancel()
        return transport

    async def bounded() -> Any:
        return await asyncio.wait_for(main(), 10)

    transport = asyncio.run(bounded())
    assert transport.sent == [b"an error", b"the end"]
    assert transport.closed == (1000, "timeout")


class Leaving(Waiting):
    """A transport whose client leaves while a frame is sent to it. `on_leaving` is called when the sending ends."""

    def __init__(self) -> None:
        super().__init__()
        self.sending = anyio.Event()
        self.on_leaving: Callable[[], None] = lambda: None

    async def send(self, data: str | bytes) -> None:
        self.sending.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.on_leaving()

    async def receive(self) -> str | None:
        await self.sending.wait()
        return None


class Drained(ScriptedSession):
    """A session that has nothing left to do when it has to drain."""

    def __init__(self, lifecycle: LifecycleMachine) -> None:
        self.lifecycle = lifecycle
        self.attachment: Attachment

    def drain(self) -> None:
        self.lifecycle.apply(LifecycleEvent.ENDED)
        self.attachment.stop_reading()

    async def wind_up(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.lifecycle.apply(LifecycleEvent.FINISHED)
        self.attachment.abandon()


def test_when_a_drain_begins_while_the_transport_leaves_then_the_session_winds_up_and_waits_for_no_client() -> None:
    async def main() -> None:
        outbox = Outbox(Journal(time.monotonic, True, max_bytes=2000, max_s=60.0), MAX_WAITING)
        lifecycle, transport = new_lifecycle(), Leaving()
        session = Drained(lifecycle)
        session.attachment = Attachment(session, outbox, lifecycle, ResumeToken(), NO_END_S)
        transport.on_leaving = session.drain
        outbox.put(message(said=0))
        async with anyio.create_task_group() as group:
            await session.attachment.serve(transport, group)
            group.cancel_scope.cancel()

    async def bounded() -> None:
        await asyncio.wait_for(main(), 10)

    asyncio.run(bounded())
