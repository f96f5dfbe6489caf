"""Vision-language models. They load from a folder, so a folder is written: in memory, where the machine has room."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from bench.models.weights import filled, made_tokenizer, write_tokenizer
from tests.adapters import tiny_vlm as tiny
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from antiphon.adapters.spec import EngineModelOptions
from antiphon.adapters.vlm.session import VisionLanguageModel
from antiphon.engine.local.weights import weights_for

FOLDER_IN_MEMORY = Path("/dev/shm")
# The largest checkpoint here.
FOLDER_BYTES = 10 << 30
SMOL, QWEN, TINY_SMOL, TINY_QWEN = "SmolVLM2-2.2B", "Qwen2.5-VL-3B", "SmolVLM tiny", "Qwen2.5-VL tiny"
TINY_TEXT = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
}
# Each size: the keywords of a SmolVLMConfig or a Qwen2_5_VLConfig. HuggingFaceTB/SmolVLM2-2.2B-Instruct and
# Qwen/Qwen2.5-VL-3B-Instruct, config.json.
SIZES: dict[str, dict[str, Any]] = {
    TINY_SMOL: {
        "text_config": TINY_TEXT | {"model_type": "llama"},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 8,
        },
        "scale_factor": 4,
    },
    SMOL: {
        "text_config": {
            "model_type": "llama",
            "vocab_size": 49280,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 16384,
        },
        "vision_config": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 384,
            "patch_size": 14,
        },
        "scale_factor": 3,
    },
    TINY_QWEN: {
        "text_config": TINY_TEXT
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
    },
    QWEN: {
        "text_config": {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "num_heads": 16,
            "intermediate_size": 3420,
            "out_hidden_size": 2048,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
}
# As released (preprocessor_config.json).
PICTURES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 3136, "longest_edge": 12845056},
}


@contextmanager
def vision_model(size: str, options: EngineModelOptions) -> Iterator[VisionLanguageModel]:
    """Yield the model of a size of SIZES, and close it at the end."""
    where = FOLDER_IN_MEMORY if shutil.disk_usage(FOLDER_IN_MEMORY).free > FOLDER_BYTES else None
    with tempfile.TemporaryDirectory(dir=where) as name:
        _write(size, Path(name), options)
        model = VisionLanguageModel(Path(name), size.lower(), options)
    try:
        yield model
    finally:
        model.close()


def _write(size: str, folder: Path, options: EngineModelOptions) -> None:
    torch.manual_seed(0)
    smol, given = size.startswith("SmolVLM"), SIZES[size]
    special = tiny.SMOL if smol else tiny.QWEN
    words = made_tokenizer(special)
    write_tokenizer(words, folder, special[1])
    ids = {name: words.token_to_id(name) for name in special}
    text = given["text_config"] | {"eos_token_id": ids[special[1]], "pad_token_id": ids["<pad>"]}
    with init_empty_weights(include_buffers=False):
        if smol:
            marks = {"image_token_id": ids["<image>"], "pad_token_id": ids["<pad>"]}
            model: Any = SmolVLMForConditionalGeneration(SmolVLMConfig(**given | marks | {"text_config": text}))
        else:
            marks = {f"{name}_token_id": ids[f"<|{name}|>"] for name in ("vision_start", "vision_end")}
            marks |= {f"{name}_token_id": ids[f"<|{name}_pad|>"] for name in ("image", "video")}
            qwen = Qwen2_5_VLConfig(**given | marks | {"text_config": text})
            model = Qwen2_5_VLForConditionalGeneration(qwen)
            (folder / "preprocessor_config.json").write_text(json.dumps(PICTURES))
    filled(model, torch.device(options.device), weights_for(options.device, options.weights)[1])
    model.save_pretrained(folder)
