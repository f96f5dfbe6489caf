"""Tiny random decoders of every family that the engine supports, and their logits without the engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY, WIDTH, CONTEXT = 97, 32, 512
# The common configuration of the families.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(
        **SHAPE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "gemma": GemmaConfig(**SHAPE, head_dim=8),
    "gemma2": Gemma2Config(
        **SHAPE, head_dim=8, sliding_window=8, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
    ),
    "gemma3": Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=8, layer_types=_LAYERS),
}
FAMILIES = tuple(CONFIGS)


@cache
def _made(family: str) -> Any:
    torch.manual_seed(7)
    # Eager, because `sdpa` ignores the softcap of Gemma 2.
    return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family]), attn_implementation="eager").eval()


def model(family: str) -> Any:
    """A fresh copy of a family's decoder in float32, with the same weights each time."""
    return copy.deepcopy(_made(family))


@dataclass(frozen=True)
class Embedded:
    """A row given as an embedding: float32 [width]."""

    numbers: tuple[float, ...]


Shadow = list[int | Embedded]


@torch.inference_mode()
def logits(reference: Any, rows: Sequence[int | Embedded]) -> torch.Tensor:
    """The logits [rows, vocabulary] of a full forward of all rows, by the untouched model."""
    table = reference.get_input_embeddings()
    ids = torch.tensor([0 if isinstance(r, Embedded) else r for r in rows])
    inputs = table(ids)
    for i, row in enumerate(rows):
        if isinstance(row, Embedded):
            inputs[i] = torch.tensor(row.numbers)
    return reference(inputs_embeds=inputs[None], use_cache=False).logits[0]


@torch.inference_mode()
def head(reference: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The logits of a last hidden state."""
    out = reference.get_output_embeddings()(hidden)
    cap = getattr(reference.config, "final_logit_softcapping", None)
    return torch.tanh(out / cap) * cap if cap else out
