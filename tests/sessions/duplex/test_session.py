"""One full-duplex conversation: what ends a response, how much of it was heard, and that no old epoch is ever sent."""

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
    CommitRefused,
    ServerVad,
    SpeechStarted,
    TranscriptionConfig,
    TranscriptPartial,
    TurnCleared,
)
from antiphon.sessions.conversation.context import ConversationContext, EmitConversation
from antiphon.sessions.conversation.session import ConversationSession
from antiphon.sessions.duplex.session import DuplexSession
from antiphon.sessions.inbox import Inbox
from antiphon.transports.journal import Journal
from tests.protocols.test_duplex import connection, receive_event
from tests.scripted import ScriptedDetector, ScriptedTranscriber
from tests.sessions.conversation.scripted import PlayedTurns, ScriptedModel, play


class DuplexScene(PlayedTurns):
    """A duplex session. The test sets its `clock`, in seconds; `emit` is used instead of `out`."""

    def __init__(
        self, policy: str = "auto", *, acks_only: bool = False, emit: EmitConversation | None = None, **config: Any
    ) -> None:
        super().__init__(ScriptedModel(config.pop("fails", False)), Inbox(10))
        self.clock = 0.0
        count = itertools.count()
        duplex = DuplexConfig(policy, acks_only=acks_only)  # type: ignore[arg-type]
        config.setdefault("interrupt_response", policy != "listen_only")
        talk = ConversationConfig(
            TranscriptionConfig(vad=ServerVad()),
            reports_transcripts=True,
            allows_backchannels=policy == "auto",
            duplex=duplex,
            **config,
        )
        context = ConversationContext(
            transcriber=ScriptedTranscriber(),
            detector=ScriptedDetector(),
            model=self.model,
            new_id=lambda prefix: f"{prefix}{next(count)}",
            clock=lambda: self.clock,
        )
        make = partial(ConversationSession, talk, context, self.inbox)

        def make_kept(**options: Any) -> ConversationSession:
            self.session = make(**options)
            return self.session

        self.duplex = DuplexSession(duplex, make_kept, emit or self.emit, clock=lambda: self.clock)

    def of(self, *kinds: type) -> list[Any]:
        return [o for o in self.out if isinstance(o, kinds)]

    @property
    def events(self) -> list[str]:
        return [o.event for o in self.of(TurnStateChanged)]

    async def ask(self, item: Any) -> None:
        await self.duplex.handle(item)
        await self.settle()

    async def answer(self) -> str:
        """Say a turn, and wait for the first second of its answer."""
        self.model.end.clear()
        self.model.go.set()
        await self.say("Tell me a story.")
        return str(self.of(SpeakStepTaken)[-1].response_id)


def run(act: Any, *policy: str, **config: Any) -> DuplexScene:
    async def main() -> DuplexScene:
        async with DuplexScene(*policy, **config) as scene:
            await act(scene)
        return scene

    return play(main())  # type: ignore[no-any-return]


def test_when_a_turn_is_answered_then_each_step_is_reported_as_a_state() -> None:
    async def act(scene: DuplexScene) -> None:
        scene.model.go.set()
        await scene.say("Hello.")
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


def test_when_the_policy_is_barge_in_on_speech_then_speech_ends_the_response() -> None:
    async def act(scene: DuplexScene) -> None:
        await scene.answer()
        scene.clock = 0.4
        await scene.start_turn()

    scene = run(act, "barge_in_on_speech")
    raised = scene.out.index(EpochRaised(1))
    assert scene.of(OverlapReported) == [OverlapReported("barge_in_on_speech", "barge_in", "server_vad_speech_started")]
    assert not [o for o in scene.out[raised:] if isinstance(o, ResponseTextDelta | ResponseAudioDelta)]
    assert [o for o in scene.out[raised:] if isinstance(o, SpeechStarted)]
    assert scene.responses() == ["cancelled turn_detected"]
    # By the clock 0.4 s of it were heard.
    assert [o.audio_end_ms for o in scene.of(ItemTruncated)] == [400]


