"""Tokenization and detokenization: a model's control tokens, and the displayable text of sampled tokens.

Text from users and clients never becomes a control token. Only whole characters of a reply are shown, up to a stop
string. No text is held back longer than necessary. Conversations with a template use `chat_template.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, GenerationConfig

from antiphon.modeling.chat_template import plain_tokenizer, token_ids


class Vocabulary:
    """The tokenizer in a checkpoint's folder. `end`: the name of the control token that ends a turn.

    `special`: tokens that are not text. `stop`: the tokens that end a generation, which are `end` and those in the
    checkpoint's generation configuration. `tokenizer`: encodes the name of a control token as the control token.
    """

    def __init__(self, folder: Path, end: str) -> None:
        """Read the tokenizer of a folder. Downloads nothing. Raises OSError or ValueError if there is none."""
        loaded: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.tokenizer: Tokenizer = loaded.backend_tokenizer
        self._plain = plain_tokenizer(self.tokenizer)
        ends = {self.tokenizer.token_to_id(end), loaded.eos_token_id, *_ends(folder)}
        self.special = frozenset(int(i) for i in loaded.added_tokens_decoder)
        self.stop = frozenset(int(i) for i in ends if isinstance(i, int))

    def plain(self, text: str) -> list[int]:
        """Encode text from a user or a client. No part of it becomes a control token."""
        return token_ids(self._plain, text)

    def control(self, text: str) -> list[int]:
        """Encode a text that the adapter wrote. The name of a control token becomes the control token."""
        return token_ids(self.tokenizer, text)

    def text(self, ids: list[int]) -> str:
        """Decode tokens, with control tokens as their names. An incomplete character at the end becomes U+FFFD."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


def _ends(folder: Path) -> list[int]:
    try:
        found = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    except OSError:
        return []
    return found if isinstance(found, list) else [] if found is None else [found]


class Detokenizer:
    """Turns the tokens of one reply into text as they arrive. Control tokens have no text.

    `stops`: strings that end the text. Neither a stop string nor any text after it is returned. `stopped`: the stop
    string that was found; None: no stop string yet.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stops = tuple(s for s in stops if s)
        self._held = ""
        self.stopped: str | None = None

    def feed(self, token: int) -> str:
        """Feed one token and return the text that it completes.

        Returns "" if a character or a possible stop string is still incomplete, or after a stop string.
        """
        if self.stopped is not None:
            return ""
        self._held += self._decoder.step(self._tokenizer, token) or ""
        found = min(((at, s) for s in self._stops if (at := self._held.find(s)) >= 0), default=None)
        if found:
            at, self.stopped = found
            text, self._held = self._held[:at], ""
            return text
        cut = len(self._held) - held_back(self._held, self._stops)
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def flush(self) -> str:
        """Return the text that was held back as the possible start of a stop string. Called after the last token."""
        text, self._held = self._held, ""
        return text


def held_back(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of one of `marks`."""
    longest = 0
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:size]):
                longest = size
                break
    return longest
