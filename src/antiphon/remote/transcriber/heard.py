"""What a server has heard, and the hypothesis that a session gets of it. Pure.

Servers return text, and some also word times or probabilities. A session needs tokens, because the tokens of words that
were sent are the prefix of the next hypothesis. Each different word is therefore a token here. A server cannot be made
to begin with a prefix, so a hypothesis begins after the words that match the prefix best.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.audio import Pcm
from antiphon.audio.quiet import spread_over_sound
from antiphon.contracts import Hypothesis, HypothesisWord, Window
from antiphon.events.words import Word, end_of

# Characters of scripts that are written without spaces. Each is a word by itself.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"\s*(?:[{_UNSPACED}][^\w\s]*|[^\s{_UNSPACED}]+)")
# Bounds: the words of one answer that are used, and the different words of one window that are remembered.
MAX_WORDS, MAX_TOKENS = 4096, 1 << 15


@dataclass(frozen=True, slots=True)
class HeardWord:
    """One word as the server wrote it, with its leading space.

    `start_s`, `end_s`: from the window's start; None if the server reports no times. `probability`: 1.0 if it reports
    none.
    """

    text: str
    start_s: float | None = None
    end_s: float | None = None
    probability: float = 1.0


@dataclass(frozen=True, slots=True)
class HeardText:
    """All that a server has heard in a window.

    `language`: as ISO-639-1; "" if the server does not report it. `is_speech`: False if the server takes the window for
    noise.
    """

    words: tuple[HeardWord, ...]
    language: str = ""
    is_speech: bool = True


def words_of(text: str) -> tuple[HeardWord, ...]:
    """Return the words of a text without times. At most MAX_WORDS."""
    pieces = [HeardWord(piece) for piece in _WORD.findall(text.strip())[:MAX_WORDS]]
    if pieces and not re.match(rf"[{_UNSPACED}]", pieces[0].text):
        # Begin with a space, as other models do, because the text follows that of the previous window.
        pieces[0] = HeardWord(" " + pieces[0].text)
    return tuple(pieces)


def timed_words(words: Sequence[HeardWord], timed: Sequence[Word]) -> tuple[HeardWord, ...]:
    """Return the words of a text with the times and probabilities of a server's list of words.

    The list is used if it has as many words as the text. Otherwise, the words stay without times.
    """
    if len(words) != len(timed):
        return tuple(words)
    return tuple(HeardWord(w.text, t.start_s, t.end_s, t.probability) for w, t in zip(words, timed, strict=True))


class WordTokens:
    """The tokens of one stream: a number for each different word of the window that is decoded."""

    def __init__(self) -> None:
        self._start = -1
        self._texts: list[str] = []
        self._ids: dict[str, int] = {}

    def hypothesis(self, window: Window, heard: HeardText) -> Hypothesis:
        """Return the hypothesis of a window: the words after those of its prefix.

        A window with another start begins with no words.
        """
        if window.start_sample != self._start or len(self._texts) > MAX_TOKENS:
            self._start, self._texts, self._ids = window.start_sample, [], {}
        known = [self._texts[token] for token in window.prefix if token < len(self._texts)]
        words = heard.words[end_of(known, [w.text for w in heard.words]) if known else 0 :]
        pieces = tuple(HypothesisWord(w.text, (self._id(w.text),), w.probability) for w in words)
        language = heard.language or window.language or window.likely_language or ""
        is_speech = heard.is_speech and bool(heard.words)
        timed = _times(window.pcm, heard.words)[len(heard.words) - len(words) :] if window.word_times else ()
        return Hypothesis(pieces, language, 1.0, is_speech, 0, len(pieces), timed)

    def has_news(self, window: Window, heard: HeardText) -> bool:
        """Return whether words were heard that the window's prefix does not have."""
        return len(heard.words) > len(window.prefix)

    def _id(self, text: str) -> int:
        found = self._ids.setdefault(text, len(self._texts))
        if found == len(self._texts):
            self._texts.append(text)
        return found


def _times(pcm: Pcm, words: Sequence[HeardWord]) -> tuple[Word, ...]:
    """Return the words with the server's times, or with estimated ones if any is missing."""
    borders = None
    if any(w.start_s is None or w.end_s is None for w in words):
        borders = spread_over_sound([max(1, len(w.text.strip())) for w in words], pcm)
    found = list[Word]()
    for k, word in enumerate(words):
        start_s, end_s = (borders[k], borders[k + 1]) if borders else (word.start_s or 0.0, word.end_s or 0.0)
        found.append(Word(word.text.strip(), start_s, max(start_s, end_s), word.probability))
    return tuple(found)