def test_when_a_backchannel_overlaps_a_response_then_it_is_ducked_and_unducked() -> None:
    async def act(scene: DuplexScene) -> None:
        await scene.answer()
        await scene.start_turn()
        assert scene.events[-1] == "duck"
        await scene.transcribe(await scene.end_turn(), "Mm-hm.")

    scene = run(act, "auto")
    assert scene.of(OverlapReported) == [OverlapReported("auto", "listen", "short_ack_transcript")]
    assert scene.events[-2:] == ["duck", "unduck"]
    assert scene.duplex.epoch == 0
    assert not scene.of(ItemTruncated)
    assert scene.model.left == 1  # when the session ended


def test_when_words_overlap_a_response_then_they_take_the_floor() -> None:
    async def act(scene: DuplexScene) -> None:
        await scene.answer()
        await scene.start_turn()
        await scene.transcription(TranscriptPartial(scene.turn, "No, wait"))

    scene = run(act, "auto")
    assert scene.of(OverlapReported) == [OverlapReported("auto", "barge_in", "words")]
    kinds = [type(o) for o in scene.out]
    assert (
        kinds.index(EpochRaised)
        < kinds.index(OverlapReported)
        < max(i for i, k in enumerate(kinds) if k is SpeechStarted)
    )
    assert scene.responses() == ["cancelled turn_detected"]


def test_when_the_policy_is_listen_only_then_speech_does_not_end_the_response() -> None:
    async def act(scene: DuplexScene) -> None:
        await scene.answer()
        await scene.start_turn()
        scene.model.end.set()
        await scene.settle()

    scene = run(act, "listen_only")
    assert scene.of(OverlapReported) == [OverlapReported("listen_only", "listen", "policy_listen_only")]
    assert scene.responses() == ["completed"]
    assert scene.duplex.epoch == 0


@pytest.mark.parametrize("policy", ["auto", "barge_in_on_speech"])
def test_when_the_client_decides_an_overlap_then_its_decision_holds(policy: str) -> None:
    async def act(scene: DuplexScene) -> None:
        await scene.answer()
        await scene.ask(HoldFloor())
        await scene.start_turn()
        assert scene.duplex.progress.is_responding
        await scene.ask(BargeIn("client_force_barge_in"))

    scene = run(act, policy)
    assert [(o.action, o.reason) for o in scene.of(OverlapReported)] == [
        ("listen", "client_overlap_action"), ("barge_in", "client_force_barge_in"),
    ]  # fmt: skip
    assert scene.responses() == ["cancelled turn_detected"]


def test_when_something_is_cancelled_then_the_epoch_rises_once_and_the_response_ends() -> None:
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
                await scene.transcription(output)
            assert not scene.duplex.progress.is_responding

        scene = run(act)
        assert scene.duplex.epoch == 1, asked
        assert scene.responses()[0].startswith("cancelled")


def test_when_there_is_nothing_to_cancel_then_it_is_rejected_and_the_epoch_stays() -> None:
    async def act(scene: DuplexScene) -> None:
        await scene.ask(CancelResponse(None, "mine"))
        await scene.ask(CreateResponse())

    scene = run(act)
    assert [(o.code, o.event_id) for o in scene.of(CommandRejected)] == [
        ("response_cancel_not_active", "mine"), ("response_create_without_input", None),
    ]  # fmt: skip
    assert scene.duplex.epoch == 0


def test_when_more_is_acknowledged_after_a_cut_then_the_history_has_what_was_acknowledged() -> None:
    async def act(scene: DuplexScene) -> None:
        response = await scene.answer()
        await scene.ask(AcknowledgePlayback(200, 200, response))
        await scene.ask(BargeIn())
        await scene.ask(AcknowledgePlayback(350, 350, response))
        await scene.say("Next.")
        await scene.ask(AcknowledgePlayback(900, 900, response, None, "late"))

    scene = run(act)
    assert [o.audio_end_ms for o in scene.of(ItemTruncated)] == [200, 350]
    assert [(o.code, o.event_id) for o in scene.of(CommandRejected)] == [("playback_ack_too_late", "late")]


def test_when_only_acknowledgements_count_then_the_history_has_only_what_was_acknowledged() -> None:
    async def act(scene: DuplexScene) -> None:
        scene.model.go.set()
        await scene.say("Hello.")
        scene.clock = 5.0
        await scene.say("Again.")
        assert scene.duplex.epoch == 0

    forgetful = run(act, acks_only=True)
    assert [m.text for m in forgetful.model.asked[-1]] == ["Hello.", "Again."]
    assert [m.text for m in run(act).model.asked[-1]] == ["Hello.", "One two.", "Again."]


