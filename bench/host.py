"""The host's part of a step: its time for a decoder of 36 layers, and the operators of each model.

    antiphon bench host [--models lm,tts,minicpmo,minicpmo_listening,asr] [--sessions 1,16,64] [--idle 0,536]
        [--rows 500] [--tokens 40]

On a GPU, the kernels of a step run while the host launches the next ones. If launching takes longer than the kernels,
the host limits the step. `lm` is a decoder with Qwen3-8B's 36 layers at a minimal width, whose matrix products take
almost no time. The time of its step is therefore almost only the host's. It is measured by KV layout and by shape of
the steps, with one thread. Then the decoder is left out, as if it were a graph that is launched. The rest of a step is
the engine's own Python: planning, filling tensors, drawing tokens and delivering them. Its CPU time is measured in the
engine's thread and in all threads, with `--idle` further sessions open.

The other models are tiny, with paged KV and padded steps as on a GPU. The measured steps are a frame of Qwen3-TTS, a
speaking and a listening unit of MiniCPM-o and a partial of Qwen3-ASR, each of all sessions at once. The benchmark
counts the operators that the host dispatches in the models' threads, except views. It counts operators in passes that a
GPU replays as one graph (decode steps, the code predictor, calls of the vocoder, passes of audio encoders) separately
from the others, which the host launches one by one. `adds` is the number of operators that each further session adds,
and `adds_sound` the part of MiniCPM-o's thread for sound, whose operators are `sound`.
`reads` is the number of times that the host waits for a number. `passes` is the number of decode passes. `cpu_ms` is
the CPU time of the process. The frame of Qwen3-TTS is also counted at the depth of the released 0.6B model, which takes
4 GB of memory.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from bench import models
from bench.common import machine, numbers, options, percentile, save, show, table, together
from bench.models import SHAPES, filled
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from antiphon.adapters.minicpmo.audio_batch import AudioPages, AudioPass
from antiphon.adapters.minicpmo.token2wav.calls import SoundPass
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import ListenStep, NativeOptions, Unit, Urgency, VoiceOptions, Window
from antiphon.engine.api import EngineSettings, Sampling
from antiphon.engine.local import decode
from antiphon.engine.local.decode import PassShape
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.kernels.norms import fuse_norms
from antiphon.engine.local.runner import Runner
from antiphon.engine.model_thread import ModelThread
from antiphon.events.duplex import NativeSampling
from antiphon.loading.loader import GPU_STEPS
from antiphon.modeling.codec.talker import CodePredictor
from antiphon.modeling.codec.vocoder_batch import VocoderCall, VocoderSlots
from antiphon.modeling.sound.window_encoder import WindowPass

NARROW = SHAPES["Qwen3-8B"] | {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "vocab_size": 256}
NARROW |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "session, exact": {},
    "paged, exact": {"kv_layout": "paged"},
    "paged, bucketed": {"kv_layout": "paged", "decode_shapes": "bucketed"},
    "paged, bucketed, one step ahead": {"kv_layout": "paged", "decode_shapes": "bucketed", "step_ahead": True},
}
ROUNDS = 3
# Engine settings of the models whose operators are counted.
AS_ON_A_GPU = EngineModelOptions(
    EngineSettings(kv_bytes=256 << 20, kv_layout="paged", decode_shapes="bucketed", **GPU_STEPS),
    weights="fp32",
    threads=1,
    gather_s=0.05,
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
            mode.counts.passes += owner is PassShape
            mode.counts.depth += 1
            try:
                return run(*args, **kwargs)
            finally:
                mode.counts.depth -= 1

        return within

    captured = [
        (PassShape, "compute"),
        (CodePredictor, "forward"),
        (VocoderCall, "compute"),
        (AudioPass, "compute"),
        (WindowPass, "compute"),
        (SoundPass, "compute"),
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
    """Return the cost of one step: the cost of 2 * `steps` steps minus that of `steps` steps, divided by `steps`.

    `sound`: the operators of a third thread that are outside of captured passes.
    """
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
        sound = {"sound": [*modes.values()][-1].counts.outside} if len(modes) > 2 else {}
        found.append(sums | sound | {"cpu_ms": began_ms})
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


async def minicpmo(count: int, *, speaks: bool = True) -> dict[str, float]:
    """Count the operators of a unit in which MiniCPM-o speaks, or only listens."""
    with closing(models.native_model("tiny", AS_ON_A_GPU, speakers=count)) as model:
        model.vocoder.windows.together = True
        model.hearing.pages = AudioPages(model.parts.audio_encoder, count, captures=False)
        listen, sampling = 0 if speaks else 1000, [NativeSampling(seed=n) for n in range(count)]
        opened = [
            await model.open(NativeOptions(models.NATIVE_PROMPT, listen_only_units=listen, sampling=s))
            for s in sampling
        ]

        async def hold(number: int, unit: int) -> None:
            await opened[number].append(Unit(models.unit(unit)))
            step = await opened[number].step(must_speak=speaks)
            assert speaks != isinstance(step, ListenStep)

        async def run(units: int) -> None:
            for unit in range(units):
                await together(count, lambda number, unit=unit: hold(number, unit))

        await run(2)
        return await operators([engine.thread for engine in model.engines], run, 3)


async def asr(count: int) -> dict[str, float]:
    """Count the operators of a partial of Qwen3-ASR."""
    with closing(models.transcriber("tiny", AS_ON_A_GPU)) as model:
        model.parts.audio_encoder.windows.together = True
        opened, sound = [model.open() for _ in range(count)], models.sound(8)

        async def hear(number: int, step: int) -> None:
            await opened[number].decode(Window(sound[: (4 + step % 4) * 16_000], language="en", max_tokens=9))

        async def run(partials: int) -> None:
            for step in range(partials):
                await together(count, lambda number, step=step: hear(number, step))

        await run(4)
        return await operators([model.engine.thread], run, 4)


# The models to count, by their names on the command line.
MODELS: dict[str, Callable[[int], Awaitable[dict[str, float]]]] = {
    "tts": tts,
    "minicpmo": minicpmo,
    "minicpmo_listening": partial(minicpmo, speaks=False),
    "asr": asr,
}


def counted(name: str, counts: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the operators of one step of a model, for each number of sessions."""
    found = {str(n): asyncio.run(MODELS[name](n)) for n in counts}
    first, last = min(counts), max(counts)
    if last > first:
        few, many = (found[str(n)]["outside"] for n in (first, last))
        found[str(last)]["adds"] = (many - few) / (last - first)
        if "sound" in found[str(last)]:
            few, many = (found[str(n)]["sound"] for n in (first, last))
            found[str(last)]["adds_sound"] = (many - few) / (last - first)
    show(f"{name}: a step of all sessions", {f"{n} sessions": row for n, row in found.items()})
    return found


