"""Vision-language models with tiny random weights, in the layout of `transformers`: one of each family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

FAMILIES = ("smolvlm", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
SMOL = ["<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>", "<pad>"]
QWEN = ["<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<pad>"]
# The first id of the control tokens. The second one ends a turn, and the third stands for a picture's rows.
FIRST = 256
SIDE, ROWS = 64, 4
PATCH = 8
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def write(
    where: Path,
    family: str = "smolvlm",
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Write the checkpoint into an existing folder, and return the folder.

    `text` and `vision` override the sizes of the two configurations. `tokenizer`: replaces the tokenizer of single
    bytes; the control tokens are added to it.
    """
    smol = family == "smolvlm"
    made = tokenizer
    if made is None:
        made = Tokenizer(BPE(vocab={c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
    special = SMOL if smol else QWEN
    made.add_special_tokens(special)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=special[1], pad_token="<pad>").save_pretrained(where)
    shape = {
        "vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.25,
        "eos_token_id": FIRST + 1, "pad_token_id": FIRST + len(special) - 1,
    } | (text or {})  # fmt: skip
    torch.manual_seed(3)
    if smol:
        encoder = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": 8,
        }
        smolvlm = SmolVLMConfig(
            text_config={"model_type": "llama"} | shape,
            vision_config=encoder | (vision or {}),
            scale_factor=4,
            image_token_id=FIRST + 2,
            pad_token_id=FIRST + 5,
        )  # fmt: skip
        SmolVLMForConditionalGeneration(smolvlm).save_pretrained(where)
        return where
    encoder = {
        "depth": 3,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "patch_size": PATCH,
        "out_hidden_size": shape["hidden_size"],
        "initializer_range": 0.25,
    }
    sections = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    ids = {
        "image_token_id": FIRST + 2,
        "video_token_id": FIRST + 3,
        "vision_start_token_id": FIRST + 4,
        "vision_end_token_id": FIRST + 5,
    }
    if family == "qwen2_5_vl":
        encoder |= {"window_size": 32, "fullatt_block_indexes": [1]} | (vision or {})
        older = Qwen2_5_VLConfig(text_config=shape | {"rope_parameters": sections}, vision_config=encoder, **ids)
        _write(Qwen2_5_VLForConditionalGeneration(older), where)
    else:
        encoder |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]} | (vision or {})
        shape |= {"head_dim": 16, "rope_parameters": sections | {"mrope_interleaved": True}}
        if family == "qwen3_vl":
            config = Qwen3VLConfig(text_config=shape, vision_config=encoder, **ids)
            _write(Qwen3VLForConditionalGeneration(config), where)
        else:
            mixed = Qwen3VLMoeConfig(text_config=shape | MOE, vision_config=encoder, **ids)
            _write(Qwen3VLMoeForConditionalGeneration(mixed), where)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 256, "longest_edge": 4096},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (where / "preprocessor_config.json").write_text(json.dumps(processor))
    return where


def _write(model: Any, where: Path) -> None:
    """Save a model after changing it so that it never writes the tokens of a picture, as random weights would."""
    with torch.no_grad():
        model.lm_head.weight[FIRST + 2 : FIRST + 4] = 0
    model.save_pretrained(where)
