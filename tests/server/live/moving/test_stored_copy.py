"""The stored copy of a conversation: frames wait for its writes, and a session ends if its host no longer owns it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
import pytest

from antiphon.errors import RemoteProtocolError, StoreError, SupersededError
from antiphon.events.conversation import (
    CreateItem,
    CreateResponse,
    Item,
    ItemAdded,
    ItemDeleted,
    Response,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.duplex import EpochRaised
from antiphon.events.transcription import (
    AppendAudio,
    ServerVad,
    SessionEnding,
    TranscriptionConfig,
    TranscriptionEvent,
)
from antiphon.protocols.connection import WireSnapshot
from antiphon.protocols.opening import Opening
from antiphon.protocols.resume import notice_frames
from antiphon.protocols.wire import Frame, message
from antiphon.server.credentials import Caller
from antiphon.server.live.moving import stored_copy
from antiphon.server.live.moving.persistence import Persistence
from antiphon.server.live.moving.resume_point import ResumePoint
from antiphon.server.live.moving.stored_copy import Restored, StoredCopy
from antiphon.server.live.moving.tail import parts_of
from antiphon.server.live.session import LiveSession
from antiphon.server.metrics import Metrics
from antiphon.server.state import ServerState
from antiphon.sessions.conversation.responses.queue import SESSION_ENDED
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.settings import Settings
from antiphon.settings.sections import ResumeSettings
from antiphon.store.sessions import Hold, ReceivedCounts, StoredSession, TailChunk
from antiphon.transports.journal import ResumeToken
from antiphon.transports.lifecycle import Lifecycle
from tests.scripted import ScriptedDetector, ScriptedTranscriber, speech
from tests.transports.scripted import ScriptedSession, ScriptedTransport

SECOND = AppendAudio(np.zeros(16_000, np.float32))
ROW = StoredSession("sess", "", b"", b"", "host-1/a", 3, ReceivedCounts(4, 500), 1)


class Store:
    """A session store that writes at once. If `waits` is set, a write waits until the test allows it."""

    def __init__(self) -> None:
        self.rows: list[StoredSession] = []
        self.turns_kept: list[bool] = []
        self.ended: list[str] = []
        self.chunks: list[TailChunk] = []
        self.waits = False
        self.failure: Exception | None = None
        self.writing: Future[None] = Future()

    def put(self, row: StoredSession, *, turn_kept: bool) -> Future[None]:
        self.rows.append(row)
        self.turns_kept.append(turn_kept)
        self.writing = Future()
        if not self.waits:
            self.finish()
        return self.writing

    def finish(self) -> None:
        if self.failure:
            self.writing.set_exception(self.failure)
        else:
            self.writing.set_result(None)

    def _end(self, how: str) -> Future[None]:
        self.ended.append(how)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def append_tail(self, hold: Hold, chunk: TailChunk) -> None:
        self.chunks.append(chunk)

    def release(self, hold: Hold) -> Future[None]:
        return self._end("released")

    def forget(self, hold: Hold) -> Future[None]:
        return self._end("forgotten")

    @property
    def snapshot(self) -> dict[str, Any]:
        """The last snapshot that was written."""
        return decoded(self.rows[-1])


def decoded(row: StoredSession) -> dict[str, Any]:
    return cast(dict[str, Any], msgspec.json.decode(row.snapshot))


def kinds(frames: list[Frame]) -> list[str]:
    return [msgspec.json.decode(frame.encode())["type"] for frame in frames]


class Stage:
    """A copy, its live session, and a conversation in which nobody speaks."""

    def __init__(
        self, restored: Restored | None = None, *, first: tuple[Frame, ...] = (), keeps_words: bool = False
    ) -> None:
        self.store = Store()
        self.state = ServerState(Settings(resume=ResumeSettings(store_speech=True)), Metrics())
        self.state.sessions.store = cast(Any, self.store)
        self.session = ScriptedSession()
        token = ResumeToken()
        token.renew()
        self.live = LiveSession(cast(Any, self.session), self.state, Caller(), token, 16)
        self.session.attachment = self.live.attachment  # type: ignore[attr-defined]
        self.inbox = Inbox(30.0)
        self.sent: list[Frame] = []
        wire = cast(Any, SimpleNamespace(id="sess", opening=Opening(), context=SimpleNamespace(new_id="{}1".format)))
        wire.snapshot = lambda: WireSnapshot("sess", "openai", msgspec.Raw(b"{}"))
        wire.notice = lambda notice: notice_frames("{}1".format, "sess", notice)
        wire.send = lambda event: [message(type=type(event).__name__)]
        self.persistence = Persistence(self.state, Caller(), wire, restored.row if restored else None)
        self.copy = StoredCopy(
            wire, self.live, self.inbox, self.persistence, self._send, first, restored, keeps_words=keeps_words
        )
        self.history = SimpleNamespace(items=[], restore=lambda items: self.history.items.extend(items))
        self.left_open_turn = False
        self.conversation = cast(
            Any,
            SimpleNamespace(
                history=self.history,
                progress=SimpleNamespace(
                    audio_s=0.0,
                    settled_ms=0.0,
                    unread_items=[],
                    owed_responses=[],
                    closing_responses=[],
                    out_of_band={},
                    native_model="",
                    unstored=[],
                    num_labels=0,
                    user_speaks=False,
                    is_responding=False,
                    is_heard=False,
                ),
                leave_open_turn=lambda: setattr(self, "left_open_turn", True),
            ),
        )

    def _send(self, frame: Frame) -> None:
        self.sent.append(frame)
        self.live.outbox.put(frame)

    async def says(self, event: Any, *frames: Frame) -> None:
        await self.copy.before_sending(event, frames)
        self.copy.send()


def play(scene: Callable[[Stage], Awaitable[None]], *given: Any, **options: Any) -> Stage:
    async def main() -> Stage:
        with anyio.fail_after(10):
            stage = Stage(*given, **options)
            await scene(stage)
            return stage

    return asyncio.run(main())


def serve(scene: Callable[[Stage], Awaitable[None]]) -> Stage:
    """Play a scene while the session is served, until it is closed."""

    async def served(stage: Stage) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(stage.live.serve, ScriptedTransport())
            await turns()
            await scene(stage)
            stage.live.attachment.abandon()

    return play(served)


def frames(*types: str) -> list[Frame]:
    return [message(type=kind) for kind in types]


async def turns() -> None:
    for _ in range(5):
        await anyio.lowlevel.checkpoint()


def test_a_client_learns_of_a_change_when_the_copy_has_it_and_other_frames_keep_their_order() -> None:
    created, item, answer, delta = frames("created", "item", "answer", "delta")

    async def scene(stage: Stage) -> None:
        stage.copy.begin(stage.conversation)
        stage.store.waits = True
        async with anyio.create_task_group() as group:
            group.start_soon(stage.says, ItemAdded(Item("x"), None), item)
            await turns()
            stage.copy.send([answer])
            group.start_soon(stage.says, ResponseTextDelta(cast(Any, None), "hi", spoken=False), delta)
            await turns()
            assert stage.sent == []
            stage.store.finish()
        assert stage.sent == [created, item, answer, delta]
        stage.copy.send()
        assert len(stage.sent) == 4

    play(scene, first=(created,))


def test_the_snapshot_holds_the_frames_that_tell_of_it() -> None:
    async def scene(stage: Stage) -> None:
        stage.copy.begin(stage.conversation)
        stage.history.items = [Item("x")]
        await stage.says(ItemAdded(Item("x"), None), *frames("item"))

    stage = play(scene)
    continued = stage.store.snapshot["continued"]
    assert [frame["text"] for frame in continued["journal"]] == ['{"type":"item","server_event_seq":1}']
    assert not continued["is_whole"]
    assert [item["id"] for item in stage.store.snapshot["items"]] == ["x"]
    assert stage.live.memory.num_bytes > 0


@pytest.mark.parametrize(("event", "keeps"), [(ItemAdded(Item("x"), None), False), (None, True)])
def test_a_turn_is_kept_with_the_event_that_ends_it(event: Any, keeps: bool) -> None:
    async def scene(stage: Stage) -> None:
        stage.copy.begin(stage.conversation)
        await stage.says(event or ResponseDone(Response("resp_1", False, None, None)))

    assert play(scene).store.turns_kept == [False, keeps]


def test_a_client_is_told_first_that_its_conversation_is_not_stored_and_that_it_is_again() -> None:
    async def scene(stage: Stage) -> None:
        stage.copy.begin(stage.conversation)
        stage.store.failure = StoreError("full")
        await stage.says(ItemAdded(Item("x"), None), *frames("first"))
        await stage.says(ItemAdded(Item("y"), None), *frames("second"))
        stage.store.failure = None
        await stage.says(ItemAdded(Item("z"), None), *frames("third"))

    stage = play(scene)
    assert kinds(stage.sent) == ["session.state_degraded", "first", "second", "session.state_degraded", "third"]
    missed_events = [msgspec.json.decode(f.encode()) for f in stage.sent]
    assert [frame["degraded"] for frame in missed_events if "degraded" in frame] == [True, False]


def test_a_session_that_another_host_has_ends_here_and_nothing_of_it_is_told() -> None:
    async def scene(stage: Stage) -> None:
        stage.copy.begin(stage.conversation)
        stage.store.failure = SupersededError("gone")
        await stage.says(ItemAdded(Item("x"), None), *frames("item"))
        assert stage.live.lifecycle is Lifecycle.CLOSING
        stage.copy.send(frames("late"))
        stage.copy.send(frames("late"), at_once=True)
        with pytest.raises(RemoteProtocolError, match="Another server"):
            await stage.copy.store_token()
        stage.copy.close()

    stage = serve(scene)
    assert kinds(stage.sent) == ["session.replaced"]
    assert stage.store.ended == []


def test_the_last_frame_of_a_client_that_leaves_waits_for_no_write() -> None:
    async def scene(stage: Stage) -> None:
        stage.copy.begin(stage.conversation)
        stage.store.waits = True
        async with anyio.create_task_group() as group:
            group.start_soon(stage.says, ItemAdded(Item("x"), None), *frames("item"))
            await turns()
            stage.copy.send(frames("closed"), at_once=True)
            assert kinds(stage.sent) == ["item", "closed"]
            stage.store.finish()

    play(scene)


def test_a_new_epoch_drops_what_waits_of_the_old_one() -> None:
    async def scene(stage: Stage) -> None:
        stage.live.outbox.put(Frame({"type": "old"}, epoch=1))
        await stage.says(EpochRaised(2), *frames("raised"))

    assert len(play(scene).live.outbox.journal) == 1


def transcription(stage: Stage, config: TranscriptionConfig | None = None) -> TranscriptionSession:
    async def emit(event: TranscriptionEvent) -> None:
        await stage.says(event, *frames(type(event).__name__))

    return TranscriptionSession(
        config or TranscriptionConfig(),
        ScriptedTranscriber(),
        ScriptedDetector(),
        stage.inbox,
        emit,
        keeps_state=stage.copy.keeps_transcription,
    )


async def hears(stage: Stage) -> None:
    """Hear an open turn, with a pause after which its first words are finished."""
    session = transcription(stage)
    stage.copy.begin(session)
    async with anyio.create_task_group() as group:
        group.start_soon(session.run)
        message = AppendAudio(speech(1, 3, 60))
        await stage.inbox.put(message)
        stage.copy.received(1, [message])
        while "TranscriptDelta" not in kinds(stage.sent):
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()


def test_a_session_that_only_transcribes_is_stored_and_its_tail_has_finished_words() -> None:
    async def scene(stage: Stage) -> None:
        await hears(stage)
        assert stage.copy.can_move
        assert stage.store.snapshot["continued"]["transcription"]["unread"] == [{"turn": 0, "since": 1}]
        # The tail has the words of the open turn, and no audio.
        (part,) = parts_of(stage.store.chunks)
        assert (part.turn, part.text.strip(), part.streamed) == (0, "w1 w2 w3", "w1 w2 w3")
        assert stage.persistence.speech is None
        stage.copy.close()

    assert play(scene).store.ended == ["forgotten"]


def test_events_of_a_transcription_that_follow_at_once_are_stored_together_before_they_are_sent() -> None:
    async def scene(stage: Stage) -> None:
        config = TranscriptionConfig(vad=ServerVad(silence_duration_ms=300))
        session = transcription(stage, config)
        stage.copy.begin(session)
        num_sent: list[int] = []
        put = stage.store.put

        def counted(row: StoredSession, *, turn_kept: bool) -> Future[None]:
            num_sent.append(len(stage.sent))
            return put(row, turn_kept=turn_kept)

        stage.store.put = counted  # type: ignore[method-assign]
        async with anyio.create_task_group() as group:
            group.start_soon(session.run)
            message = AppendAudio(speech(1, 3, 60))
            await stage.inbox.put(message)
            stage.copy.received(1, [message])
            while "TranscriptDone" not in kinds(stage.sent):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        # The end of speech and the turn are stored in one write, and so are the last words and the transcript.
        assert kinds(stage.sent) == [
            *("SpeechStarted", "SpeechStopped", "TurnCommitted", "TranscriptDelta", "TranscriptDone"),
        ]
        assert num_sent == [0, 1, 3]
        assert stage.store.turns_kept[1:] == [False, False, True]
        journal = decoded(stage.store.rows[2])["continued"]["journal"]
        assert [msgspec.json.decode(frame["text"])["type"] for frame in journal][-2:] == [
            "SpeechStopped",
            "TurnCommitted",
        ]
        assert stage.store.snapshot["continued"]["transcription"]["unreported"] == []

    play(scene)


def test_an_event_of_a_transcription_is_not_sent_until_it_is_stored() -> None:
    async def scene(stage: Stage) -> None:
        session = transcription(stage)
        stage.copy.begin(session)
        stage.store.waits = True
        async with anyio.create_task_group() as group:
            group.start_soon(session.run)
            await stage.inbox.put(AppendAudio(speech(1, 3, 60)))
            while len(stage.store.rows) < 2:
                await anyio.lowlevel.checkpoint()
            await turns()
            assert stage.sent == []
            stage.store.finish()
            while not stage.sent:
                await anyio.lowlevel.checkpoint()
            assert kinds(stage.sent) == ["TranscriptDelta"]
            group.cancel_scope.cancel()

    play(scene)


@pytest.mark.parametrize("keeps_words", [False, True])
def test_words_that_the_client_keeps_are_not_stored_and_all_others_are(keeps_words: bool) -> None:
    async def scene(stage: Stage) -> None:
        session = transcription(stage)
        stage.copy.begin(session)
        async with anyio.create_task_group() as group:
            group.start_soon(session.run)
            pcm = speech(1, 9)
            for at in range(0, len(pcm), 1600):
                await stage.inbox.put(AppendAudio(pcm[at : at + 1600]))
                while not stage.inbox.is_worked_off:
                    await anyio.lowlevel.checkpoint()
                await turns()
            given = [frame.payload.get("resume_words") for frame in stage.sent if not isinstance(frame.payload, bytes)]
            assert set(kinds(stage.sent)) == {"TranscriptDelta"}
            assert len(stage.store.rows) == 1 + given.count(None)
            assert given[0] is None
            assert any(given) is keeps_words
            # If the store has failed, the row may be older than it seems, so each word is stored again.
            stage.store.failure = StoreError("down")
            await stage.copy.store()
            num_sent, num_rows = len(stage.sent), len(stage.store.rows)
            await stage.inbox.put(AppendAudio(speech(10, 6)))
            while "TranscriptDelta" not in kinds(stage.sent[num_sent:]):
                await anyio.lowlevel.checkpoint()
            assert len(stage.store.rows) > num_rows
            group.cancel_scope.cancel()

    play(scene, keeps_words=keeps_words)


def test_when_the_settings_say_so_then_nothing_of_a_transcription_is_stored() -> None:
    async def scene(stage: Stage) -> None:
        stage.state.settings = replace(stage.state.settings, resume=ResumeSettings(store_captions=False))
        await hears(stage)
        assert not stage.copy.can_move
        assert await stage.copy.store_token() is None
        stage.copy.close()

    stage = play(scene)
    assert (stage.store.rows, stage.store.chunks, stage.store.ended) == ([], [], [])


def test_a_resume_says_how_many_messages_are_stored() -> None:
    async def scene(stage: Stage) -> None:
        stage.copy.begin(stage.conversation)
        for number in (1, 2):
            await stage.inbox.put(SECOND)
            stage.copy.received(number, [SECOND])
        await stage.inbox.get()
        await stage.inbox.get()
        stage.conversation.progress.settled_ms = 1000.0
        assert await stage.copy.store_token() == 1
        stage.conversation.progress.audio_s = 2.0
        stage.conversation.progress.settled_ms = 2000.0
        assert await stage.copy.store_token() == 2

    assert play(scene).store.rows[-1].received == ReceivedCounts(2, 2000)


def restored(**facts: Any) -> Restored:
    missed_events = [ItemDeleted("lost")]
    tail = [(5, np.ones(1600, np.float32)), (6, np.ones(800, np.float32))]
    continued = ResumePoint(received=4, applied=[6], heard_ms=50.0, owed=[CreateResponse(instructions="1")])
    return Restored(ROW, [Item("x")], **{"continued": continued, "missed_events": missed_events, "tail": tail} | facts)


def test_a_restored_session_goes_on_where_the_last_host_has_left_it() -> None:
    missed_events: list[Any] = []

    async def emit(event: Any) -> None:
        missed_events.append(event)

    async def scene(stage: Stage) -> None:
        assert stage.copy.goes_on
        stage.copy.begin(stage.conversation)
        assert [item.id for item in stage.history.items] == ["x"]
        # The session is not stored again: it was stored before its client got the new token.
        assert stage.store.rows == []
        await stage.copy.go_on(emit)
        owed, heard = await stage.inbox.get(), await stage.inbox.get()
        assert isinstance(owed, CreateResponse)
        assert owed.instructions == "1"
        assert isinstance(heard, AppendAudio)
        # The last host has already heard 50 ms of this audio.
        assert float(heard.pcm.sum()) == 800.0
        # The last host has also carried out the other message.
        assert stage.inbox.num_put == 2

    play(scene, restored())
    assert missed_events == [ItemDeleted("lost")]


def test_a_message_that_the_last_host_has_carried_out_is_passed_over() -> None:
    async def scene(stage: Stage) -> None:
        assert [stage.copy.has(number) for number in (5, 6, 7)] == [False, True, False]
        audio, item = stage.copy.unheard([AppendAudio(np.ones(1600, np.float32)), CreateItem(Item("y"))])
        assert float(cast(AppendAudio, audio).pcm.sum()) == 800.0
        assert isinstance(item, CreateItem)

    play(scene, restored(tail=()))


@pytest.mark.parametrize("items", [[Item("x")], []])
def test_a_restored_session_is_stored_with_its_new_token_before_it_begins(items: list[Item]) -> None:
    async def scene(stage: Stage) -> None:
        await stage.inbox.put(SECOND)
        assert await stage.copy.store_token() == 4

    stage = play(scene, Restored(ROW, items, ResumePoint(received=4)))
    row = stage.store.rows[0]
    assert (row.owner, row.fence, row.restores, row.received) == ("host-1/a", 3, 1, ReceivedCounts(4, 1500))
    assert row.token == stage.live.attachment.token.hash  # type: ignore[union-attr]
    assert len(stage.store.snapshot["items"]) == len(items)


def test_a_row_that_does_not_say_where_it_stood_begins_with_its_client_and_is_stored_then() -> None:
    async def scene(stage: Stage) -> None:
        assert not stage.copy.goes_on
        stage.copy.begin(stage.conversation)

    assert len(play(scene, Restored(ROW, [Item("x")])).store.rows) == 1


@pytest.mark.parametrize("is_released", [True, False])
def test_a_session_that_moves_is_stored_with_all_its_frames_and_its_client_sent_on(is_released: bool) -> None:
    async def scene(stage: Stage) -> None:
        assert not stage.copy.can_move
        stage.copy.begin(stage.conversation)
        await stage.copy.store()
        assert stage.copy.can_move
        stage.copy.send([Frame({"type": "response.piece.delta"})])
        await stage.copy.move(0.0)
        assert stage.left_open_turn
        assert stage.live.lifecycle is Lifecycle.DRAINING
        stage.store.failure = None if is_released else StoreError("full")
        await stage.copy.give_away()
        stage.copy.close()

    stage = serve(scene)
    assert kinds(stage.sent) == ["response.piece.delta", "session.moving" if is_released else SessionEnding.__name__]
    continued = stage.store.snapshot["continued"]
    assert continued["is_whole"]
    assert [frame["seq"] for frame in continued["journal"]] == [1]
    assert stage.store.turns_kept[-1]
    assert stage.store.ended == (["released"] if is_released else ["forgotten"])


def test_a_response_that_a_move_ends_is_reported_by_the_next_host_alone() -> None:
    response = Response("resp_1", False, None, None, request=CreateResponse(), status="cancelled")
    ended, cancelled = (replace(response, reason=reason) for reason in (SESSION_ENDED, "client_cancelled"))

    async def scene(stage: Stage) -> None:
        stage.copy.begin(stage.conversation)
        await stage.copy.move(0.0)
        await stage.says(ResponseDone(cancelled), frames("first")[0])
        await stage.says(ResponseDone(ended), frames("second")[0])
        await stage.copy.give_away()

    stage = serve(scene)
    assert kinds(stage.sent) == ["first", "session.moving"]
    assert stage.store.snapshot["continued"]["open_response"]["id"] == "resp_1"


def test_what_is_too_large_to_be_handed_over_is_stored_as_in_any_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_copy, "MAX_HANDED_OVER_BYTES", 10)

    async def scene(stage: Stage) -> None:
        stage.copy.begin(stage.conversation)
        stage.copy.send([Frame({"type": "response.piece.delta"}), Frame({"type": "response.done"})])
        await stage.copy.store()
        await stage.copy.move(0.0)
        await stage.copy.give_away()
        stage.copy.close()

    continued = serve(scene).store.snapshot["continued"]
    assert not continued["is_whole"]
    # The delta is left out, since the response is generated again. The frame after it is kept.
    assert [frame["seq"] for frame in continued["journal"]] == [2]


def test_a_session_that_does_not_move_is_not_given_away() -> None:
    async def scene(stage: Stage) -> None:
        stage.copy.begin(stage.conversation)
        await stage.copy.give_away()
        stage.copy.close()

    stage = play(scene)
    assert (stage.sent, stage.store.ended) == ([], ["forgotten"])


@pytest.mark.parametrize(("unsettled_ms", "num_chunks"), [(499.0, 0), (500.0, 1)])
def test_what_is_being_said_is_stored_once_there_is_more_than_is_always_on_its_way(
    unsettled_ms: float, num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_copy, "SPEECH_EVERY_S", 0.0)

    async def scene(stage: Stage) -> None:
        stage.copy.begin(stage.conversation)
        stage.copy.received(1, [SECOND])
        now = stage.conversation.progress
        now.audio_s, now.settled_ms = 1.0, 1000.0 - unsettled_ms
        async with anyio.create_task_group() as group:
            group.start_soon(stage.copy.store_speech)
            await turns()
            group.cancel_scope.cancel()
        assert len(stage.store.chunks) == num_chunks

    play(scene)


def test_a_conversation_is_stored_again_while_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_copy, "STORE_EVERY_S", 0.0)

    async def scene(stage: Stage) -> None:
        stage.copy.begin(stage.conversation)
        async with anyio.create_task_group() as group:
            group.start_soon(stage.copy.store_regularly)
            await turns()
            assert len(stage.store.rows) > 1
            stage.live.end(1001, "draining")
            await turns()
            num_stored = len(stage.store.rows)
            await turns()
            group.cancel_scope.cancel()
        assert len(stage.store.rows) == num_stored

    serve(scene)
