"""A checkpoint's tokens: which of them control the model, and how text is encoded so that it becomes none of those.

For adapters that build their prompts token by token; conversations with a template have `chat_template.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig

from antiphon.modeling.chat_template import plain_tokenizer, token_ids


class Vocabulary:
    """The tokenizer of a checkpoint's folder. `end`: the name of the control token that ends a turn.

    `special`: tokens that are no text. `stop`: tokens that end a generation: `end`, and those that the checkpoint's
    generation configuration names. `tokenizer`: knows control tokens by their names.
    """

    def __init__(self, folder: Path, end: str) -> None:
        """Read the tokenizer of a folder. Raises OSError or ValueError where there is none; nothing is downloaded."""
        loaded: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.tokenizer: Tokenizer = loaded.backend_tokenizer
        self._plain = plain_tokenizer(self.tokenizer)
        ends = {self.tokenizer.token_to_id(end), loaded.eos_token_id, *_ends(folder)}
        self.special = frozenset(int(i) for i in loaded.added_tokens_decoder)
        self.stop = frozenset(int(i) for i in ends if isinstance(i, int))

    def plain(self, text: str) -> list[int]:
        """Encode a text that a user or a client wrote: what it says becomes no control token, whatever it says."""
        return token_ids(self._plain, text)

    def control(self, text: str) -> list[int]:
        """Encode a text of the adapter's own, in which the names of control tokens become these tokens."""
        return token_ids(self.tokenizer, text)

    def text(self, ids: list[int]) -> str:
        """Decode tokens, with control tokens by their names. Half a character at the end becomes U+FFFD."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


def _ends(folder: Path) -> list[int]:
    try:
        found = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    except OSError:
        return []
    return found if isinstance(found, list) else [] if found is None else [found]
