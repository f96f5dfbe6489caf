"""Reads the released checkpoint: each part of the model is built empty, then filled from the tensors under its name.

What a part computes is in the module of that part; this one knows config.json and the names of the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from antiphon.modeling.tensors import Tensors, fill, own_config

# The vision encoder's configuration where config.json has none.
DEFAULT_VISION = {
    "hidden_size": 1152,
    "image_size": 980,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
}
# The code decoder's head is saved as a weight norm: a gain `original0` and a direction `original1` for each code.
CODE_HEAD = "tts.head_code.0.parametrizations.weight."


@dataclass(frozen=True, slots=True)
class MiniCpmOParts:
    """The model's parts on one device, all in one type.

    `forbidden`: tokens that are never spoken. `decoder`: the language model. `text_conditions` and `code_decoder`: the
    two halves of its voice, up to the codes. `max_slices`: most slices that an image is cut into.
    """

    tokenizer: Tokenizer
    ids: SpecialTokens
    forbidden: tuple[int, ...]
    decoder: Qwen3ForCausalLM
    audio_encoder: AudioEncoder
    vision_encoder: VisionEncoder
    text_conditions: TextConditions
    code_decoder: LlamaForCausalLM
    max_slices: int

    @property
    def code_end(self) -> int:
        """The code that ends a turn's audio: the last of the code decoder's vocabulary, which has no sound itself."""
        return int(self.code_decoder.config.vocab_size) - 1


def read(folder: Path, device: torch.device, dtype: torch.dtype) -> MiniCpmOParts:
    """Load a checkpoint's folder onto a device, in one type. Waits for seconds to minutes.

    Raises ModelError for a folder that is no MiniCPM-o 4.5 checkpoint, or lacks a part.
    """
    try:
        return _read(folder, device, dtype)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"{folder} is no MiniCPM-o 4.5 checkpoint: {error}") from error


def _read(folder: Path, device: torch.device, dtype: torch.dtype) -> MiniCpmOParts:
    config = json.loads((folder / "config.json").read_text())
    tokenizer = _tokenizer(folder / "tokenizer.json")
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    parts = build(config, tokenizer, tokenizer_config.get("bad_token_ids", ()))
    with ExitStack() as files:
        tensors = Tensors(folder, files, device, dtype)
        fill(parts.decoder, tensors, {"": "llm."})
        fill(parts.audio_encoder, tensors, {"": ""})
        fill(parts.vision_encoder, tensors, {"": ""})
        fill(parts.text_conditions, tensors, {"": "tts."})
        gain, direction = tensors[CODE_HEAD + "original0"], tensors[CODE_HEAD + "original1"]
        head = {"lm_head.weight": gain * torch.nn.functional.normalize(direction.float(), dim=1).to(dtype)}
        fill(parts.code_decoder, tensors, {"model.embed_tokens.": "tts.emb_code.0.", "": "tts."}, head)
    return parts


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises nothing more specific than Exception.
        raise ValueError(f"{path.name}: {error}") from None


def build(config: dict[str, Any], tokenizer: Tokenizer, forbidden: Sequence[int] = ()) -> MiniCpmOParts:
    """Return the parts that a config.json describes, with parameters on the meta device, which hold nothing yet.

    `forbidden`: tokens that are never spoken, besides those that are so by the released rules. Raises ValueError or
    KeyError for another model's configuration.
    """
    tts, vision = _supported_tts(config), config.get("vision_config") or DEFAULT_VISION
    slicing = config.get("slice_config") or {}
    ids = SpecialTokens.of(tokenizer.token_to_id)
    width = int(config["hidden_size"])
    audio = WhisperConfig(**own_config(config["audio_config"]))
    with init_empty_weights(include_buffers=False):
        decoder = Qwen3ForCausalLM(Qwen3Config(**own_config(config, "audio_config", "vision_config", "tts_config")))
        audio_encoder = AudioEncoder(
            audio, width, config.get("audio_pool_step", 5), config.get("audio_chunk_length", 1.0)
        )
        vision_encoder = VisionEncoder(
            Idefics2VisionConfig(**own_config(vision)),
            width,
            int(config.get("query_num", 64)),
            int(slicing.get("scale_resolution", 448)),
            drop_last=bool(config.get("drop_vision_last_layer", True)),
        )
        text_conditions = TextConditions(
            tts["num_text_tokens"], tts["llm_dim"], tts["hidden_size"], tts["audio_bos_token_id"]
        )
        code_decoder = LlamaForCausalLM(_code_decoder_config(tts))
    never = (ids.tts_pad, *map(int, forbidden), ids.chunk_eos)
    max_slices = int(slicing.get("max_slice_nums", 1))
    return MiniCpmOParts(
        tokenizer,
        ids,
        never,
        decoder,
        audio_encoder,
        vision_encoder,
        text_conditions,
        code_decoder,
        max_slices,
    )


def _supported_tts(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the voice. Raises ValueError where it, or the whole, is of another kind."""
    if config.get("model_type") != "minicpmo":
        raise ValueError(f"its model_type is {config.get('model_type')!r}")
    tts: dict[str, Any] = config["tts_config"]
    if tts.get("projector_type", "mlp") != "mlp" or tts.get("num_vq", 1) != 1 or tts.get("backbone_model") != "llama":
        raise ValueError("its speech decoder is of another kind")
    return tts


def _code_decoder_config(tts: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=tts["num_audio_tokens"],
        hidden_size=tts["hidden_size"],
        intermediate_size=tts["intermediate_size"],
        num_attention_heads=tts["num_attention_heads"],
        num_key_value_heads=tts["num_key_value_heads"],
        num_hidden_layers=tts["num_hidden_layers"],
        max_position_embeddings=tts["max_position_embeddings"],
        tie_word_embeddings=False,
    )
