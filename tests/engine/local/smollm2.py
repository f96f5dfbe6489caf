"""SmolLM2 in float32 with its tokenizer, loaded once for all tests that use it."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from antiphon.loading.loader import store_of
from antiphon.settings import load as load_settings
from antiphon.store import MODELS
from tests.conftest import SMALL


@cache
def checkpoint() -> tuple[Any, Any]:
    """The model, which must not be changed, and the tokenizer."""
    folder = store_of(load_settings({}, os.environ).models).require(MODELS[SMALL])
    where: dict[str, Any] = {"gguf_file": "model.gguf", "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **where
    )
    return model.eval(), AutoTokenizer.from_pretrained(folder, **where)
