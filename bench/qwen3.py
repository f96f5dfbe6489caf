"""The Qwen3 voice family at its real dimensions with random weights: timing needs no training.

    antiphon bench qwen3 [--sections asr,tts,omni] [--device cpu|cuda] [--weights auto|int8|bf16] [--streams 1,2,3,4]

`asr`: Qwen3-ASR-0.6B, streams that grow by a second a step as a session grows them: five tokens rolled back and 3.5 a
second of speech said anew, the prompt cut into tokens by Qwen's own tokenizer. A step alone, a final, steps of several
streams at once, and tokens a second.

`tts`: Qwen3-TTS-0.6B: first sound, and frames a second (12.5 are real time) of one and several texts at once; what the
talker, the code predictor and the vocoder take of a frame.

`omni`: Qwen3-Omni-30B-A3B (qwen3_omni.py): first text and first sound after a spoken question, tokens and frames a
second, of one and several at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import Qwen3ASRConfig, Qwen3ASRForConditionalGeneration

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import RESULTS, machine, percentile, save, table
from native import filled
from qwen3_omni import omni_section
from tests.adapters import tiny_qwen3_asr as tiny
from tests.adapters import tiny_qwen3_tts as tiny_tts

from antiphon.adapters.qwen3_asr.audio_encoder import WindowedAudioEncoder
from antiphon.adapters.qwen3_asr.checkpoint import END, Qwen3AsrParts
from antiphon.adapters.qwen3_asr.transcriber import Qwen3Asr
from antiphon.adapters.qwen3_tts.checkpoint import Qwen3TtsConfig, SpeechTokenizerConfig, build
from antiphon.adapters.qwen3_tts.synthesizer import Qwen3Tts
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import Urgency, VoiceOptions, Window
from antiphon.engine.api import Sampling
from antiphon.loading.loader import prepare, store_of
from antiphon.loading.selection import selected_models
from antiphon.modeling.codec_talker import DEFAULT_CODEC_SAMPLING
from antiphon.modeling.codec_vocoder import VocoderState
from antiphon.modeling.text_decoder import TextDecoder
from antiphon.modeling.vocabulary import Vocabulary
from antiphon.settings import EngineOptions, Settings

# Qwen/Qwen3-ASR-0.6B, config.json.
ASR_06B = Qwen3ASRConfig(
    audio_config={
        "num_mel_bins": 128,
        "encoder_layers": 18,
        "encoder_attention_heads": 14,
        "encoder_ffn_dim": 3584,
        "d_model": 896,
        "output_dim": 1024,
    },
    text_config={
        "vocab_size": 152064,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 65536,
        "tie_word_embeddings": True,
    },
)
# Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice, config.json; the vocoder as the published package (qwen-tts 0.1.1) has it by
# default.
DECODER = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 32768,
}
TTS_06B = tiny_tts.config("custom_voice") | {
    "talker_config": tiny_tts.TALKER
    | DECODER
    | {
        "vocab_size": 3072,
        "num_code_groups": 16,
        "text_hidden_size": 2048,
        "text_vocab_size": 152064,
        "codec_eos_token_id": 2150,
        "codec_bos_id": 2149,
        "codec_pad_id": 2148,
        "codec_think_id": 2154,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "code_predictor_config": DECODER | {"num_hidden_layers": 5, "vocab_size": 2048, "num_code_groups": 16},
    },
}
VOCODER = {
    "codebook_size": 2048,
    "codebook_dim": 512,
    "hidden_size": 1024,
    "latent_dim": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "sliding_window": 72,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_quantizers": 16,
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2],
    "decoder_dim": 1536,
}
TEXT = "Good morning, and welcome back: here is the news of the day, as far as we know it."
TTS_FRAMES = 40
TOKENS_A_S = 3.5
ROLLED_BACK = 5
STEPS = 12


def qwen_tokenizer() -> Path:
    """The default language model's tokenizer, which is of the same family."""
    settings = Settings(engine=EngineOptions(language_model="qwen2.5-coder-0.5b-instruct"))
    return prepare(settings, store_of(settings.models), selected_models(settings, ("language",))[0]) / "tokenizer.json"


def asr(device: str, weights: str) -> Qwen3Asr:
    """The model of released dimensions."""
    torch.manual_seed(0)
    dtype = torch.float32 if weights == "fp32" else torch.bfloat16
    torch.set_default_dtype(dtype)
    whole: Any = Qwen3ASRForConditionalGeneration
    model = whole(ASR_06B).to(device).eval()
    torch.set_default_dtype(torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        tiny.write(Path(folder))
        shutil.copyfile(qwen_tokenizer(), f"{folder}/tokenizer.json")
        words = Tokenizer.from_file(f"{folder}/tokenizer.json")
        words.add_special_tokens(tiny.SPECIAL)
        words.save(f"{folder}/tokenizer.json")
        vocabulary = Vocabulary(Path(folder), END)
    # Random weights say an end as seldom as anything else.
    parts = Qwen3AsrParts(
        vocabulary, WindowedAudioEncoder(model.model), TextDecoder(model.model.language_model, model.lm_head)
    )
    return Qwen3Asr(parts, "qwen3-asr-0.6b", EngineModelOptions(device=device, weights=weights))


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
    model, sound = asr(device, weights), tiny.sound(24)
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


def tts(device: str, weights: str) -> Qwen3Tts:
    """The model of released dimensions."""
    torch.manual_seed(0)
    where, dtype = torch.device(device), torch.float32 if weights == "fp32" else torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        tiny_tts.write(Path(folder))
        words = Tokenizer.from_file(str(qwen_tokenizer()))
        words.add_special_tokens(tiny_tts.SPECIAL)
        words.save(f"{folder}/tokenizer.json")
        vocabulary = Vocabulary(Path(folder), END)
    sound = {"decoder_config": VOCODER, "decode_upsample_rate": 1920, "output_sample_rate": 24000}
    ids = {f"tts_{n}_token_id": 151671 + i for i, n in enumerate(("pad", "bos", "eos"))}
    config, tokenizer = msgspec.convert(TTS_06B | ids, Qwen3TtsConfig), msgspec.convert(sound, SpeechTokenizerConfig)
    parts = build(config, None, tokenizer, vocabulary, DEFAULT_CODEC_SAMPLING)
    for module in (parts.decoder, parts.text_embedding, parts.text_projection, parts.code_predictor):
        filled(module, where, dtype)
    filled(parts.vocoder, where, torch.float32)
    return Qwen3Tts(parts, "qwen3-tts-0.6b", EngineModelOptions(device=device, weights=weights))


async def tts_section(device: str, weights: str, texts: list[int]) -> dict[str, Any]:
    """See the module's docstring."""
    model = tts(device, weights)
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
        talks, words = ([1] if args.device == "cpu" else [1, 8, 32]), qwen_tokenizer()
        document[f"omni-{args.device}"] = [
            asyncio.run(omni_section(args.device, kind, words, talks)) for kind in kinds if kind != "int8"
        ]
    if args.device == "cpu":
        print("\nGPU figures: no GPU here, not measured")
    print(f"\nwritten: {save('qwen3', document)}")


if __name__ == "__main__":
    main()
