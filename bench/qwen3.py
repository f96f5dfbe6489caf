"""The Qwen3 voice family at its real dimensions with random weights (bench/models/): timing needs no training.

    antiphon bench qwen3 [--sections asr,tts,omni] [--device cpu|cuda] [--weights auto|int8|bf16] [--streams 1,2,3,4]

`asr`: Qwen3-ASR-0.6B, streams that grow by a second a step as a session grows them: five tokens rolled back and 3.5 a
second of speech said anew, the prompt cut into tokens by Qwen's own tokenizer. A step alone, a final, steps of several
streams at once, and tokens a second.

`tts`: Qwen3-TTS-0.6B: first sound, and frames a second (12.5 are real time) of one and several texts at once; what the
talker, the code predictor and the vocoder take of a frame.

`omni`: Qwen3-Omni-30B-A3B : first text and first sound after a spoken question, tokens and frames a
second, of one and several at once. Then the first text after turns of 2, 10 and 30 s: taken in once the turn has
ended, and while it goes on, window by window.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench.models import qwen3_asr, qwen3_omni, qwen3_tts
from common import RESULTS, machine, percentile, save, table

from antiphon.adapters.qwen3_asr.transcriber import Qwen3Asr
from antiphon.adapters.qwen3_omni.model import Qwen3Omni
from antiphon.adapters.spec import EngineModelOptions
from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import (
    AudioPart,
    Message,
    ReplyOptions,
    ResponseAudio,
    TextDelta,
    Urgency,
    VoiceOptions,
    Window,
)
from antiphon.engine.api import Sampling
from antiphon.loading.loader import prepare, store_of
from antiphon.loading.selection import selected_models
from antiphon.modeling.codec_vocoder import VocoderState
from antiphon.settings import EngineOptions, Settings

TEXT = "Good morning, and welcome back: here is the news of the day, as far as we know it."
TTS_FRAMES = 40
TOKENS_A_S = 3.5
ROLLED_BACK = 5
STEPS = 12
# Of Qwen3-Omni: seconds of the question, and tokens and frames of the answer.
HEARD_S, OMNI_TOKENS, OMNI_FRAMES = 3, 24, 40
# Seconds of the turns after which the first text is timed, and how often each is.
TURNS_S, TURN_REPEATS = (2, 10, 30), 5


def qwen_tokenizer() -> Tokenizer:
    """The default language model's tokenizer, which is of the same family."""
    settings = Settings(engine=EngineOptions(language_model="qwen2.5-coder-0.5b-instruct"))
    folder = prepare(settings, store_of(settings.models), selected_models(settings, ("language",))[0])
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


class Stream:
    """One session that grows by a second a step."""

    def __init__(self, model: Qwen3Asr, sound: np.ndarray) -> None:
        self.stream, self._sound = model.open(), sound
        self._rng = np.random.default_rng(0)

    async def decode(self, seconds: float, *, final: bool = False) -> float:
        """Seconds that a partial or a final took."""
        said = max(0, int(seconds * TOKENS_A_S) - ROLLED_BACK - int(TOKENS_A_S))
        prefix = tuple(int(i) for i in self._rng.integers(1000, 100_000, said))
        new = ROLLED_BACK + int(TOKENS_A_S) + 1
        began = time.perf_counter()
        window = Window(self._sound[: int(seconds * 16000)], prefix=prefix, language="en", final=final, max_tokens=new)
        await self.stream.decode(window)
        return time.perf_counter() - began


