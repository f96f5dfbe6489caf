"""The host's part of a step: its time for a decoder of 36 layers, and the operators of each model.

    antiphon bench host [--models lm,tts,minicpmo,asr] [--sessions 1,16,64] [--rows 500] [--tokens 40]

On a GPU, the kernels of a step run while the host launches the next ones. If launching takes longer than the kernels,
the host limits the step. `lm` is a decoder with Qwen3-8B's 36 layers at a minimal width, whose matrix products take
almost no time. The time of its step is therefore almost only the host's. It is measured by KV layout and by shape of
the steps, with one thread.

The other models are tiny, with paged KV and padded steps as on a GPU. The measured steps are a frame of Qwen3-TTS, a
speaking unit of MiniCPM-o and a partial of Qwen3-ASR, each of all sessions at once. The benchmark counts the operators
that the host dispatches in the models' threads, except views. It counts operators in passes that a GPU replays as one
graph (decode steps, the code predictor, calls of the vocoder, passes of the audio encoder) separately from the others,
which the host launches one by one. `adds` is the number of operators that each further session adds. `reads` is the
number of times that the host waits for a number. `passes` is the number of decode passes. `cpu_ms` is the CPU time of
the process. The frame of Qwen3-TTS is also counted at the depth of the released 0.6B model, which takes 4 GB of memory.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from bench import models
from bench.common import machine, numbers, options, percentile, save, show, table, together
from bench.models import SHAPES, filled
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import NativeOptions, Unit, Urgency, VoiceOptions, Window
from antiphon.engine.api import EngineSettings, Sampling
from antiphon.engine.local.decode import DecodeShape
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.kernels.norms import fuse_norms
from antiphon.engine.local.runner import Runner
from antiphon.engine.model_thread import ModelThread
from antiphon.events.duplex import NativeSampling
from antiphon.modeling.codec_talker import CodePredictor
from antiphon.modeling.sound.window_encoder import WindowPass
from antiphon.modeling.vocoder_batch import VocoderCall, VocoderSlots

NARROW = SHAPES["Qwen3-8B"] | {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "vocab_size": 256}
NARROW |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "session, exact": {},
    "paged, exact": {"kv_layout": "paged"},
    "paged, bucketed": {"kv_layout": "paged", "decode_shapes": "bucketed"},
}
ROUNDS = 3
# Engine settings of the models whose operators are counted.
AS_ON_A_GPU = EngineModelOptions(
    EngineSettings(kv_bytes=256 << 20, kv_layout="paged", decode_shapes="bucketed"), weights="fp32", threads=1
)
TEXT = "Some say the world will end in fire, some say in ice, and from what I have tasted of desire I hold with those."
COUNTED = ("outside", "captured", "reads", "passes")


@dataclass(slots=True)
class Counts:
    """The operators dispatched in one thread. `depth` is above 0 inside a pass that a GPU replays as a graph."""

    outside: int = 0
    captured: int = 0
    reads: int = 0
    passes: int = 0
    depth: int = 0


class Counting(TorchDispatchMode):
    """Counts the operators of the thread that enters it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.counts.reads += 1
        elif self.counts.depth:
            self.counts.captured += not func.is_view
        else:
            self.counts.outside += not func.is_view
        return func(*args, **(kwargs or {}))


@contextmanager
def as_graphs(counting: Mapping[int, Counting]) -> Iterator[None]:
    """Mark the passes that a GPU replays as one graph. `counting` has the counter of each thread, by thread id."""

    def marked(owner: Any, name: str) -> Callable[..., Any]:
        run = getattr(owner, name)

        def within(*args: Any, **kwargs: Any) -> Any:
            mode = counting.get(threading.get_ident())
            if mode is None:
                return run(*args, **kwargs)
            mode.counts.passes += owner is DecodeShape
            mode.counts.depth += 1
            try:
                return run(*args, **kwargs)
            finally:
                mode.counts.depth -= 1

        return within

    captured = [
        (DecodeShape, "compute"),
        (CodePredictor, "forward"),
        (VocoderCall, "compute"),
        (WindowPass, "compute"),
    ]
    before = [getattr(owner, name) for owner, name in captured]
    for owner, name in captured:
        setattr(owner, name, marked(owner, name))
    try:
        yield
    finally:
        for (owner, name), method in zip(captured, before, strict=True):
            setattr(owner, name, method)


