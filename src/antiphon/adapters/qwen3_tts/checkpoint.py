"""A Qwen3-TTS checkpoint's folder: the talker, its code predictor, its text's embeddings, and the vocoder under `speech_tokenizer/`."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import MimiConfig, MimiModel, Qwen3Config, Qwen3Model

from antiphon.adapters.qwen3_tts.voice_cloning import SpeakerEncoder
from antiphon.engine.api import Sampling
from antiphon.modeling.codec_talker import DEFAULT_CODEC_SAMPLING, CodecSampling, CodePredictor, TextProjection
from antiphon.modeling.codec_vocoder import CodecVocoder
from antiphon.modeling.tensors import Tensors, fill, own_config
from antiphon.modeling.text_decoder import TextDecoder
from antiphon.modeling.vocabulary import Vocabulary

END = "<|im_end|>"
CheckpointKind = Literal["custom_voice", "voice_design", "base"]
SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "attention_bias",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TtsSpecialIds:
    """Ids that are no sound: of the talker's codes, and of the text."""

    end: int
    bos: int
    pad: int
    think: int
    no_think: int
    think_bos: int
    think_eos: int
    text_bos: int
    text_eos: int
    text_pad: int


@dataclass(frozen=True, slots=True)
class Qwen3TtsParts:
    """The model on one device. `speakers`, `languages`: names to codes; `dialects`: the language a speaker speaks Chinese in.

    `instructed`: it follows instructions.
    """

    kind: CheckpointKind
    vocabulary: Vocabulary
    decoder: TextDecoder
    text: nn.Embedding
    projection: TextProjection
    inner: CodePredictor
    vocoder: CodecVocoder
    # Of a checkpoint that clones voices: who speaks, and what they say in codes (a MimiModel).
    speaker: SpeakerEncoder | None
    encoder: Any
    marks: TtsSpecialIds
    speakers: dict[str, int]
    dialects: dict[str, str]
    languages: dict[str, int]
    instructed: bool
    manner: CodecSampling
    sample_rate_hz: int
    frame_samples: int


