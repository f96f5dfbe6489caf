"""Reads the released checkpoint.

Each part of the model is built without weights, then filled from the tensors whose names have its prefix. This module
handles config.json and the names of the tensors. What a part computes is in that part's module.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate import init_empty_weights
from tokenizers import Tokenizer
from transformers import (
    Idefics2VisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    WhisperConfig,
)

from antiphon.adapters.minicpmo.audio_encoder import AudioEncoder
from antiphon.adapters.minicpmo.sampling import SpecialTokens
from antiphon.adapters.minicpmo.speech_decoder import TextConditions
from antiphon.adapters.minicpmo.vision_encoder import VisionEncoder
from antiphon.errors import ModelError
from antiphon.modeling.tensors import CheckpointType, Tensors, fill, own_config, read_config

# The vision encoder's configuration if config.json does not contain one.
DEFAULT_VISION = {
    "hidden_size": 1152,
    "image_size": 980,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
}
# Fields of config.json that describe other parts. The remaining fields describe the language model.
OTHER_PARTS = ("audio_config", "vision_config", "tts_config")
# The code decoder's head is saved with weight norm: a gain `original0` and a direction `original1` for each code.
CODE_HEAD = "tts.head_code.0.parametrizations.weight."


class SpeechDecoderType(msgspec.Struct, frozen=True):
    """The fields of `tts_config` that distinguish the speech decoder of 4.5 from those of other releases."""

    projector_type: str = "mlp"
    num_vq: int = 1
    backbone_model: str | None = None


class MiniCpmOType(CheckpointType, frozen=True, kw_only=True):
    """The fields of config.json that distinguish MiniCPM-o 4.5 from other models."""

    tts_config: SpeechDecoderType = SpeechDecoderType()


class SpeechDecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The `tts_config` of config.json: the sizes of the code decoder and of its input rows."""

    # Vocabulary size of the text embedding.
    num_text_tokens: int
    # Width of the language model's hidden states.
    llm_dim: int
    # The text token that asks for codes.
    audio_bos_token_id: int
    # Vocabulary size of the codes.
    num_audio_tokens: int
    # Width of the code decoder.
    hidden_size: int
    # Width of the code decoder's MLPs.
    intermediate_size: int
    # Attention heads of each layer.
    num_attention_heads: int
    # Key and value heads of each layer.
    num_key_value_heads: int
    # Decoder layers.
    num_hidden_layers: int
    # Limit of rows in the code decoder's context.
    max_position_embeddings: int


class SliceConfig(msgspec.Struct, frozen=True):
    """How an image is sliced: into up to `max_slice_nums` slices of about `scale_resolution` ** 2 pixels each."""

    scale_resolution: int = 448
    max_slice_nums: int = 1


class MiniCpmOConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The config.json of the checkpoint, without the language model's fields, which are on the same level."""

    # Width of the language model.
    hidden_size: int
    # The code decoder.
    tts_config: SpeechDecoderConfig
    # Keyword arguments of the audio encoder's WhisperConfig.
    audio_config: dict[str, Any]
    # Keyword arguments of the vision encoder's Idefics2VisionConfig. None: DEFAULT_VISION.
    vision_config: dict[str, Any] | None = None
    # How images are sliced. None: the defaults of SliceConfig.
    slice_config: SliceConfig | None = None
    # Number of audio encoder positions that are averaged into one embedding.
    audio_pool_step: int = 5
    # Length in seconds of an attention chunk when the audio encoder encodes a clip.
    audio_chunk_length: float = 1.0
    # Number of embeddings for each image or slice.
    query_num: int = 64
    # True if the vision encoder's last layer is skipped.
    drop_vision_last_layer: bool = True


class TokenizerConfig(msgspec.Struct, frozen=True):
    """The tokenizer_config.json of the checkpoint. `bad_token_ids`: tokens that are never spoken."""

    bad_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MiniCpmOParts:
    """The model's parts in one dtype, on one device. The voice may be on another device."""

    # The language model's tokenizer.
    tokenizer: Tokenizer
    # The ids of its special tokens.
    ids: SpecialTokens
    # Tokens that are never spoken.
    forbidden: tuple[int, ...]
    # The language model.
    decoder: Qwen3ForCausalLM
    # Turns audio into embeddings.
    audio_encoder: AudioEncoder
    # Turns images into embeddings.
    vision_encoder: VisionEncoder
    # The first half of the voice: turns words and hidden states into the code decoder's input rows.
    text_conditions: TextConditions
    # The second half of the voice: turns these input rows into codes.
    code_decoder: LlamaForCausalLM
    # Limit of slices for each image.
    max_slices: int

    @property
    def code_end(self) -> int:
        """The code that ends a turn's audio: the last one of the code decoder's vocabulary. It is silent."""
        return int(self.code_decoder.config.vocab_size) - 1


