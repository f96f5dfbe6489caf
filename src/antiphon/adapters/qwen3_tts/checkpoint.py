"""Reads a Qwen3-TTS checkpoint: the talker, its code predictor, the text embedding, and the speech tokenizer.

The speech tokenizer, in `speech_tokenizer/`, consists of the vocoder and, if the checkpoint clones voices, the encoder
of their samples. Each part is built without weights from config.json, then filled from the tensors whose names have its
prefix.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import MimiConfig, MimiModel, Qwen3Config, Qwen3Model

from antiphon.adapters.qwen3_tts.voice_cloning import SpeakerEncoder, SpeakerEncoderConfig
from antiphon.engine.api import Sampling
from antiphon.modeling.codec.talker import DEFAULT_CODEC_SAMPLING, CodecSampling, CodePredictor, TextProjection
from antiphon.modeling.codec.vocoder import CodecVocoder, VocoderConfig
from antiphon.modeling.tensors import CheckpointType, Tensors, fill, own_config, read_config
from antiphon.modeling.text_decoder import QwenTextConfig, TextDecoder
from antiphon.modeling.tokens import Vocabulary

END = "<|im_end|>"
CheckpointKind = Literal["custom_voice", "voice_design", "base"]
# The base of the rotary embeddings if a configuration does not set it.
DEFAULT_THETA = 10_000

# Prefixes of a part's parameter names -> the prefixes in the checkpoint. The first match applies.
TALKER_PREFIXES = {
    "text.embed_tokens.": "talker.model.codec_embedding.",
    "text.": "talker.model.",
    "head.": "talker.codec_head.",
}
PREDICTOR_PREFIXES = {
    "codec_embedding.": "talker.code_predictor.model.codec_embedding.",
    "": "talker.code_predictor.",
}
# The checkpoint has the names of `transformers` before 5.23, under one prefix. Since 5.23 the convolutions, the
# transformer and the downsampling are in `encoder`.
ENCODER_PREFIXES = {
    "encoder.encoder_seanet.": "encoder.encoder.",
    "encoder.encoder_transformer.": "encoder.encoder_transformer.",
    "encoder.downsample.": "encoder.downsample.",
    "": "encoder.",
}


class TtsCheckpointType(CheckpointType, frozen=True, kw_only=True):
    """The fields of config.json that distinguish Qwen3-TTS of 12 Hz from other models."""

    tokenizer_type: str = ""


class CodePredictorConfig(QwenTextConfig, frozen=True, kw_only=True):
    """The `code_predictor_config` of the talker: the sizes of the code predictor."""

    vocab_size: int
    hidden_size: int


class TalkerConfig(QwenTextConfig, frozen=True, kw_only=True):
    """The `talker_config` of config.json: the sizes and the control ids of the talker."""

    # Vocabulary size of the first codebook, with control codes.
    vocab_size: int
    # Width of the talker.
    hidden_size: int
    # Vocabulary size of the text.
    text_vocab_size: int
    # Width of the text embedding.
    text_hidden_size: int
    # Codebooks, which is the number of codes in a frame.
    num_code_groups: int
    # The sizes of the code predictor.
    code_predictor_config: CodePredictorConfig
    # See TtsSpecialIds.end.
    codec_eos_token_id: int
    # See TtsSpecialIds.bos.
    codec_bos_id: int
    # See TtsSpecialIds.pad.
    codec_pad_id: int
    # See TtsSpecialIds.think.
    codec_think_id: int
    # See TtsSpecialIds.no_think.
    codec_nothink_id: int
    # See TtsSpecialIds.think_bos.
    codec_think_bos_id: int
    # See TtsSpecialIds.think_eos.
    codec_think_eos_id: int
    # The codes of the speakers, by name.
    spk_id: dict[str, int] | None = None
    # The dialect of each speaker, by the speaker's name: a name in `codec_language_id`, or False.
    spk_is_dialect: dict[str, str | bool] | None = None
    # The codes of the languages and dialects, by name.
    codec_language_id: dict[str, int] | None = None


class Qwen3TtsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The config.json of a Qwen3-TTS checkpoint, without the speaker encoder, which is in `CloningConfig`."""

    # The talker.
    talker_config: TalkerConfig
    # See TtsSpecialIds.text_bos.
    tts_bos_token_id: int
    # See TtsSpecialIds.text_eos.
    tts_eos_token_id: int
    # See TtsSpecialIds.text_pad.
    tts_pad_token_id: int
    # Whether the checkpoint has named voices, designs voices from descriptions, or clones them ("base").
    tts_model_type: CheckpointKind = "custom_voice"
    # The release size, such as "0b6".
    tts_model_size: str = ""


