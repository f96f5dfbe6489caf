"""One step of each model under torch.profiler, and the data that it has to move, compared with the memory's bandwidth.

A step is one unit of the model's work for all sessions at once: a token, a frame of codes, a partial transcript, a unit
of audio, an image. Its host time is the wall-clock time without the profiler. The data to move is computed: the weights
of the model's decoders, counted for each run of a decoder, and the KV of the language model. It does not include
encoders, vocoders and shorter KV.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bench import models
from bench.common import together
from bench.gpu import language, media, speech_client
from bench.gpu.suite import Plan, Recorder, counted
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from antiphon.adapters.minicpmo.sampling import MAX_UNIT_TOKENS
from antiphon.adapters.minicpmo.speech_decoder import UNIT_CODES
from antiphon.contracts import Message, ReplyOptions, Unit, Urgency, VoiceOptions, Window

# Calls of the CUDA runtime that wait for the device.
SYNCHRONISATIONS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
# Number of bytes that a copy moves in one direction; more than any cache holds.
COPY_BYTES = 2 << 30
# GB of memory for the KV of each model.
ROOM_GB = 16


@dataclass(frozen=True, slots=True)
class Profiled:
    """A model to profile."""

    # The model's name.
    model: str
    # Its sessions and rows, as the table shows them.
    load: str
    # What one step is, such as a token.
    step: str
    # Number of steps to profile. The profiler takes 50 us for each operator in them.
    steps: int
    # Runs this number of steps.
    run: Callable[[int], Awaitable[None]]
    # Bytes that a step has to read.
    moved_bytes: int


def weight_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of a module's weights that a step of one row reads.

    Embedding tables are left out, because only a row of them is read, and so are experts to which the row is not
    routed.
    """
    tables = {id(m.weight) for m in module.modules() if isinstance(m, torch.nn.Embedding)}
    config = getattr(module, "config", None)
    used = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_experts", 1)
    sizes = {name: p.numel() * p.element_size() for name, p in module.named_parameters() if id(p) not in tables}
    return int(sum(size * (used if ".experts." in name else 1) for name, size in sizes.items()))


def profile(plan: Plan, recorder: Recorder) -> None:
    """The section `profile`: the models one after another, each alone."""
    bandwidth = measured_bandwidth(plan)
    recorder.figure("memory", "copy, read and written", f"{plan.device}", bandwidth / 1e9, "GB/s")
    settings = language.engine_settings(plan).items()
    languages = {f"lm, {label}": partial(_language, label=label, settings=given) for label, given in settings}
    for name, opened in (languages | MODELS).items():
        with recorder.part(name):
            asyncio.run(_profile(plan, recorder, opened, bandwidth))


def measured_bandwidth(plan: Plan) -> float:
    """Return the bytes per second that a copy within device memory reads and writes: the median of five copies."""
    size = plan.pick(16 << 20, COPY_BYTES)
    source = torch.zeros(size, dtype=torch.uint8, device=plan.device)
    target, took = torch.empty_like(source), []
    for _ in range(6):
        _wait(plan)
        began = time.perf_counter()
        target.copy_(source)
        _wait(plan)
        took.append(time.perf_counter() - began)
    return 2 * size / sorted(took[1:])[2]


def _wait(plan: Plan) -> None:
    if not plan.dry:
        torch.cuda.synchronize()


async def _profile(
    plan: Plan, recorder: Recorder, opened: Callable[[Plan], AbstractAsyncContextManager[Profiled]], bandwidth: float
) -> None:
    async with opened(plan) as found:
        steps = 1 if plan.dry else found.steps
        await found.run(steps)
        began = time.perf_counter()
        await found.run(steps)
        host_ms = (time.perf_counter() - began) / steps * 1000
        counts = await counts_of(plan, found, steps)
    load = f"{found.step}, {found.load}"
    floor_ms = found.moved_bytes / bandwidth * 1000
    recorder.figure(found.model, "host time", load, host_ms, "ms")
    recorder.figure(found.model, "computed floor of memory traffic", load, floor_ms, "ms", bytes=found.moved_bytes)
    recorder.figure(found.model, "of the memory's bandwidth", load, 100 * floor_ms / host_ms, "%")
    for measure, (count, unit) in counts.items():
        recorder.figure(found.model, measure, load, count / steps, unit)


async def counts_of(plan: Plan, profiled: Profiled, steps: int) -> dict[str, tuple[float, str]]:
    """Return the profiler's counts for `steps` steps: by measure, with the unit of each."""
    activities = [ProfilerActivity.CPU] + ([] if plan.dry else [ProfilerActivity.CUDA])
    # Counts all threads, because the engines run in threads of their own.
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=activities, experimental_config=all_threads, acc_events=True) as found:
        await profiled.run(steps)
        _wait(plan)
    host, device = list[Any](), list[Any]()
    for event in found.key_averages():
        (host if event.device_type == DeviceType.CPU else device).append(event)

    def number(events: list[Any]) -> tuple[float, str]:
        return float(sum(e.count for e in events)), ""

    counts = {
        "operators": number([e for e in host if e.key.startswith("aten::")]),
        "numbers read on the host": number([e for e in host if e.key == "aten::_local_scalar_dense"]),
    }
    if plan.dry:
        return counts
    kernels = [e for e in device if not e.key.startswith(("Memcpy", "Memset"))]
    return counts | {
        "kernels": number(kernels),
        "kernel time": (sum(e.self_device_time_total for e in kernels) / 1000, "ms"),
        "synchronisations": number([e for e in host if e.key in SYNCHRONISATIONS]),
        "copies to the host": number([e for e in device if "DtoH" in e.key]),
        "launched graphs": number([e for e in host if e.key == "cudaGraphLaunch"]),
    }


