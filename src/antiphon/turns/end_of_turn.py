"""Decides when a pause ends the turn, from the sound and the words of the turn and the length of the pause. Pure.

Let p be the probability that a pause of 0.2 s is the end of its turn, and S(t) the share of the pauses inside turns
that are longer than t. Then

    P(the turn is over | the pause has lasted t) = p / (p + (1 - p) * S(t))

because the speaker of a finished turn stays silent, while an unfinished turn continues at the rate at which S falls. p
comes from a logistic regression on the sound, as judged by the turn detector, and on the words (`unfinished.py`). S is
log-normal in the time beyond 0.2 s. With the eagerness "auto", the speaker's pauses in the session count too: their
lengths scale S, and their number in a turn may lower p. A turn ends when P reaches a threshold, which the client's
eagerness selects. With a higher threshold the server waits longer; with a lower threshold it cuts off more unfinished
turns.

All numbers are in `end_of_turn_table.py`, which bench/turn_taking/fit.py makes from recordings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist, median

from antiphon.events.transcription import Eagerness, Expects, ServerVad
from antiphon.turns.end_of_turn_table import (
    LOGISTIC,
    PAUSE_MEDIAN_S,
    PAUSE_SPREAD,
    PAUSES_A_TURN,
    SPEAKER_SHRINKAGE,
    THRESHOLDS,
    TURN_SHRINKAGE,
)
from antiphon.turns.unfinished import WordCues, word_cues

# A pause is judged after this time. A shorter pause does not end a turn.
MIN_SILENCE_MS = 200
# Milliseconds after which a pause ends the turn whatever was said, by eagerness.
MAX_SILENCE_MS: Mapping[str, int] = {"low": 8000, "medium": 4000, "auto": 4000, "high": 2500}
# Maximum absolute logit of the turn detector's probability. Larger values contain no more information.
MAX_LOGIT = 5.0
# The part of the turn detector's logit above SURE_LOGIT has a separate weight. In read speech, most pauses inside turns
# reach SURE_LOGIT, and the part above it separates them from ends of turns.
SURE_LOGIT = 2.0
# Maximum factor by which a speaker's pauses count as longer or shorter than the typical speaker's.
MAX_SCALE = 2.5
# Maximum by which the number of a speaker's pauses lowers the logit of p.
MAX_SHIFT = 1.5
# What the application's hint adds to the logit of p while the words fit the hint. Chosen, not fitted, because no
# recording has hints.
HINT_LOGITS: Mapping[Expects, float] = {"digits": -1.5, "yes_no": 2.0, "open": -1.0}
# An answer to an open question has at least this many words if it is over.
OPEN_WORDS = 8
# Numbers of a speaker's most recent pauses, whose lengths count, and of turns, whose numbers of pauses count.
KEPT_PAUSES, KEPT_TURNS = 32, 16


@dataclass(frozen=True, slots=True)
class PauseEvidence:
    """The evidence about a pause. When more becomes known, make a new object and call `EndOfTurn.silence_ms` again.

    - `complete`: the turn detector's probability, in [0, 1], that the turn is complete, judged after 0.2 s of the
      pause. None if it was not judged yet, or if the detector failed.
    - `text`: the transcript of the turn so far. An empty string means that it is unknown, not that there are no words.
    - `language`: ISO 639-1. None if unknown, which counts as English.
    - `expects`: what the application expects the user to say. None if it does not say.
    """

    complete: float | None = None
    text: str = ""
    language: str | None = None
    expects: Expects | None = None


@dataclass(frozen=True, slots=True)
class EndOfTurnTable:
    """The fitted parameters of p and S.

    - `logistic`: the weight of each feature, by the available evidence ("sound and words", "sound", "words",
      "nothing").
    - `median_s`: the median length of the pauses inside turns, in seconds beyond MIN_SILENCE_MS.
    - `spread`: the standard deviation of the natural logarithm of that length.
    """

    logistic: Mapping[str, Mapping[str, float]]
    median_s: float
    spread: float


_NORMAL = NormalDist()
FITTED = EndOfTurnTable(LOGISTIC, PAUSE_MEDIAN_S, PAUSE_SPREAD)


@dataclass(slots=True)
class SpeakerPauses:
    """The pauses that one speaker has made inside turns in a session so far. For the eagerness "auto"."""

    _excess_s: list[float] = field(default_factory=list)
    # The number of pauses in each turn. The last one is the open turn, or the next if none is open.
    _by_turn: list[int] = field(default_factory=lambda: [0])

    def add(self, length_ms: int) -> None:
        """Add a pause after which the speaker continued. Ignores pauses shorter than MIN_SILENCE_MS."""
        if length_ms >= MIN_SILENCE_MS:
            self._excess_s.append((length_ms - MIN_SILENCE_MS) / 1000 + 0.016)
            del self._excess_s[:-KEPT_PAUSES]
            self._by_turn[-1] += 1

    def end_turn(self) -> None:
        """Count the pauses from now on as those of another turn."""
        self._by_turn.append(0)
        del self._by_turn[: -KEPT_TURNS - 1]

    def join_turns(self, length_ms: int) -> None:
        """Make one turn of the last two, with a pause between them."""
        if len(self._by_turn) > 1:
            open_turn = self._by_turn.pop()
            self._by_turn[-1] += open_turn
        self.add(length_ms)

    @property
    def scale(self) -> float:
        """The length of this speaker's pauses relative to the typical speaker's, in [1 / MAX_SCALE, MAX_SCALE]. It is 1
        at first, and approaches the ratio of the medians as pauses are added.
        """
        if not self._excess_s:
            return 1.0
        weight = len(self._excess_s) / (len(self._excess_s) + SPEAKER_SHRINKAGE)
        ratio = math.exp(weight * math.log(median(self._excess_s) / PAUSE_MEDIAN_S))
        return min(MAX_SCALE, max(1 / MAX_SCALE, ratio))

    @property
    def shift(self) -> float:
        """What is added to the logit of p because of the number of this speaker's pauses, in [-MAX_SHIFT, 0]. It is 0
        if the speaker makes no more pauses in a turn than the typical speaker.
        """
        return shift_of(sum(self._by_turn), len(self._by_turn) - 1)


def shift_of(
    num_pauses: int, num_turns: int, typical: float = PAUSES_A_TURN, shrinkage: float = TURN_SHRINKAGE
) -> float:
    """Return the shift of a speaker who has made `num_pauses` pauses and has ended `num_turns` turns. `typical`: the
    pauses in a turn of the typical speaker, who counts for `shrinkage` turns.
    """
    pauses_a_turn = (num_pauses + shrinkage * typical) / (num_turns + shrinkage)
    return max(-MAX_SHIFT, min(0.0, math.log(typical / pauses_a_turn)))


def features(evidence: PauseEvidence) -> dict[str, float]:
    """Return the features of the logistic regression, by their names in the table. Unknown features are missing."""
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
            "listing": float(cues.listing),
            "complete": float(cues.complete),
        }
    return found


def kind_of(evidence: PauseEvidence) -> str:
    """Return the row of the logistic table for the evidence: "sound and words", "sound", "words", or "nothing"."""
    words, sound = bool(evidence.text.strip()), evidence.complete is not None
    return {(True, True): "sound and words", (True, False): "sound", (False, True): "words"}.get(
        (sound, words), "nothing"
    )


def completeness(evidence: PauseEvidence, table: EndOfTurnTable = FITTED, shift: float = 0.0) -> float:
    """Return the probability, in (0, 1), that a pause is the end of its turn, if all that is known about its length is
    that it has reached MIN_SILENCE_MS. `shift`: as of `SpeakerPauses`.
    """
    weights = table.logistic[kind_of(evidence)]
    logit = sum(weights[name] * value for name, value in features(evidence).items()) + _hint(evidence) + shift
    return 1 / (1 + math.exp(-min(30.0, max(-30.0, logit))))


def _hint(evidence: PauseEvidence) -> float:
    """Return what the hint adds to the logit. 0 if what was said contradicts the hint."""
    if evidence.expects is None:
        return 0.0
    is_known, cues = bool(evidence.text.strip()), _cues(evidence.text, evidence.language)
    fits = {
        "digits": not is_known or cues.number == "part",
        "yes_no": cues.complete,
        "open": not cues.complete and len(evidence.text.split()) < OPEN_WORDS,
    }
    return HINT_LOGITS[evidence.expects] if fits[evidence.expects] else 0.0


def survival(silence_ms: float, scale: float = 1.0, table: EndOfTurnTable = FITTED) -> float:
    """Of the pauses inside turns that last at least MIN_SILENCE_MS, return the share, in [0, 1], that lasts longer than
    `silence_ms`. The speaker's pauses are `scale` times as long as the typical speaker's.
    """
    excess_s = (silence_ms - MIN_SILENCE_MS) / 1000
    if excess_s <= 0:
        return 1.0
    return 0.5 * math.erfc(math.log(excess_s / (table.median_s * scale)) / (table.spread * math.sqrt(2)))


def probability_over(
    evidence: PauseEvidence, silence_ms: float, scale: float = 1.0, table: EndOfTurnTable = FITTED
) -> float:
    """Return the probability, in (0, 1], that a turn is over when its pause has lasted `silence_ms`. The probability
    never falls as the pause gets longer.
    """
    p = completeness(evidence, table)
    return p / (p + (1 - p) * survival(silence_ms, scale, table))


def silence_for(
    evidence: PauseEvidence,
    threshold: float,
    scale: float = 1.0,
    table: EndOfTurnTable = FITTED,
    shift: float = 0.0,
) -> float:
    """Return the milliseconds of silence after which `probability_over` reaches `threshold`, which is in (0, 1). The
    result is at least MIN_SILENCE_MS and has no upper bound. `scale` and `shift`: as of `SpeakerPauses`.
    """
    p = completeness(evidence, table, shift)
    share = p * (1 - threshold) / ((1 - p) * threshold)
    if share >= 1:
        return float(MIN_SILENCE_MS)
    excess_s = table.median_s * scale * math.exp(-table.spread * _NORMAL.inv_cdf(share))
    return MIN_SILENCE_MS + 1000 * excess_s


class EndOfTurn:
    """Decides, for one eagerness, how long a pause has to last to end its turn. Keeps no state about pauses."""

    def __init__(self, eagerness: str = "medium") -> None:
        """`eagerness` is "low", "medium", "high", or "auto", which is "medium" adapted to the speaker's own pauses.
        Raises KeyError for any other value.
        """
        self.eagerness = eagerness
        self.threshold = THRESHOLDS[eagerness]
        self.max_silence_ms = MAX_SILENCE_MS[eagerness]

    def silence_ms(self, evidence: PauseEvidence, speaker: SpeakerPauses | None = None) -> int:
        """Return the milliseconds of silence, counted from the start of the pause, after which the turn ends according
        to the current evidence. The result is in [MIN_SILENCE_MS, max_silence_ms].

        Call it again when the turn detector has judged the pause or the transcript has changed. If the pause has
        already lasted longer than the new result, the turn ends at once. `speaker` is used for "auto" only.
        """
        speaker = speaker if speaker and self.eagerness == "auto" else SpeakerPauses()
        silence = silence_for(evidence, self.threshold, speaker.scale, shift=speaker.shift)
        return int(min(self.max_silence_ms, silence))


@lru_cache(256)
def _cues(text: str, language: str | None) -> WordCues:
    return word_cues(text, language)


def semantic_vad(eagerness: Eagerness = "auto", expects: Expects | None = None) -> ServerVad:
    """Return the settings of `semantic_vad` with a client's eagerness and hint, and with the default threshold and
    padding.
    """
    return ServerVad(silence_duration_ms=MAX_SILENCE_MS[eagerness], eagerness=eagerness, expects=expects)
