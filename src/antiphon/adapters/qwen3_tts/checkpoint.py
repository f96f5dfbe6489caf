"""Reads a Qwen3-TTS checkpoint: the talker, its code predictor, the text's embeddings, and the speech tokenizer.

The speech tokenizer, under `speech_tokenizer/`, is the vocoder and, where the checkpoint clones voices, the encoder of
their samples. Each part is built empty from config.json, then filled from the tensors under its name.
"""

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
# Fields of the talker's and the code predictor's configuration that that of `transformers` has too.
DECODER_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_bias",
)  # fmt: skip

# Prefixes of a part's parameter names -> those of the checkpoint; the first that fits counts.
TALKER_PREFIXES = {
    "text.embed_tokens.": "talker.model.codec_embedding.",
    "text.": "talker.model.",
    "head.": "talker.codec_head.",
}
PREDICTOR_PREFIXES = {
    "codec_embedding.": "talker.code_predictor.model.codec_embedding.",
    "": "talker.code_predictor.",
}
# `transformers` 5 names the encoder's two halves apart; the checkpoint has both under one name.
ENCODER_PREFIXES = {"encoder.encoder_seanet.": "encoder.encoder.", "encoder.": "encoder.", "": "encoder."}


@dataclass(frozen=True, slots=True)
class TtsSpecialIds:
    """The ids that control the talker: codes that are no audio, and the text tokens that begin, end and pad a text.

    `end` ends the audio. `think` comes before a language's code, `no_think` where the talker chooses the language.
    """

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
    """The model's parts on one device.

    `decoder`: the talker, which the engine steps. `text_embedding`, `text_projection`: from text tokens to its rows.
    `speaker_encoder`, `sample_encoder`: of a checkpoint that clones voices, else None: from a sample to the speaker's
    vector, and to codes (a MimiModel). `speakers`, `languages`: lower-case names to codes. `dialects`: for speakers who
    speak Chinese in a dialect, its name in `languages`. `sampling`: how the checkpoint's makers sample.
    `frame_samples`: samples of audio in a frame.
    """

    kind: CheckpointKind
    vocabulary: Vocabulary
    decoder: TextDecoder
    text_embedding: nn.Embedding
    text_projection: TextProjection
    code_predictor: CodePredictor
    vocoder: CodecVocoder
    speaker_encoder: SpeakerEncoder | None
    sample_encoder: Any
    special_ids: TtsSpecialIds
    speakers: dict[str, int]
    dialects: dict[str, str]
    languages: dict[str, int]
    follows_instructions: bool
    sampling: CodecSampling
    sample_rate_hz: int
    frame_samples: int


