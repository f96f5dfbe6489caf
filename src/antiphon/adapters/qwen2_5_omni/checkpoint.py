"""Reads the thinker of a Qwen2.5-Omni checkpoint: its language model and its encoders, without the talker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniThinkerForConditionalGeneration

from antiphon.modeling.omni.checkpoint import ThinkerParts, tokenizer
from antiphon.modeling.text_decoder import TextDecoder


def read(folder: Path, device: str, dtype: torch.dtype) -> ThinkerParts:
    """Load the thinker from a checkpoint's folder. The talker's weights are passed over.

    Waits for a minute and more. Raises OSError, ValueError, KeyError or RuntimeError for a folder that is no such
    checkpoint, or lacks something.
    """
    config: Any = Qwen2_5OmniConfig.from_pretrained(folder, local_files_only=True)
    model: Any = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(
        folder, config=config.thinker_config, dtype=dtype, local_files_only=True
    )
    model = model.to(device).eval()
    return ThinkerParts(model, TextDecoder(model.get_decoder(), model.lm_head), tokenizer(folder))