class CloningConfig(msgspec.Struct, frozen=True):
    """The part of config.json that only voice-cloning checkpoints have."""

    speaker_encoder_config: SpeakerEncoderConfig


class SpeechTokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The config.json of the speech tokenizer.

    `decode_upsample_rate`: samples of audio in a frame. `encoder_config`: keyword arguments of a MimiConfig.
    """

    decoder_config: VocoderConfig
    encoder_config: dict[str, Any] | None = None
    output_sample_rate: int = 24_000
    decode_upsample_rate: int = 1920


@dataclass(frozen=True, slots=True)
class TtsSpecialIds:
    """The ids that control the talker: codes without audio, and text tokens."""

    # The code that ends the audio.
    end: int
    # The code that begins the audio.
    bos: int
    # The code that pads rows without audio.
    pad: int
    # The code that announces the code of a language.
    think: int
    # The code that leaves the language to the talker.
    no_think: int
    # The code that begins the language field.
    think_bos: int
    # The code that ends the language field.
    think_eos: int
    # The text token that begins a text.
    text_bos: int
    # The text token that ends a text.
    text_eos: int
    # The text token that pads rows without text.
    text_pad: int


@dataclass(frozen=True, slots=True)
class Qwen3TtsParts:
    """The model's parts, on one device."""

    # The kind of the checkpoint.
    kind: CheckpointKind
    # The text tokenizer.
    vocabulary: Vocabulary
    # The talker, which the engine steps.
    decoder: TextDecoder
    # Embeds text tokens: the first of two steps to the talker's rows.
    text_embedding: nn.Embedding
    # Projects these embeddings to the talker's rows: the second step.
    text_projection: TextProjection
    # Predicts the codes of a frame after the first.
    code_predictor: CodePredictor
    # Turns codes into audio.
    vocoder: CodecVocoder
    # Turns a sample into the speaker's vector. None: the checkpoint does not clone voices.
    speaker_encoder: SpeakerEncoder | None
    # A MimiModel, which turns a sample into codes. None: the checkpoint does not clone voices by codes.
    sample_encoder: Any
    # The ids that control the talker.
    special_ids: TtsSpecialIds
    # The codes of the speakers, by lower-case name.
    speakers: dict[str, int]
    # The dialects of speakers of a Chinese dialect, by speaker; each is a name in `languages`.
    dialects: dict[str, str]
    # The codes of the languages and dialects, by lower-case name.
    languages: dict[str, int]
    # True if the checkpoint follows instructions on how to speak.
    follows_instructions: bool
    # The checkpoint's sampling.
    sampling: CodecSampling
    # The sample rate of the audio.
    sample_rate_hz: int
    # Samples of audio in a frame.
    frame_samples: int


