"""From sampled tokens to text that may be shown: whole characters only, up to a stop string.

Nothing is held back longer than it has to be. Pure but for the tokenizer that it is given; knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Turns the tokens of one reply into text as they come. Control tokens give no text.

    `stops`: strings that end the text; neither the one found nor what follows it is given out. `stopped`: the stop
    string that was found, or None so far.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stops = tuple(s for s in stops if s)
        self._held = ""
        self.stopped: str | None = None

    def feed(self, token: int) -> str:
        """Feed one token and return the text that it settles.

        That is "" while a character, or what may become a stop string, is incomplete, and after a stop string.
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
        """Return what was held back as the possible beginning of a stop string, once no more tokens come."""
        text, self._held = self._held, ""
        return text


def held_back(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of one of `marks`, but not all of it."""
    longest = 0
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:size]):
                longest = size
                break
    return longest
