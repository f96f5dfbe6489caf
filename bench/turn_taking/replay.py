"""Applies rules that end turns to the recorded pauses, and counts. Pure functions, without audio and models.

For each pause, a rule returns the silence after which it ends the turn. If the pause is inside a turn and lasts that
long, this is a false cut-off. If the pause is the end of the turn, that silence is the wait.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from bench.turn_taking.pauses import Pause

from antiphon.turns.end_of_turn import (
    FITTED,
    EndOfTurn,
    EndOfTurnTable,
    PauseEvidence,
    SpeakerPauses,
    shift_of,
    silence_for,
)

# Milliseconds of silence until the turn detector has judged: it starts at 224 ms, a frame's end, and takes 30 ms.
JUDGED_MS = 256
# Milliseconds of silence until the transcript is available: decoding starts at 64 ms, and takes 250 ms for ten seconds
# of audio (Whisper base on a core of its own).
WORDS_MS = 336
# Milliseconds from the end of a turn to the first audio of its answer, and from the start of the silence at least: the
# answer is prepared in the pause, which takes this long on two cores.
ANSWER_MS, SOONEST_MS = 100, 600
RESAMPLES = 2000
Rule = Callable[[Pause], float]


@dataclass(frozen=True, slots=True)
class Speaker:
    """What a session knows about a speaker, see `SpeakerPauses`; by default nothing."""

    scale: float = 1.0
    shift: float = 0.0


# Seed of the split into fitted speakers and others. It is the smallest number that gives each side at least two fifths
# of the real pauses and of the ends. No score was looked at.
SPLIT = 1


def is_fitted(speaker: str) -> bool:
    """Return whether the model is fitted to this speaker's pauses. All other speakers only test the model."""
    return hashlib.sha256(f"{SPLIT} {speaker}".encode()).digest()[0] % 2 == 0


def evidence_of(pause: Pause, *, sound: bool = True, words: bool = True) -> PauseEvidence:
    """Return what a server knows in the pause, without the judgement by sound or without the words if so asked."""
    return PauseEvidence(pause.complete if sound else None, pause.text if words else "", pause.language)


def turn_detector_alone(threshold: float, complete_ms: float = 300, patience_ms: float = 4000) -> Rule:
    """Return a rule: a turn that sounds complete ends after `complete_ms`, and any other turn after `patience_ms`."""
    return lambda pause: complete_ms if pause.complete >= threshold else patience_ms


def _first_end(pause: Pause, silence_ms: Callable[[PauseEvidence], float], words_ms: float) -> float:
    early = max(JUDGED_MS, silence_ms(evidence_of(pause, words=False)))
    return early if early <= words_ms else max(words_ms, silence_ms(evidence_of(pause)))


def listening(
    threshold: float,
    table: EndOfTurnTable = FITTED,
    *,
    words_ms: float = WORDS_MS,
    most_ms: float = 4000,
    speaker_of: Callable[[Pause], Speaker] = lambda pause: Speaker(),
) -> Rule:
    """Return a rule: the end-of-turn model with a threshold. It decides by sound until the transcript is available."""

    def end(pause: Pause) -> float:
        who = speaker_of(pause)
        return _first_end(
            pause, lambda e: min(most_ms, silence_for(e, threshold, who.scale, table, who.shift)), words_ms
        )

    return end


def at_eagerness(eagerness: str, pauses: Sequence[Pause] = (), *, words_ms: float = WORDS_MS) -> Rule:
    """Return a rule: the end-of-turn model of a session that heard the speaker's earlier pauses, which `pauses` has."""
    model = EndOfTurn(eagerness)

    def end(pause: Pause) -> float:
        speaker = heard_before(pause, pauses)
        return _first_end(pause, lambda e: model.silence_ms(e, speaker), words_ms)

    return end


def earlier(pause: Pause, pauses: Sequence[Pause]) -> list[Pause]:
    """Return the speaker's real pauses and ends before this pause. The recordings count in the order of their names."""
    known = [p for p in pauses if p.speaker == pause.speaker and not p.mixed]
    before = [p for p in known if (p.recording, p.at_s) < (pause.recording, pause.at_s)]
    return sorted(before, key=lambda p: (p.recording, p.at_s))


