"""One video session over a scripted video model: frames in order, questions that interrupt, memory, audio, failures."""

from __future__ import annotations

import asyncio
import io
import itertools
import zlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import anyio.to_thread
import numpy as np
import pytest
from PIL import Image

from antiphon.audio import Pcm
from antiphon.contracts import (
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    TextDelta,
    VideoFrame,
    VideoProfile,
    VideoQuestion,
    VoiceOptions,
)
from antiphon.errors import MediaError, ModelError, Refused
from antiphon.events.video import (
    AnswerAudioDelta,
    AnswerDone,
    AnswerSampling,
    AnswerStarted,
    AnswerTextDelta,
    AppendFrame,
    AppendVideoAudio,
    AskQuestion,
    FinishVideo,
    FrameInfo,
    FrameReceived,
    VideoConfig,
    VideoEnded,
    VideoFailed,
)
from antiphon.pipelines.observer import Observer
from antiphon.sessions.video.session import MAX_AUDIO_SAMPLES, MAX_WAITING_BYTES, QuestionSound, VideoSession, VideoTime
from antiphon.vision.images import decode
from tests.pipelines.scripted import Partner, Reader


def png(value: int, side: int = 64) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((side, side, 3), value, np.uint8)).save(file, "PNG")
    return file.getvalue()