async def operators(
    threads: Sequence[ModelThread], run: Callable[[int], Awaitable[None]], steps: int
) -> dict[str, float]:
    """Return the cost of one step: the cost of 2 * `steps` steps minus that of `steps` steps, divided by `steps`."""
    found = []
    for count in (steps, 2 * steps):
        modes = {await thread.call(threading.get_ident): Counting() for thread in threads}
        began = time.process_time()
        with as_graphs(modes):
            for thread, mode in zip(threads, modes.values(), strict=True):
                await thread.call(mode.__enter__)
            await run(count)
            for thread, mode in zip(threads, modes.values(), strict=True):
                await thread.call(partial(mode.__exit__, None, None, None))
        sums = {name: sum(getattr(m.counts, name) for m in modes.values()) for name in COUNTED}
        began_ms = (time.process_time() - began) * 1000
        found.append(sums | {"cpu_ms": began_ms})
    return {name: (found[1][name] - found[0][name]) / steps for name in found[0]}


async def tts(count: int) -> dict[str, float]:
    """Count the operators of a frame of Qwen3-TTS."""
    with closing(models.synthesizer("tiny", AS_ON_A_GPU)) as model:
        model.vocoders.together, model.vocoders.slots = True, VocoderSlots(model.parts.vocoder, captures=False)
        voices = [VoiceOptions(model.profile.voices[0], seed=n) for n in range(count)]

        async def say(number: int, frames: int) -> None:
            async for _ in model.speak(TEXT, replace(voices[number], max_frames=frames), lambda: Urgency.FINAL):
                pass

        async def run(frames: int) -> None:
            await together(count, lambda number: say(number, frames))

        await run(24)
        return await operators([model.engine.thread], run, 12)


async def tts_body() -> dict[str, float]:
    """Count the operators of a frame of one text at Qwen3-TTS-0.6B's depth, with fused norms and no vocoder."""
    with closing(models.synthesizer("0.6B", AS_ON_A_GPU)) as model:
        for part in (model.engine.runner.model, model.parts.code_predictor):
            fuse_norms(part)

        async def audio(*_: Any) -> np.ndarray:
            return np.zeros(1, np.float32)

        model.vocoders.audio = audio
        voice = model.profile.voices[0]

        async def run(frames: int) -> None:
            async for _ in model.speak(TEXT, VoiceOptions(voice, seed=1, max_frames=frames), lambda: Urgency.FINAL):
                pass

        await run(4)
        return await operators([model.engine.thread], run, 4)


