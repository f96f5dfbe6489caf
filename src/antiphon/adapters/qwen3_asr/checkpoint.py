"""A Qwen3-ASR checkpoint's folder: as its makers released it, or as `transformers` writes it (`-hf`)."""

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

# Released names to those of `transformers`, in this order.
NAMES = {
    r"^thinker\.audio_tower\.proj1\.": "model.multi_modal_projector.linear_1.",
    r"^thinker\.audio_tower\.proj2\.": "model.multi_modal_projector.linear_2.",
    r"^thinker\.audio_tower\.": "model.audio_tower.",
    r"^thinker\.model\.": "model.language_model.",
    r"^thinker\.lm_head\.": "lm_head.",
}
END = "<|im_end|>"
AUDIO = (
    "num_mel_bins", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "d_model", "activation_function", "scale_embedding", "n_window",
    "output_dim", "n_window_infer", "downsample_hidden_size",
)  # fmt: skip
TEXT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "attention_bias",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Qwen3AsrParts:
    """The model on one device."""

    vocabulary: Vocabulary
    ears: WindowedAudioEncoder
    decoder: TextDecoder


def read(folder: Path, device: str, dtype: torch.dtype) -> Qwen3AsrParts:
    """Load it. Raises OSError, ValueError, KeyError, RuntimeError."""
    given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if given.get("model_type") != "qwen3_asr":
        raise ValueError(f"{given.get('model_type')} is no qwen3_asr")
    kind: Any = Qwen3ASRForConditionalGeneration
    if "thinker_config" in given:
        with ExitStack() as files:
            headed = "thinker.lm_head.weight" in Tensors(folder, files, torch.device("cpu"), dtype)
        model = kind.from_pretrained(
            folder,
            config=_config(given["thinker_config"], headed=headed),
            key_mapping=NAMES,
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


def _config(thinker: dict[str, Any], *, headed: bool = True) -> Any:
    audio, text = thinker["audio_config"], thinker["text_config"]
    # Its three rows of rotary positions are equal: one does.
    rope = {"rope_type": "default", "rope_theta": text.get("rope_theta", 5e6)}
    return Qwen3ASRConfig(
        audio_config={k: audio[k] for k in AUDIO if k in audio},
        text_config={k: text[k] for k in TEXT if k in text}
        | {"rope_parameters": rope, "tie_word_embeddings": not headed},
        audio_token_id=thinker.get("audio_token_id", 151676),
        tie_word_embeddings=not headed,
    )