class NoDecoder(Runner):
    """A runner without its decoder: logits are constant, and no KV is written."""

    def decoder_pass(self, inputs: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, attention: Any) -> Any:
        return decode.PassOutput(torch.zeros(len(keep), self.vocabulary_size), None, None)


@dataclass(slots=True)
class Clock:
    """Seconds so far: in the runner's steps, of the engine thread's CPU, and of all threads' CPU."""

    step_s: float
    thread_s: float
    process_s: float


async def steps_ms(make: type[Runner], settings: dict[str, Any], count: int, idle: int, args: Namespace) -> list[Clock]:
    """Return the milliseconds of a step that gives `count` sessions a token while `idle` others are open, by round."""
    model = Qwen3ForCausalLM(Qwen3Config(**NARROW))
    filled(model, torch.device("cpu"), torch.float32)
    engine = LocalEngine(make(model, rotate_half=True), EngineSettings(**settings))
    sessions = [await engine.open() for _ in range(count)]
    for number, session in enumerate([*sessions, *[await engine.open(64) for _ in range(idle)]]):
        session.append([(number + i) % 250 for i in range(args.rows if number < count else 16)])
        await session.settle()
    stats, found = engine.runner.stats, list[Clock]()

    async def say(number: int) -> None:
        async for _ in sessions[number].generate(Sampling(max_tokens=args.tokens)):
            pass

    async def now() -> tuple[int, Clock]:
        return stats.steps, Clock(stats.step_s, await engine.thread.call(time.thread_time), time.process_time())

    began = await now()
    for _ in range(ROUNDS):
        await together(count, say)
        ended = await now()
        before, after = astuple(began[1]), astuple(ended[1])
        found.append(Clock(*((b - a) / (ended[0] - began[0]) * 1000 for a, b in zip(before, after, strict=True))))
        began = ended
    engine.close()
    return found


