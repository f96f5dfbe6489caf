"""Models that hear, speak and see: MiniCPM-o, Qwen3-Omni, and the vision-language models."""

from __future__ import annotations

import asyncio
import io
import time
from contextlib import aclosing

import numpy as np
import torch
from bench.common import percentile
from bench.gpu.speech import model_options
from bench.gpu.suite import Plan, Recorder
from bench.models import minicpmo, qwen3_asr, qwen3_omni, vision
from PIL import Image

from antiphon.adapters.minicpmo.model import MiniCpmO
from antiphon.adapters.qwen3_omni.model import Qwen3Omni
from antiphon.adapters.vlm.session import VisionLanguageModel
from antiphon.contracts import (
    AudioPart,
    Message,
    NativeOptions,
    ReplyOptions,
    ResponseAudio,
    TextDelta,
    Unit,
    VideoFrame,
    VoiceOptions,
)
from antiphon.events.duplex import NativeSampling
from antiphon.vision.images import EncodedImage

# Units of each session, of which the first are not counted.
UNITS, UNCOUNTED = 12, 2
# A session that is so many units behind gets no more: all that are left of it are missed.
FAR_BEHIND = 8
# Frames that each video session is shown, of this size.
FRAMES, WIDTH, HEIGHT = 16, 640, 480


def native(plan: Plan, recorder: Recorder) -> None:
    """The section `minicpmo`: sessions that get a unit a second and speak in every one, to its last token.

    That is the most a unit can cost; the codes are made, but no audio of them. A unit is missed where its step is not
    done when the next one is there.
    """
    room = 64 << 20 if plan.dry else 24 << 30
    model = minicpmo.native_model("tiny" if plan.dry else "4.5", model_options(plan, kv_bytes=room))
    try:
        for count in [2] if plan.dry else [1, 32, 8]:
            with recorder.part(f"{count} sessions"):
                asyncio.run(_measure_native(plan, recorder, model, count))
    finally:
        model.close()


async def _measure_native(plan: Plan, recorder: Recorder, model: MiniCpmO, count: int) -> None:
    pace_s, units, uncounted = (0.1, 3, 1) if plan.dry else (model.profile.unit_s, UNITS, UNCOUNTED)
    streams = [
        await model.open(NativeOptions(minicpmo.PROMPT, listen_only_units=0, sampling=NativeSampling(seed=i)))
        for i in range(count)
    ]
    sounds, took, began = [minicpmo.sound(n) for n in range(8)], list[float](), time.perf_counter()

    async def hold(number: int) -> None:
        for unit in range(units):
            # The sessions' units end at times of their own, spread over the second.
            due = began + (unit + 1 + number / count) * pace_s
            if time.perf_counter() - due > FAR_BEHIND * pace_s:
                return
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await streams[number].append(Unit(sounds[unit % len(sounds)]))
            await streams[number].step()
            if unit >= uncounted:
                took.append(time.perf_counter() - due)

    await asyncio.gather(*(hold(n) for n in range(count)))
    for stream in streams:
        stream.close()
    name, load = f"MiniCPM-o {'tiny' if plan.dry else '4.5'}", f"{count} session{'s' if count > 1 else ''}"
    for p in (50, 95):
        recorder.figure(name, f"unit p{p}", load, percentile(took, p) * 1000, "ms")
    due = count * (units - uncounted)
    recorder.figure(name, "missed units", load, due - sum(t <= pace_s for t in took), f"of {due}")


def omni(plan: Plan, recorder: Recorder) -> None:
    """The section `omni`: first text and first sound of the answer to a spoken question."""
    size = "tiny" if plan.dry else "30B-A3B"
    room = 64 << 20 if plan.dry else 24 << 30
    model = qwen3_omni.conversation_model(size, model_options(plan, kv_bytes=room))
    try:
        asyncio.run(_measure_omni(plan, recorder, model, f"Qwen3-Omni {size}"))
    finally:
        model.close()


async def _measure_omni(plan: Plan, recorder: Recorder, model: Qwen3Omni, name: str) -> None:
    await answer(model, 1)
    for heard_s, count in [(1, 1), (2, 1)] if plan.dry else [(3, 1), (30, 1), (3, 8), (30, 8)]:
        found = await asyncio.gather(*(answer(model, heard_s) for _ in range(count)))
        load = f"{heard_s} s heard, {count} talk{'s' if count > 1 else ''}"
        recorder.figure(name, "first text p50", load, percentile([t for t, _ in found], 50) * 1000, "ms")
        recorder.figure(name, "first sound p50", load, percentile([s for _, s in found], 50) * 1000, "ms")


async def answer(model: Qwen3Omni, heard_s: int) -> tuple[float, float]:
    """Ask with so many seconds of speech, and return the seconds to the first text and to the first sound.

    Raises RuntimeError for an answer without either.
    """
    talk, began = await model.open(), time.perf_counter()
    asked = [Message("user", "", parts=(AudioPart(qwen3_asr.sound(heard_s)), "What was that?"))]
    options, text, sound = ReplyOptions(max_tokens=24, temperature=0.0), 0.0, 0.0
    try:
        async with aclosing(talk.respond(asked, options, VoiceOptions(qwen3_omni.VOICE, seed=1))) as chunks:
            async for chunk in chunks:
                if isinstance(chunk, TextDelta):
                    text = text or time.perf_counter() - began
                elif isinstance(chunk, ResponseAudio):
                    sound = sound or time.perf_counter() - began
                if text and sound:
                    return text, sound
    finally:
        talk.close()
    raise RuntimeError(f"the answer had {'no sound' if text else 'no text'}")


def video(plan: Plan, recorder: Recorder) -> None:
    """The section `vision`: frames a second into the KV, from JPEG on, as a live camera's are before a question."""
    for size in [vision.TINY_SMOL, vision.TINY_QWEN] if plan.dry else [vision.SMOL, vision.QWEN]:
        with recorder.part(size):
            room = 64 << 20 if plan.dry else 32 << 30
            with vision.vision_model(size, model_options(plan, kv_bytes=room)) as model:
                asyncio.run(_measure_video(plan, recorder, model, size))


async def _measure_video(plan: Plan, recorder: Recorder, model: VisionLanguageModel, name: str) -> None:
    await watch(model, 0, 2)
    for count in [2] if plan.dry else [1, 8]:
        frames, began = 2 if plan.dry else FRAMES, time.perf_counter()
        await asyncio.gather(*(watch(model, n, frames) for n in range(count)))
        rate = count * frames / (time.perf_counter() - began)
        load = f"{count} session{'s' if count > 1 else ''}, {WIDTH} x {HEIGHT}"
        recorder.figure(name, "frames a second", load, rate, "frames/s")


async def watch(model: VisionLanguageModel, number: int, frames: int) -> None:
    """Show frames to a session of its own, one after another, and wait until they are in the KV."""
    stream = await model.open("Say what you see.")
    for frame in range(frames):
        await stream.append_frame(VideoFrame(frame, float(frame), EncodedImage(picture(number * frames + frame))))
        stream.select_frames(tuple(range(frame + 1)))
        await stream.session.settle()
    stream.close()


def picture(number: int) -> bytes:
    """Return a JPEG of noise over a gradient, as large as a camera's frame; no two numbers give the same."""
    noise = torch.randint(0, 40, (HEIGHT // 8, WIDTH // 8, 3), generator=torch.Generator().manual_seed(number))
    smooth = np.linspace(0, 200, WIDTH, dtype=np.uint8)[None, :, None]
    pixels = noise.numpy().astype(np.uint8).repeat(8, 0).repeat(8, 1) + smooth
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()
