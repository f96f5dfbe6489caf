"""Which words of a growing hypothesis may be sent. Pure: hypotheses in, deltas out; nothing is ever taken back.

A window is decoded again and again as it grows, with what has been sent as its forced prefix. A word is sent once it has
stood at its place, after the same words, while `agreement_s` of audio came in, has `rollback_tokens` tokens behind it,
and was likely. The last decode of a window is not bound to what was sent; its words behind the sent ones are the last delta.

Why it has to stand: with hypotheses every 0.3 s over 38 clips of read English, a likely word (over 0.9) that had been seen once
was wrong in the final text about one time in four, one that had stood for 0.9 s about one time in thirty.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from antiphon.contracts import Hypothesis, HypothesisWord, TranscriberProfile
from antiphon.events.transcription import StreamTuning
from antiphon.events.words import bare_word

# A language guessed from a second of sound is not to be trusted with words that cannot be taken back.
MIN_LANGUAGE_PROBABILITY = 0.5
LONE_PROBABILITY = 0.6


def tuned(profile: TranscriberProfile, tuning: StreamTuning) -> TranscriberProfile:
    """The profile with a session's own values; audio and tokens never above what the model can take."""
    changes: dict[str, float | int] = {}
    if tuning.segment_duration_s is not None:
        changes |= {"step_s": tuning.segment_duration_s, "first_step_s": tuning.segment_duration_s}
    if tuning.rollback_tokens is not None:
        changes["rollback_tokens"] = tuning.rollback_tokens
    if tuning.unfixed_chunks is not None:
        changes["unfixed_chunks"] = tuning.unfixed_chunks
    if tuning.max_audio_s is not None:
        changes["max_window_s"] = min(profile.max_window_s, tuning.max_audio_s)
        changes["long_window_s"] = min(profile.long_window_s, tuning.max_audio_s)
    if tuning.max_prefix_tokens is not None:
        changes["max_prefix_tokens"] = min(profile.max_prefix_tokens, tuning.max_prefix_tokens)
    if tuning.max_tokens is not None:
        changes["max_tokens"] = min(profile.max_tokens, tuning.max_tokens)
    return replace(profile, **changes)  # type: ignore[arg-type]


def goes_on(text: str) -> bool:
    """Its last word has no mark of a sentence's end behind it. Only of Latin letters, which are written with such marks."""
    last = text.rstrip()[-1:]
    return last in (",", ";", "-", "\u2013") or (last.isalpha() and ord(last) < 0x250)


@dataclass(slots=True)
class _Candidate:
    word: str
    since_s: float