async def asr_section(device: str, weights: str, streams: list[int]) -> dict[str, Any]:
    """See the module's docstring."""
    model = qwen3_asr.transcriber("0.6B", EngineModelOptions(device=device, weights=weights), qwen_tokenizer())
    sound = qwen3_asr.sound(24)
    alone: dict[str, list[float]] = {"partial": [], "final": []}
    for _ in range(3):
        one = Stream(model, sound)
        for step in range(1, STEPS + 1):
            took = await one.decode(step)
            if step > 2:
                alone["partial"].append(took)
        alone["final"].append(await one.decode(STEPS + 0.3, final=True))
        one.stream.close()
    together = []
    for count in streams:
        those, took = [Stream(model, sound) for _ in range(count)], []
        for step in range(1, STEPS + 1):
            took += await asyncio.gather(*(s.decode(step) for s in those))
        for s in those:
            s.stream.close()
        together.append({"streams": count, "p50_s": percentile(took, 50), "p95_s": percentile(took, 95)})
    speeds = []
    for count in (1, 4, 8):
        sessions = [await model.engine.open() for _ in range(count)]
        for n, s in enumerate(sessions):
            s.append(list(range(1000 + n, 1150 + n)))
            await s.settle()

        async def say(session: Any) -> None:
            async for _ in session.generate(Sampling(max_tokens=32)):
                pass

        began = time.perf_counter()
        await asyncio.gather(*(say(s) for s in sessions))
        speeds.append({"sessions": count, "tokens_a_s": 32 * count / (time.perf_counter() - began)})
        for s in sessions:
            s.close()
    model.close()
    found = {
        "weights": weights,
        "device": device,
        "partial_s": {p: percentile(alone["partial"], p) for p in (50, 95)},
        "final_s": percentile(alone["final"], 50),
        "streams": together,
        "decode": speeds,
    }
    table(
        f"Qwen3-ASR-0.6B dimensions, random weights, {weights}, {device}",
        ["partial p50 / p95", "final", "tokens a second at 1 / 4 / 8"],
        [
            [
                f"{found['partial_s'][50]:.2f} / {found['partial_s'][95]:.2f} s",
                f"{found['final_s']:.2f} s",
                " / ".join(f"{s['tokens_a_s']:.0f}" for s in speeds),
            ]
        ],
    )
    table(
        "streams at once, a step a second of sound",
        ["streams", "step p50", "step p95"],
        [[t["streams"], f"{t['p50_s']:.2f} s", f"{t['p95_s']:.2f} s"] for t in together],
    )
    return found


async def tts_section(device: str, weights: str, texts: list[int]) -> dict[str, Any]:
    """See the module's docstring."""
    model = qwen3_tts.synthesizer("0.6B", EngineModelOptions(device=device, weights=weights), qwen_tokenizer())
    options = VoiceOptions(model.profile.voices[0], seed=1, max_frames=TTS_FRAMES)

    async def say() -> tuple[float, float]:
        began, first = time.perf_counter(), 0.0
        async for _ in model.speak(TEXT, options, lambda: Urgency.FINAL):
            first = first or time.perf_counter() - began
        return first, time.perf_counter() - began

    await say()
    together = []
    for count in texts:
        began = time.perf_counter()
        firsts = [first for first, _ in await asyncio.gather(*(say() for _ in range(count)))]
        took = time.perf_counter() - began
        together.append(
            {"texts": count, "first_sound_s": percentile(firsts, 50), "frames_a_s": count * TTS_FRAMES / took}
        )
    frames = [[1] * 16] * 12
    past, shares = VocoderState(), {}

    def timed(call: Any) -> float:
        call()
        began = time.perf_counter()
        for _ in range(3):
            call()
        return (time.perf_counter() - began) / 3

    shares["vocoder_ms_a_frame"] = await model.engine.thread.call(
        lambda: 1000 * timed(lambda: model.parts.vocoder(frames, past)) / 12
    )
    width = int(model.parts.decoder.config.hidden_size)
    row = torch.zeros(1, width, device=device, dtype=model.parts.text_embedding.weight.dtype)
    shares["predictor_ms_a_frame"] = await model.engine.thread.call(
        lambda: 1000 * timed(lambda: model.parts.code_predictor(row, row, [lambda _: 1]))
    )
    model.close()
    table(
        f"Qwen3-TTS-0.6B dimensions, random weights, {weights}, {device}",
        ["texts at once", "first sound", "frames a second (12.5 are real time)"],
        [[t["texts"], f"{t['first_sound_s']:.2f} s", f"{t['frames_a_s']:.1f}"] for t in together],
    )
    print(", ".join(f"{k.replace('_', ' ')}: {v:.0f}" for k, v in shares.items()))
    return {"weights": weights, "device": device, "texts": together} | shares