def test_when_a_turn_has_no_words_then_a_listen_step_is_reported() -> None:
    async def act(scene: DuplexScene) -> None:
        await scene.say("  ")

    scene = run(act)
    assert scene.of(ListenStepTaken) == [ListenStepTaken("nothing_said")]
    assert scene.duplex.state == "idle"


def test_when_the_client_skips_the_response_then_the_turn_is_not_answered() -> None:
    async def act(scene: DuplexScene) -> None:
        scene.model.go.set()
        await scene.ask(SkipResponse())
        await scene.say("A note to myself.")
        assert scene.num_created == 0
        await scene.say("A question.")

    scene = run(act)
    assert scene.responses() == ["completed"]
    assert [m.text for m in scene.model.asked[-1]] == ["A note to myself.", "A question."]


def test_when_the_client_sends_a_signal_then_it_is_reported_as_a_state_change() -> None:
    async def act(scene: DuplexScene) -> None:
        await scene.ask(SignalTurn("nod", {"angle": 3}))

    assert run(act).of(TurnStateChanged) == [TurnStateChanged("nod", "idle", {"angle": 3})]


def test_when_a_response_fails_then_the_next_turn_is_answered() -> None:
    async def act(scene: DuplexScene) -> None:
        scene.model.go.set()
        await scene.say("Hello.")
        scene.model.fails = False
        await scene.say("Again.")

    assert run(act, fails=True).responses() == ["failed", "completed"]


def test_when_the_client_holds_the_floor_then_the_turn_is_answered_after_the_response() -> None:
    async def act(scene: DuplexScene) -> None:
        await scene.answer()
        await scene.ask(HoldFloor())
        await scene.start_turn()
        await scene.transcribe(await scene.end_turn(), "And what was his name?")
        assert scene.duplex.progress.is_responding
        assert scene.responses() == []
        scene.model.end.set()
        await scene.settle()

    scene = run(act, "barge_in_on_speech")
    assert scene.responses() == ["completed", "completed"]
    assert scene.duplex.epoch == 0


def test_when_a_turn_replaces_a_response_then_the_response_is_of_an_old_epoch() -> None:
    async def act(scene: DuplexScene) -> None:
        # The user is already speaking when an answer is requested.
        scene.model.end.clear()
        scene.model.go.set()
        await scene.ask(CreateItem(Item("i", parts=[ContentPart("input_text", "Hello")])))
        await scene.start_turn()
        await scene.ask(CreateResponse())
        await scene.transcribe(await scene.end_turn(), "No, wait.")
        scene.model.end.set()
        await scene.settle()

    scene = run(act, "barge_in_on_speech")
    assert scene.responses() == ["cancelled turn_detected", "completed"]
    assert scene.of(OverlapReported)[-1].reason == "turn_answered"
    assert scene.duplex.epoch >= 1


def test_when_the_client_barges_in_during_an_undecided_overlap_then_it_counts_once() -> None:
    async def act(scene: DuplexScene) -> None:
        await scene.answer()
        await scene.start_turn()
        await scene.ask(BargeIn())

    scene = run(act)
    assert scene.duplex.epoch == 1
    assert len(scene.of(OverlapReported)) == 1
    assert scene.duplex.state == "user_speaking"


def test_when_a_commit_is_refused_then_the_next_turn_is_answered() -> None:
    async def act(scene: DuplexScene) -> None:
        scene.model.go.set()
        await scene.ask(SkipResponse())
        await scene.transcription(CommitRefused(0, 1))
        await scene.say("Hello.")

    assert run(act).responses() == ["completed"]


def test_when_audio_is_played_late_or_held_then_speech_still_interrupts_it() -> None:
    async def act(scene: DuplexScene) -> None:
        scene.model.go.set()
        await scene.say("Hello.")
        # The audio arrived a while ago, but has been playing only briefly.
        scene.clock = 5.0
        await scene.ask(AcknowledgePlayback(300, 300))
        assert scene.duplex.state == "assistant_playing"
        await scene.start_turn()
        assert scene.events[-1] == "duck"
        # Playback does not advance while it is ducked, however long that takes.
        scene.clock = 9.0
        await scene.transcription(TranscriptPartial(scene.turn, "No, wait"))

    scene = run(act)
    assert scene.duplex.epoch == 1
    assert [o.audio_end_ms for o in scene.of(ItemTruncated)] == [300]