class WindowText:
    """The text of one window. Turns that share the window each get their own words, by where the words lie.

    `base`: settled words whose sound the window begins with.
    """

    def __init__(self, profile: TranscriberProfile, base: tuple[HypothesisWord, ...] = ()) -> None:
        self._profile = profile
        self.base = base
        self.sent: list[tuple[int, HypothesisWord]] = []
        self._candidates: list[_Candidate] = []
        self._offers = 0

    @property
    def prefix(self) -> tuple[int, ...]:
        """Tokens the next partial must begin with: the base and all that was sent."""
        return self.base_tokens + tuple(t for _, p in self.sent for t in p.tokens)

    @property
    def base_tokens(self) -> tuple[int, ...]:
        """Tokens the final must begin with."""
        return tuple(t for p in self.base for t in p.tokens)

    def untouched(self, turn: int) -> bool:
        """Nothing of the turn has been sent from this window."""
        return all(t != turn for t, _ in self.sent)

    def offer(
        self, hypothesis: Hypothesis, audio_s: float, owners: Sequence[int], eager: bool
    ) -> list[tuple[int, str]]:
        """A partial of the audio up to `audio_s`; its pieces follow `prefix`, `owners` has the turn of each.

        `eager`: the first words of a turn are awaited. Returns (turn, new stable text), in order; often nothing.
        """
        self._offers += 1
        if not hypothesis.is_speech or hypothesis.language_probability < MIN_LANGUAGE_PROBABILITY:
            self._candidates.clear()
            return []
        pieces = hypothesis.pieces
        self._stand(pieces, audio_s)
        if self._offers <= self._profile.unfixed_chunks:
            return []
        stable = self._stable(pieces, audio_s, eager)
        del self._candidates[:stable]
        return self._send(list(zip(owners[:stable], pieces[:stable], strict=True)))

    def finish(
        self, final: Hypothesis, owners: Sequence[int]
    ) -> tuple[list[tuple[int, str]], list[tuple[int, HypothesisWord]]]:
        """The final hypothesis, not bound to what was sent; `owners` has the turn of each of its pieces.

        Returns the last deltas, (turn, text), and its pieces by turn.
        """
        pieces = list(zip(owners, final.pieces, strict=True)) if final.is_speech else []
        tail: list[tuple[int, HypothesisWord]] = []
        for turn in dict.fromkeys(t for t, _ in pieces):
            mine = [p for t, p in pieces if t == turn]
            tail += [(turn, p) for p in mine[end_of([p for t, p in self.sent if t == turn], mine) :]]
        return self._send(tail), pieces

    def _send(self, pieces: Sequence[tuple[int, HypothesisWord]]) -> list[tuple[int, str]]:
        self.sent += pieces
        return [(turn, "".join(p.text for _, p in group)) for turn, group in groupby(pieces, key=lambda x: x[0])]

    def _stand(self, pieces: Sequence[HypothesisWord], audio_s: float) -> None:
        words = [bare_word(p.text) for p in pieces]
        same = 0
        while same < min(len(words), len(self._candidates)) and words[same] == self._candidates[same].word:
            same += 1
        self._candidates[same:] = [_Candidate(w, audio_s) for w in words[same:]]

    def _stable(self, pieces: Sequence[HypothesisWord], audio_s: float, eager: bool) -> int:
        behind = sum(len(p.tokens) for p in pieces)
        stable = 0
        for piece, candidate in zip(pieces, self._candidates, strict=True):
            behind -= len(piece.tokens)
            stood = audio_s - candidate.since_s
            # A word seen once has not stood at all, however short the agreement asked for.
            if stood <= 0 or stood < self._needed_s(behind, piece, eager) - 1e-6:
                break
            if piece.probability < self._profile.min_probability:
                break
            stable += 1
        return stable

    def _needed_s(self, behind: int, piece: HypothesisWord, eager: bool) -> float:
        """How long a word with `behind` tokens after it must have stood."""
        enough = behind >= self._profile.rollback_tokens
        if not eager:
            return self._profile.agreement_s if enough else math.inf
        if enough:
            return self._profile.first_agreement_s
        # The first sign of life: a likely word that has stood twice as long need not wait for the next one.
        lone = piece.probability >= LONE_PROBABILITY and self._profile.rollback_tokens <= 1
        return 2 * self._profile.first_agreement_s if lone else math.inf


def end_of(sent: Sequence[HypothesisWord], final: Sequence[HypothesisWord]) -> int:
    """Where in `final`, another reading of the same sound and more, the words behind the last of `sent` begin."""
    mine, theirs = [bare_word(p.text) for p in sent], [bare_word(p.text) for p in final]
    if mine == theirs[: len(mine)]:
        return len(mine)
    end = 0
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, mine, theirs, autojunk=False).get_opcodes():
        if tag == "equal":
            end = j2
        elif tag == "replace":
            end = min(j2, j1 + (i2 - i1)) if i2 == len(mine) else j2
        elif tag == "insert" and i2 < len(mine):
            end = j2
    return end


def shortened(final: Hypothesis, keep: int) -> Hypothesis:
    """Its first `keep` words."""
    return replace(final, pieces=final.pieces[:keep], words=final.words[:keep])


def words_to_settle(final: Hypothesis, sent: int, length_s: float) -> int:
    """How many words to settle: up to the widest gap in the last third, behind what was sent, before the last second."""
    words = final.words
    best, widest = 0, -1.0
    for k in range(max(1, sent), len(words)):
        gap = words[k].start_s - words[k - 1].end_s
        if words[k - 1].end_s < length_s * 0.6 or words[k].start_s > length_s - 1.0:
            continue
        if gap > widest:
            best, widest = k, gap
    return best or len(words)
