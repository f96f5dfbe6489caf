"""Qwen3-Omni-30B-A3B's dimensions with random weights, for bench/qwen3.py.

On a CPU its 35 billion parameters have no room: there all layers of a decoder share the experts of one. What a step
reads and multiplies is the same.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from common import percentile, table
from native import filled
from tests.adapters import tiny_qwen3_asr
from tests.adapters import tiny_qwen3_omni as tiny
from tokenizers import AddedToken, Tokenizer
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    WhisperFeatureExtractor,
)

from antiphon.adapters.qwen3_omni.checkpoint import parts_of, tokenizer
from antiphon.adapters.qwen3_omni.model import Qwen3Omni
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import AudioPart, Message, ReplyOptions, ResponseAudio, TextDelta, VoiceOptions

ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0}
SECTIONS = ROPE | {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
HEARD_S, TOKENS, FRAMES, FRAME_SAMPLES = 3, 24, 40, 1920


def dimensions(ids: dict[str, int]) -> Any:
    """Qwen/Qwen3-Omni-30B-A3B-Instruct, config.json; `ids` of the control tokens are the tokenizer's here."""
    places = {n: ids[f"<|{n[:5]}_pad|>"] for n in ("audio_token_id", "image_token_id", "video_token_id")}
    starts = {"vision_start_token_id": ids["<|vision_start|>"], "audio_start_token_id": ids["<|audio_start|>"]}
    thinker = (
        {
            "text_config": {
                "vocab_size": 152064,
                "hidden_size": 2048,
                "intermediate_size": 768,
                "num_hidden_layers": 48,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "max_position_embeddings": 65536,
                "rope_parameters": SECTIONS,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
            },
            "audio_config": {"output_dim": 2048},
            "vision_config": {"out_hidden_size": 2048},
            "user_token_id": ids["user"],
        }
        | places
        | starts
    )
    talker = (
        {
            "text_config": {
                "vocab_size": 3072,
                "hidden_size": 1024,
                "intermediate_size": 2048,
                "num_hidden_layers": 20,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "head_dim": 128,
                "max_position_embeddings": 65536,
                "rope_parameters": SECTIONS,
                "num_experts": 128,
                "num_experts_per_tok": 6,
                "moe_intermediate_size": 384,
                "shared_expert_intermediate_size": 768,
            },
            "code_predictor_config": {"num_code_groups": 16, "rope_parameters": ROPE},
            "num_code_groups": 16,
            "codec_eos_token_id": 2150,
            "codec_nothink_id": 2155,
            "codec_think_bos_id": 2156,
            "codec_think_eos_id": 2157,
            "codec_pad_id": 2148,
            "codec_bos_id": 2149,
            "speaker_id": {"ethan": 2302},
            "spatial_merge_size": 2,
        }
        | places
        | starts
    )
    named = {"im_start": "<|im_start|>", "im_end": "<|im_end|>", "tts_pad": "<tts_pad>", "tts_bos": "<tts_text_bos>"}
    named |= {"tts_eos": "<tts_text_eod>", "system": "system", "user": "user", "assistant": "assistant"}
    more = {f"{name}_token_id": ids[text] for name, text in named.items()}
    sound = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    return Qwen3OmniMoeConfig(thinker_config=thinker, talker_config=talker, code2wav_config=sound, **more)


def omni(device: str, weights: str, words_of: Path) -> Qwen3Omni:
    """The model; `words_of`: a tokenizer.json of its family."""
    torch.manual_seed(0)
    where, dtype = torch.device(device), torch.float32 if weights == "fp32" else torch.bfloat16
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = Tokenizer.from_file(str(words_of))
        words.add_special_tokens(tiny.SPECIAL)
        words.add_tokens([AddedToken(word, normalized=False) for word in tiny.WORDS])
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>").save_pretrained(folder)
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": tiny.TEMPLATE}))
        WhisperFeatureExtractor(feature_size=128).save_pretrained(folder)
        facts = json.loads((folder / "preprocessor_config.json").read_text())
        facts |= {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2}
        (folder / "preprocessor_config.json").write_text(json.dumps(facts))
        ids = {text: words.token_to_id(text) for text in (*tiny.SPECIAL, *tiny.WORDS)}
        with init_empty_weights(include_buffers=False):
            whole: Any = Qwen3OmniMoeForConditionalGeneration(dimensions(ids))
        if device == "cpu":
            for layers in (whole.thinker.model.language_model.layers, whole.talker.model.layers):
                shared(list(layers), where, dtype)
        filled(whole, where, dtype)
        parts = parts_of(whole, tokenizer(folder))
        options = EngineModelOptions(device=device, weights=weights)
        return Qwen3Omni(folder, "qwen3-omni-30b-a3b", options, parts=parts)


def shared(layers: list[Any], where: torch.device, dtype: torch.dtype) -> None:
    """One layer's experts for all."""
    first = layers[0].mlp.experts
    filled(first, where, dtype)
    for layer in layers[1:]:
        layer.mlp.experts = first


async def omni_section(device: str, weights: str, words: Path, talks: list[int]) -> dict[str, Any]:
    """A spoken question of HEARD_S seconds:
    first text, first sound, tokens and frames a second, of one and several at once.
    """
    model = omni(device, weights, words)
    options = ReplyOptions(max_tokens=TOKENS, temperature=0.0)

    async def answer() -> tuple[float, float, float, float]:
        talk, began = await model.open(), time.perf_counter()
        text, sound, last, samples = 0.0, 0.0, 0.0, 0
        asked = [Message("user", "", parts=(AudioPart(tiny_qwen3_asr.sound(HEARD_S)), "What was that?"))]
        async with aclosing(talk.respond(asked, options, VoiceOptions("ethan", seed=1))) as parts:
            async for part in parts:
                now = time.perf_counter() - began
                if isinstance(part, TextDelta):
                    text, last = text or now, now
                elif isinstance(part, ResponseAudio):
                    sound, samples = sound or now, samples + len(part.pcm)
                    if samples > FRAMES * FRAME_SAMPLES:
                        break
        talk.close()
        return (
            text,
            sound,
            (TOKENS - 1) / max(1e-9, last - text),
            samples / FRAME_SAMPLES / (time.perf_counter() - began - sound),
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
    return {"weights": weights, "device": device, "shared_experts": device == "cpu", "talks": together}