@asynccontextmanager
async def _language(plan: Plan, label: str, settings: dict[str, Any]) -> AsyncIterator[Profiled]:
    rows, sessions = plan.pick((64, 2), (2000, 16))
    with closing(language.new_engine(plan, **settings)) as model:
        opened = [await model.open() for _ in range(sessions)]
        for number, session in enumerate(opened):
            session.append(language.tokens(model, rows, number))
            await session.settle()

        async def run(steps: int) -> None:
            await together(sessions, lambda number: language.turn(opened[number], [number], steps))

        kv_bytes = sessions * rows * model.scheduler.cache.storage.row_bytes
        load = f"{sessions} sessions, {language.short(rows)} rows, {label}"
        yield Profiled(language.name(plan), load, "token", 16, run, weight_bytes(model.runner.model) + kv_bytes)


@asynccontextmanager
async def _tts(plan: Plan) -> AsyncIterator[Profiled]:
    size, texts = plan.pick(("tiny", 2), ("0.6B", 8))
    with closing(models.synthesizer(size, plan.options(ROOM_GB))) as model:

        async def say(number: int, frames: int) -> None:
            voice = VoiceOptions(model.profile.voices[0], seed=number, max_frames=frames)
            async for _ in model.speak(speech_client.TEXT, voice, lambda: Urgency.FINAL):
                pass

        async def run(steps: int) -> None:
            await together(texts, lambda number: say(number, steps))

        predictor = model.parts.code_predictor
        # The predictor's decoder runs once for each code after the first.
        passes = len(predictor.lm_head)
        moved = weight_bytes(model.parts.decoder) + passes * weight_bytes(predictor.model)
        yield Profiled(f"Qwen3-TTS {size}", f"{texts} texts", "frame", 8, run, moved + weight_bytes(predictor.lm_head))


@asynccontextmanager
async def _asr(plan: Plan) -> AsyncIterator[Profiled]:
    size, streams = plan.pick(("tiny", 2), ("0.6B", 16))
    with closing(models.transcriber(size, plan.options(ROOM_GB))) as model:
        opened, sound, tokens = [model.open() for _ in range(streams)], models.sound(8), 9

        async def hear(number: int, steps: int) -> None:
            for step in range(steps):
                await opened[number].decode(Window(sound[: (4 + step % 4) * 16_000], language="en", max_tokens=tokens))

        async def run(steps: int) -> None:
            await together(streams, lambda number: hear(number, steps))

        moved = tokens * weight_bytes(model.parts.decoder)
        yield Profiled(f"Qwen3-ASR {size}", f"{streams} streams", "partial", 4, run, moved)


@asynccontextmanager
async def _native(plan: Plan) -> AsyncIterator[Profiled]:
    size, sessions = plan.pick(("tiny", 1), ("4.5", 8))
    with closing(models.native_model(size, plan.options(ROOM_GB))) as model:
        opened = [await media.speaking(model, seed) for seed in range(sessions)]

        async def hold(number: int, units: int) -> None:
            for unit in range(units):
                await opened[number].append(Unit(models.unit(unit)))
                await opened[number].step()

        async def run(steps: int) -> None:
            await together(sessions, lambda number: hold(number, steps))

        parts = model.parts
        moved = (MAX_UNIT_TOKENS + 1) * weight_bytes(parts.decoder) + UNIT_CODES * weight_bytes(parts.code_decoder)
        moved += weight_bytes(parts.audio_encoder)
        yield Profiled(f"MiniCPM-o {size}", counted(sessions, "session"), "unit", 2, run, moved)


@asynccontextmanager
async def _omni(plan: Plan) -> AsyncIterator[Profiled]:
    size = plan.pick("tiny", "30B-A3B")
    with closing(models.conversation_model(size, plan.options(ROOM_GB))) as model:

        async def run(steps: int) -> None:
            talk = await model.open()
            options = ReplyOptions(max_tokens=steps, temperature=0.0)
            async for _ in talk.respond([Message("user", "What was that?")], options, None):
                pass
            talk.close()

        moved = weight_bytes(model.thinker.engine.runner.model)
        yield Profiled(f"Qwen3-Omni {size}", "1 talk, text alone", "token", 16, run, moved)


@asynccontextmanager
async def _video(plan: Plan) -> AsyncIterator[Profiled]:
    size = plan.pick(models.TINY_QWEN, models.QWEN)
    with models.vision_model(size, plan.options(ROOM_GB)) as model:

        async def run(steps: int) -> None:
            await media.watch(model, 0, steps)

        yield Profiled(size, "1 session", "picture", 4, run, weight_bytes(model.family.decoder))


# By the name that notes use: the function that opens a model and yields what to profile.
MODELS: dict[str, Callable[[Plan], AbstractAsyncContextManager[Profiled]]] = {
    "tts": _tts,
    "minicpmo": _native,
    "asr": _asr,
    "omni": _omni,
    "vision": _video,
}
