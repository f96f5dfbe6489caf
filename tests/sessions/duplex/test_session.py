"""One full-duplex conversation: what ends an answer, what of it was heard, and that nothing of an old epoch is ever sent."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from functools import partial
from typing import Any

import pytest

from antiphon.events.conversation import (
    CancelResponse,
    CommandRejected,
    ContentPart,
    ConversationConfig,
    CreateItem,
    CreateResponse,
    Item,
    ItemTruncated,
    ResponseAudioDelta,
    ResponseTextDelta,
)
from antiphon.events.duplex import (
    AcknowledgePlayback,
    BargeIn,
    CancelInput,
    DuplexConfig,
    EpochRaised,
    HoldFloor,
    ListenStepTaken,
    OverlapReported,
    PlaybackAcknowledged,
    SignalTurn,
    SkipResponse,
    SpeakStepTaken,
    TurnStateChanged,
)
from antiphon.events.transcription import (
    ClearAudio,
    CommitRefused,
    ServerVad,
    SpeechStarted,
    TranscriptionConfig,
    TranscriptPartial,
    TurnCleared,
)
from antiphon.protocols.resume.journal import Journal
from antiphon.sessions.conversation.session import ConversationSession
from antiphon.sessions.duplex.session import DuplexSession
from antiphon.sessions.inbox import Inbox
from tests.protocols.test_duplex import connection, say
from tests.scripted import ScriptedDetector, ScriptedTranscriber
from tests.sessions.conversation.test_session import Partner, Scene, play


class DuplexScene(Scene):
    """A duplex session whose listener is played by hand. `clock`: what its ledger goes by, in seconds."""

    def __init__(self, policy: str = "auto", *, acks_only: bool = False, **config: Any) -> None:
        self.partner = Partner(config.pop("fails", False))
        self.out: list[Any] = []
        self.overlaps: list[Any] = []
        self.clock = 0.0
        self.turn = -1
        self.inbox = Inbox(10)
        count = itertools.count()
        duplex = DuplexConfig(policy, acks_only=acks_only)  # type: ignore[arg-type]
        config.setdefault("interrupt_response", policy != "listen_only")
        talk = ConversationConfig(
            TranscriptionConfig(vad=ServerVad()), reports_transcripts=True, allows_backchannels=policy == "auto", duplex=duplex, **config
        )  # fmt: skip
        make = partial(
            ConversationSession, talk, ScriptedTranscriber(), ScriptedDetector(), self.partner, self.inbox,
            new_id=lambda prefix: f"{prefix}{next(count)}", clock=lambda: self.clock,
        )  # fmt: skip
        self.duplex = DuplexSession(duplex, make, self.emit, clock=lambda: self.clock)
        self.session = self.duplex.talk

    def of(self, *kinds: type) -> list[Any]:
        return [o for o in self.out if isinstance(o, kinds)]

    @property
    def events(self) -> list[str]:
        return [o.event for o in self.of(TurnStateChanged)]

    async def ask(self, item: Any) -> None:
        await self.duplex.handle(item)
        await self.settle()

    async def answer(self) -> str:
        """A turn, and the first second of its answer."""
        self.partner.end.clear()
        self.partner.go.set()
        await self.says("Tell me a story.")
        return str(self.of(SpeakStepTaken)[-1].response_id)


def run(act: Any, *policy: str, **config: Any) -> DuplexScene:
    async def main() -> DuplexScene:
        async with DuplexScene(*policy, **config) as scene:
            await act(scene)
        return scene

    return play(main())  # type: ignore[no-any-return]


def test_a_turn_and_its_answer_as_states() -> None:
    async def act(scene: DuplexScene) -> None:
        scene.partner.go.set()
        await scene.says("Hello.")
        await scene.ask(AcknowledgePlayback(1000, 1000))

    scene = run(act)
    states = [(o.event, o.state) for o in scene.of(TurnStateChanged)]
    assert states == [
        ("user_speech_started", "user_speaking"),
        ("user_turn_committed", "user_committed"),
        ("response_created", "assistant_generating"),
        ("playback_started", "assistant_playing"),
        ("playback_finished", "idle"),
    ]
    assert scene.duplex.epoch == 0
    (known,) = scene.of(PlaybackAcknowledged)
    assert known.history_exact


def test_speech_over_an_answer_ends_it_where_that_is_the_policy() -> None:
    async def act(scene: DuplexScene) -> None:
        await scene.answer()
        scene.clock = 0.4
        await scene.begins()

    scene = run(act, "barge_in_on_speech")
    raised = scene.out.index(EpochRaised(1))
    assert scene.of(OverlapReported) == [OverlapReported("barge_in_on_speech", "barge_in", "server_vad_speech_started")]
    assert not [o for o in scene.out[raised:] if isinstance(o, ResponseTextDelta | ResponseAudioDelta)]
    assert [o for o in scene.out[raised:] if isinstance(o, SpeechStarted)]
    assert scene.responses() == ["cancelled turn_detected"]
    # By the clock 0.4 s of it were heard.
    assert [o.audio_end_ms for o in scene.of(ItemTruncated)] == [400]


def test_an_acknowledgement_is_ducked_and_let_go() -> None:
    async def act(scene: DuplexScene) -> None:
        await scene.answer()
        await scene.begins()
        assert scene.events[-1] == "duck"
        await scene.known(await scene.stops(), "Mm-hm.")

    scene = run(act, "auto")
    assert scene.of(OverlapReported) == [OverlapReported("auto", "listen", "short_ack_transcript")]
    assert scene.events[-2:] == ["duck", "unduck"]
    assert scene.duplex.epoch == 0
    assert not scene.of(ItemTruncated)
    assert scene.partner.left == 1  # when the session ended


def test_words_over_an_answer_take_the_floor() -> None:
    async def act(scene: DuplexScene) -> None:
        await scene.answer()
        await scene.begins()
        await scene.session._heard(TranscriptPartial(scene.turn, "No, wait"))
        await scene.settle()

    scene = run(act, "auto")
    assert scene.of(OverlapReported) == [OverlapReported("auto", "barge_in", "words")]
    kinds = [type(o) for o in scene.out]
    assert (
        kinds.index(EpochRaised)
        < kinds.index(OverlapReported)
        < max(i for i, k in enumerate(kinds) if k is SpeechStarted)
    )
    assert scene.responses() == ["cancelled turn_detected"]


def test_who_only_listens_is_not_interrupted() -> None:
    async def act(scene: DuplexScene) -> None:
        await scene.answer()
        await scene.begins()
        scene.partner.end.set()
        await scene.settle()

    scene = run(act, "listen_only")
    assert scene.of(OverlapReported) == [OverlapReported("listen_only", "listen", "policy_listen_only")]
    assert scene.responses() == ["completed"]
    assert scene.duplex.epoch == 0


@pytest.mark.parametrize("policy", ["auto", "barge_in_on_speech"])
def test_the_clients_word_decides(policy: str) -> None:
    async def act(scene: DuplexScene) -> None:
        await scene.answer()
        await scene.ask(HoldFloor())
        await scene.begins()
        assert scene.duplex.answering
        await scene.ask(BargeIn("client_force_barge_in"))

    scene = run(act, policy)
    assert [(o.action, o.reason) for o in scene.of(OverlapReported)] == [
        ("listen", "client_overlap_action"), ("barge_in", "client_force_barge_in"),
    ]  # fmt: skip
    assert scene.responses() == ["cancelled turn_detected"]


def test_what_is_called_off_raises_the_epoch_once_and_ends_the_answer() -> None:
    for asked, also in (
        (CancelResponse(), []),
        (CancelInput(), [TurnCleared()]),
        (None, [TurnCleared()]),
        (BargeIn(), []),
    ):

        async def act(scene: DuplexScene, asked: Any = asked, also: Any = also) -> None:
            await scene.answer()
            if asked:
                await scene.ask(asked)
            for output in also:
                await scene.session._heard(output)
            await scene.settle()
            assert not scene.duplex.answering

        scene = run(act)
        assert scene.duplex.epoch == 1, asked
        assert scene.responses()[0].startswith("cancelled")


def test_a_cancel_of_nothing_is_refused_and_raises_nothing() -> None:
    async def act(scene: DuplexScene) -> None:
        await scene.ask(CancelResponse(None, "mine"))
        await scene.ask(CreateResponse())

    scene = run(act)
    assert [(o.code, o.event_id) for o in scene.of(CommandRejected)] == [
        ("response_cancel_not_active", "mine"), ("response_create_without_input", None),
    ]  # fmt: skip
    assert scene.duplex.epoch == 0


def test_history_is_what_was_acknowledged_even_after_it_was_cut() -> None:
    async def act(scene: DuplexScene) -> None:
        response = await scene.answer()
        await scene.ask(AcknowledgePlayback(200, 200, response))
        await scene.ask(BargeIn())
        await scene.ask(AcknowledgePlayback(350, 350, response))
        await scene.says("Next.")
        await scene.ask(AcknowledgePlayback(900, 900, response, None, "late"))

    scene = run(act)
    assert [o.audio_end_ms for o in scene.of(ItemTruncated)] == [200, 350]
    assert [(o.code, o.event_id) for o in scene.of(CommandRejected)] == [("playback_ack_too_late", "late")]


def test_only_what_was_acknowledged_is_remembered_where_that_is_the_policy() -> None:
    async def act(scene: DuplexScene) -> None:
        scene.partner.go.set()
        await scene.says("Hello.")
        scene.clock = 5.0
        await scene.says("Again.")
        assert scene.duplex.epoch == 0

    forgetful = run(act, acks_only=True)
    assert [m.text for m in forgetful.partner.asked[-1]] == ["Hello.", "Again."]
    assert [m.text for m in run(act).partner.asked[-1]] == ["Hello.", "One two.", "Again."]


def test_a_turn_that_says_nothing_is_listened_to() -> None:
    async def act(scene: DuplexScene) -> None:
        await scene.says("  ")

    scene = run(act)
    assert scene.of(ListenStepTaken) == [ListenStepTaken("nothing_said")]
    assert scene.duplex.state == "idle"


def test_a_commit_that_is_not_to_be_answered() -> None:
    async def act(scene: DuplexScene) -> None:
        scene.partner.go.set()
        await scene.ask(SkipResponse())
        await scene.says("A note to myself.")
        assert scene.created == 0
        await scene.says("A question.")

    scene = run(act)
    assert scene.responses() == ["completed"]
    assert [m.text for m in scene.partner.asked[-1]] == ["A note to myself.", "A question."]


def test_signals_are_passed_on() -> None:
    async def act(scene: DuplexScene) -> None:
        await scene.ask(SignalTurn("nod", {"angle": 3}))

    assert run(act).of(TurnStateChanged) == [TurnStateChanged("nod", "idle", {"angle": 3})]


def test_an_answer_that_fails_is_followed_by_the_next_turn() -> None:
    async def act(scene: DuplexScene) -> None:
        scene.partner.go.set()
        await scene.says("Hello.")
        scene.partner.fails = False
        await scene.says("Again.")

    assert run(act, fails=True).responses() == ["failed", "completed"]


def test_what_the_client_dismissed_is_answered_after_the_answer_it_did_not_end() -> None:
    async def act(scene: DuplexScene) -> None:
        await scene.answer()
        await scene.ask(HoldFloor())
        await scene.begins()
        await scene.known(await scene.stops(), "And what was his name?")
        assert scene.duplex.answering
        assert scene.responses() == []
        scene.partner.end.set()
        await scene.settle()

    scene = run(act, "barge_in_on_speech")
    assert scene.responses() == ["completed", "completed"]
    assert scene.duplex.epoch == 0


def test_an_answer_that_is_overruled_is_old() -> None:
    async def act(scene: DuplexScene) -> None:
        # The user speaks already when an answer is asked for.
        scene.partner.end.clear()
        scene.partner.go.set()
        await scene.ask(CreateItem(Item("i", parts=[ContentPart("input_text", "Hello")])))
        await scene.begins()
        await scene.ask(CreateResponse())
        await scene.known(await scene.stops(), "No, wait.")
        scene.partner.end.set()
        await scene.settle()

    scene = run(act, "barge_in_on_speech")
    assert scene.responses() == ["cancelled turn_detected", "completed"]
    assert scene.of(OverlapReported)[-1].reason == "turn_answered"
    assert scene.duplex.epoch >= 1


def test_the_clients_word_over_speech_that_is_held_counts_once() -> None:
    async def act(scene: DuplexScene) -> None:
        await scene.answer()
        await scene.begins()
        await scene.ask(BargeIn())

    scene = run(act)
    assert scene.duplex.epoch == 1
    assert len(scene.of(OverlapReported)) == 1
    assert scene.duplex.state == "user_speaking"


def test_a_commit_that_is_refused_leaves_the_next_turn_to_be_answered() -> None:
    async def act(scene: DuplexScene) -> None:
        scene.partner.go.set()
        await scene.ask(SkipResponse())
        await scene.session._heard(CommitRefused(0, 1))
        await scene.says("Hello.")

    assert run(act).responses() == ["completed"]


def test_sound_that_is_played_late_or_held_can_be_interrupted() -> None:
    async def act(scene: DuplexScene) -> None:
        scene.partner.go.set()
        await scene.says("Hello.")
        # It came a while ago, and has been played for a moment only.
        scene.clock = 5.0
        await scene.ask(AcknowledgePlayback(300, 300))
        assert scene.duplex.state == "assistant_playing"
        await scene.begins()
        assert scene.events[-1] == "duck"
        # Nothing sounds while it is ducked, however long that takes.
        scene.clock = 9.0
        await scene.session._heard(TranscriptPartial(scene.turn, "No, wait"))
        await scene.settle()

    scene = run(act)
    assert scene.duplex.epoch == 1
    assert [o.audio_end_ms for o in scene.of(ItemTruncated)] == [300]


def test_a_cancel_of_what_only_sounds_is_one() -> None:
    async def act(scene: DuplexScene) -> None:
        scene.partner.go.set()
        await scene.says("Hello.")
        assert not scene.duplex.answering
        scene.clock = 0.25
        await scene.ask(CancelResponse())

    scene = run(act)
    assert not scene.of(CommandRejected)
    assert scene.duplex.epoch == 1
    assert [o.audio_end_ms for o in scene.of(ItemTruncated)] == [250]


# --- whatever happens -------------------------------------------------------------------------------------------------


async def schedule(draw: random.Random, steps: int) -> int:
    """Random speech, answers, cuts and acknowledgements, and a client that reads when it will. Returns the frames it got."""
    scene = DuplexScene(draw.choice(("auto", "barge_in_on_speech", "listen_only")), acks_only=draw.random() < 0.2)
    wire, journal = connection(), Journal(lambda: 0.0, True)
    say(wire, "session.update", session={})
    epoch, received, has = 0, 0, 0
    read: list[dict[str, Any]] = []

    async def emit(output: Any) -> None:
        nonlocal epoch
        wire.send(output)
        for frame in wire.frames():
            journal.push(frame)
        if isinstance(output, EpochRaised):
            epoch = output.epoch
            journal.raise_epoch(epoch)

    scene.emit = scene.duplex._emit = emit  # type: ignore[method-assign]

    def take(most: int) -> None:
        """The client reads: nothing of an older epoch, ever."""
        for _ in range(most):
            text = journal.next()
            if text is None:
                return
            event = json.loads(text)
            read.append(event)
            told = (event.get("metadata") or {}).get("epoch")
            assert told is None or told == epoch, (event, epoch)

    async with scene:
        for _ in range(steps):
            match draw.randrange(13):
                case 0 | 1:
                    await scene.begins()
                case 2:
                    if scene.turn >= 0 and scene.turn in scene.session._turns:
                        await scene.known(await scene.stops(), draw.choice(("Yes.", "Tell me more.", "")))
                case 3:
                    await scene.session._heard(TranscriptPartial(scene.turn, draw.choice(("Mm-hm", "No, wait"))))
                case 4:
                    (scene.partner.go.set if draw.random() < 0.7 else scene.partner.go.clear)()
                case 5:
                    (scene.partner.end.set if draw.random() < 0.5 else scene.partner.end.clear)()
                case 6:
                    await scene.duplex.handle(BargeIn())
                case 7:
                    await scene.duplex.handle(CancelResponse())
                case 8:
                    ms = draw.randrange(1200)
                    await scene.duplex.handle(AcknowledgePlayback(ms, ms))
                case 9:
                    await scene.duplex.handle(draw.choice((HoldFloor(), CancelInput())))
                case 10:
                    scene.clock += draw.random()
                case 11:
                    # Cut off: it has all up to some frame, and no less than it had before.
                    sent = max((event.get("server_event_seq", 0) for event in read), default=0)
                    has = draw.randint(has, sent)
                    journal.rewind(has)
                case 12:
                    await scene.inbox.put(ClearAudio())
            for _ in range(draw.randrange(8)):
                await asyncio.sleep(0)
            take(draw.randrange(6))
        received = len(read)
        take(10**6)
    return received


@pytest.mark.parametrize("seed", range(300))
def test_nothing_of_an_old_epoch_is_sent_whatever_happens(seed: int) -> None:
    asyncio.run(schedule(random.Random(seed), 40))
