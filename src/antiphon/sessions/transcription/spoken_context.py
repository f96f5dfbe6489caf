"""The newest text of a session, for a model that is given what was said before a window. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from antiphon.contracts import HypothesisWord
from antiphon.events.words import bare_word

# A phrase of up to so many words that comes so often in a row is given once: a model that is given a loop goes on with
# it.
LOOP_WORDS, LOOP_REPEATS = 8, 4


class SpokenContext:
    """The words of finished windows, the newest ones, of at most `max_tokens` tokens. With 0 it is empty."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._words: deque[HypothesisWord] = deque()
        self._num_tokens = 0

    @property
    def text(self) -> str:
        """The words as the model spelled them."""
        return "".join(w.text for w in self._words)

    def limit(self, max_tokens: int) -> None:
        """Keep at most so many tokens from now on."""
        self._max_tokens = max_tokens
        self._trim()

    def add(self, words: Iterable[HypothesisWord]) -> None:
        """Add words that were said behind those that are there."""
        for word in words:
            self._words.append(word)
            self._num_tokens += _size(word)
            self._fold_loop()
        self._trim()

    def _fold_loop(self) -> None:
        """Leave one of the phrases that the words end with, where they are the same LOOP_REPEATS times."""
        words = [bare_word(w.text) for w in self._words][-LOOP_WORDS * LOOP_REPEATS :]
        for size in range(1, len(words) // LOOP_REPEATS + 1):
            tail = words[-size * LOOP_REPEATS :]
            if tail == tail[:size] * LOOP_REPEATS:
                for _ in range(size * (LOOP_REPEATS - 1)):
                    self._num_tokens -= _size(self._words.pop())
                return

    def _trim(self) -> None:
        while self._num_tokens > self._max_tokens:
            self._num_tokens -= _size(self._words.popleft())


def _size(word: HypothesisWord) -> int:
    return max(1, len(word.tokens))
