"""Reads a Qwen3-ASR checkpoint: as its makers released it, or as `transformers` writes it (`-hf`)."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import torch
from transformers import Qwen3ASRConfig, Qwen3ASRForConditionalGeneration

from antiphon.adapters.qwen3_asr.audio_encoder import WindowedAudioEncoder
from antiphon.modeling.tensors import CheckpointType, Tensors, read_config
from antiphon.modeling.text_decoder import QwenTextConfig, TextDecoder
from antiphon.modeling.tokens import Vocabulary

# Patterns of the released parameter names -> the names of `transformers`, in the order in which they are tried.
KEY_MAPPING = {
    r"^thinker\.audio_tower\.proj1\.": "model.multi_modal_projector.linear_1.",
    r"^thinker\.audio_tower\.proj2\.": "model.multi_modal_projector.linear_2.",
    r"^thinker\.audio_tower\.": "model.audio_tower.",
    r"^thinker\.model\.": "model.language_model.",
    r"^thinker\.lm_head\.": "lm_head.",
}
END = "<|im_end|>"


class AudioEncoderFields(TypedDict, total=False):
    """The fields of a released `audio_config` that the configuration of `transformers` has too."""

    num_mel_bins: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    d_model: int
    activation_function: str
    scale_embedding: bool
    n_window: int
    output_dim: int
    n_window_infer: int
    downsample_hidden_size: int


class ThinkerConfig(msgspec.Struct, frozen=True):
    """The `thinker_config` of a released config.json: the whole model, but for its tokenizer."""

    audio_config: AudioEncoderFields
    text_config: QwenTextConfig
    audio_token_id: int = 151676


class ReleasedConfig(msgspec.Struct, frozen=True):
    """A config.json as the makers released it. One that `transformers` wrote has no `thinker_config`."""

    thinker_config: ThinkerConfig | None = None


@dataclass(frozen=True, slots=True)
class Qwen3AsrParts:
    """The model's parts on one device: its tokens, its audio encoder, and the text decoder that the engine steps."""

    vocabulary: Vocabulary
    audio_encoder: WindowedAudioEncoder
    decoder: TextDecoder


def read(folder: Path, device: str, dtype: torch.dtype) -> Qwen3AsrParts:
    """Load a checkpoint's folder onto a device. Waits for seconds.

    Raises ValueError for another model's folder, and OSError, KeyError or RuntimeError for one that lacks something.
    """
    model_type = read_config(folder / "config.json", CheckpointType).model_type
    if model_type != "qwen3_asr":
        raise ValueError(f"{model_type} is no qwen3_asr")
    thinker = read_config(folder / "config.json", ReleasedConfig).thinker_config
    kind: Any = Qwen3ASRForConditionalGeneration
    if thinker is not None:
        with ExitStack() as files:
            has_head = "thinker.lm_head.weight" in Tensors(folder, files, torch.device("cpu"), dtype)
        model = kind.from_pretrained(
            folder,
            config=released_config(thinker, has_head=has_head),
            key_mapping=KEY_MAPPING,
            dtype=dtype,
            local_files_only=True,
        )
    else:
        model = kind.from_pretrained(folder, dtype=dtype, local_files_only=True)
    model = model.to(device).eval()
    return Qwen3AsrParts(
        Vocabulary(folder, END),
        WindowedAudioEncoder(model.model),
        TextDecoder(model.model.language_model, model.lm_head),
    )


def released_config(thinker: ThinkerConfig, *, has_head: bool = True) -> Any:
    """Return the Qwen3ASRConfig that a released checkpoint's `thinker_config` describes.

    `has_head`: the checkpoint has an output head; without one, the head is the table of embeddings.
    """
    return Qwen3ASRConfig(
        audio_config=dict(thinker.audio_config),
        text_config=thinker.text_config.keywords(5e6, tied=not has_head),
        audio_token_id=thinker.audio_token_id,
        tie_word_embeddings=not has_head,
    )
