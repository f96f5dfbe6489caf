"""When a pause ends the turn: from its sound, its words and its length. Pure.

With p, the probability that a pause of 0.2 s is the end of its turn, and S(t), the share of the pauses inside turns
that are longer than t,

    P(the turn is over | the pause has lasted t) = p / (p + (1 - p) * S(t))

because a finished turn stays silent, and an unfinished one continues at the rate at which S falls. p is a logistic
regression on the sound, as judged by the turn detector, and on the words (`unfinished.py`). S is log-normal in the time
beyond 0.2 s. A turn ends when P reaches a threshold: a client's eagerness is a point on the curve between false
cut-offs and waiting.

All numbers are in `end_of_turn_table.py`, which bench/turn_taking/fit.py makes from recordings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist, median

from antiphon.events.transcription import Eagerness, ServerVad
from antiphon.turns.end_of_turn_table import (
    LOGISTIC,
    PAUSE_MEDIAN_S,
    PAUSE_SPREAD,
    SPEAKER_SHRINKAGE,
    THRESHOLDS,
)
from antiphon.turns.unfinished import WordCues, word_cues

# A pause is judged after this time; a shorter one does not end a turn.
MIN_SILENCE_MS = 200
# Maximum pause within a turn, by eagerness, whatever was said.
MAX_SILENCE_MS: Mapping[str, int] = {"low": 8000, "medium": 4000, "auto": 4000, "high": 2500}
# Bound of the absolute logit of the turn detector's probability; beyond it the logit carries no more information.
MAX_LOGIT = 5.0
# The part of the turn detector's logit above this has a separate weight: most pauses inside turns of read speech reach
# it, and the part above it separates them from ends of turns.
SURE_LOGIT = 2.0
# Maximum factor between a speaker's pauses and the typical speaker's, in either direction.
MAX_SCALE = 2.5
# Number of recent pauses of a speaker that count.
KEPT_PAUSES = 32


@dataclass(frozen=True, slots=True)
class PauseEvidence:
    """The evidence about a pause. Make a new object when more is known, and ask again.

    - `complete`: the turn detector's probability, in [0, 1], that the turn is complete, judged at 0.2 s of the pause;
      None: not judged yet, or the detector failed.
    - `text`: the transcript of the turn so far; "" while it is unknown, which differs from a turn without words.
    - `language`: ISO 639-1; None if unknown, which counts as English.
    """

    complete: float | None = None
    text: str = ""
    language: str | None = None


@dataclass(frozen=True, slots=True)
class EndOfTurnTable:
    """The fitted numbers of p and S.

    - `logistic`: the weight of each feature, by the available evidence ("sound and words", "sound", "words",
      "nothing").
    - `median_s`: the median length of the pauses inside turns, in seconds beyond MIN_SILENCE_MS; `spread`: the standard
      deviation of its natural logarithm.
    """

    logistic: Mapping[str, Mapping[str, float]]
    median_s: float
    spread: float


_NORMAL = NormalDist()
FITTED = EndOfTurnTable(LOGISTIC, PAUSE_MEDIAN_S, PAUSE_SPREAD)


@dataclass(slots=True)
class SpeakerPauses:
    """The pauses of one speaker inside turns, as heard in a session so far, for the eagerness "auto"."""

    _excess_s: list[float] = field(default_factory=list)

    def add(self, length_ms: int) -> None:
        """Add a pause after which the speaker continued. Ignores pauses shorter than MIN_SILENCE_MS."""
        if length_ms >= MIN_SILENCE_MS:
            self._excess_s.append((length_ms - MIN_SILENCE_MS) / 1000 + 0.016)
            del self._excess_s[:-KEPT_PAUSES]

    @property
    def scale(self) -> float:
        """Ratio of this speaker's pauses to the typical speaker's, in [1 / MAX_SCALE, MAX_SCALE]. It is 1 without any
        pause, and approaches the ratio of the medians as pauses are added.
        """
        if not self._excess_s:
            return 1.0
        weight = len(self._excess_s) / (len(self._excess_s) + SPEAKER_SHRINKAGE)
        ratio = math.exp(weight * math.log(median(self._excess_s) / PAUSE_MEDIAN_S))
        return min(MAX_SCALE, max(1 / MAX_SCALE, ratio))


def features(evidence: PauseEvidence) -> dict[str, float]:
    """Return the features of the logistic regression, by their names in the table. Unknown features are absent."""
    found = {"bias": 1.0}
    if evidence.complete is not None:
        bounded = min(1 - 1e-9, max(1e-9, evidence.complete))
        found["sound"] = min(MAX_LOGIT, max(-MAX_LOGIT, math.log(bounded / (1 - bounded))))
        found["sound sure"] = max(0.0, found["sound"] - SURE_LOGIT)
    if evidence.text.strip():
        cues = _cues(evidence.text, evidence.language)
        found |= {
            "stop": float(cues.mark == "stop"),
            "question": float(cues.mark == "question"),
            "open": float(cues.mark == "open"),
            "dangling": float(cues.dangling),
            "auxiliary": float(cues.auxiliary),
            "filler": float(cues.filler),
            "dictating": float(cues.dictating),
            "complete": float(cues.complete),
        }
    return found


def kind_of(evidence: PauseEvidence) -> str:
    """Return the row of the logistic table for the evidence: "sound and words", "sound", "words", or "nothing"."""
    words, sound = bool(evidence.text.strip()), evidence.complete is not None
    return {(True, True): "sound and words", (True, False): "sound", (False, True): "words"}.get(
        (sound, words), "nothing"
    )


def completeness(evidence: PauseEvidence, table: EndOfTurnTable = FITTED) -> float:
    """Return the probability, in (0, 1), that a pause is the end of its turn, given that it has reached MIN_SILENCE_MS
    and nothing else about its length.
    """
    weights = table.logistic[kind_of(evidence)]
    logit = sum(weights[name] * value for name, value in features(evidence).items())
    return 1 / (1 + math.exp(-min(30.0, max(-30.0, logit))))


def survival(silence_ms: float, scale: float = 1.0, table: EndOfTurnTable = FITTED) -> float:
    """Return the share, in [0, 1], of the pauses inside turns that last longer than `silence_ms`, among those that last
    MIN_SILENCE_MS, for a speaker whose pauses are `scale` times as long as the typical speaker's.
    """
    excess_s = (silence_ms - MIN_SILENCE_MS) / 1000
    if excess_s <= 0:
        return 1.0
    return 0.5 * math.erfc(math.log(excess_s / (table.median_s * scale)) / (table.spread * math.sqrt(2)))


def probability_over(
    evidence: PauseEvidence, silence_ms: float, scale: float = 1.0, table: EndOfTurnTable = FITTED
) -> float:
    """Return the probability, in (0, 1], that a turn whose pause has lasted `silence_ms` is over. Never falls with
    time.
    """
    p = completeness(evidence, table)
    return p / (p + (1 - p) * survival(silence_ms, scale, table))


def silence_for(evidence: PauseEvidence, threshold: float, scale: float = 1.0, table: EndOfTurnTable = FITTED) -> float:
    """Return the milliseconds of silence after which `probability_over` reaches `threshold`, which is in (0, 1). At
    least MIN_SILENCE_MS; without an upper bound.
    """
    p = completeness(evidence, table)
    share = p * (1 - threshold) / ((1 - p) * threshold)
    if share >= 1:
        return float(MIN_SILENCE_MS)
    excess_s = table.median_s * scale * math.exp(-table.spread * _NORMAL.inv_cdf(share))
    return MIN_SILENCE_MS + 1000 * excess_s


class EndOfTurn:
    """Decides, for one eagerness, after which silence a turn ends. Keeps no state of a pause."""

    def __init__(self, eagerness: str = "medium") -> None:
        """eagerness: "low", "medium", "high", or "auto", which is "medium" adapted to the speaker's own pauses. Raises
        KeyError for any other value.
        """
        self.eagerness = eagerness
        self.threshold = THRESHOLDS[eagerness]
        self.max_silence_ms = MAX_SILENCE_MS[eagerness]

    def silence_ms(self, evidence: PauseEvidence, speaker: SpeakerPauses | None = None) -> int:
        """Return the milliseconds of silence, counted from the start of the pause, after which the turn ends by the
        current evidence, in [MIN_SILENCE_MS, max_silence_ms].

        Ask again when the turn detector has judged or the transcript has changed. A turn whose pause has lasted longer
        than the new answer ends at once. speaker: used for "auto" only.
        """
        scale = speaker.scale if speaker and self.eagerness == "auto" else 1.0
        return int(min(self.max_silence_ms, silence_for(evidence, self.threshold, scale)))


@lru_cache(256)
def _cues(text: str, language: str | None) -> WordCues:
    return word_cues(text, language)


def semantic_vad(eagerness: Eagerness = "auto") -> ServerVad:
    """Return the endpointing of `semantic_vad` with a client's eagerness, at the default threshold and padding."""
    return ServerVad(silence_duration_ms=MAX_SILENCE_MS[eagerness], eagerness=eagerness)