async def asr_partial_ms(count: int) -> dict[str, float]:
    """Return the CPU time of a partial of Qwen3-ASR when `count` are decoded at once, without encoder and decoder."""
    with (
        patch.object(Runner, "decoder_pass", NoDecoder.decoder_pass),
        closing(models.transcriber("tiny", AS_ON_A_GPU)) as model,
    ):
        windows, sound = model.parts.audio_encoder.windows, models.sound(8)
        made = windows.forward(torch.zeros(1, *windows.window_shape), torch.ones(1, dtype=torch.long))
        windows.together, windows.forward = True, lambda chunks, _: made.expand(len(chunks), -1, -1)
        opened = [model.open() for _ in range(count)]

        async def run(seconds: Sequence[int]) -> None:
            for end in seconds:
                window = Window(sound[: end * 16_000], language="en", max_tokens=9)
                await together(count, lambda number, window=window: opened[number].decode(window))

        async def now() -> tuple[float, float]:
            return await model.engine.thread.call(time.thread_time), time.process_time()

        found = []
        for _ in range(5):
            await run([1])
            before = await now()
            await run(range(2, 8))
            after = await now()
            found.append([(b - a) / 6 / count * 1000 for a, b in zip(before, after, strict=True)])
        thread_ms, process_ms = (percentile([each[i] for each in found], 50) for i in range(2))
        return {"streams": count, "engine_thread_ms": thread_ms, "all_threads_ms": process_ms}


def decode_steps(counts: Sequence[int], args: Namespace) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a decode step of `lm`, by layout and number of sessions."""
    found: dict[str, dict[str, float]] = {}
    for label, settings in LAYOUTS.items():
        for count in counts:
            took = [clock.step_s for clock in asyncio.run(steps_ms(Runner, settings, count, 0, args))]
            found.setdefault(label, {})[str(count)] = percentile(took, 50)
    table(
        f"host time of a decode step, ms, {args.rows} rows a session",
        ["KV and steps", *(f"{n} sessions" for n in counts)],
        [[label, *(found[label][str(n)] for n in counts)] for label in found],
    )
    return found


def python_of_steps(counts: Sequence[int], idle: Sequence[int], args: Namespace) -> list[dict[str, float]]:
    """Return the CPU time of a decode step of `lm` without its decoder, by number of sessions and idle ones."""
    found = []
    for count, others in itertools.product(counts, idle):
        clocks = asyncio.run(steps_ms(NoDecoder, LAYOUTS["paged, bucketed"], count, others, args))
        thread_ms, process_ms = (percentile([astuple(c)[i] for c in clocks], 50) for i in (1, 2))
        found.append({"sessions": count, "idle": others, "engine_thread_ms": thread_ms, "all_threads_ms": process_ms})
    show("CPU time of a decode step without its decoder", found)
    return found


def main() -> None:
    parser = options("antiphon bench host", __doc__)
    parser.add_argument("--models", default=f"lm,{','.join(MODELS)}")
    parser.add_argument("--sessions", default="1,16,64")
    parser.add_argument("--idle", default="0,536", help="numbers of idle sessions that are open besides")
    parser.add_argument("--rows", type=int, default=500, help="rows of each session's KV")
    parser.add_argument("--tokens", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    # As with the kernels of a GPU, which read any number of pages.
    decode.MOST_GATHERED_PAGES = 1 << 30
    counts, wanted = numbers(args.sessions), args.models.split(",")
    if unknown := set(wanted) - {"lm", *MODELS}:
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    document: dict[str, Any] = {"machine": machine()}
    if "lm" in wanted:
        document |= {"rows": args.rows, "step_ms": decode_steps(counts, args)}
        document["step_python_ms"] = python_of_steps(counts, numbers(args.idle), args)
    document |= {name: counted(name, counts) for name in wanted if name in MODELS}
    if "asr" in wanted:
        document["asr_partial_cpu_ms"] = [asyncio.run(asr_partial_ms(n)) for n in counts]
        show("CPU time of a partial of 9 tokens, without encoder and decoder", document["asr_partial_cpu_ms"])
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
