"""A native model: the audio it gets, when it is fed silence, and how its turns become responses and end."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

from antiphon.audio.pcm import to_pcm16
from antiphon.audio.wav import wav_header
from antiphon.contracts import (
    AudioPart,
    AwayStep,
    ConversationModel,
    ListenStep,
    NativeLoad,
    NativeOptions,
    NativeProfile,
    NativeStep,
    SpeakStep,
    Unit,
)
from antiphon.errors import MediaError, ModelError, RemoteProtocolError
from antiphon.events.conversation import (
    CancelResponse,
    CommandRejected,
    ContentPart,
    ConversationConfig,
    CreateItem,
    CreateResponse,
    Item,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.duplex import (
    AcknowledgePlayback,
    AppendFrames,
    BargeIn,
    DuplexConfig,
    EpochRaised,
    ListenStepTaken,
    NativeSampling,
    SkipResponse,
    SpeakStepTaken,
)
from antiphon.events.transcription import AppendAudio, CommitAudio, ServerVad, TranscriptionConfig
from antiphon.pipelines.cascade import Cascade
from antiphon.pipelines.fallback import ConversationWithFallback
from antiphon.pipelines.native_conversation import NativeConversationModel
from antiphon.sessions.conversation.context import ConversationContext
from antiphon.sessions.conversation.native_response import ANSWER_UNITS, NativeResponse
from antiphon.sessions.conversation.native_turns import NativeTurns
from antiphon.sessions.conversation.native_units import MAX_WAITING_UNITS, UnitClock, UnitQueue
from antiphon.sessions.conversation.session import ConversationSession
from antiphon.sessions.duplex.session import DuplexSession
from antiphon.sessions.inbox import Inbox
from tests.scripted import ScriptedDetector, ScriptedTranscriber, speech

UNIT = 800
RATE_HZ = 8000
# A level of sound that is not speech.
QUIET = 1e-4


class Native:
    """Follows its steps, one per unit; with `held` each step waits for a `go`."""

    def __init__(self, *steps: NativeStep | Exception, voice: bool = True, held: bool = False) -> None:
        self.profile = NativeProfile(
            "native", UNIT / 16_000, RATE_HZ if voice else 0, ("one",) if voice else (), 2, 1, (100, 50)
        )
        self.steps = list(steps)
        self.units: list[Unit] = []
        self.forced: list[bool] = []
        self.options: NativeOptions | None = None
        # The conversation so far, as the model got it when it was opened.
        self.recalled = ""
        self.held, self.go = held, asyncio.Semaphore(0)
        self.interrupts = self.closes = 0
        self.refuses: bytes | None = None
        self.obeys = self.away = False

    async def open(self, options: NativeOptions) -> Native:
        self.options, self.recalled = options, options.recall()
        return self

    async def append(self, unit: Unit) -> None:
        if self.refuses in unit.frames:
            raise MediaError("no image")
        self.units.append(unit)

    async def step(self, *, must_speak: bool = False) -> NativeStep:
        if self.held:
            await self.go.acquire()
        if self.away:
            return AwayStep()
        self.forced.append(must_speak)
        if must_speak and not self.steps:
            return says("At last.", last=True)
        step = self.steps.pop(0) if self.steps else ListenStep()
        if isinstance(step, Exception):
            raise step
        return step

    def load(self) -> NativeLoad:
        return NativeLoad(1, 7)

    def interrupt(self) -> None:
        self.interrupts += 1
        if self.obeys:
            self.steps.clear()

    def close(self) -> None:
        self.closes += 1


def says(text: str, *, last: bool = False, samples: int = 400) -> SpeakStep:
    return SpeakStep(text, np.full(samples, 0.1, np.float32), last)


class Scene:
    """A duplex session with a native partner."""

    def __init__(
        self, native: Native, duplex: DuplexConfig | None = None, fallback: Cascade | None = None, **config: Any
    ) -> None:
        model: ConversationModel = NativeConversationModel(native)
        if fallback:
            model = ConversationWithFallback(model, fallback)
        self.native, self.out = native, []  # type: ignore[var-annotated]
        self.inbox = Inbox(10)
        count = itertools.count()
        duplex = duplex or DuplexConfig()
        # The model itself detects speech over it.
        config.setdefault("interrupt_response", False)
        talk = ConversationConfig(
            TranscriptionConfig(vad=ServerVad()), reports_transcripts=True, duplex=duplex, **config
        )
        context = ConversationContext(
            transcriber=ScriptedTranscriber(),
            detector=ScriptedDetector(),
            model=model,
            new_id=lambda prefix: f"{prefix}{next(count)}",
        )
        make = partial(ConversationSession, talk, context, self.inbox)
        self.session = DuplexSession(duplex, make, self.emit)

    async def emit(self, output: Any) -> None:
        self.out.append(output)

    def of(self, *kinds: type) -> list[Any]:
        return [o for o in self.out if isinstance(o, kinds)]

    @property
    def listened(self) -> list[Any]:
        return [o for o in self.of(ListenStepTaken) if o.reason == "model"]

    @property
    def text(self) -> str:
        return "".join(o.text for o in self.of(ResponseTextDelta))

    async def hears(self, units: float = 1) -> None:
        await self.inbox.put(AppendAudio(np.full(int(units * UNIT), QUIET, np.float32)))

    async def hears_words(self, first: int, count: int, silence_units: int = 12) -> None:
        silence = np.zeros(silence_units * UNIT, np.float32)
        await self.inbox.put(AppendAudio(np.concatenate((speech(first, count), silence))))

    async def until(self, done: Any) -> None:
        async with asyncio.timeout(10):
            while not done():  # noqa: ASYNC110
                await asyncio.sleep(0.002)


def run(native: Native, act: Any, duplex: DuplexConfig | None = None, **config: Any) -> Scene:
    async def main() -> Scene:
        scene = Scene(native, duplex, **config)
        task = asyncio.create_task(scene.session.run())
        try:
            async with asyncio.timeout(20):
                await act(scene)
                scene.inbox.close()
                await task
        finally:
            task.cancel()
        return scene

    return asyncio.run(main())


def test_audio_is_cut_into_units_and_images_go_with_the_unit_in_which_they_came() -> None:
    units = UnitQueue(4, 2)
    units.append_frames((b"a",))
    units.append(np.arange(1, 3, dtype=np.float32), 1.0)
    assert not units.has_unit
    units.append(np.arange(3, 5, dtype=np.float32), 2.0)
    units.append_frames((b"b", b"c", b"d"))
    units.append(np.arange(5, 8, dtype=np.float32), 3.0)
    assert (units.has_unit, units.num_waiting, units.num_received) == (True, 7, 7)
    pcm, arrived_s = units.take()
    assert (pcm.tolist(), arrived_s, units.take_frames()) == ([1, 2, 3, 4], 2.0, (b"a",))
    pcm, arrived_s = units.take()
    assert (pcm.tolist(), arrived_s, units.take_frames()) == ([5, 6, 7, 0], None, (b"c", b"d"))
    units.append_frames((b"e",))
    # A unit of silence only.
    pcm, arrived_s = units.take()
    assert (pcm.tolist(), arrived_s, units.take_frames()) == ([0] * 4, None, (b"e",))
    assert units.num_waiting == 0


def test_a_model_without_vision_gets_no_images_and_a_flood_of_them_is_not_kept() -> None:
    blind, units = UnitQueue(4, 0), UnitQueue(4, 1)
    for queue in (blind, units):
        queue.append_frames((b"a",) * 100 + (b"b",))
        queue.append(np.ones(4, np.float32), 0.0)
        assert queue.has_unit
        queue.take()
    assert (blind.take_frames(), units.take_frames()) == ((), (b"b",))


def test_when_a_voice_is_configured_then_the_model_speaks_with_it() -> None:
    data = to_pcm16(np.linspace(-0.5, 0.5, 8000, dtype=np.float32))
    native = Native()

    async def act(scene: Scene) -> None:
        await scene.until(lambda: native.options)

    run(native, act, DuplexConfig(voice_reference=wav_header(16_000, len(data)) + data))
    assert native.options is not None
    assert native.options.voice_reference is not None
    np.testing.assert_allclose(native.options.voice_reference, np.linspace(-0.5, 0.5, 8000), atol=1e-3)
    with pytest.raises(BaseExceptionGroup) as failed:
        run(Native(), act, DuplexConfig(voice_reference=b"no sound"))
    assert failed.group_contains(ModelError, match="reference voice cannot be decoded")


def test_when_audio_comes_then_the_model_hears_whole_units_in_order() -> None:
    async def act(scene: Scene) -> None:
        for part in (0.5, 1.0, 1.75):
            await scene.hears(part)
        await scene.until(lambda: len(scene.listened) == 3)

    native = Native()
    scene = run(
        native,
        act,
        DuplexConfig(listen_only_units=7, sampling=NativeSampling(temperature=0.0)),
        instructions="Be kind.",
    )
    assert native.options == NativeOptions(
        "Be kind.", None, listen_only_units=7, sampling=NativeSampling(temperature=0.0)
    )
    assert [len(u.pcm) for u in native.units] == [UNIT] * 3
    assert all((u.pcm == np.float32(QUIET)).all() for u in native.units)
    assert len(scene.listened) == 3
    assert not scene.of(ResponseCreated)
    assert native.closes == 1


def test_when_no_audio_comes_while_the_model_speaks_then_it_is_fed_silence() -> None:
    async def act(scene: Scene) -> None:
        await scene.hears(1.25)
        await scene.until(lambda: scene.of(ResponseDone))

    native = Native(says("One two"), says(" three,"), says(" four.", last=True))
    scene = run(native, act)
    (done,) = scene.of(ResponseDone)
    assert done.response.status == "completed"
    assert scene.text == "One two three, four."
    assert len(native.units) == 3
    # The received part of a second unit is included in it.
    assert (native.units[1].pcm[: UNIT // 4] == np.float32(QUIET)).all()
    assert not native.units[1].pcm[UNIT // 4 :].any()
    assert not native.units[2].pcm.any()
    assert sum(len(o.pcm) for o in scene.of(ResponseAudioDelta)) == 1200
    (part,) = done.response.output[0].parts
    # Word times are spread over each unit's audio.
    assert [(w.text, round(w.start_s, 3)) for w in part.words] == [
        ("One", 0.0), ("two", 0.025), ("three,", 0.05), ("four.", 0.1),
    ]  # fmt: skip
    assert len(scene.of(SpeakStepTaken)) == 1


def test_when_audio_is_a_little_late_then_no_silence_is_heard_in_between() -> None:
    clock = UnitClock(1.0)
    clock.begin(10.0, 10.0)
    # A client that sends audio gets time for its next second; one whose turn is committed may send no more.
    assert clock.left_s(10.9, is_committed=False) == pytest.approx(0.6)
    assert clock.left_s(10.9, is_committed=True) == pytest.approx(0.1)
    # After that time without audio, silence follows in real time.
    clock.begin(11.5, None)
    assert clock.left_s(12.0, is_committed=False) == pytest.approx(0.5)


def test_when_the_model_has_no_turn_then_it_waits_for_audio() -> None:
    async def act(scene: Scene) -> None:
        await scene.hears()
        await scene.until(lambda: scene.listened)
        await asyncio.sleep(4 * UNIT / 16_000)

    native = Native()
    run(native, act)
    assert len(native.units) == 1


def test_when_a_step_is_interrupted_then_nothing_of_it_is_sent_and_the_model_is_told() -> None:
    async def act(scene: Scene) -> None:
        native.go.release()
        await scene.hears(2)
        await scene.until(lambda: scene.of(ResponseAudioDelta) and len(native.units) == 2)
        await scene.session.handle(BargeIn())
        await scene.until(lambda: scene.of(ResponseDone))
        native.go.release()
        native.go.release()
        native.go.release()
        await scene.hears(2)
        await scene.until(lambda: len(scene.of(ResponseDone)) == 2)

    native = Native(says("One"), says(" two"), ListenStep(), says("Yes?", last=True), held=True)
    scene = run(native, act)
    assert native.interrupts == 1
    assert scene.text == "OneYes?"
    first, second = (o.response for o in scene.of(ResponseDone))
    assert (first.status, first.reason) == ("cancelled", "turn_detected")
    assert second.status == "completed"
    raised = scene.out.index(EpochRaised(1))
    assert not [o for o in scene.out[raised : scene.out.index(scene.listened[0])] if isinstance(o, ResponseTextDelta)]


def test_when_the_client_lets_speech_interrupt_then_speech_over_the_model_takes_the_floor() -> None:
    async def act(scene: Scene) -> None:
        await scene.hears()
        await scene.until(lambda: scene.of(ResponseAudioDelta))
        await scene.inbox.put(AppendAudio(np.full(16_000, 0.5, np.float32)))
        await scene.until(lambda: scene.of(ResponseDone))

    native = Native(says("One"), *[says(" more")] * 50)
    native.obeys = True
    scene = run(native, act, interrupt_response=True)
    assert scene.of(ResponseDone)[0].response.reason == "turn_detected"
    assert native.interrupts == 1


def test_when_the_client_barges_in_on_a_silent_model_then_the_model_is_told() -> None:
    async def act(scene: Scene) -> None:
        await scene.session.handle(BargeIn("client_force_listen"))

    native = Native()
    run(native, act)
    assert native.interrupts == 1


def test_when_a_response_was_heard_in_part_then_the_history_has_that_part() -> None:
    async def act(scene: Scene) -> None:
        await scene.hears()
        await scene.until(lambda: len(scene.of(ResponseAudioDelta)) == 2)
        await scene.session.handle(AcknowledgePlayback(60, 60))
        await scene.session.handle(BargeIn())
        await scene.until(lambda: scene.of(ResponseDone))

    scene = run(Native(says("One two"), says(" three four"), held=False), act)
    (item,) = [i for i in scene.session.history.items if i.role == "assistant"]
    assert item.text == "One two"


def test_when_frames_come_then_they_go_with_the_next_unit_and_a_wrong_one_is_named() -> None:
    async def act(scene: Scene) -> None:
        for frames in ((b"a", b"b"), (b"c",)):
            await scene.inbox.put(AppendFrames(frames))
        await scene.hears()
        await scene.until(lambda: len(native.units) == 1)
        await scene.inbox.put(AppendFrames((b"x",)))
        await scene.hears(2)
        await scene.until(lambda: len(native.units) == 3)
        native.held = True
        await scene.hears()
        await scene.until(lambda: len(native.units) == 4)
        await scene.inbox.put(AppendFrames((b"d",)))
        await scene.hears(2)
        await asyncio.sleep(0.02)
        for _ in range(3):
            native.go.release()
        await scene.until(lambda: len(native.units) == 6)

    native = Native()
    native.refuses = b"x"
    scene = run(native, act)
    assert [u.frames for u in native.units[:3]] == [(b"b", b"c"), (), ()]
    # A frame belongs to the audio that arrived after it, however many wait.
    assert [u.frames for u in native.units[3:]] == [(), (b"d",), ()]
    assert [o.code for o in scene.of(CommandRejected)] == ["invalid_video_frames"]


def test_when_the_client_commits_then_the_model_hears_silence_until_it_speaks() -> None:
    async def act(scene: Scene) -> None:
        await scene.hears(1.25)
        await scene.inbox.put(CommitAudio())
        await scene.until(lambda: scene.of(ResponseDone))

    native = Native(ListenStep(), ListenStep(), ListenStep(), says("Yes.", last=True))
    scene = run(native, act)
    assert scene.text == "Yes."
    assert len(native.units) == 4
    # The incomplete unit is padded with silence.
    assert (native.units[1].pcm[: UNIT // 4] == np.float32(QUIET)).all()
    assert not native.units[1].pcm[UNIT // 4 :].any()
    assert not native.units[2].pcm.any()
    assert native.forced == [False] * 4


@pytest.mark.parametrize("heard", [1, 1.25, 3.5])
def test_when_a_committed_turn_is_not_answered_in_time_then_the_model_has_to_speak(heard: float) -> None:
    async def act(scene: Scene) -> None:
        await scene.hears(heard)
        await scene.inbox.put(CommitAudio())
        await scene.until(lambda: scene.of(ResponseDone))
        await asyncio.sleep(4 * UNIT / 16_000)

    native = Native()
    scene = run(native, act)
    assert scene.text == "At last."
    # The whole units, the one that the commit pads or makes, and then silence.
    assert len(native.units) == int(heard) + 1 + ANSWER_UNITS
    assert native.forced == [False] * (len(native.units) - 1) + [True]


def test_when_the_user_goes_on_after_a_commit_then_the_silence_ends() -> None:
    async def act(scene: Scene) -> None:
        await scene.hears(0.5)
        await scene.inbox.put(CommitAudio())
        await scene.until(lambda: len(native.units) == 1)
        await scene.hears(0.25)
        await scene.until(lambda: scene.session.progress.audio_s >= 0.75 * UNIT / 16_000)
        native.held = False
        for _ in range(50):
            native.go.release()
        await asyncio.sleep(4 * UNIT / 16_000)

    native = Native(held=True)
    scene = run(native, act)
    assert len(native.units) == 1
    assert not any(native.forced)
    assert not scene.of(ResponseCreated)


def test_when_a_commit_is_not_to_be_answered_then_only_its_unit_is_filled_up() -> None:
    async def act(scene: Scene) -> None:
        await scene.hears(0.5)
        await scene.inbox.put(SkipResponse())
        await scene.inbox.put(CommitAudio())
        await scene.until(lambda: len(scene.listened) == 1)
        await asyncio.sleep(4 * UNIT / 16_000)

    native = Native()
    run(native, act)
    assert len(native.units) == 1


def test_when_an_item_has_what_the_model_cannot_take_then_the_error_names_it() -> None:
    said = ContentPart("input_audio", "What is it?")
    sound, image = ContentPart("input_audio", media=AudioPart(np.zeros(8, np.float32))), ContentPart("input_image")

    async def act(scene: Scene) -> None:
        for name, part in (("a", said), ("b", sound), ("c", image)):
            await scene.inbox.put(CreateItem(Item(name, parts=[part])))
        await scene.inbox.put(CreateResponse())
        await scene.until(lambda: scene.of(ResponseDone))

    native = Native()
    scene = run(native, act, create_response=False)
    assert native.units[0].text == "What is it?"
    assert [(o.code, o.param) for o in scene.of(CommandRejected)] == [("unsupported_content_type", "item.content")] * 2


def test_when_the_client_asks_for_a_response_then_the_model_speaks() -> None:
    async def act(scene: Scene) -> None:
        await scene.inbox.put(CreateItem(Item("one", parts=[ContentPart("input_text", "x" * 150)])))
        await scene.inbox.put(CreateResponse(metadata={"mine": "1"}))
        await scene.until(lambda: scene.of(ResponseDone))

    native = Native()
    scene = run(native, act, create_response=False)
    assert [len(u.text) for u in native.units[:3]] == [128, 22, 0]
    assert len(native.units) == 1 + ANSWER_UNITS
    assert scene.of(ResponseDone)[0].response.metadata == {"mine": "1"}
    assert not scene.of(CommandRejected)


def test_when_audio_arrives_while_a_response_is_asked_for_then_the_model_still_speaks() -> None:
    async def act(scene: Scene) -> None:
        await scene.hears(1)
        await scene.inbox.put(CreateResponse())
        await scene.hears(2.5)
        await scene.until(lambda: scene.of(ResponseDone))

    native = Native()
    scene = run(native, act)
    assert scene.text == "At last."
    assert len(native.units) <= 4 + ANSWER_UNITS


@pytest.mark.parametrize("steps", [(), (says("Yes."), says(" Sir.", last=True))])
def test_when_a_request_follows_a_commit_then_there_is_one_answer(steps: tuple[NativeStep, ...]) -> None:
    async def act(scene: Scene) -> None:
        await scene.hears(0.5)
        await scene.inbox.put(CommitAudio())
        if steps:
            await scene.until(lambda: scene.of(ResponseCreated))
        await scene.inbox.put(CreateResponse())
        await scene.until(lambda: scene.of(ResponseDone))
        await asyncio.sleep(4 * UNIT / 16_000)

    scene = run(Native(*steps), act)
    assert len(scene.of(ResponseCreated)) == 1
    assert not scene.of(CommandRejected)


@pytest.mark.parametrize(
    ("then", "ends"),
    [
        ([CreateResponse()], ["cancelled", "completed"]),
        ([CreateResponse(), CancelResponse()], ["cancelled", "cancelled"]),
    ],
)
def test_when_a_response_is_asked_for_right_after_a_cancellation_then_the_model_speaks_again(
    then: list[CreateResponse | CancelResponse], ends: list[str]
) -> None:
    async def act(scene: Scene) -> None:
        await scene.hears(1)
        await scene.until(lambda: scene.of(ResponseTextDelta))
        for command in [CancelResponse(), *then]:
            await scene.session.handle(command)
        await scene.until(lambda: len(scene.of(ResponseDone)) == 2)

    scene = run(Native(says("Yes."), says("More."), says("More."), says("More."), says("No.", last=True)), act)
    assert [o.response.status for o in scene.of(ResponseDone)] == ends
    assert not scene.of(CommandRejected)


def test_when_a_request_is_cancelled_before_its_answer_then_the_model_listens_on() -> None:
    async def act(scene: Scene) -> None:
        await scene.hears(1)
        await scene.inbox.put(CreateResponse())
        await scene.until(lambda: len(native.units) == 2)
        await scene.inbox.put(CancelResponse())
        native.held = False
        for _ in range(50):
            native.go.release()
        await asyncio.sleep(4 * UNIT / 16_000)

    native = Native(held=True)
    native.go.release()
    scene = run(native, act)
    assert len(native.units) == 2
    # A client that has requested the response gets its end.
    assert [(o.response.status, o.response.reason) for o in scene.of(ResponseDone)] == [
        ("cancelled", "client_cancelled")
    ]
    assert not scene.text
    assert not scene.of(CommandRejected)


@pytest.mark.parametrize("end", ["barge_in", "close"])
def test_when_a_request_is_overtaken_before_its_answer_then_it_ends_as_cancelled(end: str) -> None:
    async def act(scene: Scene) -> None:
        await scene.hears(1)
        await scene.inbox.put(CreateResponse(metadata={"mine": "1"}))
        await scene.until(lambda: len(native.units) == 2)
        if end == "barge_in":
            await scene.session.handle(BargeIn())
            await scene.until(lambda: scene.of(ResponseDone))
        scene.inbox.close()
        for _ in range(60):
            await asyncio.sleep(0)
        native.go.release()

    native = Native(held=True)
    native.go.release()
    (done,) = run(native, act).of(ResponseDone)
    reason = "turn_detected" if end == "barge_in" else "client_cancelled"
    assert (done.response.status, done.response.reason) == ("cancelled", reason)
    assert done.response.metadata == {"mine": "1"}


@pytest.mark.parametrize("asked", [True, False])
def test_when_a_model_says_nothing_although_it_has_to_then_it_is_not_asked_for_ever(asked: bool) -> None:
    async def act(scene: Scene) -> None:
        await scene.hears(1)
        await scene.inbox.put(CreateResponse() if asked else CommitAudio())
        await scene.until(lambda: True in native.forced)
        await asyncio.sleep(4 * UNIT / 16_000)

    native = Native(*[ListenStep()] * 200)
    scene = run(native, act)
    assert native.forced.count(True) == 1
    ends = [(o.response.status, o.response.error) for o in scene.of(ResponseDone)]
    assert ends == ([("failed", "the model said nothing")] if asked else [])


def test_when_the_instructions_of_a_request_are_too_long_then_they_are_refused() -> None:
    async def act(scene: Scene) -> None:
        await scene.inbox.put(CreateItem(Item("one", parts=[ContentPart("input_text", "x" * 7000)])))
        await scene.inbox.put(CreateResponse(instructions="y" * 1001))
        await scene.until(lambda: scene.of(CommandRejected))

    scene = run(Native(), act)
    assert [o.code for o in scene.of(CommandRejected)] == ["string_above_max_length"]
    assert not scene.of(ResponseCreated)


def test_when_a_response_cannot_be_asked_of_a_native_model_then_the_error_names_why() -> None:
    async def act(scene: Scene) -> None:
        await scene.inbox.put(CreateResponse())
        await scene.inbox.put(CreateResponse(stored=False))
        await scene.inbox.put(CreateItem(Item("one", parts=[ContentPart("input_text", "x" * 8001)])))
        await scene.hears(1)
        await scene.until(lambda: scene.of(ResponseCreated))
        # It speaks by itself. Another host would begin this response again.
        assert scene.session.progress.is_responding
        assert scene.session.progress.owed_responses == [CreateResponse()]
        await scene.inbox.put(CreateResponse())

    scene = run(Native(says("One"), *[says(" more")] * 200), act)
    assert [o.code for o in scene.of(CommandRejected)] == [
        "response_create_without_input",
        "response_create_unsupported",
        "string_above_max_length",
        "conversation_already_has_active_response",
    ]


def test_when_the_placeholder_is_asked_for_a_response_then_it_refuses() -> None:
    async def respond() -> None:
        stream = await NativeConversationModel(Native()).open()
        async for _ in stream.respond((), None, None):  # type: ignore[arg-type]
            pass

    with pytest.raises(RemoteProtocolError):
        asyncio.run(respond())


def test_when_the_model_has_no_voice_then_it_responds_with_text() -> None:
    async def act(scene: Scene) -> None:
        await scene.hears()
        await scene.until(lambda: scene.of(ResponseDone))

    scene = run(Native(says("Hello.", last=True, samples=0), voice=False), act)
    assert scene.text == "Hello."
    assert scene.of(ResponseDone)[0].response.output[0].parts[0].kind == "output_text"


def test_when_a_step_fails_then_the_session_ends() -> None:
    async def act(scene: Scene) -> None:
        await scene.hears()
        await asyncio.sleep(5)

    native = Native(ModelError("no"))
    with pytest.raises(ExceptionGroup) as raised:
        run(native, act)
    assert raised.group_contains(ModelError)
    assert native.closes == 1


def test_when_the_model_is_behind_then_audio_is_held_back() -> None:
    async def main() -> int:
        native = Native(held=True)
        units = NativeTurns(native, lambda turn: asyncio.sleep(0), lambda output: asyncio.sleep(0))
        await units.open(ConversationConfig(TranscriptionConfig()))
        task = asyncio.create_task(units.run())
        heard = 0

        async def hear() -> None:
            nonlocal heard
            for _ in range(20):
                await units.append_audio(np.zeros(UNIT, np.float32))
                heard += 1

        hearing = asyncio.create_task(hear())
        for _ in range(200):
            await asyncio.sleep(0)
        behind = heard
        for _ in range(20):
            native.go.release()
        await hearing
        await asyncio.wait_for(asyncio.sleep(0.05), 5)
        units.close()
        await task
        assert len(native.units) == 20
        return behind

    # One of them is in its step.
    assert asyncio.run(main()) == MAX_WAITING_UNITS + 1


def continued(native: Native, items: list[Item], act: Any) -> Scene:
    """Run a session whose items are those of another host."""

    async def main() -> Scene:
        scene = Scene(native)
        scene.session.history.restore(items)
        task = asyncio.create_task(scene.session.run())
        try:
            async with asyncio.timeout(20):
                await act(scene)
                scene.inbox.close()
                await task
        finally:
            task.cancel()
        return scene

    return asyncio.run(main())


def test_a_conversation_of_another_host_begins_with_what_was_said_and_can_be_answered_at_once() -> None:
    async def act(scene: Scene) -> None:
        # The second request is the client's own, which does not know of the first.
        for _ in range(2):
            await scene.inbox.put(CreateResponse(when_busy="wait"))
        await scene.until(lambda: len(scene.of(ResponseDone)) == 2)
        assert not scene.of(CommandRejected)

    said = [Item("a", parts=[ContentPart("input_audio", "Hello.")]),
            Item("b", role="assistant", parts=[ContentPart("output_audio", "Good day.")]),
            Item("c", parts=[ContentPart("input_text", "And now?")])]  # fmt: skip
    native = Native()
    scene = continued(native, said, act)
    assert native.recalled.splitlines()[1:] == ["User: Hello.", "You: Good day.", "User: And now?"]
    assert scene.text == "At last.At last."
    # A request is answered even if nothing was said: the client sends the audio again.
    empty = Native()
    assert continued(empty, [], act).text == "At last.At last."
    assert empty.recalled == ""


def test_an_answer_is_owed_from_the_end_of_a_turn_until_the_model_has_spoken_or_has_chosen_to_listen() -> None:
    async def main() -> None:
        native, begun = Native(held=True), list[NativeResponse]()

        async def begin(turn: NativeResponse) -> None:
            begun.append(turn)

        turns = NativeTurns(native, begin, lambda output: asyncio.sleep(0))
        await turns.open(ConversationConfig(TranscriptionConfig()))
        async with asyncio.TaskGroup() as group:
            group.create_task(turns.run())

            async def step(step: NativeStep) -> None:
                native.steps.append(step)
                count = len(native.forced)
                await turns.append_audio(np.zeros(UNIT, np.float32))
                native.go.release()
                while len(native.forced) == count:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                await asyncio.sleep(0.01)

            assert turns.owed == []
            turns.turn_ended()
            await step(ListenStep())
            assert turns.owed == [CreateResponse()]
            await step(says("Yes.", last=True))
            assert turns.owed == []
            # The model has answered before the turn had its transcript.
            turns.turn_ended()
            assert turns.owed == []
            turns.turn_started()
            turns.turn_ended()
            for _ in range(ANSWER_UNITS):
                assert turns.owed == [CreateResponse()]
                await step(ListenStep())
            assert turns.owed == []
            turns.ask(request := CreateResponse(instructions="Speak."))
            assert turns.owed == [request]
            turns.close()
            native.go.release()
        for turn in begun:
            await turn.drop()

    asyncio.run(main())