class ScriptedModel:
    """A video model and its stream in one object: answers a question with the question's words.

    With `held`, each word after the first waits for `go`. `num_ended`: answers that ended or were closed.
    """

    def __init__(self, *, voice: bool = True, held: bool = False, fails: Exception | None = None) -> None:
        self.profile = VideoProfile("scripted", "text", 8000, ("one", "two") if voice else ())
        self.held, self.fails, self.go = held, fails, asyncio.Event()
        self.frames: list[VideoFrame] = []
        self.asked: list[VideoQuestion] = []
        self.voices: list[VoiceOptions | None] = []
        self.options: list[ReplyOptions] = []
        self.forgotten: list[float] = []
        self.heard: list[tuple[float, int]] = []
        self.instructions = ""
        self.num_ended = self.num_closed = self.num_running = 0

    async def open(self, instructions: str, owner: object = None) -> ScriptedModel:
        self.instructions = instructions
        return self

    async def run(self) -> None:
        self.num_running += 1
        try:
            await asyncio.sleep(3600)
        finally:
            self.num_running -= 1

    async def append_frame(self, frame: VideoFrame) -> None:
        await anyio.to_thread.run_sync(frame.image.overview)
        self.frames.append(frame)

    def append_audio(self, pcm: Pcm, at_s: float) -> None:
        self.heard.append((at_s, len(pcm)))

    def select_frames(self, frames: tuple[int, ...]) -> None:
        self.selected = frames

    def drop_frame(self, frame: int) -> None:
        self.dropped = frame

    async def settled(self) -> None:
        return

    def forget(self, before_s: float) -> None:
        self.forgotten.append(before_s)

    async def answer(
        self, question: VideoQuestion, options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        self.asked.append(question)
        self.voices.append(voice)
        self.options.append(options)
        try:
            for i, word in enumerate(question.text.split()):
                if i and self.held:
                    await self.go.wait()
                if i and self.fails:
                    raise self.fails
                yield TextDelta(f" {word}" if i else word)
                if voice:
                    yield ResponseAudio(np.full(80, 0.1, np.float32))
            yield ReplyDone("stop", 5, 4, 3)
        finally:
            self.num_ended += 1

    def close(self) -> None:
        self.num_closed += 1


class Scene:
    def __init__(self, model: ScriptedModel, **config: Any) -> None:
        self.model, self.out = model, []  # type: ignore[var-annotated]
        self.clock = 100.0
        count = itertools.count()
        config.setdefault("filter", None)
        self.session = VideoSession(
            VideoConfig(**config), model, self.emit, new_id=lambda p: f"{p}{next(count)}", clock=lambda: self.clock
        )

    async def emit(self, event: Any) -> None:
        self.out.append(event)

    def of(self, *kinds: type) -> list[Any]:
        return [o for o in self.out if isinstance(o, kinds)]

    async def frame(self, name: str, value: int = 0, pts_ms: float | None = None, image: bytes | None = None) -> None:
        await self.session.put(AppendFrame(image or png(value), FrameInfo(self.clock * 1000, name, pts_ms)))

    async def until(self, done: Callable[[], Any]) -> None:
        async with asyncio.timeout(10):
            while not done():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def ask(self, text: str) -> None:
        count = len(self.of(AnswerDone, VideoFailed))
        await self.session.put(AskQuestion(text))
        await self.until(lambda: len(self.of(AnswerDone, VideoFailed)) > count)


def run(model: ScriptedModel, act: Any, **config: Any) -> Scene:
    async def main() -> Scene:
        scene = Scene(model, **config)
        task = asyncio.create_task(scene.session.run())
        try:
            async with asyncio.timeout(20):
                await act(scene)
                scene.session.close()
                await task
        finally:
            task.cancel()
        return scene

    return asyncio.run(main())


def test_when_a_question_is_asked_then_it_is_answered_from_sampled_frames_in_text_and_audio() -> None:
    async def act(scene: Scene) -> None:
        for i in range(6):
            await scene.frame(f"f{i}", pts_ms=1000 + 500 * i)
        await scene.session.put(AppendVideoAudio(np.ones(160, np.float32)))
        await scene.session.put(AppendVideoAudio(np.zeros(160, np.float32)))
        await scene.ask("What is this?")
        await scene.ask("And now?")

    model = ScriptedModel()
    scene = run(model, act, num_frames=3, instructions="Be brief.", voice="two")
    first, second = model.asked
    assert (first.text, first.at_s, first.frames) == ("What is this?", 2.5, (0, 2, 5))
    assert model.selected == first.frames
    assert first.pcm is not None
    assert len(first.pcm) == 320
    # Audio belongs only to the next question; frames stay.
    assert second.pcm is None
    assert second.frames == (0, 2, 5)
    assert model.instructions == "Be brief."
    assert [v.voice for v in model.voices if v] == ["two", "two"]
    began = scene.of(AnswerStarted)
    assert [f.id for f in began[0].frames] == ["f0", "f2", "f5"]
    assert began[0].request_id != began[1].request_id
    assert "".join(o.text for o in scene.of(AnswerTextDelta)) == "What is this?And now?"
    assert len(scene.of(AnswerAudioDelta)) == 5
    done = scene.of(AnswerDone)[0]
    assert (done.text, done.spoken) == ("What is this?", True)
    assert done.token_counts == {"prompt_tokens": 5, "cached_tokens": 4, "completion_tokens": 3}
    assert (model.num_closed, model.num_running) == (1, 0)


def test_an_answer_is_sampled_as_the_configuration_says() -> None:
    async def act(scene: Scene) -> None:
        await scene.frame("f")
        await scene.ask("What is this?")

    model = ScriptedModel()
    run(model, act, sampling=AnswerSampling(5, 0.0, 0.5, 7, 1.5, 3))
    run(model, act)
    wanted = ReplyOptions(max_tokens=5, temperature=0.0, top_p=0.5, top_k=7, repetition_penalty=1.5, seed=3)
    assert model.options == [wanted, ReplyOptions()]


def test_when_text_or_audio_is_switched_off_then_answers_have_only_the_other() -> None:
    async def act(scene: Scene) -> None:
        await scene.frame("a")
        await scene.ask("One two")

    silent = run(ScriptedModel(), act, audio_output=False)
    assert not silent.of(AnswerAudioDelta)
    assert len(silent.of(AnswerTextDelta)) == 2
    spoken = run(ScriptedModel(), act, text_output=False)
    assert not spoken.of(AnswerTextDelta)
    assert spoken.of(AnswerDone)[0].text == "One two"
    voiceless = run(ScriptedModel(voice=False), act)
    assert not voiceless.of(AnswerDone)[0].spoken


def test_when_a_question_follows_then_the_answer_before_it_ends() -> None:
    async def act(scene: Scene) -> None:
        await scene.frame("a")
        await scene.session.put(AskQuestion("first never said"))
        await scene.until(lambda: scene.of(AnswerTextDelta))
        await scene.session.put(AskQuestion("second"))
        await scene.until(lambda: scene.of(AnswerDone))
        model.go.set()

    model = ScriptedModel(held=True)
    scene = run(model, act)
    assert [o.text for o in scene.of(AnswerTextDelta)] == ["first", "second"]
    assert [o.text for o in scene.of(AnswerDone)] == ["second"]
    assert model.num_ended == 2
    # The first had ended before the second began.
    assert scene.out.index(scene.of(AnswerStarted)[1]) > scene.out.index(scene.of(AnswerTextDelta)[0])


def test_when_the_session_is_finished_then_the_answer_under_way_is_completed() -> None:
    async def act(scene: Scene) -> None:
        await scene.frame("a")
        await scene.session.put(AskQuestion("one two"))
        await scene.session.put(FinishVideo())
        await scene.until(lambda: scene.of(AnswerTextDelta))
        await asyncio.sleep(0.02)
        assert not scene.of(VideoEnded)
        model.go.set()
        await scene.until(lambda: scene.of(VideoEnded))

    model = ScriptedModel(held=True)
    scene = run(model, act)
    assert isinstance(scene.out[-1], VideoEnded)
    assert scene.of(AnswerDone)[0].text == "one two"


def test_when_the_session_is_closed_then_the_answer_ends() -> None:
    async def act(scene: Scene) -> None:
        await scene.frame("a")
        await scene.session.put(AskQuestion("one two"))
        await scene.until(lambda: scene.of(AnswerTextDelta))

    model = ScriptedModel(held=True)
    scene = run(model, act)
    assert (model.num_ended, model.num_closed) == (1, 1)
    assert not scene.of(AnswerDone)


def test_when_frames_are_alike_or_too_many_then_they_are_filtered_or_the_oldest_leaves() -> None:
    async def act(scene: Scene) -> None:
        for name, value in (("a", 0), ("b", 5), ("c", 100), ("d", 200), ("e", 50)):
            await scene.frame(name, value)
        await scene.ask("What?")

    model = ScriptedModel()
    scene = run(model, act, filter="evs", max_frames=2)
    taken = scene.of(FrameReceived)
    assert [(t.info.id, t.accepted, t.buffered, t.reason) for t in taken] == [
        ("a", True, 1, None),
        ("b", False, 1, "filtered"),
        ("c", True, 2, None),
        ("d", True, 2, None),
        ("e", True, 2, None),
    ]
    assert [t.dropped.id if t.dropped else None for t in taken] == [None, None, None, "a", "c"]
    assert [f.id for f in scene.of(AnswerStarted)[0].frames] == ["d", "e"]
    assert len(model.frames) == 4
    assert scene.session.num_frames == 5
    assert scene.session.num_kept == 4


def test_when_the_client_gives_timestamps_then_time_is_its_own_and_else_the_servers() -> None:
    async def with_times(scene: Scene) -> None:
        await scene.frame("a", pts_ms=7000)
        await scene.frame("b", pts_ms=9500)

    async def without_times(scene: Scene) -> None:
        await scene.frame("a")
        await scene.until(lambda: scene.of(FrameReceived))
        scene.clock = 101.5
        await scene.frame("b")

    for act, second in ((with_times, 2.5), (without_times, 1.5)):

        async def whole(scene: Scene, act: Any = act) -> None:
            await act(scene)
            await scene.until(lambda: len(scene.of(FrameReceived)) == 2)

        model = ScriptedModel()
        run(model, whole, max_memory_s=1.0)
        assert [s.at_s for s in model.frames] == [0.0, second]
        assert model.forgotten == [-1.0, second - 1.0]


def test_when_a_frame_is_too_old_then_no_question_is_answered_from_it() -> None:
    async def act(scene: Scene) -> None:
        for name, pts_ms in (("a", 0), ("b", 1000), ("c", 2500)):
            await scene.frame(name, pts_ms=pts_ms)
        # The question arrives at the time of the last frame.
        await scene.ask("What?")

    scene = run(ScriptedModel(), act, max_memory_s=2.0)
    assert [f.id for f in scene.of(AnswerStarted)[0].frames] == ["b", "c"]


def test_when_too_many_bytes_wait_then_put_waits() -> None:
    async def act(scene: Scene) -> None:
        big = np.zeros(MAX_WAITING_BYTES // 8, np.float32)
        await scene.frame("a")
        await scene.session.put(AskQuestion("one two"))
        await scene.until(lambda: scene.of(AnswerTextDelta))
        # The session waits for its answer; later commands wait.
        await scene.session.put(FinishVideo())
        put = 0

        async def send() -> None:
            nonlocal put
            for _ in range(6):
                await scene.session.put(AppendVideoAudio(big))
                put += 1

        sending = asyncio.create_task(send())
        await asyncio.sleep(0.05)
        assert put == 3
        model.go.set()
        await scene.until(lambda: scene.of(VideoEnded))
        await sending

    model = ScriptedModel(held=True)
    run(model, act)


@pytest.mark.parametrize("filtered", ["evs", None])
def test_when_a_frame_is_no_image_then_it_is_an_error_and_the_session_goes_on(filtered: Any) -> None:
    async def act(scene: Scene) -> None:
        await scene.ask("Anything?")
        await scene.frame("broken", image=png(0)[:60])
        await scene.frame("bomb", image=_bomb())
        await scene.frame("good")
        await scene.ask("And now?")

    scene = run(ScriptedModel(), act, filter=filtered)
    wrong = scene.of(VideoFailed)
    assert [w.message for w in wrong] == ["No frames buffered", "Frame decode failed", "Frame decode failed"]
    assert "million" in wrong[2].detail
    assert scene.of(AnswerDone)[0].text == "And now?"
    assert [t.info.id for t in scene.of(FrameReceived)] == ["good"]


def _bomb() -> bytes:
    """Return a PNG whose header claims 50 megapixels."""
    data = bytearray(png(0))
    data[16:24] = (10_000).to_bytes(4, "big") + (5_000).to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


def test_when_too_much_audio_waits_then_it_is_dropped() -> None:
    async def act(scene: Scene) -> None:
        await scene.frame("a")
        await scene.session.put(AppendVideoAudio(np.zeros(MAX_AUDIO_SAMPLES, np.float32)))
        await scene.session.put(AppendVideoAudio(np.zeros(1, np.float32)))
        await scene.session.put(AppendVideoAudio(np.zeros(7, np.float32)))
        await scene.ask("Heard?")

    model = ScriptedModel()
    scene = run(model, act)
    assert [w.message for w in scene.of(VideoFailed)] == ["Audio buffer overflow"]
    (question,) = model.asked
    assert question.pcm is not None
    assert len(question.pcm) == 7


def test_when_sound_comes_then_the_model_is_told_when_it_began() -> None:
    async def act(scene: Scene) -> None:
        await scene.session.put(AppendVideoAudio(np.zeros(1600, np.float32)))
        await scene.frame("a", pts_ms=5000)
        await scene.ask("one")
        await scene.frame("b", pts_ms=7000)
        await scene.session.put(AppendVideoAudio(np.zeros(8000, np.float32)))
        await scene.session.put(AppendVideoAudio(np.zeros(800, np.float32)))
        await scene.ask("two")

    model = ScriptedModel()
    run(model, act)
    assert [(round(at_s, 3), count) for at_s, count in model.heard] == [(0.0, 1600), (2.0, 8000), (2.5, 800)]
    assert [(round(q.pcm_at_s, 3), len(q.pcm)) for q in model.asked if q.pcm is not None] == [(0.0, 1600), (2.0, 8800)]


def test_when_audio_is_not_used_then_questions_have_none() -> None:
    async def act(scene: Scene) -> None:
        await scene.frame("a")
        await scene.session.put(AppendVideoAudio(np.zeros(7, np.float32)))
        await scene.ask("Heard?")

    model = ScriptedModel()
    run(model, act, uses_audio=False)
    assert model.asked[0].pcm is None


@pytest.mark.parametrize("error", [ModelError("no"), Refused("full", 1.0)])
def test_when_an_answer_fails_then_it_is_an_error_and_the_session_goes_on(error: Exception) -> None:
    async def act(scene: Scene) -> None:
        await scene.frame("a")
        await scene.ask("one two")
        model.fails = None
        await scene.ask("three four")

    model = ScriptedModel(fails=error)
    scene = run(model, act)
    (wrong,) = scene.of(VideoFailed)
    assert (wrong.message, wrong.ends_answer, wrong.partial_text) == ("Query processing failed", True, "one")
    assert scene.of(AnswerDone)[0].text == "three four"


def test_when_the_video_model_has_no_room_then_the_session_ends() -> None:
    class Full(ScriptedModel):
        async def open(self, instructions: str, owner: object = None) -> ScriptedModel:
            raise Refused("no room", 1.0)

    async def main() -> None:
        with pytest.raises(Refused):
            await Scene(Full()).session.run()

    asyncio.run(main())


def test_when_a_frame_is_filtered_and_observed_and_read_then_it_is_decoded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = 0
    real = Image.open

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal opened
        opened += 1
        return real(*args, **options)

    async def act(scene: Scene) -> None:
        for number, value in enumerate((0, 1, 90, 180)):
            await scene.frame(str(number), value)
            await scene.session.settled()

    monkeypatch.setattr(Image, "open", counted)
    reader = Reader()
    scene = run(Observer(Partner(), reader, None), act, filter="evs")  # type: ignore[arg-type]
    # The second is like the first: the filter drops it, and it is not read.
    assert [o.accepted for o in scene.of(FrameReceived)] == [True, False, True, True]
    assert reader.read_levels == [0, 90, 180]
    assert opened == 4


def test_when_a_frame_has_too_many_pixels_then_it_is_not_decoded() -> None:
    with pytest.raises(MediaError, match="million"):
        decode(_bomb())


def test_when_the_session_ends_then_whoever_waits_for_it_to_settle_is_let_go() -> None:
    class Unread(ScriptedModel):
        async def settled(self) -> None:
            await asyncio.sleep(3600)

    async def main() -> None:
        async def emit(_: object) -> None:
            return

        session = VideoSession(VideoConfig(), Unread(), emit, new_id=lambda prefix: prefix)
        running = asyncio.create_task(session.run())
        await session.put(AppendFrame(png(1), FrameInfo(0.0)))
        waiting = asyncio.create_task(session.settled())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        session.close()
        await running
        await asyncio.wait_for(waiting, 5)
        # A command put into an ended session is dropped, and `settled` returns.
        await session.put(AppendFrame(png(2), FrameInfo(0.0)))
        await asyncio.wait_for(session.settled(), 5)

    asyncio.run(main())


def test_the_time_of_a_session_never_goes_back_and_sound_is_where_it_was_heard() -> None:
    clock_s = 100.0
    time, sound = VideoTime(lambda: clock_s), QuestionSound()
    assert time.sound(16_000) == 0.0
    assert [time.frame(FrameInfo(0.0, pts_ms=pts)) for pts in (1000, 3000, 1500)] == [0.0, 2.0, 0.5]
    assert time.now_s == 2.0
    clock_s = 105.0
    # Of the five seconds since the newest frame, the last one.
    assert sound.append(np.zeros(16_000, np.float32), time) == 6.0
    clock_s = 110.0
    assert sound.append(np.zeros(16_000, np.float32), time) == 7.0
    assert (sound.at_s, sound.num_samples) == (6.0, 32_000)
    pcm = sound.take()
    assert pcm is not None
    assert len(pcm) == 32_000
    assert (sound.take(), sound.num_samples) == (None, 0)
    assert sound.append(np.zeros(16_000, np.float32), time) == 11.0
