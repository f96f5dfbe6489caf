"""The Qwen3 voice family at its real dimensions with random weights (bench/models.py), since timing needs no training.

    antiphon bench qwen3 [--sections asr,tts,omni] [--device cpu|cuda] [--weights auto|int8|bf16] [--streams 1,2,3,4]

`asr` is Qwen3-ASR-0.6B. Streams grow by a second per step, as in a session. At each step the newest five tokens are
rolled back and generated again, and 3.5 tokens are added for the new second of speech. Qwen's own tokenizer splits the
prompt. It measures a single step, a final, and steps of several streams at once.

`tts` is Qwen3-TTS-0.6B: first sound, and frames per second (12.5 are real time), of one text and of several at once.

`omni` is Qwen3-Omni-30B-A3B: first text and first sound after a spoken question, and tokens and frames per second, of
one question and of several at once. It also measures the time from the end of turns of 2, 10 and 30 s to the first
text: with the whole turn prefilled at its end, and with each window prefilled as soon as it has been heard.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, closing
from typing import Any

import numpy as np
import torch
from bench.common import measured, numbers, options, percentile, show, spread, together
from bench.gpu.media import answer
from bench.models import conversation_model, sound, synthesizer, transcriber
from tokenizers import Tokenizer

from antiphon.adapters.qwen3_asr.transcriber import Qwen3Asr
from antiphon.adapters.qwen3_omni.model import Qwen3Omni
from antiphon.adapters.spec import EngineModelOptions
from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import AudioPart, Message, ReplyOptions, SoundTrack, Urgency, VoiceOptions, Window
from antiphon.loading.loader import prepare, store_of
from antiphon.loading.selection import selected_models
from antiphon.settings import EngineOptions, Settings

TEXT = "Good morning, and welcome back: here is the news of the day, as far as we know it."
TTS_FRAMES = 40
TOKENS_A_S, ROLLED_BACK, STEPS = 3.5, 5, 12
# For Qwen3-Omni: seconds of the question, and number of frames of the answer.
HEARD_S, OMNI_FRAMES, FRAME_SAMPLES = 3, 40, 1920
# For Qwen3-Omni: seconds of the turns after which the first text is timed, and the number of repetitions.
TURNS_S, TURN_REPEATS = (2, 10, 30), 5


def qwen_tokenizer() -> Tokenizer:
    """Return the default language model's tokenizer, which is of the Qwen family."""
    settings = Settings(engine=EngineOptions(language_model="qwen2.5-coder-0.5b-instruct"))
    folder = prepare(settings, store_of(settings.models), selected_models(settings, ("language",))[0])
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


async def asr(chosen: EngineModelOptions, streams: list[int]) -> dict[str, Any]:
    """Measure Qwen3-ASR; see the module's docstring."""
    pcm, alone, finals, rows = sound(24), list[float](), list[float](), list[dict[str, Any]]()
    with closing(transcriber("0.6B", chosen, qwen_tokenizer())) as model:
        for _ in range(3):
            took = await _grown(model, pcm, 1)
            alone += [partial for (partial,) in took[2:STEPS]]
            finals += took[STEPS]
        for count in streams:
            steps = (await _grown(model, pcm, count))[:STEPS]
            rows.append({"streams": count} | spread([s for step in steps for s in step]))
    partial_s = {p: percentile(alone, p) for p in (50, 95)}
    found = {"partial_s": partial_s, "final_s": percentile(finals, 50), "streams": rows}
    print(f"\nalone: a partial {partial_s[50]:.2f} s, p95 {partial_s[95]:.2f} s; a final {found['final_s']:.2f} s")
    show("concurrent streams, one step per second of sound, s", rows)
    return found


async def _grown(model: Qwen3Asr, pcm: np.ndarray, count: int) -> list[list[float]]:
    """Let streams grow together, second by second, up to STEPS, then end them. Return the seconds of each step."""
    opened = [(model.open(), np.random.default_rng(0)) for _ in range(count)]

    async def decode(number: int, seconds: float) -> float:
        stream, drawn = opened[number]
        fresh = ROLLED_BACK + int(TOKENS_A_S)
        prefix = tuple(int(i) for i in drawn.integers(1000, 100_000, max(0, int(seconds * TOKENS_A_S) - fresh)))
        heard, final = pcm[: int(seconds * SAMPLE_RATE_HZ)], seconds > STEPS
        began = time.perf_counter()
        await stream.decode(Window(heard, prefix=prefix, language="en", final=final, max_tokens=fresh + 1))
        return time.perf_counter() - began

    steps = [*range(1, STEPS + 1), STEPS + 0.3]
    took = [await together(count, lambda n, s=seconds: decode(n, s)) for seconds in steps]
    for stream, _ in opened:
        stream.close()
    return took


