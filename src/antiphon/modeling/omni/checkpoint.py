"""What both checkpoints have in common: a thinker, and a tokenizer whose chat template is in a file beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from antiphon.modeling.text_decoder import TextDecoder

# Where a released checkpoint has its chat template, beside the tokenizer.
TEMPLATES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True, slots=True)
class ThinkerParts:
    """The language model on its device.

    `model`: a thinker of `transformers` (Qwen2_5Omni… or Qwen3OmniMoeThinkerForConditionalGeneration), for its encoders
    and its table of tokens. `decoder`: its text model and head, which the engine steps. `tokenizer`: of `transformers`,
    with a chat template.
    """

    model: Any
    decoder: TextDecoder
    tokenizer: Any


def tokenizer(folder: Path) -> Any:
    """Return the checkpoint's tokenizer with its chat template, which as released is in a file beside it.

    Raises OSError for a folder without a tokenizer, ValueError where there is no template.
    """
    made: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for name in TEMPLATES if not made.chat_template else ():
        if (folder / name).is_file():
            text = (folder / name).read_text(encoding="utf-8")
            made.chat_template = json.loads(text)["chat_template"] if name.endswith(".json") else text
    if not made.chat_template:
        raise ValueError(f"it lacks a chat template ({', '.join(TEMPLATES)})")
    return made
