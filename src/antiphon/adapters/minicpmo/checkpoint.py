"""The released checkpoint's files: its parts, each built empty and filled from the tensors of its name."""

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

# Of the vision encoder where config.json says nothing.
VISION = {
    "hidden_size": 1152,
    "image_size": 980,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
}
CODES = "tts.head_code.0.parametrizations.weight."


@dataclass(frozen=True, slots=True)
class MiniCpmOParts:
    """The model's parts on one device. `forbidden`: tokens that are never spoken."""

    tokenizer: Tokenizer
    ids: SpecialTokens
    forbidden: tuple[int, ...]
    decoder: Qwen3ForCausalLM
    hearing: AudioEncoder
    seeing: VisionEncoder
    conditions: TextConditions
    codes: LlamaForCausalLM
    max_slices: int

    @property
    def code_end(self) -> int:
        """The code that ends a sound."""
        return int(self.codes.config.vocab_size) - 1


def read(folder: Path, device: torch.device, dtype: torch.dtype) -> MiniCpmOParts:
    """Raises ModelError for a folder that is no such checkpoint, or lacks a part."""
    try:
        return _read(folder, device, dtype)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"{folder} is no MiniCPM-o 4.5 checkpoint: {error}") from error


def _read(folder: Path, device: torch.device, dtype: torch.dtype) -> MiniCpmOParts:
    config = json.loads((folder / "config.json").read_text())
    tokenizer = _tokenizer(folder / "tokenizer.json")
    about = json.loads((folder / "tokenizer_config.json").read_text())
    parts = build(config, tokenizer, about.get("bad_token_ids", ()))
    with ExitStack() as files:
        tensors = Tensors(folder, files, device, dtype)
        fill(parts.decoder, tensors, {"": "llm."})
        fill(parts.hearing, tensors, {"": ""})
        fill(parts.seeing, tensors, {"": ""})
        fill(parts.conditions, tensors, {"": "tts."})
        gain, direction = tensors[CODES + "original0"], tensors[CODES + "original1"]
        made = {"lm_head.weight": gain * torch.nn.functional.normalize(direction.float(), dim=1).to(dtype)}
        fill(parts.codes, tensors, {"model.embed_tokens.": "tts.emb_code.0.", "": "tts."}, made)
    return parts


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises nothing more of a kind.
        raise ValueError(f"{path.name}: {error}") from None


def build(config: dict[str, Any], tokenizer: Tokenizer, forbidden: Sequence[int] = ()) -> MiniCpmOParts:
    """The parts that a config.json describes, on no device yet. Raises ValueError, KeyError for another model's."""
    if config.get("model_type") != "minicpmo":
        raise ValueError(f"its model_type is {config.get('model_type')!r}")
    tts, vision, slicing = config["tts_config"], config.get("vision_config") or VISION, config.get("slice_config") or {}
    if tts.get("projector_type", "mlp") != "mlp" or tts.get("num_vq", 1) != 1 or tts.get("backbone_model") != "llama":
        raise ValueError("its speech decoder is of another kind")
    ids = SpecialTokens.of(tokenizer.token_to_id)
    width = int(config["hidden_size"])
    audio = WhisperConfig(**own_config(config["audio_config"]))
    with init_empty_weights(include_buffers=False):
        decoder = Qwen3ForCausalLM(Qwen3Config(**own_config(config, "audio_config", "vision_config", "tts_config")))
        hearing = AudioEncoder(audio, width, config.get("audio_pool_step", 5), config.get("audio_chunk_length", 1.0))
        seeing = VisionEncoder(
            Idefics2VisionConfig(**own_config(vision)),
            width,
            int(config.get("query_num", 64)),
            int(slicing.get("scale_resolution", 448)),
            drop_last=bool(config.get("drop_vision_last_layer", True)),
        )
        conditions = TextConditions(
            tts["num_text_tokens"], tts["llm_dim"], tts["hidden_size"], tts["audio_bos_token_id"]
        )
        codes = LlamaForCausalLM(_codes_config(tts))
    never = (ids.tts_pad, *map(int, forbidden), ids.chunk_eos)
    max_slices = int(slicing.get("max_slice_nums", 1))
    return MiniCpmOParts(tokenizer, ids, never, decoder, hearing, seeing, conditions, codes, max_slices)


def _codes_config(tts: dict[str, Any]) -> LlamaConfig:
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
