"""MiniCPM-o 4.5, without its token2wav: codes are made of what it says, and no audio of them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
from bench.models.weights import filled, made_tokenizer
from tests.adapters import tiny_minicpmo as tiny
from transformers import Qwen3Config

from antiphon.adapters.minicpmo.checkpoint import DEFAULT_VISION, OTHER_PARTS, MiniCpmOConfig, build
from antiphon.adapters.minicpmo.model import MiniCpmO
from antiphon.adapters.spec import EngineModelOptions
from antiphon.engine.local.weights import weights_for
from antiphon.modeling.tensors import own_config

# openbmb/MiniCPM-o-4_5, config.json.
RELEASED: dict[str, Any] = tiny.CONFIG | {
    "vocab_size": 151748,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "query_num": 64,
    "drop_vision_last_layer": False,
    "vision_config": DEFAULT_VISION,
    "audio_config": tiny.CONFIG["audio_config"]
    | {
        "d_model": 1024,
        "encoder_layers": 24,
        "encoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "max_source_positions": 1500,
    },
    "tts_config": tiny.CONFIG["tts_config"]
    | {
        "llm_dim": 4096,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "num_hidden_layers": 20,
        "max_position_embeddings": 4096,
        "num_audio_tokens": 6562,
        "num_text_tokens": 152064,
        "audio_bos_token_id": 151687,
    },
}
SIZES: dict[str, dict[str, Any]] = {"tiny": tiny.CONFIG, "4.5": RELEASED}
PROMPT, sound = tiny.PROMPT, tiny.sound


class Silent:
    """In the place of token2wav: its codes are made, its sound is not."""

    lookahead = 3

    def open(self, reference: Any) -> None:
        return None

    def decode(self, state: None, codes: Any, *, last: bool) -> tuple[Any, None]:
        return np.zeros(960 * len(codes), np.float32), None


def native_model(size: str, options: EngineModelOptions) -> MiniCpmO:
    """Return the model of a size of SIZES."""
    torch.manual_seed(0)
    where, dtype = torch.device(options.device), weights_for(options.device, options.weights)[1]
    config = SIZES[size]
    words = made_tokenizer(tiny.SPECIAL, trained=False)
    parts = build(msgspec.convert(config, MiniCpmOConfig), Qwen3Config(**own_config(config, *OTHER_PARTS)), words)
    for module in (parts.decoder, parts.audio_encoder, parts.vision_encoder, parts.text_conditions, parts.code_decoder):
        filled(module, where, dtype)
    return MiniCpmO(parts, f"minicpm-o-{size}", options, vocoder=Silent())