async def tts_frame_ms(count: int) -> list[float]:
    """Milliseconds of all threads' CPU time that a frame of `count` texts takes, without predictor and vocoder."""
    with closing(models.synthesizer("tiny", AS_ON_A_GPU)) as model:
        predictor = model.parts.code_predictor

        def codes(thoughts: torch.Tensor, first: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.ones(len(thoughts), predictor.num_codes, dtype=torch.long), first

        async def audio(*_: Any) -> np.ndarray:
            return np.zeros(1, np.float32)

        predictor.forward, model.vocoders.audio = codes, audio
        voice = model.profile.voices[0]

        async def say(number: int, frames: int) -> None:
            async for _ in model.speak(
                TEXT, VoiceOptions(voice, seed=number, max_frames=frames), lambda: Urgency.FINAL
            ):
                pass

        async def cpu_s(frames: int) -> float:
            began = time.process_time()
            await together(count, lambda number: say(number, frames))
            return time.process_time() - began

        await cpu_s(20)
        return [(-await cpu_s(40) + await cpu_s(120)) / 80 * 1000 for _ in range(5)]


async def minicpmo(count: int) -> dict[str, float]:
    """Count the operators of a unit in which MiniCPM-o speaks."""
    with closing(models.native_model("tiny", AS_ON_A_GPU)) as model:
        sampling = [NativeSampling(seed=n) for n in range(count)]
        opened = [
            await model.open(NativeOptions(models.NATIVE_PROMPT, listen_only_units=0, sampling=s)) for s in sampling
        ]

        async def hold(number: int, units: int) -> None:
            for unit in range(units):
                await opened[number].append(Unit(models.unit(unit)))
                await opened[number].step(must_speak=True)

        async def run(units: int) -> None:
            await together(count, lambda number: hold(number, units))

        await run(2)
        return await operators([model.engine.thread, model.code_engine.thread], run, 3)


async def asr(count: int) -> dict[str, float]:
    """Count the operators of a partial of Qwen3-ASR."""
    with closing(models.transcriber("tiny", AS_ON_A_GPU)) as model:
        model.parts.audio_encoder.windows.together = True
        opened, sound = [model.open() for _ in range(count)], models.sound(8)

        async def hear(number: int, partials: int) -> None:
            for step in range(partials):
                await opened[number].decode(Window(sound[: (4 + step % 4) * 16_000], language="en", max_tokens=9))

        async def run(partials: int) -> None:
            await together(count, lambda number: hear(number, partials))

        await run(4)
        return await operators([model.engine.thread], run, 4)


# The models to count, by their names on the command line.
MODELS: dict[str, Callable[[int], Awaitable[dict[str, float]]]] = {"tts": tts, "minicpmo": minicpmo, "asr": asr}


def counted(name: str, counts: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the operators of one step of a model, for each number of sessions."""
    found = {str(n): asyncio.run(MODELS[name](n)) for n in counts}
    first, last = min(counts), max(counts)
    if last > first:
        few, many = (found[str(n)]["outside"] for n in (first, last))
        found[str(last)]["adds"] = (many - few) / (last - first)
    show(f"{name}: a step of all sessions", {f"{n} sessions": row for n, row in found.items()})
    return found


async def steps_ms(settings: dict[str, Any], count: int, rows: int, tokens: int) -> list[float]:
    """Return the milliseconds of each step that gives `count` sessions of `rows` rows a token."""
    model = Qwen3ForCausalLM(Qwen3Config(**NARROW))
    filled(model, torch.device("cpu"), torch.float32)
    engine = LocalEngine(Runner(model, rotate_half=True), EngineSettings(**settings))
    sessions = [await engine.open() for _ in range(count)]
    for number, session in enumerate(sessions):
        session.append([(number + i) % 250 for i in range(rows)])
        await session.settle()
    took, stats = list[float](), engine.runner.stats
    observed = (stats.steps, stats.step_s)

    async def say(number: int) -> None:
        async for _ in sessions[number].generate(Sampling(max_tokens=tokens)):
            pass

    for _ in range(ROUNDS):
        await together(count, say)
        now = (stats.steps, stats.step_s)
        took.append((now[1] - observed[1]) / (now[0] - observed[0]) * 1000)
        observed = now
    engine.close()
    return took


def decode_steps(counts: Sequence[int], rows: int, tokens: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a decode step of `lm`, by layout and number of sessions."""
    found: dict[str, dict[str, float]] = {}
    for label, settings in LAYOUTS.items():
        for count in counts:
            took = asyncio.run(steps_ms(settings, count, rows, tokens))
            found.setdefault(label, {})[str(count)] = percentile(took, 50)
    table(
        f"host time of a decode step, ms, {rows} rows a session",
        ["KV and steps", *(f"{n} sessions" for n in counts)],
        [[label, *(found[label][str(n)] for n in counts)] for label in found],
    )
    return found


def main() -> None:
    parser = options("antiphon bench host", __doc__)
    parser.add_argument("--models", default=f"lm,{','.join(MODELS)}")
    parser.add_argument("--sessions", default="1,16,64")
    parser.add_argument("--rows", type=int, default=500, help="rows of each session's KV")
    parser.add_argument("--tokens", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts, wanted = numbers(args.sessions), args.models.split(",")
    if unknown := set(wanted) - {"lm", *MODELS}:
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    document: dict[str, Any] = {"machine": machine()}
    if "lm" in wanted:
        document |= {"rows": args.rows, "step_ms": decode_steps(counts, args.rows, args.tokens)}
    document |= {name: counted(name, counts) for name in wanted if name in MODELS}
    if "tts" in wanted:
        document["tts_body"] = asyncio.run(tts_body())
        show("tts: a frame at the depth of the 0.6B model", {"1 text": document["tts_body"]})
        found = {str(n): percentile(asyncio.run(tts_frame_ms(n)), 50) for n in counts}
        document["tts_frame_cpu_ms"] = found
        rows = [[number, ms] for number, ms in found.items()]
        table("CPU time of a TTS frame, ms, all threads, without predictor and vocoder", ["texts", "ms"], rows)
    print(f"\nwritten: {save('host', document)}")


if __name__ == "__main__":
    main()
