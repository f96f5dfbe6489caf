"""Reads a Qwen3-ASR checkpoint: as its makers released it, or as `transformers` writes it (`-hf`)."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ASRConfig, Qwen3ASRForConditionalGeneration

from antiphon.adapters.qwen3_asr.audio_encoder import WindowedAudioEncoder
from antiphon.modeling.tensors import Tensors
from antiphon.modeling.text_decoder import TextDecoder
from antiphon.modeling.vocabulary import Vocabulary

# Patterns of the released parameter names -> the names of `transformers`, in the order in which they are tried.
KEY_MAPPING = {
    r"^thinker\.audio_tower\.proj1\.": "model.multi_modal_projector.linear_1.",
    r"^thinker\.audio_tower\.proj2\.": "model.multi_modal_projector.linear_2.",
    r"^thinker\.audio_tower\.": "model.audio_tower.",
    r"^thinker\.model\.": "model.language_model.",
    r"^thinker\.lm_head\.": "lm_head.",
}
END = "<|im_end|>"
# Fields of a released configuration that that of `transformers` has too.
AUDIO_FIELDS = (
    "num_mel_bins", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "d_model", "activation_function",
    "scale_embedding", "n_window", "output_dim", "n_window_infer", "downsample_hidden_size",
)  # fmt: skip
TEXT_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_bias",
)  # fmt: skip


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
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "qwen3_asr":
        raise ValueError(f"{config.get('model_type')} is no qwen3_asr")
    kind: Any = Qwen3ASRForConditionalGeneration
    if "thinker_config" in config:
        with ExitStack() as files:
            has_head = "thinker.lm_head.weight" in Tensors(folder, files, torch.device("cpu"), dtype)
        model = kind.from_pretrained(
            folder,
            config=released_config(config["thinker_config"], has_head=has_head),
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


def released_config(thinker: dict[str, Any], *, has_head: bool = True) -> Any:
    """Return the Qwen3ASRConfig that a released checkpoint's `thinker_config` describes.

    `has_head`: the checkpoint has an output head; without one, the head is the table of embeddings. Raises KeyError for
    a configuration without audio or text.
    """
    audio, text = thinker["audio_config"], thinker["text_config"]
    # The three coordinates of its rotary positions are always equal: one is enough.
    rope = {"rope_type": "default", "rope_theta": text.get("rope_theta", 5e6)}
    return Qwen3ASRConfig(
        audio_config={k: audio[k] for k in AUDIO_FIELDS if k in audio},
        text_config={k: text[k] for k in TEXT_FIELDS if k in text}
        | {"rope_parameters": rope, "tie_word_embeddings": not has_head},
        audio_token_id=thinker.get("audio_token_id", 151676),
        tie_word_embeddings=not has_head,
    )