def test_when_a_response_is_heard_then_a_cancel_reaches_the_one_that_waits_too() -> None:
    async def act(scene: DuplexScene) -> None:
        scene.model.go.set()
        await scene.ask(CreateItem(Item("one", parts=[ContentPart("input_text", "Hello.")])))
        await scene.ask(CreateResponse())
        await scene.start_turn()
        turn = await scene.end_turn()
        await scene.ask(CreateResponse())
        await scene.ask(CancelResponse())
        await scene.transcribe(turn, "Well?")

    scene = run(act, "listen_only", create_response=False)
    assert scene.responses() == ["completed", "cancelled client_cancelled"]


def test_when_a_finished_response_is_still_heard_then_it_can_be_cancelled() -> None:
    async def act(scene: DuplexScene) -> None:
        scene.model.go.set()
        await scene.say("Hello.")
        assert not scene.duplex.progress.is_responding
        scene.clock = 0.25
        await scene.ask(CancelResponse())

    scene = run(act)
    assert not scene.of(CommandRejected)
    assert scene.duplex.epoch == 1
    assert [o.audio_end_ms for o in scene.of(ItemTruncated)] == [250]


# --- random schedules -------------------------------------------------------------------------------------------------


async def schedule(draw: random.Random, steps: int) -> int:
    """Run random speech, responses, cuts and acknowledgements, with a client that reads at random times.

    Returns the number of frames that the client had read by the end of the session.
    """
    policy, acks_only = draw.choice(("auto", "barge_in_on_speech", "listen_only")), draw.random() < 0.2
    wire, journal = connection(), Journal(lambda: 0.0, True)
    receive_event(wire, "session.update", session={})
    epoch, received, has = 0, 0, 0
    # Same as the segmenter: a turn begins when none is open, and a cleared turn has no end.
    is_open = False
    read: list[dict[str, Any]] = []

    async def emit(output: Any) -> None:
        nonlocal epoch, is_open
        wire.send(output)
        for frame in wire.frames():
            journal.push(frame)
        match output:
            case EpochRaised():
                epoch = output.epoch
                journal.raise_epoch(epoch)
            case TurnCleared():
                is_open = False

    scene = DuplexScene(policy, acks_only=acks_only, emit=emit)

    def take(most: int) -> None:
        """Let the client read frames, and check that none has an older epoch."""
        for _ in range(most):
            text = journal.next()
            if text is None:
                return
            event = json.loads(text)
            read.append(event)
            reported = (event.get("metadata") or {}).get("epoch")
            assert reported is None or reported == epoch, (event, epoch)

    async with scene:
        for _ in range(steps):
            match draw.randrange(13):
                case 0 | 1 if not is_open:
                    is_open = True
                    await scene.start_turn()
                case 2:
                    if is_open:
                        is_open = False
                        await scene.transcribe(await scene.end_turn(), draw.choice(("Yes.", "Tell me more.", "")))
                case 3:
                    await scene.session.handle_transcription(
                        TranscriptPartial(scene.turn, draw.choice(("Mm-hm", "No, wait")))
                    )
                case 4:
                    (scene.model.go.set if draw.random() < 0.7 else scene.model.go.clear)()
                case 5:
                    (scene.model.end.set if draw.random() < 0.5 else scene.model.end.clear)()
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
                    # Cut off: the client has all frames up to some number, and at least those it had before.
                    sent = max((event.get("server_event_seq", 0) for event in read), default=0)
                    has = draw.randint(has, sent)
                    journal.rewind(has)
                case 12:
                    # Same as the listening: from the task that reports where turns begin and end.
                    await scene.session.handle_transcription(TurnCleared())
            for _ in range(draw.randrange(8)):
                await asyncio.sleep(0)
            take(draw.randrange(6))
        received = len(read)
        take(10**6)
    return received


@pytest.mark.parametrize("seed", range(300))
def test_when_anything_happens_in_any_order_then_nothing_of_an_old_epoch_is_sent(seed: int) -> None:
    asyncio.run(schedule(random.Random(seed), 40))
