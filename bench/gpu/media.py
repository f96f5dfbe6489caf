"""Models for audio and images: MiniCPM-o, Qwen3-Omni and vision-language models."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, replace

import numpy as np
import torch
from bench import models
from bench.common import percentile, together
from bench.gpu import speech
from bench.gpu.suite import Plan, Recorder, counted
from PIL import Image

from antiphon.adapters.minicpmo.model import MiniCpmO, MiniCpmOStream
from antiphon.adapters.qwen3_omni.model import Qwen3Omni
from antiphon.adapters.vlm.session import VisionLanguageModel
from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import (
    AudioPart,
    Message,
    NativeOptions,
    ReplyOptions,
    ResponseAudio,
    SoundTrack,
    TextDelta,
    Unit,
    VideoFrame,
    VoiceOptions,
)
from antiphon.events.duplex import NativeSampling
from antiphon.sessions.conversation.turn_audio import GROWTH_MS, TAIL_MS
from antiphon.vision.images import EncodedImage

# Number of units of each session, and the number of first units that are not counted.
UNITS, UNCOUNTED = 12, 2
# Number of units after which a session that lags behind is stopped. All of its remaining units count as missed.
FAR_BEHIND = 8
# Maximum number of tokens of an answer to speech.
ANSWER_TOKENS = 24
# Number of frames of each video session, and their size.
FRAMES, WIDTH, HEIGHT = 16, 640, 480


def native(plan: Plan, recorder: Recorder) -> None:
    """The section `minicpmo`: sessions that get a unit every second, and speak in every unit to its last token.

    Speaking in every unit is the most expensive case. The codes of speech are generated, but no audio. A unit is missed
    if its step is not done when the next unit arrives. `python -m bench.gpu_memory gpu.json` draws the time of a unit
    over sessions.
    """
    _measure_natives(plan, recorder, plan.pick([2], [32, 8, 1, 16]))
    _measure_natives(plan, recorder, plan.pick([2], [32]), step_ahead=True)


def room(plan: Plan, recorder: Recorder) -> None:
    """The section `room`: numbers of texts and sessions beyond the goals."""
    for count in plan.pick([3], [128, 256]):
        with recorder.part(f"{count} texts"):
            asyncio.run(speech.measure_tts(plan, recorder, plan.pick("tiny", "0.6B"), [count]))
    _measure_natives(plan, recorder, plan.pick([3], [48, 64]))


def _measure_natives(plan: Plan, recorder: Recorder, counts: Sequence[int], *, step_ahead: bool = False) -> None:
    way = ", one step ahead" if step_ahead else ""
    if step_ahead:
        plan = replace(plan, engine=plan.engine | {"step_ahead": True})
    with closing(models.native_model(plan.pick("tiny", "4.5"), plan.options(44))) as model:
        for count in counts:
            with recorder.part(f"{count} sessions{way}"):
                asyncio.run(_measure_native(plan, recorder, model, count, way))


async def _measure_native(plan: Plan, recorder: Recorder, model: MiniCpmO, count: int, way: str) -> None:
    pace_s, units, uncounted = (0.1, 3, 1) if plan.dry else (model.profile.unit_s, UNITS, UNCOUNTED)
    streams = [await speaking(model, seed) for seed in range(count)]
    sounds, took, began = [models.unit(n) for n in range(8)], list[float](), time.perf_counter()

    async def hold(number: int) -> None:
        for unit in range(units):
            # The sessions' units are spread evenly over the second.
            due = began + (unit + 1 + number / count) * pace_s
            if time.perf_counter() - due > FAR_BEHIND * pace_s:
                return
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await streams[number].append(Unit(sounds[unit % len(sounds)]))
            await streams[number].step()
            if unit >= uncounted:
                took.append(time.perf_counter() - due)

    await together(count, hold)
    for stream in streams:
        stream.close()
    name, load = f"MiniCPM-o {plan.pick('tiny', '4.5')}", counted(count, "session") + way
    for p in (50, 95):
        recorder.figure(name, f"unit p{p}", load, percentile(took, p) * 1000, "ms")
    due = count * (units - uncounted)
    recorder.figure(name, "missed units", load, due - sum(t <= pace_s for t in took), f"of {due}")


async def speaking(model: MiniCpmO, seed: int) -> MiniCpmOStream:
    """Open a session that speaks in every unit."""
    sampling = NativeSampling(seed=seed)
    return await model.open(NativeOptions(models.NATIVE_PROMPT, listen_only_units=0, sampling=sampling))


def omni(plan: Plan, recorder: Recorder) -> None:
    """The section `omni`: the times from the end of a turn to the first text and the first sound of its answer.

    As in a conversation, the audio of a turn is prefilled while the user speaks, in windows.
    """
    size = plan.pick("tiny", "30B-A3B")
    with closing(models.conversation_model(size, plan.options(24))) as model:
        asyncio.run(_measure_omni(plan, recorder, model, f"Qwen3-Omni {size}"))


async def _measure_omni(plan: Plan, recorder: Recorder, model: Qwen3Omni, name: str) -> None:
    for heard_s in (1, 9):
        await answer(model, heard_s)
    first_s: dict[tuple[int, int], float] = {}
    for heard_s, count in [(2, 1), (30, 1), (2, 8), (30, 8)]:
        found = list[Answer]()
        for _ in range(plan.pick(5, 1) if count > 1 else 5):
            found += await together(count, lambda _, heard_s=heard_s: answer(model, heard_s))
        load = f"{heard_s} s heard, {counted(count, 'talk')}"
        recorder.figure(name, "first text p50", load, percentile([f.text_s for f in found], 50) * 1000, "ms")
        first_s[heard_s, count] = percentile([f.sound_s for f in found], 50)
        recorder.figure(name, "first sound p50", load, first_s[heard_s, count] * 1000, "ms")
        if heard_s == 30:
            ratio = first_s[30, count] / first_s[2, count]
            recorder.figure(name, "first sound, 30 s to 2 s", counted(count, "talk"), ratio, "")


@dataclass(frozen=True, slots=True)
class Answer:
    """The measurements of an answer: seconds to its first text and first sound, and the rates of what follows."""

    text_s: float
    sound_s: float
    tokens_a_s: float
    samples_a_s: float


async def answer(model: Qwen3Omni, heard_s: int, samples: int = 0) -> Answer:
    """Ask with `heard_s` seconds of speech. Wait for text, and for more than `samples` samples of audio.

    The times begin at the end of the speech. What a session prefills before that is computed by then. Raises
    RuntimeError if the answer has no text or no audio.
    """
    talk, pcm, turn = await model.open(), models.sound(heard_s), SoundTrack()
    window, tail = (ms * SAMPLE_RATE_HZ // 1000 for ms in (model.profile.audio_window_ms, TAIL_MS))
    for end in range(window + tail, len(pcm) + 1, SAMPLE_RATE_HZ * GROWTH_MS // 1000):
        part = AudioPart(pcm[:end], turn, grows=True)
        await talk.prefill([Message("user", "", parts=(part,))])
    asked, began = [Message("user", "", parts=(AudioPart(pcm, turn),))], time.perf_counter()
    options, voice = ReplyOptions(max_tokens=ANSWER_TOKENS, temperature=0.0), VoiceOptions(models.OMNI_VOICE, seed=1)
    text_s, last_s, sound_s, count = 0.0, 0.0, 0.0, 0
    async with aclosing(talk.respond(asked, options, voice)) as chunks:
        async for chunk in chunks:
            now_s = time.perf_counter() - began
            if isinstance(chunk, TextDelta):
                text_s, last_s = text_s or now_s, now_s
            elif isinstance(chunk, ResponseAudio):
                sound_s, count = sound_s or now_s, count + len(chunk.pcm)
            if text_s and count > samples:
                break
    talk.close()
    if not text_s or not sound_s:
        raise RuntimeError(f"the answer had {'no sound' if text_s else 'no text'}")
    spoken_s = max(1e-9, time.perf_counter() - began - sound_s)
    return Answer(text_s, sound_s, (ANSWER_TOKENS - 1) / max(1e-9, last_s - text_s), count / spoken_s)


def video(plan: Plan, recorder: Recorder) -> None:
    """The section `vision`: frames per second from JPEG into the KV, as from a live camera before a question."""
    for size in plan.pick([models.TINY_SMOL, models.TINY_QWEN], [models.SMOL, models.QWEN]):
        with recorder.part(size), models.vision_model(size, plan.options(32)) as model:
            asyncio.run(_measure_video(plan, recorder, model, size))


async def _measure_video(plan: Plan, recorder: Recorder, model: VisionLanguageModel, name: str) -> None:
    await watch(model, 0, 2)
    for count in plan.pick([2], [1, 8]):
        frames, began = plan.pick(2, FRAMES), time.perf_counter()
        await together(count, lambda n, frames=frames: watch(model, n, frames))
        rate = count * frames / (time.perf_counter() - began)
        load = f"{counted(count, 'session')}, {WIDTH} x {HEIGHT}"
        recorder.figure(name, "frames a second", load, rate, "frames/s")


async def watch(model: VisionLanguageModel, number: int, frames: int) -> None:
    """Show frames to a new session one after another, and wait until all are in the KV."""
    stream = await model.open("Say what you see.")
    for frame in range(frames):
        await stream.append_frame(VideoFrame(frame, float(frame), EncodedImage(picture(number * frames + frame))))
        stream.select_frames(tuple(range(frame + 1)))
        await stream.session.settle()
    stream.close()


def picture(number: int) -> bytes:
    """Return a JPEG of the size of a camera's frame, with noise over a gradient. Each number gives another image."""
    noise = torch.randint(0, 40, (HEIGHT // 8, WIDTH // 8, 3), generator=torch.Generator().manual_seed(number))
    smooth = np.linspace(0, 200, WIDTH, dtype=np.uint8)[None, :, None]
    pixels = noise.numpy().astype(np.uint8).repeat(8, 0).repeat(8, 1) + smooth
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()
