"""A checkpoint's tokens: which of them control the model, and text that can become none of those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig

from antiphon.modeling.chat_template import plain_tokenizer


class Vocabulary:
    """A checkpoint's tokens. `end`: the control token that ends a turn."""

    def __init__(self, folder: Path, end: str) -> None:
        """Raises OSError, ValueError."""
        made: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.tokenizer: Tokenizer = made.backend_tokenizer
        self._plain = plain_tokenizer(self.tokenizer)
        ends = {self.tokenizer.token_to_id(end), made.eos_token_id, *_ends(folder)}
        # Tokens that are no text.
        self.special = frozenset(int(i) for i in made.added_tokens_decoder)
        self.stop = frozenset(int(i) for i in ends if isinstance(i, int))

    def plain(self, text: str) -> list[int]:
        """Tokens of a text, none of them a control token."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def control(self, text: str) -> list[int]:
        """Tokens of a text that may name control tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, ids: list[int]) -> str:
        """What the tokens say, control tokens by their names."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


def _ends(folder: Path) -> list[int]:
    try:
        found = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    except OSError:
        return []
    return found if isinstance(found, list) else [] if found is None else [found]
