"""From tokens to text that may be shown: whole characters only, ended by stop strings, nothing held longer than it must be.

Pure but for the tokenizer it is given.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Feed tokens, get text. `stops` end it: `stopped` is the one found, and neither it nor what follows is given out."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stops = tuple(s for s in stops if s)
        self._held = ""
        self.stopped: str | None = None

    def feed(self, token: int) -> str:
        """The text that the token settles; "" while a character or a possible stop string is incomplete."""
        if self.stopped is not None:
            return ""
        self._held += self._decoder.step(self._tokenizer, token) or ""
        found = min(((at, s) for s in self._stops if (at := self._held.find(s)) >= 0), default=None)
        if found:
            at, self.stopped = found
            text, self._held = self._held[:at], ""
            return text
        keep = held_back(self._held, self._stops)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def flush(self) -> str:
        """What was held back, when nothing more comes."""
        text, self._held = self._held, ""
        return text


def held_back(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `marks`."""
    longest = 0
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:size]):
                longest = size
                break
    return longest
