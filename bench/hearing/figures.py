"""Figures of transcripts: word errors, paired differences, delays. Pure functions, without a server or files."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bench import words as wer
from bench.hearing.client import FileText, Heard
from bench.hearing.clips import Clip

RESAMPLES = 10_000
# Number of words at a clip's start, one of which has to be shown for its first words to count as shown.
FIRST_WORDS = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two error rates over the same clips, in percentage points, with its 95 % interval."""

    points: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.points:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


def difference(errors: Sequence[tuple[int, int]], num_words: Sequence[int]) -> Difference:
    """Return the first error rate minus the second, in percent of all words.

    `errors` has both counts of each clip. The interval comes from a bootstrap over clips, so the counts of a clip stay
    together. With a single clip, it has no width.
    """
    more = np.array([a - b for a, b in errors], np.float64)
    words = np.array(num_words, np.float64)
    chosen = np.random.default_rng(0).integers(0, len(more), (RESAMPLES, len(more)))
    rates = 100 * more[chosen].sum(1) / words[chosen].sum(1)
    low, high = np.percentile(rates, (2.5, 97.5))
    return Difference(float(100 * more.sum() / words.sum()), float(low), float(high))


@dataclass(frozen=True, slots=True)
class Reading:
    """One clip and its transcripts."""

    # The clip.
    clip: Clip
    # The joined finals of the live session.
    live: str
    # The joined deltas of the live session.
    shown: str
    # The transcript of the whole file.
    file: str
    # Number of turns of the live session.
    num_turns: int
    # Error events, and turns whose transcript failed.
    failures: tuple[str, ...] = ()

    def errors(self, which: str) -> int:
        """Return errors in words; in characters if the script of the language has no spaces."""
        return wer.score(self.clip.text, getattr(self, which), self.clip.language)[0]

    @property
    def num_words(self) -> int:
        return wer.score(self.clip.text, "", self.clip.language)[1]


def readings(clips: Sequence[Clip], heard: dict[str, Heard], files: dict[str, FileText]) -> list[Reading]:
    """Return the readings of clips: each clip with all of its transcripts."""
    return [
        Reading(c, h.text, h.shown, files[c.id].text, len(h.finals), tuple(h.failures))
        for c in clips
        for h in [heard[c.id]]
    ]


def errors_row(found: Sequence[Reading]) -> dict[str, Any]:
    """Return error rates over the clips in percent, and their paired differences as (points, low, high)."""
    num_words = [r.num_words for r in found]
    errors = {which: [r.errors(which) for r in found] for which in ("live", "shown", "file")}
    row: dict[str, Any] = {"clips": len(found), "words": sum(num_words)}
    row |= {which: 100 * sum(wrong) / sum(num_words) for which, wrong in errors.items()}
    for a, b in (("live", "file"), ("shown", "live")):
        found_difference = difference(list(zip(errors[a], errors[b], strict=True)), num_words)
        row[f"{a}_minus_{b}"] = (found_difference.points, found_difference.low, found_difference.high)
    row["turns_a_clip"] = sum(r.num_turns for r in found) / len(found)
    row["failures"] = sum(len(r.failures) for r in found)
    return row


def cells(row: dict[str, Any]) -> dict[str, Any]:
    """Format a row for printing; its differences are (points, low, high)."""
    return {key: str(Difference(*value)) if isinstance(value, tuple) else value for key, value in row.items()}


def rate(pairs: Iterable[tuple[Clip, str]]) -> float:
    """Return the word error rate (character error rate in scripts without spaces) over clips, in percent."""
    errors = total = 0
    for clip, text in pairs:
        e, n = wer.score(clip.text, text, clip.language)
        errors, total = errors + e, total + n
    return 100 * errors / max(1, total)


def shown_words(clip: Clip, heard: Heard) -> list[tuple[str, float]]:
    """Return the normalized words of the deltas, each with its time."""
    return [(w, t) for t, text in heard.deltas for w in wer.norm(text, clip.language)]


def matches(these: Sequence[str], those: Sequence[str]) -> list[tuple[int, int]]:
    """Return the positions of the words that both lists have in common, in order."""
    match = difflib.SequenceMatcher(None, these, those, autojunk=False)
    return [(a + k, b + k) for a, b, size in match.get_matching_blocks() for k in range(size)]


def first_words_s(clip: Clip, heard: Heard) -> float | None:
    """Return the seconds from the true start of speech to the first delta with one of the first FIRST_WORDS words.

    None if none of these words was shown. Words that were not said do not count.
    """
    sent = shown_words(clip, heard)
    said = wer.norm(clip.text, clip.language)
    for at, shown in matches(said, [w for w, _ in sent]):
        if at < FIRST_WORDS:
            return sent[shown][1] - clip.speech_start
    return None


def word_delays(clip: Clip, heard: Heard, spoken: Sequence[tuple[str, float, float]]) -> list[float]:
    """Return for each word the seconds from its end, as timed in the whole file, to the delta that contains it."""
    sent = shown_words(clip, heard)
    theirs = [(w, end) for word, _, end in spoken for w in wer.norm(word, clip.language)]
    return [sent[b][1] - theirs[a][1] for a, b in matches([w for w, _ in theirs], [w for w, _ in sent])]
