"""Qwen3 language models."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import init_empty_weights
from bench.models.weights import filled
from transformers import Qwen3Config, Qwen3ForCausalLM

TINY = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
# Qwen/Qwen3-8B, config.json, but for the longer context, which costs nothing where it is not used.
QWEN3_8B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
}
SIZES = {"tiny": TINY, "8B": QWEN3_8B}


def language_model(size: str, device: str, dtype: torch.dtype) -> Any:
    """Return a Qwen3ForCausalLM of a size of SIZES."""
    torch.manual_seed(0)
    with init_empty_weights(include_buffers=False):
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES[size]))
    filled(model, torch.device(device), dtype)
    return model