def read(folder: Path, device: torch.device, dtype: torch.dtype) -> Qwen3TtsParts:
    """Load a checkpoint's folder onto a device. Waits for seconds.

    The vocoder and the encoders are kept in float32: their audio is made of small numbers. Raises OSError, ValueError,
    KeyError or RuntimeError for a folder that is no Qwen3-TTS checkpoint of 12 Hz, or lacks a part.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer_config = json.loads((folder / "speech_tokenizer" / "config.json").read_text(encoding="utf-8"))
    parts = build(config, tokenizer_config, Vocabulary(folder, END), _sampling(folder))
    with ExitStack() as files:
        tensors = Tensors(folder, files, device, dtype)
        fill(parts.decoder, tensors, TALKER_PREFIXES)
        fill(parts.text_embedding, tensors, {"": "talker.model.text_embedding."})
        fill(parts.text_projection, tensors, {"": "talker.text_projection."})
        width = parts.code_predictor.model.config.hidden_size
        unused = {"model.embed_tokens.weight": torch.zeros(1, width, dtype=dtype, device=device)}
        fill(parts.code_predictor, tensors, PREDICTOR_PREFIXES, unused)
        tokenizer_tensors = Tensors(folder / "speech_tokenizer", files, device, torch.float32)
        fill(parts.vocoder, tokenizer_tensors, {"": "decoder."})
        if parts.speaker_encoder is not None:
            fill(parts.speaker_encoder, Tensors(folder, files, device, torch.float32), {"": "speaker_encoder."})
        if parts.sample_encoder is not None:
            fill(parts.sample_encoder, tokenizer_tensors, ENCODER_PREFIXES)
    return parts


def build(
    config: dict[str, Any], tokenizer_config: dict[str, Any], vocabulary: Vocabulary, sampling: CodecSampling
) -> Qwen3TtsParts:
    """Return the parts that the two config.json describe, with parameters on the meta device, which hold nothing yet.

    `tokenizer_config`: of the speech tokenizer. Raises ValueError or KeyError for another model's configuration.
    """
    if config.get("model_type") != "qwen3_tts" or config.get("tokenizer_type", "").endswith("25hz"):
        raise ValueError(f"{config.get('model_type')} {config.get('tokenizer_type', '')} is no qwen3_tts of 12 Hz")
    talker = config["talker_config"]
    kind = config.get("tts_model_type", "custom_voice")
    clones = kind == "base"
    with init_empty_weights(include_buffers=False):
        decoder, code_predictor = _talker(talker)
        text_embedding = nn.Embedding(int(talker["text_vocab_size"]), int(talker["text_hidden_size"]))
        text_projection = TextProjection(int(talker["text_hidden_size"]), int(talker["hidden_size"]))
        vocoder = CodecVocoder(tokenizer_config["decoder_config"])
        sample_encoder = _sample_encoder(tokenizer_config) if clones else None
    dialects = {s.lower(): d for s, d in (talker.get("spk_is_dialect") or {}).items() if d}
    return Qwen3TtsParts(
        kind=kind,
        vocabulary=vocabulary,
        decoder=decoder,
        text_embedding=text_embedding,
        text_projection=text_projection,
        code_predictor=code_predictor,
        vocoder=vocoder,
        speaker_encoder=SpeakerEncoder(config["speaker_encoder_config"]) if clones else None,
        sample_encoder=sample_encoder,
        special_ids=_special_ids(config),
        speakers={n.lower(): i for n, i in (talker.get("spk_id") or {}).items()},
        dialects=dialects,
        languages={n.lower(): i for n, i in (talker.get("codec_language_id") or {}).items()},
        # The makers leave instructions out for the smaller of the checkpoints with voices of their own.
        follows_instructions=not clones and not (kind == "custom_voice" and config.get("tts_model_size") == "0b6"),
        sampling=sampling,
        sample_rate_hz=int(tokenizer_config.get("output_sample_rate", 24_000)),
        frame_samples=int(tokenizer_config.get("decode_upsample_rate", 1920)),
    )


def _talker(talker: dict[str, Any]) -> tuple[TextDecoder, CodePredictor]:
    predictor = talker["code_predictor_config"]
    width, num_codebooks = int(talker["hidden_size"]), int(talker["num_code_groups"])
    text = Qwen3Model(Qwen3Config(**_decoder_config(talker)))
    small = Qwen3Model(Qwen3Config(**(_decoder_config(predictor) | {"vocab_size": 1, "pad_token_id": None})))
    size, inner_width = int(predictor["vocab_size"]), int(predictor["hidden_size"])
    tables = nn.ModuleList(nn.Embedding(size, width) for _ in range(num_codebooks - 1))
    heads = nn.ModuleList(nn.Linear(inner_width, size, bias=False) for _ in range(num_codebooks - 1))
    decoder = TextDecoder(text, nn.Linear(width, int(talker["vocab_size"]), bias=False))
    return decoder, CodePredictor(small, tables, heads, width)


def _sample_encoder(tokenizer_config: dict[str, Any]) -> Any:
    if "encoder_config" not in tokenizer_config:
        return None
    mimi = MimiConfig(**own_config(tokenizer_config["encoder_config"]))
    mimi.decoder_config = None
    return MimiModel(mimi)


def _special_ids(config: dict[str, Any]) -> TtsSpecialIds:
    talker = config["talker_config"]
    return TtsSpecialIds(
        end=talker["codec_eos_token_id"],
        bos=talker["codec_bos_id"],
        pad=talker["codec_pad_id"],
        think=talker["codec_think_id"],
        no_think=talker["codec_nothink_id"],
        think_bos=talker["codec_think_bos_id"],
        think_eos=talker["codec_think_eos_id"],
        text_bos=config["tts_bos_token_id"],
        text_eos=config["tts_eos_token_id"],
        text_pad=config["tts_pad_token_id"],
    )


def _decoder_config(config: dict[str, Any]) -> dict[str, Any]:
    # The three coordinates of its rotary positions are always equal: one is enough.
    rope = {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000)}
    fields = {k: config[k] for k in DECODER_FIELDS if k in config}
    return fields | {"rope_parameters": rope, "tie_word_embeddings": False}


def _sampling(folder: Path) -> CodecSampling:
    """The sampling that generation_config.json asks for; what it does not name is as the makers' defaults."""
    path, defaults = folder / "generation_config.json", DEFAULT_CODEC_SAMPLING
    given = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def of(prefix: str, base: Sampling) -> Sampling:
        draws = given.get(f"{prefix}do_sample", given.get(f"{prefix}dosample", True))
        return Sampling(
            temperature=given.get(f"{prefix}temperature", base.temperature) if draws else 0.0,
            top_k=given.get(f"{prefix}top_k", base.top_k),
            top_p=given.get(f"{prefix}top_p", base.top_p),
            repetition_penalty=given.get("repetition_penalty", base.repetition_penalty) if not prefix else 1.0,
            repetition_window=base.repetition_window,
        )

    return CodecSampling(of("", defaults.first), of("subtalker_", defaults.rest))
