"""Reads a Qwen3-ASR checkpoint in its released layout, or in the layout of `transformers` (`-hf`)."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import torch
from transformers import Qwen3ASRConfig, Qwen3ASRForConditionalGeneration

from antiphon.adapters.qwen3_asr.audio_encoder import WindowedAudioEncoder
from antiphon.engine.local.weights import load_whole
from antiphon.modeling.tensors import CheckpointType, Tensors, read_config
from antiphon.modeling.text_decoder import QwenTextConfig, TextDecoder
from antiphon.modeling.tokens import Vocabulary

# Patterns of the released parameter names -> the names in `transformers`, in the order in which they are tried.
KEY_MAPPING = {
    r"^thinker\.audio_tower\.proj1\.": "model.multi_modal_projector.linear_1.",
    r"^thinker\.audio_tower\.proj2\.": "model.multi_modal_projector.linear_2.",
    r"^thinker\.audio_tower\.": "model.audio_tower.",
    r"^thinker\.model\.": "model.language_model.",
    r"^thinker\.lm_head\.": "lm_head.",
}
END = "<|im_end|>"


class AudioEncoderFields(TypedDict, total=False):
    """The fields of a released `audio_config` that the configuration of `transformers` also has."""

    # Bins of the mel spectrogram.
    num_mel_bins: int
    # Transformer layers.
    encoder_layers: int
    # Attention heads of each layer.
    encoder_attention_heads: int
    # Width of the MLPs.
    encoder_ffn_dim: int
    # Width of the encoder.
    d_model: int
    # Activation of the MLPs, by its name in `transformers`.
    activation_function: str
    # True if embeddings are scaled by the square root of `d_model`.
    scale_embedding: bool
    # Half the number of mel frames in a chunk. The convolutions see one chunk at a time.
    n_window: int
    # Width of the decoder.
    output_dim: int
    # The number of mel frames in a window. Attention sees one window at a time.
    n_window_infer: int
    # Channels of the convolutions.
    downsample_hidden_size: int


class ThinkerConfig(msgspec.Struct, frozen=True):
    """The `thinker_config` of a released config.json: the whole model, without its tokenizer."""

    audio_config: AudioEncoderFields
    text_config: QwenTextConfig
    audio_token_id: int = 151676


class ReleasedConfig(msgspec.Struct, frozen=True):
    """A released config.json. The config.json that `transformers` writes has no `thinker_config`."""

    thinker_config: ThinkerConfig | None = None


@dataclass(frozen=True, slots=True)
class Qwen3AsrParts:
    """The model's parts on one device: its tokens, its audio encoder, and the text decoder that the engine steps."""

    vocabulary: Vocabulary
    audio_encoder: WindowedAudioEncoder
    decoder: TextDecoder


def read(folder: Path, device: str, dtype: torch.dtype) -> Qwen3AsrParts:
    """Load a checkpoint's folder onto a device. Takes several seconds.

    Raises ValueError if the folder has a different model, and OSError, KeyError or RuntimeError if it is incomplete.
    """
    model_type = read_config(folder / "config.json", CheckpointType).model_type
    if model_type != "qwen3_asr":
        raise ValueError(f"{model_type} is not qwen3_asr")
    thinker = read_config(folder / "config.json", ReleasedConfig).thinker_config
    kind: Any = Qwen3ASRForConditionalGeneration
    if thinker is not None:
        with ExitStack() as files:
            has_head = "thinker.lm_head.weight" in Tensors(folder, files, torch.device("cpu"), dtype)
        config = released_config(thinker, has_head=has_head)
        model = load_whole(kind, folder, config=config, key_mapping=KEY_MAPPING, dtype=dtype, device_map=device)
    else:
        model = load_whole(kind, folder, dtype=dtype, device_map=device)
    return Qwen3AsrParts(
        Vocabulary(folder, END),
        WindowedAudioEncoder(model.model),
        TextDecoder(model.model.language_model, model.lm_head),
    )


def released_config(thinker: ThinkerConfig, *, has_head: bool = True) -> Any:
    """Return the Qwen3ASRConfig that a released checkpoint's `thinker_config` describes.

    `has_head`: the checkpoint has an output head. Otherwise the head is tied to the token embedding.
    """
    return Qwen3ASRConfig(
        audio_config=dict(thinker.audio_config),
        text_config=thinker.text_config.keywords(5e6, tied=not has_head),
        audio_token_id=thinker.audio_token_id,
        tie_word_embeddings=not has_head,
    )