def read(folder: Path, device: torch.device, dtype: torch.dtype) -> Qwen3TtsParts:
    """Load it. Raises OSError, ValueError, KeyError, RuntimeError for a folder that is no such checkpoint, or lacks a part."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sound = json.loads((folder / "speech_tokenizer" / "config.json").read_text(encoding="utf-8"))
    parts = build(config, sound, Vocabulary(folder, END), _manner(folder))
    with ExitStack() as files:
        tensors = Tensors(folder, files, device, dtype)
        fill(
            parts.decoder,
            tensors,
            {
                "text.embed_tokens.": "talker.model.codec_embedding.",
                "text.": "talker.model.",
                "head.": "talker.codec_head.",
            },
        )
        fill(parts.text, tensors, {"": "talker.model.text_embedding."})
        fill(parts.projection, tensors, {"": "talker.text_projection."})
        made = {
            "model.embed_tokens.weight": torch.zeros(
                1, parts.inner.model.config.hidden_size, dtype=dtype, device=device
            )
        }
        fill(
            parts.inner,
            tensors,
            {
                "codec_embedding.": "talker.code_predictor.model.codec_embedding.",
                "": "talker.code_predictor.",
            },
            made,
        )
        # Its sound is made of small numbers: never in half of them.
        sounds = Tensors(folder / "speech_tokenizer", files, device, torch.float32)
        fill(parts.vocoder, sounds, {"": "decoder."})
        if parts.speaker is not None:
            fill(parts.speaker, Tensors(folder, files, device, torch.float32), {"": "speaker_encoder."})
        if parts.encoder is not None:
            # `transformers` 5 has the two halves apart; a checkpoint has not, and here only one of them.
            fill(
                parts.encoder,
                sounds,
                {"encoder.encoder_seanet.": "encoder.encoder.", "encoder.": "encoder.", "": "encoder."},
            )
    return parts


def build(
    config: dict[str, Any], sound: dict[str, Any], vocabulary: Vocabulary, manner: CodecSampling
) -> Qwen3TtsParts:
    """The parts that two config.json describe, on no device yet. Raises ValueError, KeyError for another model's."""
    if config.get("model_type") != "qwen3_tts" or config.get("tokenizer_type", "").endswith("25hz"):
        raise ValueError(f"{config.get('model_type')} {config.get('tokenizer_type', '')} is no qwen3_tts of 12 Hz")
    talker, predictor = config["talker_config"], config["talker_config"]["code_predictor_config"]
    width, count = int(talker["hidden_size"]), int(talker["num_code_groups"])
    with init_empty_weights(include_buffers=False):
        text = Qwen3Model(Qwen3Config(**_shape(talker)))
        small = Qwen3Model(Qwen3Config(**(_shape(predictor) | {"vocab_size": 1, "pad_token_id": None})))
        decoder = TextDecoder(text, nn.Linear(width, int(talker["vocab_size"]), bias=False))
        size, inside = int(predictor["vocab_size"]), int(predictor["hidden_size"])
        tables = nn.ModuleList(nn.Embedding(size, width) for _ in range(count - 1))
        heads = nn.ModuleList(nn.Linear(inside, size, bias=False) for _ in range(count - 1))
        inner = CodePredictor(small, tables, heads, width)
        table = nn.Embedding(int(talker["text_vocab_size"]), int(talker["text_hidden_size"]))
        projection = TextProjection(int(talker["text_hidden_size"]), width)
        vocoder = CodecVocoder(sound["decoder_config"])
        clones = config.get("tts_model_type") == "base"
        encoder = None
        if clones and "encoder_config" in sound:
            mimi = MimiConfig(**own_config(sound["encoder_config"]))
            mimi.decoder_config = None
            encoder = MimiModel(mimi)
    speaker = SpeakerEncoder(config["speaker_encoder_config"]) if clones else None
    marks = TtsSpecialIds(
        talker["codec_eos_token_id"],
        talker["codec_bos_id"],
        talker["codec_pad_id"],
        talker["codec_think_id"],
        talker["codec_nothink_id"],
        talker["codec_think_bos_id"],
        talker["codec_think_eos_id"],
        config["tts_bos_token_id"],
        config["tts_eos_token_id"],
        config["tts_pad_token_id"],
    )
    languages = talker.get("codec_language_id") or {}
    dialects = {s: d for s, d in (talker.get("spk_is_dialect") or {}).items() if d}
    kind = config.get("tts_model_type", "custom_voice")
    # Its makers leave the instructions of the smaller one with voices of its own out.
    instructed = kind != "base" and not (kind == "custom_voice" and config.get("tts_model_size") == "0b6")
    return Qwen3TtsParts(
        kind,
        vocabulary,
        decoder,
        table,
        projection,
        inner,
        vocoder,
        speaker,
        encoder,
        marks,
        {n.lower(): i for n, i in (talker.get("spk_id") or {}).items()},
        {s.lower(): d for s, d in dialects.items()},
        {n.lower(): i for n, i in languages.items()},
        instructed,
        manner,
        int(sound.get("output_sample_rate", 24_000)),
        int(sound.get("decode_upsample_rate", 1920)),
    )


def _shape(config: dict[str, Any]) -> dict[str, Any]:
    # Its three rows of rotary positions are equal: one does.
    rope = {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000)}
    return {k: config[k] for k in SHAPE if k in config} | {"rope_parameters": rope, "tie_word_embeddings": False}


def _manner(folder: Path) -> CodecSampling:
    """As its generation_config.json says."""
    path, given = folder / "generation_config.json", DEFAULT_CODEC_SAMPLING
    said = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def of(prefix: str, base: Sampling) -> Sampling:
        drawn = said.get(f"{prefix}do_sample", said.get(f"{prefix}dosample", True))
        return Sampling(
            temperature=said.get(f"{prefix}temperature", base.temperature) if drawn else 0.0,
            top_k=said.get(f"{prefix}top_k", base.top_k),
            top_p=said.get(f"{prefix}top_p", base.top_p),
            repetition_penalty=said.get("repetition_penalty", base.repetition_penalty) if not prefix else 1.0,
            repetition_window=base.repetition_window,
        )

    return CodecSampling(of("", given.first), of("subtalker_", given.rest))