def read(
    folder: Path, device: torch.device, dtype: torch.dtype, voice_device: torch.device | None = None
) -> MiniCpmOParts:
    """Load a checkpoint's folder onto `device` in one dtype. The voice is loaded onto `voice_device`, if given.

    Takes seconds to minutes. Raises ModelError if the folder is not a MiniCPM-o 4.5 checkpoint or lacks a part.
    """
    try:
        return _read(folder, device, dtype, voice_device or device)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"{folder} is not a MiniCPM-o 4.5 checkpoint: {error}") from error


def _read(folder: Path, device: torch.device, dtype: torch.dtype, voice_device: torch.device) -> MiniCpmOParts:
    path = folder / "config.json"
    _check_type(read_config(path, MiniCpmOType))
    config = read_config(path, MiniCpmOConfig)
    language = Qwen3Config(**own_config(json.loads(path.read_bytes()), *OTHER_PARTS))
    forbidden = read_config(folder / "tokenizer_config.json", TokenizerConfig).bad_token_ids
    parts = build(config, language, _tokenizer(folder / "tokenizer.json"), forbidden)
    with ExitStack() as files:
        tensors = Tensors(folder, files, device, dtype)
        fill(parts.decoder, tensors, {"": "llm."})
        fill(parts.audio_encoder, tensors, {"": ""})
        fill(parts.vision_encoder, tensors, {"": ""})
        tensors = Tensors(folder, files, voice_device, dtype)
        fill(parts.text_conditions, tensors, {"": "tts."})
        gain, direction = tensors[CODE_HEAD + "original0"], tensors[CODE_HEAD + "original1"]
        head = {"lm_head.weight": gain * torch.nn.functional.normalize(direction.float(), dim=1).to(dtype)}
        fill(parts.code_decoder, tensors, {"model.embed_tokens.": "tts.emb_code.0.", "": "tts."}, head)
    return parts


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises plain Exception.
        raise ValueError(f"{path.name}: {error}") from None


def build(
    config: MiniCpmOConfig, language: Qwen3Config, tokenizer: Tokenizer, forbidden: Sequence[int] = ()
) -> MiniCpmOParts:
    """Return the parts that a config.json describes, with empty parameters on the meta device.

    `language`: the configuration of the language model. `forbidden`: tokens that are never spoken, in addition to those
    of the released rules. Raises ValueError if the tokenizer lacks a special token.
    """
    tts, slicing, width = config.tts_config, config.slice_config or SliceConfig(), config.hidden_size
    ids = SpecialTokens.of(tokenizer.token_to_id)
    audio = WhisperConfig(**own_config(config.audio_config))
    with init_empty_weights(include_buffers=False):
        decoder = Qwen3ForCausalLM(language)
        audio_encoder = AudioEncoder(audio, width, config.audio_pool_step, config.audio_chunk_length)
        vision_encoder = VisionEncoder(
            Idefics2VisionConfig(**own_config(config.vision_config or DEFAULT_VISION)),
            width,
            config.query_num,
            slicing.scale_resolution,
            drop_last=config.drop_vision_last_layer,
        )
        text_conditions = TextConditions(tts.num_text_tokens, tts.llm_dim, tts.hidden_size, tts.audio_bos_token_id)
        code_decoder = LlamaForCausalLM(_code_decoder_config(tts))
    never = (ids.tts_pad, *map(int, forbidden), ids.chunk_eos)
    return MiniCpmOParts(
        tokenizer,
        ids,
        never,
        decoder,
        audio_encoder,
        vision_encoder,
        text_conditions,
        code_decoder,
        slicing.max_slice_nums,
    )


def _check_type(found: MiniCpmOType) -> None:
    """Raise ValueError if the checkpoint is a different model, or has a different kind of speech decoder."""
    if found.model_type != "minicpmo":
        raise ValueError(f"its model_type is {found.model_type!r}")
    tts = found.tts_config
    if tts.projector_type != "mlp" or tts.num_vq != 1 or tts.backbone_model != "llama":
        raise ValueError("its speech decoder is of another kind")


def _code_decoder_config(tts: SpeechDecoderConfig) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=tts.num_audio_tokens,
        hidden_size=tts.hidden_size,
        intermediate_size=tts.intermediate_size,
        num_attention_heads=tts.num_attention_heads,
        num_key_value_heads=tts.num_key_value_heads,
        num_hidden_layers=tts.num_hidden_layers,
        max_position_embeddings=tts.max_position_embeddings,
        tie_word_embeddings=False,
    )
