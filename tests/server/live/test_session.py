"""The common part of live sessions, over scripted transports: how sessions end, even while a client resumes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from logging.handlers import MemoryHandler
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.errors import RemoteProtocolError
from antiphon.server.live.session import LiveSession
from antiphon.server.metrics import Metrics
from antiphon.server.state import ServerState
from antiphon.settings import Settings
from antiphon.transports.attachment import Attachment
from antiphon.transports.journal import ResumeToken
from antiphon.transports.lifecycle import AttachmentState, Lifecycle
from tests.transports.scripted import ScriptedSession, ScriptedTransport, note

LIMIT_S = 10


class Held(ScriptedSession):
    """A session with a token. The message "close" closes it; any other message is answered."""

    def __init__(self, state: ServerState, token: ResumeToken | None) -> None:
        self.live = LiveSession(self, state, self.caller, token, 16)
        self.is_winding_up = False
        # The handling of a frame and the preparation of a resume wait for these events.
        self.may_handle, self.may_resume = anyio.Event(), anyio.Event()
        self.is_handling, self.is_resuming = anyio.Event(), anyio.Event()

    @property
    def attachment(self) -> Attachment:
        return self.live.attachment

    async def handle(self, data: Any) -> None:
        self.is_handling.set()
        await self.may_handle.wait()
        if data == "close":
            self.live.close("session_closed")
        else:
            self.live.outbox.put(note(data))

    async def wind_up(self) -> None:
        self.is_winding_up = True

    async def resumed(self, token: str, how: str) -> Any:
        self.is_resuming.set()
        await self.may_resume.wait()
        return await super().resumed(token, how)

    async def reaches(self, state: AttachmentState) -> None:
        while self.attachment.state is not state:
            await anyio.lowlevel.checkpoint()


class Stage:
    """A served session, its first transport, and clients that resume it."""

    def __init__(self, *, resumes: bool = True, is_stalled: bool = False) -> None:
        self.state = ServerState(Settings(), Metrics())
        token = ResumeToken() if resumes else None
        self.token = token.renew() if token else ""
        self.session = Held(self.state, token)
        self.live = self.session.live
        self.transport = ScriptedTransport(is_stalled=is_stalled)
        self.refused: list[str] = []

    async def serve(self) -> None:
        await self.live.serve(self.transport)

    async def resume(
        self, transport: ScriptedTransport, last_received: int = 0, scope: anyio.CancelScope | None = None
    ) -> None:
        """Resume the session over `transport`. Cancelling the scope simulates a client that gives up."""
        try:
            with scope or anyio.CancelScope():
                await self.live.attachment.resume(self.token, last_received, transport)
        except RemoteProtocolError as error:
            self.refused.append(error.code)


def run(play: Callable[[Stage, anyio.abc.TaskGroup], Awaitable[None]], **options: bool) -> Stage:
    """Play a scene while the session runs; return when the session is closed and every client was served."""

    async def main() -> Stage:
        stage = Stage(**options)
        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as group:
                group.start_soon(stage.serve)
                await stage.session.reaches(AttachmentState.ATTACHED)
                await play(stage, group)
        return stage

    stage = asyncio.run(main())
    assert stage.live.lifecycle is Lifecycle.CLOSED
    assert not stage.state.sessions.live
    assert not stage.state.sessions.resumable
    return stage


def test_when_a_session_finishes_then_its_last_frames_are_sent_before_the_close() -> None:
    async def play(stage: Stage, _: Any) -> None:
        stage.live.outbox.put(note("last"))
        stage.live.finish()
        # Too late: only the first call counts.
        stage.live.finish(1011, "late")
        stage.live.close("late")
        stage.live.end(1001, "late")
        assert stage.live.lifecycle is Lifecycle.FLUSHING

    stage = run(play)
    assert (stage.transport.notes, stage.transport.closed) == (["last"], (1000, ""))
    assert not stage.session.is_winding_up


STEPS = (
    "say",
    "leave",
    "stall",
    "read",
    "resume",
    "resume wrongly",
    "cancel",
    "handle",
    "prepare",
    "end",
    "finish",
    "close",
)


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 6)), max_size=12))
@settings(max_examples=100, deadline=None)
def test_when_anything_happens_in_any_order_then_no_transition_is_refused_and_the_session_ends(
    steps: list[tuple[str, int]],
) -> None:
    transports: list[ScriptedTransport] = []

    async def play(stage: Stage, group: anyio.abc.TaskGroup) -> None:
        transports.append(stage.transport)
        resuming = anyio.CancelScope()
        for step, num_turns in steps:
            match step:
                case "say":
                    transports[-1].say("close" if num_turns % 2 else "hello")
                case "leave":
                    transports[-1].leave()
                case "stall" | "read":
                    transports[-1].stall(step == "stall")
                case "resume" | "resume wrongly":
                    transports.append(ScriptedTransport())
                    resuming = anyio.CancelScope()
                    group.start_soon(stage.resume, transports[-1], 0 if step == "resume" else 99, resuming)
                case "cancel":
                    resuming.cancel()
                case "handle":
                    stage.session.may_handle.set()
                case "prepare":
                    stage.session.may_resume.set()
                case "end":
                    stage.live.end(1001, "draining")
                case "finish":
                    stage.live.outbox.put(note("last"))
                    stage.live.finish()
                case "close":
                    stage.live.close("session_closed")
            # Lets the tasks progress before the next step.
            for _ in range(num_turns):
                await anyio.lowlevel.checkpoint()
        for transport in transports:
            transport.stall(False)
        stage.session.may_handle.set()
        stage.session.may_resume.set()
        stage.live.attachment.abandon()

    failures = MemoryHandler(1000, flushLevel=logging.CRITICAL + 1)
    failures.setLevel(logging.ERROR)
    log = logging.getLogger("antiphon.transports.attachment")
    log.addHandler(failures)
    try:
        run(play)
    finally:
        log.removeHandler(failures)
    # A failure in a task of an attachment would be logged, and end only the session.
    assert failures.buffer == []


@pytest.mark.parametrize(("how", "closed"), [((), (1001, "draining")), ((1011,), (1011, "draining"))])
def test_when_the_server_ends_a_session_then_it_winds_up_and_closes_as_the_end_said(
    how: tuple[int, ...], closed: tuple[int, str]
) -> None:
    async def play(stage: Stage, _: Any) -> None:
        stage.live.end(1001, "draining")
        stage.live.end(1008, "a second reason")
        # A message that arrives now is not read.
        stage.transport.say("late")
        while not stage.session.is_winding_up:
            await anyio.lowlevel.checkpoint()
        stage.live.outbox.put(note("last"))
        stage.live.finish(*how)

    stage = run(play)
    assert (stage.transport.notes, stage.transport.closed) == (["last"], closed)
    assert not stage.session.is_handling.is_set()


def test_when_a_client_closes_its_session_then_it_cannot_be_resumed() -> None:
    async def play(stage: Stage, group: anyio.abc.TaskGroup) -> None:
        stage.transport.stall(True)
        stage.live.outbox.put(note("last"))
        await anyio.lowlevel.checkpoint()
        stage.live.close("session_closed")
        await stage.resume(ScriptedTransport())
        assert stage.refused == ["invalid_resume_token"]
        stage.live.attachment.abandon()

    run(play)


def test_when_a_client_closes_its_session_while_it_is_replaced_then_the_session_ends() -> None:
    async def play(stage: Stage, group: anyio.abc.TaskGroup) -> None:
        stage.transport.say("close")
        await stage.session.is_handling.wait()
        group.start_soon(stage.resume, ScriptedTransport())
        await stage.session.reaches(AttachmentState.REPLACED)
        # The old connection's last message is handled completely: it closes the session that is being resumed.
        stage.session.may_handle.set()

    stage = run(play)
    assert stage.refused == ["invalid_resume_token"]


def test_when_a_session_finishes_while_a_client_resumes_then_that_client_gets_its_last_frames() -> None:
    following = ScriptedTransport()

    async def play(stage: Stage, group: anyio.abc.TaskGroup) -> None:
        stage.transport.leave()
        await stage.session.reaches(AttachmentState.DETACHED)
        group.start_soon(stage.resume, following)
        await stage.session.is_resuming.wait()
        stage.live.outbox.put(note("last"))
        stage.live.finish()
        assert stage.live.lifecycle is Lifecycle.FLUSHING
        stage.session.may_resume.set()

    run(play)
    assert (following.notes, following.closed) == (["session.resumed", "last"], (1000, ""))


def test_when_a_broken_connection_is_not_noticed_then_a_finished_session_can_still_be_resumed() -> None:
    following = ScriptedTransport()

    async def play(stage: Stage, group: anyio.abc.TaskGroup) -> None:
        stage.live.outbox.put(note("last"))
        stage.live.finish()
        stage.session.may_resume.set()
        group.start_soon(stage.resume, following)
        await stage.session.reaches(AttachmentState.REPLACED)
        stage.transport.stall(False)

    stage = run(play, is_stalled=True)
    assert (following.notes, following.closed) == (["session.resumed", "last"], (1000, ""))
    assert (stage.transport.notes, stage.transport.closed) == (["session.replaced"], (1000, "session_replaced"))


def test_when_a_client_gives_up_resuming_then_the_session_waits_for_the_next() -> None:
    following = ScriptedTransport()

    async def play(stage: Stage, group: anyio.abc.TaskGroup) -> None:
        stage.transport.say("hello")
        await stage.session.is_handling.wait()
        async with anyio.create_task_group() as resuming:
            resuming.start_soon(stage.resume, ScriptedTransport())
            await stage.session.reaches(AttachmentState.REPLACED)
            resuming.cancel_scope.cancel()
        assert stage.live.attachment.state is AttachmentState.LEAVING
        stage.session.may_handle.set()
        await stage.session.reaches(AttachmentState.DETACHED)
        # The session waits for its client, and serves the next one that resumes.
        assert stage.live.lifecycle is Lifecycle.OPEN
        stage.session.may_resume.set()
        group.start_soon(stage.resume, following)
        await stage.session.reaches(AttachmentState.ATTACHED)
        stage.live.finish()

    run(play)
    assert (following.notes, following.closed) == (["session.resumed", "hello"], (1000, ""))


def test_when_a_session_without_a_token_loses_its_client_then_it_is_over() -> None:
    async def play(stage: Stage, _: Any) -> None:
        stage.transport.leave()

    assert run(play, resumes=False).transport.closed is None


def last_line(caplog: pytest.LogCaptureFixture, end: Callable[[LiveSession], object]) -> str:
    """Return the last log line of a session that measures four turns and is ended by `end`."""

    async def main() -> None:
        stage = Stage(resumes=False)
        async with asyncio.TaskGroup() as group:
            group.create_task(stage.serve())
            await stage.session.reaches(AttachmentState.ATTACHED)
            for seconds in (0.3, 0.1, 0.2, 0.9):
                stage.live.measure("final", seconds)
            stage.live.measure("partial", 9.0)
            end(stage.live)
            if stage.live.lifecycle is Lifecycle.OPEN:
                stage.transport.leave()
        stage.live.log_end()

    caplog.set_level(logging.INFO)
    caplog.clear()
    asyncio.run(main())
    (line,) = [message for message in caplog.messages if message.startswith("session ended")]
    return line


def test_the_last_line_of_a_session_says_why_it_ended_and_how_long_its_client_waited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    line = last_line(caplog, lambda live: live.close("session_closed"))
    assert "reason=session_closed" in line
    assert "turns=4 final_ms=250.0" in line
    assert "partial" not in line
    assert "reason=finished" in last_line(caplog, lambda live: live.finish())
    assert "reason=client_left" in last_line(caplog, lambda _: None)
