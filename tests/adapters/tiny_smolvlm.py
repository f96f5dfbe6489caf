"""A SmolVLM of tiny random weights, as `transformers` writes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, SmolVLMConfig, SmolVLMForConditionalGeneration

SPECIAL = ["<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>", "<pad>"]
FIRST, SIDE, ROWS = 256, 64, 4


def write(where: Path, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None) -> Path:
    """The checkpoint, in a folder that is there; `text` and `vision` make it larger."""
    made = Tokenizer(BPE(vocab={c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end_of_utterance>", pad_token="<pad>").save_pretrained(
        where
    )
    shape = {
        "model_type": "llama", "vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.25, "eos_token_id": FIRST + 1, "pad_token_id": FIRST + 5,
    }  # fmt: skip
    eyes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": 8,
    }
    config = SmolVLMConfig(
        text_config=shape | (text or {}),
        vision_config=eyes | (vision or {}),
        scale_factor=4,
        image_token_id=FIRST + 2,
        pad_token_id=FIRST + 5,
    )
    torch.manual_seed(3)
    SmolVLMForConditionalGeneration(config).save_pretrained(where)
    return where
