"""Requests that wait, what begins after a response has ended, and the limit of preemptive responses."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    CommandRejected,
    ConversationConfig,
    CreateResponse,
    IdleTimeoutReached,
    Item,
    ResponseDone,
)
from antiphon.events.transcription import ServerVad, TranscriptionConfig
from antiphon.sessions.conversation.context import ConversationContext
from antiphon.sessions.conversation.history import ConversationHistory
from antiphon.sessions.conversation.responses.heard import HeardResponses
from antiphon.sessions.conversation.responses.queue import ResponseQueue
from antiphon.sessions.conversation.responses.waiting_requests import MAX_WAITING, WaitingRequests
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.turns.floor import Floor
from tests.scripted import ScriptedDetector, ScriptedTranscriber
from tests.sessions.conversation.scripted import ScriptedModel, play


def request(what: str, *, stored: bool = True) -> CreateResponse:
    return CreateResponse(instructions=what, stored=stored)


def test_requests_are_taken_in_their_order_as_long_as_the_first_need_not_wait() -> None:
    waiting = WaitingRequests()
    assert not waiting
    assert waiting.take(lambda _: False) is None
    first, second = request("a"), request("b")
    waiting.add(first)
    waiting.add(second)
    assert waiting
    assert waiting.take(lambda r: r is first) is None
    assert waiting.take(lambda r: r is second) == (first, False)
    assert waiting.take(lambda r: r is second) is None
    assert waiting.owed == [second]


def test_withdrawn_requests_are_still_taken_and_those_out_of_band_are_never_withdrawn() -> None:
    waiting = WaitingRequests()
    own, beside = request("a"), request("b", stored=False)
    assert not waiting.withdraw()
    waiting.add(own)
    waiting.add(beside)
    assert waiting.withdraw()
    # A request equal to a withdrawn one, made after that.
    again = replace(own)
    waiting.add(again)
    assert waiting.owed == [beside, again]
    taken = [waiting.take(lambda _: False) for _ in range(3)]
    assert taken == [(own, True), (beside, False), (again, False)]


def test_a_request_that_was_to_cut_only_waits_from_then_on_and_there_is_room_for_so_many() -> None:
    waiting = WaitingRequests()
    for _ in range(MAX_WAITING):
        waiting.check()
        waiting.add(CreateResponse(when_busy="cut"))
    with pytest.raises(RemoteProtocolError, match="16"):
        waiting.check()
    assert {r.when_busy for r in waiting.owed} == {"wait"}


class Scripted:
    """A queue without a session. `now`: the current sample of the microphone."""

    def __init__(self, max_preemptive: int | None = None, idle_timeout_ms: int | None = None) -> None:
        self.now, self.audio_s = 0, 0.0
        self.out: list[Any] = []
        self.model = ScriptedModel()
        self.model.profile = replace(self.model.profile, max_preemptive=max_preemptive)
        self.floor, history, count = Floor(), ConversationHistory(), itertools.count()
        context = ConversationContext(
            transcriber=ScriptedTranscriber(),
            detector=ScriptedDetector(),
            model=self.model,
            new_id=lambda prefix: f"{prefix}{next(count)}",
            # All audio that is sent has been played.
            clock=lambda: math.inf,
        )
        listener = cast(TranscriptionSession, self)
        heard = HeardResponses(history, listener, context, self.emit)
        config = ConversationConfig(TranscriptionConfig(vad=ServerVad()), idle_timeout_ms=idle_timeout_ms)
        self.queue = ResponseQueue(config, context, history, self.floor, listener, heard, self.emit)

    def expect_echo(self, pcm: Pcm) -> None: ...
    def expect_silence(self) -> None: ...

    async def emit(self, event: Any) -> None:
        self.out.append(event)

    def silences(self) -> int:
        return sum(isinstance(e, IdleTimeoutReached) for e in self.out)

    def ended(self) -> list[str]:
        return [f"{e.response.status} {e.response.reason}".strip() for e in self.out if isinstance(e, ResponseDone)]


@pytest.mark.parametrize(("most", "begun"), [(None, 4), (0, 0), (1, 1), (2, 2)])
def test_the_responses_that_begin_unasked_in_a_minute_are_bounded(most: int | None, begun: int) -> None:
    async def main() -> None:
        scripted = Scripted(most)
        assert [scripted.queue.may_guess(0) for _ in range(4)] == [True] * begun + [False] * (4 - begun)
        scripted.now = 60 * SAMPLE_RATE_HZ - 1
        assert scripted.queue.may_guess(0) == (most is None)
        scripted.now += 1
        assert scripted.queue.may_guess(0) == (most != 0)

    play(main())


def test_none_begins_unasked_while_a_turn_before_has_no_transcript() -> None:
    async def main() -> None:
        scripted = Scripted()
        scripted.floor.open_turn(0, Item("item_a"))
        scripted.floor.committed(0)
        assert scripted.queue.may_guess(0)
        assert not scripted.queue.may_guess(1)

    play(main())


def test_a_response_that_cannot_be_made_is_rejected_and_what_waits_begins_at_the_end_of_another() -> None:
    async def main() -> list[str]:
        scripted = Scripted()
        async with anyio.create_task_group() as group:
            await scripted.queue.open(group)
            await scripted.queue.ask(CreateResponse())
            await scripted.queue.ask(CreateResponse(event_id="mine"))
            (code,) = (e.code for e in scripted.out if isinstance(e, CommandRejected))
            assert code == "conversation_already_has_active_response"
            assert not scripted.queue.may_guess(0)
            await scripted.queue.ask(CreateResponse(when_busy="wait"))
            assert len(scripted.queue.owed) == 2
            await anyio.wait_all_tasks_blocked()
            scripted.model.go.set()
        await scripted.queue.close()
        assert scripted.queue.owed == []
        return scripted.ended()

    assert play(main()) == ["completed"] * 2


def test_at_the_end_what_is_under_way_and_what_waits_is_cancelled() -> None:
    async def main() -> list[str]:
        scripted = Scripted()
        async with anyio.create_task_group() as group:
            await scripted.queue.open(group)
            await scripted.queue.ask(CreateResponse())
            await scripted.queue.ask(CreateResponse(when_busy="wait"))
            await anyio.wait_all_tasks_blocked()
            scripted.queue.end()
        return scripted.ended()

    assert play(main()) == ["cancelled session_ended"] * 2


def test_when_the_client_cancels_then_what_waits_is_cancelled_too_and_an_id_names_one_response() -> None:
    async def main() -> list[str]:
        scripted = Scripted()
        async with anyio.create_task_group() as group:
            await scripted.queue.open(group)
            with pytest.raises(RemoteProtocolError):
                scripted.queue.cancel(None)
            await scripted.queue.ask(CreateResponse())
            await scripted.queue.ask(CreateResponse(when_busy="wait"))
            with pytest.raises(RemoteProtocolError):
                scripted.queue.cancel("resp_9")
            assert len(scripted.queue.owed) == 2
            scripted.queue.cancel(None)
            assert len(scripted.queue.owed) == 1
            await anyio.wait_all_tasks_blocked()
        return scripted.ended()

    assert play(main()) == ["cancelled client_cancelled"] * 2


def test_a_silence_after_a_response_is_answered_and_one_after_a_response_out_of_band_is_not() -> None:
    async def main() -> list[Any]:
        scripted = Scripted(idle_timeout_ms=0)
        scripted.model.go.set()
        async with anyio.create_task_group() as group:
            await scripted.queue.open(group)
            await scripted.queue.ask(CreateResponse(stored=False))
            await anyio.wait_all_tasks_blocked()
            assert (scripted.ended(), scripted.silences()) == (["completed"], 0)
            scripted.model.end.clear()
            await scripted.queue.ask(CreateResponse())
            await anyio.wait_all_tasks_blocked()
            scripted.model.go.clear()
            scripted.model.end.set()
            while scripted.silences() < 1:
                await anyio.lowlevel.checkpoint()
            # It is answered once, and the answer is under way.
            await anyio.wait_all_tasks_blocked()
            assert scripted.queue.responder.active
            scripted.queue.end()
        return scripted.ended()

    assert play(main()) == ["completed", "completed", "cancelled session_ended"]