def read(folder: Path, device: torch.device, dtype: torch.dtype) -> Qwen3TtsParts:
    """Load a checkpoint's folder onto a device. Takes several seconds.

    The vocoder and the encoders stay in float32, because they compute with small numbers. Raises OSError, ValueError,
    KeyError or RuntimeError if the folder is not a Qwen3-TTS checkpoint of 12 Hz, or lacks a part.
    """
    path = folder / "config.json"
    found = read_config(path, TtsCheckpointType)
    if found.model_type != "qwen3_tts" or found.tokenizer_type.endswith("25hz"):
        raise ValueError(f"{found.model_type} {found.tokenizer_type} is not qwen3_tts of 12 Hz")
    config = read_config(path, Qwen3TtsConfig)
    cloning = read_config(path, CloningConfig) if config.tts_model_type == "base" else None
    tokenizer_config = read_config(folder / "speech_tokenizer" / "config.json", SpeechTokenizerConfig)
    parts = build(config, cloning, tokenizer_config, Vocabulary(folder, END), _sampling(folder))
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
    config: Qwen3TtsConfig,
    cloning: CloningConfig | None,
    tokenizer_config: SpeechTokenizerConfig,
    vocabulary: Vocabulary,
    sampling: CodecSampling,
) -> Qwen3TtsParts:
    """Return the parts that the two config.json files describe, with empty parameters on the meta device.

    `cloning`: None if the checkpoint does not clone voices. `tokenizer_config`: the speech tokenizer's config.json.
    """
    talker, kind = config.talker_config, config.tts_model_type
    with init_empty_weights(include_buffers=False):
        decoder, code_predictor = _talker(talker)
        text_embedding = nn.Embedding(talker.text_vocab_size, talker.text_hidden_size)
        text_projection = TextProjection(talker.text_hidden_size, talker.hidden_size)
        vocoder = CodecVocoder(tokenizer_config.decoder_config)
        sample_encoder = _sample_encoder(tokenizer_config) if cloning else None
    return Qwen3TtsParts(
        kind=kind,
        vocabulary=vocabulary,
        decoder=decoder,
        text_embedding=text_embedding,
        text_projection=text_projection,
        code_predictor=code_predictor,
        vocoder=vocoder,
        speaker_encoder=SpeakerEncoder(cloning.speaker_encoder_config) if cloning else None,
        sample_encoder=sample_encoder,
        special_ids=_special_ids(config),
        speakers={n.lower(): i for n, i in (talker.spk_id or {}).items()},
        dialects={n.lower(): d for n, d in (talker.spk_is_dialect or {}).items() if isinstance(d, str)},
        languages={n.lower(): i for n, i in (talker.codec_language_id or {}).items()},
        # The released code ignores instructions for the smaller checkpoint with named voices.
        follows_instructions=not cloning and not (kind == "custom_voice" and config.tts_model_size == "0b6"),
        sampling=sampling,
        sample_rate_hz=tokenizer_config.output_sample_rate,
        frame_samples=tokenizer_config.decode_upsample_rate,
    )


def _talker(talker: TalkerConfig) -> tuple[TextDecoder, CodePredictor]:
    predictor = talker.code_predictor_config
    width, num_codebooks = talker.hidden_size, talker.num_code_groups
    text = Qwen3Model(Qwen3Config(**talker.keywords(DEFAULT_THETA, tied=False)))
    fields = predictor.keywords(DEFAULT_THETA, tied=False) | {"vocab_size": 1, "pad_token_id": None}
    small = Qwen3Model(Qwen3Config(**fields))
    size, inner_width = predictor.vocab_size, predictor.hidden_size
    tables = nn.ModuleList(nn.Embedding(size, width) for _ in range(num_codebooks - 1))
    heads = nn.ModuleList(nn.Linear(inner_width, size, bias=False) for _ in range(num_codebooks - 1))
    decoder = TextDecoder(text, nn.Linear(width, talker.vocab_size, bias=False))
    return decoder, CodePredictor(small, tables, heads, width)


def _sample_encoder(tokenizer_config: SpeechTokenizerConfig) -> Any:
    if tokenizer_config.encoder_config is None:
        return None
    mimi = MimiConfig(**own_config(tokenizer_config.encoder_config))
    mimi.decoder_config = None
    model: Any = MimiModel(mimi)
    if model.decoder is not None:
        # `transformers` before 5.23 always creates a decoder.
        model.decoder = model.decoder_transformer = model.upsample = None
    return model


def _special_ids(config: Qwen3TtsConfig) -> TtsSpecialIds:
    talker = config.talker_config
    return TtsSpecialIds(
        end=talker.codec_eos_token_id,
        bos=talker.codec_bos_id,
        pad=talker.codec_pad_id,
        think=talker.codec_think_id,
        no_think=talker.codec_nothink_id,
        think_bos=talker.codec_think_bos_id,
        think_eos=talker.codec_think_eos_id,
        text_bos=config.tts_bos_token_id,
        text_eos=config.tts_eos_token_id,
        text_pad=config.tts_pad_token_id,
    )


def _sampling(folder: Path) -> CodecSampling:
    """Return the sampling of generation_config.json. Missing values are taken from DEFAULT_CODEC_SAMPLING."""
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
