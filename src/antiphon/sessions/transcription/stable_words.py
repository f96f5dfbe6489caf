"""Decides which words of a growing hypothesis may be sent. Pure: gets hypotheses, returns words, and never takes a word
back.

A window is decoded repeatedly as it grows. The words that were sent are a forced prefix of each decode. A word is sent
if it is likely, has `rollback_tokens` tokens after it, and has stayed in the same place, after the same words, while
`agreement_s` of audio arrived. The final of a window is decoded without that prefix. Its words that follow the sent
ones are the last delta.

A word has to stay for some time, because a new word is often wrong. With hypotheses every 0.3 s over 38 clips of read
English, a likely word (over 0.9) that had been seen once was wrong in the final text about one time in four. A word
that had stayed for 0.9 s was wrong about one time in thirty.

A turn's first word may be sent sooner (`first_probability`). With a decode every 0.1 s over 116 clips, a first word
with a probability of at least 0.4 was wrong in 4 % if it was seen twice, or if a word with at least 0.5 followed it.
Under the rule for other words, the first word was sent 0.2 s later, and it was wrong in 7 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from antiphon.contracts import Hypothesis, HypothesisWord, TranscriberProfile
from antiphon.events.words import bare_word, end_of
from antiphon.sessions.transcription.spoken_language import MIN_LANGUAGE_PROBABILITY

# A turn's first word may be sent the first time it is seen if the second word has at least this probability.
FOLLOWING_PROBABILITY = 0.5
# The number of a turn, and a word of it from a hypothesis.
TurnPiece = tuple[int, HypothesisWord]


@dataclass(slots=True)
class _Candidate:
    word: str
    since_s: float


class WindowText:
    """The text of one window. If turns share the window, each gets the words at its positions.

    - `base`: the words of the previous window whose audio is the context at the beginning of this one.
    - `base_tokens`: the token ids that the final has to begin with. They are only those of the base, so that the final
      may differ from the words that were sent.
    - `sent`: the words that were sent, each with the number of its turn, in order.
    - `prefix`: the token ids that the next partial has to begin with: the tokens of the base, then those of all words
      sent. So a partial cannot contradict the words that were sent.
    """

    def __init__(self, profile: TranscriberProfile, base: tuple[HypothesisWord, ...] = ()) -> None:
        self._profile = profile
        self.base = base
        self.base_tokens = self.prefix = tuple(t for p in base for t in p.tokens)
        self.sent: list[TurnPiece] = []
        self._turns_sent: set[int] = set()
        self._candidates: list[_Candidate] = []
        self._num_offers = 0

    def untouched(self, turn: int) -> bool:
        """True if no word of the turn was sent from this window. Words sent from an earlier window do not count."""
        return turn not in self._turns_sent

    def restore(self, sent: Sequence[TurnPiece]) -> None:
        """Count words as sent that another session has sent from this window."""
        self._send(list(sent))

    def offer(self, hypothesis: Hypothesis, audio_s: float, turns: Sequence[int], eager: bool) -> list[TurnPiece]:
        """Compare a partial with the previous partials, and return the words that are now stable, in order. Often there
        are none. The returned words count as sent.

        - `hypothesis`: the partial. Its pieces follow `prefix`. A hypothesis without speech, or of an uncertain
          language, restarts the comparison.
        - `audio_s`: the end of the decoded audio, in seconds since the session's start.
        - `turns`: the number of each piece's turn.
        - `eager`: whether no word of the turn was sent yet. A word then needs to stay for a shorter time.
        """
        self._num_offers += 1
        if not hypothesis.is_speech or hypothesis.language_probability < MIN_LANGUAGE_PROBABILITY:
            self._candidates.clear()
            return []
        pieces = hypothesis.pieces
        self._update_candidates(pieces, audio_s)
        if self._num_offers <= self._profile.unfixed_chunks:
            return []
        stable = self._stable(pieces, audio_s, eager)
        del self._candidates[:stable]
        return self._send(list(zip(turns[:stable], pieces[:stable], strict=True)))

    def finish(self, final: Hypothesis, turns: Sequence[int]) -> tuple[list[TurnPiece], list[TurnPiece]]:
        """Complete the window with its final. The final may differ from the words that were sent. `turns` has the
        number of each piece's turn.

        Returns the words to send now, and all words of the final, both in order. Without speech, both are empty.
        """
        pieces = list(zip(turns, final.pieces, strict=True)) if final.is_speech else []
        tail: list[TurnPiece] = []
        for turn in dict.fromkeys(t for t, _ in pieces):
            of_turn = [p for t, p in pieces if t == turn]
            sent = [p.text for t, p in self.sent if t == turn]
            tail += [(turn, p) for p in of_turn[end_of(sent, [p.text for p in of_turn]) :]]
        return self._send(tail), pieces

    def _send(self, pieces: list[TurnPiece]) -> list[TurnPiece]:
        self.sent += pieces
        for turn, piece in pieces:
            self._turns_sent.add(turn)
            self.prefix += tuple(piece.tokens)
        return pieces

    def _update_candidates(self, pieces: Sequence[HypothesisWord], audio_s: float) -> None:
        words = [bare_word(p.text) for p in pieces]
        same = 0
        while same < min(len(words), len(self._candidates)) and words[same] == self._candidates[same].word:
            same += 1
        self._candidates[same:] = [_Candidate(w, audio_s) for w in words[same:]]

    def _stable(self, pieces: Sequence[HypothesisWord], audio_s: float, eager: bool) -> int:
        tokens_behind = sum(len(p.tokens) for p in pieces)
        stable = 0
        for k, (piece, candidate) in enumerate(zip(pieces, self._candidates, strict=True)):
            tokens_behind -= len(piece.tokens)
            if piece.probability < self._profile.min_probability:
                break
            stood_s = audio_s - candidate.since_s
            is_first = eager and k == 0 and self._profile.first_probability is not None
            # A word that was seen only once has not stayed for any time, even if no time is required.
            has_stood = stood_s > 0 and stood_s >= self._needed_s(tokens_behind, eager and not is_first) - 1e-6
            if not has_stood and not (is_first and self._first_is_likely(pieces, stood_s)):
                break
            stable += 1
        return stable

    def _first_is_likely(self, pieces: Sequence[HypothesisWord], stood_s: float) -> bool:
        """Whether a turn's first word, which has stayed for `stood_s` seconds, is likely enough to be sent early."""
        enough = self._profile.first_probability
        if enough is None or pieces[0].probability < enough:
            return False
        return stood_s > 0 or (len(pieces) > 1 and pieces[1].probability >= FOLLOWING_PROBABILITY)

    def _needed_s(self, tokens_behind: int, eager: bool) -> float:
        """Return the seconds for which a word with `tokens_behind` tokens after it has to stay before it is sent."""
        if tokens_behind < self._profile.rollback_tokens:
            return math.inf
        return self._profile.first_agreement_s if eager else self._profile.agreement_s


def shortened(final: Hypothesis, keep: int) -> Hypothesis:
    """Return the hypothesis with only its first `keep` words, in both its pieces and its word times. Token counts and
    language stay those of the whole hypothesis.
    """
    return replace(final, pieces=final.pieces[:keep], words=final.words[:keep])


def words_before_cut(final: Hypothesis, sent: int, length_s: float) -> int:
    """Return the number of words of `final` that stay before the cut of its window. The cut is at the widest gap
    between two words that follows at least `sent` words, begins after 60 % of the window, and ends before the window's
    last second. Without such a gap, all words stay.

    `length_s` is the window's length in seconds. Word times count from its start.
    """
    words = final.words
    best, widest = 0, -1.0
    for k in range(max(1, sent), len(words)):
        gap = words[k].start_s - words[k - 1].end_s
        if words[k - 1].end_s < length_s * 0.6 or words[k].start_s > length_s - 1.0:
            continue
        if gap > widest:
            best, widest = k, gap
    return best or len(words)