async def turn_lengths(model: Qwen3Omni) -> list[dict[str, float]]:
    """Seconds to the first text after turns of each length: taken in at once, and while they go on."""
    options, window = (
        ReplyOptions(max_tokens=1, temperature=0.0),
        model.profile.audio_window_ms * SAMPLE_RATE_HZ // 1000,
    )

    async def first_text(seconds: int, *, grows: bool) -> float:
        pcm, turn = qwen3_asr.sound(seconds), object()
        stream = await model.open()
        if grows:
            # As a session does: when a window has ended, and a little more has come.
            for end in range(window + SAMPLE_RATE_HZ // 10, len(pcm), window):
                await stream.prefill([Message("user", "", parts=(AudioPart(pcm[:end], turn, grows=True),))])
                await stream.chat._session.settle(include_newest=True)
        began = time.perf_counter()
        asked = [Message("user", "", parts=(AudioPart(pcm, turn),))]
        async with aclosing(stream.respond(asked, options, None)) as parts:
            await anext(parts)
        taken = time.perf_counter() - began
        stream.close()
        return taken

    out = []
    for seconds in TURNS_S:
        taken = {
            grows: [await first_text(seconds, grows=grows) for _ in range(TURN_REPEATS)] for grows in (False, True)
        }
        at_once, growing = percentile(taken[False], 50), percentile(taken[True], 50)
        out.append({"turn_s": seconds, "first_text_at_once_s": at_once, "first_text_s": growing})
    table(
        "First text after the end of a turn",
        ["turn", "taken in at its end", "taken in while it goes on", "of that after 2 s"],
        [
            [
                f"{t['turn_s']} s",
                f"{t['first_text_at_once_s']:.2f} s",
                f"{t['first_text_s']:.2f} s",
                f"{t['first_text_s'] / out[0]['first_text_s']:.2f}",
            ]
            for t in out
        ],
    )
    return out


async def omni_section(device: str, weights: str, talks: list[int]) -> dict[str, Any]:
    """See the module's docstring."""
    model = qwen3_omni.conversation_model(
        "30B-A3B", EngineModelOptions(device=device, weights=weights), qwen_tokenizer()
    )
    frame = qwen3_omni.FRAME_SAMPLES["30B-A3B"]
    options = ReplyOptions(max_tokens=OMNI_TOKENS, temperature=0.0)

    async def answer() -> tuple[float, float, float, float]:
        talk, began = await model.open(), time.perf_counter()
        text, sound, last, samples = 0.0, 0.0, 0.0, 0
        asked = [Message("user", "", parts=(AudioPart(qwen3_asr.sound(HEARD_S)), "What was that?"))]
        async with aclosing(talk.respond(asked, options, VoiceOptions(qwen3_omni.VOICE, seed=1))) as parts:
            async for part in parts:
                now = time.perf_counter() - began
                if isinstance(part, TextDelta):
                    text, last = text or now, now
                elif isinstance(part, ResponseAudio):
                    sound, samples = sound or now, samples + len(part.pcm)
                    if samples > OMNI_FRAMES * frame:
                        break
        talk.close()
        return (
            text,
            sound,
            (OMNI_TOKENS - 1) / max(1e-9, last - text),
            samples / frame / (time.perf_counter() - began - sound),
        )

    await answer()
    together = []
    for count in talks:
        texts, sounds, tokens, frames = zip(*await asyncio.gather(*(answer() for _ in range(count))), strict=True)
        together.append(
            {
                "talks": count,
                "first_text_s": percentile(list(texts), 50),
                "first_sound_s": percentile(list(sounds), 50),
                "tokens_a_s": sum(tokens),
                "frames_a_s": sum(frames),
            }
        )
    turns = await turn_lengths(model)
    model.close()
    shared = ", layers sharing experts" if device == "cpu" else ""
    table(
        f"Qwen3-Omni-30B-A3B dimensions, random weights{shared}, {weights}, {device}",
        ["talks at once", "first text", "first sound", "tokens a second", "frames a second (12.5 are real time)"],
        [
            [
                t["talks"],
                f"{t['first_text_s']:.2f} s",
                f"{t['first_sound_s']:.2f} s",
                f"{t['tokens_a_s']:.1f}",
                f"{t['frames_a_s']:.1f}",
            ]
            for t in together
        ],
    )
    return {"weights": weights, "device": device, "shared_experts": device == "cpu", "talks": together, "turns": turns}


def main() -> None:
    parser = argparse.ArgumentParser(prog="antiphon bench qwen3", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sections", default="asr,tts,omni")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--weights", default="", help="types to measure, all that suit the device where none is given")
    parser.add_argument("--streams", default="1,2,3,4")
    args = parser.parse_args()
    document: dict[str, Any] = {"machine": machine()}
    if (before := RESULTS / "qwen3.json").is_file():
        document = json.loads(before.read_text()) | document
    wanted = set(args.sections.split(","))
    kinds = args.weights.split(",") if args.weights else ["int8", "bf16"] if args.device == "cpu" else ["bf16"]
    streams = [int(n) for n in args.streams.split(",")]
    if "asr" in wanted:
        document[f"asr-{args.device}"] = [asyncio.run(asr_section(args.device, kind, streams)) for kind in kinds]
    if "tts" in wanted:
        texts = [1, 4] if args.device == "cpu" else [1, 8, 32]
        document[f"tts-{args.device}"] = [asyncio.run(tts_section(args.device, kind, texts)) for kind in kinds]
    if "omni" in wanted:
        talks = [1] if args.device == "cpu" else [1, 8, 32]
        document[f"omni-{args.device}"] = [
            asyncio.run(omni_section(args.device, kind, talks)) for kind in kinds if kind != "int8"
        ]
    if args.device == "cpu":
        print("\nGPU figures: no GPU here, not measured")
    print(f"\nwritten: {save('qwen3', document)}")


if __name__ == "__main__":
    main()