async def tts(chosen: EngineModelOptions, texts: list[int]) -> dict[str, Any]:
    """Measure Qwen3-TTS; see the module's docstring."""
    rows = []
    with closing(synthesizer("0.6B", chosen, qwen_tokenizer())) as model:
        voice = VoiceOptions(model.profile.voices[0], seed=1, max_frames=TTS_FRAMES)

        async def say(_: int) -> float:
            began, first_s = time.perf_counter(), 0.0
            async for _ in model.speak(TEXT, voice, lambda: Urgency.FINAL):
                first_s = first_s or time.perf_counter() - began
            return first_s

        await say(0)
        for count in texts:
            began = time.perf_counter()
            firsts = await together(count, say)
            rate = count * TTS_FRAMES / (time.perf_counter() - began)
            rows.append({"texts": count, "first_sound_s": percentile(firsts, 50), "frames_a_s": rate})
    show("concurrent texts; 12.5 frames a second are real time", rows)
    return {"texts": rows}


async def omni(chosen: EngineModelOptions, talks: list[int]) -> dict[str, Any]:
    """Measure Qwen3-Omni; see the module's docstring."""
    rows = []
    with closing(conversation_model("30B-A3B", chosen, qwen_tokenizer())) as model:
        await answer(model, HEARD_S)
        for count in talks:
            said = await together(count, lambda _: answer(model, HEARD_S, OMNI_FRAMES * FRAME_SAMPLES))
            rows.append(
                {
                    "talks": count,
                    "first_text_s": percentile([s.text_s for s in said], 50),
                    "first_sound_s": percentile([s.sound_s for s in said], 50),
                    "tokens_a_s": sum(s.tokens_a_s for s in said),
                    "frames_a_s": sum(s.samples_a_s for s in said) / FRAME_SAMPLES,
                }
            )
        turns = [await _turns(model, seconds) for seconds in TURNS_S]
    show("concurrent conversations; 12.5 frames a second are real time", rows)
    show("first text after the end of a turn, with prefill at its end and during the turn", turns)
    return {"shared_experts": chosen.device == "cpu", "talks": rows, "turns": turns}


async def _turns(model: Qwen3Omni, seconds: int) -> dict[str, float]:
    """Return the seconds from turns of this length to the first text: prefilled at the end, and during the turn."""
    reply, window = ReplyOptions(max_tokens=1, temperature=0.0), model.profile.audio_window_ms * SAMPLE_RATE_HZ // 1000

    async def first_text_s(*, grows: bool) -> float:
        pcm, turn = sound(seconds), SoundTrack()
        stream = await model.open()
        # Prefills as a session does: after a window and a little more audio, and every second from then on.
        for end in range(window + SAMPLE_RATE_HZ // 10, len(pcm) if grows else 0, SAMPLE_RATE_HZ):
            await stream.prefill([Message("user", "", parts=(AudioPart(pcm[:end], turn, grows=True),))])
        began = time.perf_counter()
        asked = [Message("user", "", parts=(AudioPart(pcm, turn),))]
        async with aclosing(stream.respond(asked, reply, None)) as parts:
            await anext(parts)
        took = time.perf_counter() - began
        stream.close()
        return took

    at_once, growing = [
        percentile([await first_text_s(grows=grows) for _ in range(TURN_REPEATS)], 50) for grows in (False, True)
    ]
    return {"turn_s": seconds, "first_text_at_once_s": at_once, "first_text_s": growing}


def main() -> None:
    parser = options("antiphon bench qwen3", __doc__, ("asr", "tts", "omni"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--weights", default="", help="types to measure; by default all that suit the device")
    parser.add_argument("--streams", default="1,2,3,4")
    args = parser.parse_args()
    cpu = args.device == "cpu"
    kinds = args.weights.split(",") if args.weights else ["int8", "bf16"] if cpu else ["bf16"]
    work: dict[str, Any] = {
        "asr": lambda chosen: asr(chosen, numbers(args.streams)),
        "tts": lambda chosen: tts(chosen, [1, 4] if cpu else [1, 8, 32]),
        "omni": lambda chosen: omni(chosen, [1] if cpu else [1, 8, 32]),
    }

    def by_weights(name: str) -> list[dict[str, Any]]:
        found = []
        for kind in kinds if name != "omni" else [k for k in kinds if k != "int8"]:
            print(f"\n# {name}, released dimensions, random weights, {kind}, {args.device}")
            chosen = EngineModelOptions(device=args.device, weights=kind)
            found.append({"weights": kind, "device": args.device} | asyncio.run(work[name](chosen)))
        return found

    wanted = ",".join(f"{name}-{args.device}" for name in args.sections.split(","))
    measured("qwen3", wanted, {f"{name}-{args.device}": lambda name=name: by_weights(name) for name in work})


if __name__ == "__main__":
    main()