def heard_before(pause: Pause, pauses: Sequence[Pause]) -> SpeakerPauses:
    """Return the speaker's pauses, in turns, before this one."""
    speaker = SpeakerPauses()
    for one in earlier(pause, pauses):
        if one.length_s is None:
            speaker.end_turn()
        else:
            speaker.add(round(one.length_s * 1000))
    return speaker


def speakers(pauses: Sequence[Pause], typical: float, shrinkage: float) -> Callable[[Pause], Speaker]:
    """Return a function from each of these pauses to its speaker, as known before the pause.

    `typical` and `shrinkage`: as of `end_of_turn.shift_of`.
    """
    found = {}
    for pause in pauses:
        before = earlier(pause, pauses)
        num_turns = sum(p.length_s is None for p in before)
        shifted = shift_of(len(before) - num_turns, num_turns, typical, shrinkage)
        found[pause.recording, pause.at_s] = Speaker(heard_before(pause, pauses).scale, shifted)
    return lambda pause: found[pause.recording, pause.at_s]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of applying a rule to pauses."""

    # Share of the pauses inside turns at which the rule ended the turn.
    cut_off: float
    # Lower bound of the 95 % interval of `cut_off`.
    low: float
    # Upper bound of the 95 % interval of `cut_off`.
    high: float
    # Share of the pauses inside turns in which the answer is heard.
    talked_into: float
    # Median silence at true ends, in seconds.
    wait_p50_s: float
    # 95th percentile of the silence at true ends, in seconds.
    wait_p95_s: float
    # Mean silence at true ends, in seconds.
    wait_mean_s: float
    # Number of pauses inside turns.
    num_pauses: int
    # Number of ends of turns.
    num_ends: int

    def row(self) -> dict[str, Any]:
        """Return the outcome for the results, in percent and seconds."""
        return {
            "cut_off_percent": round(100 * self.cut_off, 1),
            "low": round(100 * self.low, 1),
            "high": round(100 * self.high, 1),
            "talked_into_percent": round(100 * self.talked_into, 1),
            "wait_p50_s": round(self.wait_p50_s, 3),
            "wait_p95_s": round(self.wait_p95_s, 3),
            "wait_mean_s": round(self.wait_mean_s, 3),
            "pauses": self.num_pauses,
            "ends": self.num_ends,
        }


def outcome(rule: Rule, inner: Sequence[Pause], ends: Sequence[Pause], resamples: int = RESAMPLES) -> Outcome:
    """Return the outcome of a rule for these pauses.

    Intervals come from a bootstrap over speakers with this number of resamples; with 0, they are the share itself.
    """
    cut = np.array([rule(p) <= 1000 * (p.length_s or 0) for p in inner], np.float64)
    waits = np.array([rule(p) / 1000 for p in ends], np.float64)
    into = np.array([max(rule(p) + ANSWER_MS, SOONEST_MS) <= 1000 * (p.length_s or 0) for p in inner], np.float64)
    low = high = float(cut.mean())
    if resamples:
        low, high = _interval(cut, [p.speaker for p in inner], resamples)
    p50, p95 = np.percentile(waits, (50, 95))
    shares = float(cut.mean()), low, high, float(into.mean())
    return Outcome(*shares, float(p50), float(p95), float(waits.mean()), len(inner), len(ends))


def _interval(values: np.ndarray, speakers: Sequence[str], resamples: int) -> tuple[float, float]:
    names = sorted(set(speakers))
    sums = np.array([sum(v for v, s in zip(values, speakers, strict=True) if s == n) for n in names])
    counts = np.array([sum(s == n for s in speakers) for n in names], np.float64)
    chosen = np.random.default_rng(0).integers(0, len(names), (resamples, len(names)))
    low, high = np.percentile(sums[chosen].sum(1) / counts[chosen].sum(1), (2.5, 97.5))
    return float(low), float(high)


def renamed(pauses: Sequence[Pause]) -> list[Pause]:
    """Return the same pauses, but each recording of the nameless crowd is a separate speaker, which intervals need."""
    return [replace(p, speaker=p.recording) if p.speaker == "barista" else p for p in pauses]
