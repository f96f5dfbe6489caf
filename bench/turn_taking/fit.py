"""Fits the end-of-turn model to the pauses of pauses.py, and writes its table.

    python -m bench.turn_taking.fit [--pauses FILE] [--out TABLE]

It needs no audio and no models. Its only input is a file of pauses.py: bench/results/turns-pauses.json, unless
`--pauses` names another, such as one of another turn detector. It computes the same table on every machine. Only the
speakers of `replay.is_fitted` count. The pauses of one recording weigh at most as much as MAX_PAUSES pauses, so that
long readings do not outweigh conversations.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench.turn_taking.pauses import PAUSES, Pause, read
from bench.turn_taking.replay import Speaker, earlier, evidence_of, is_fitted, listening, renamed, speakers

from antiphon.turns.end_of_turn import (
    MAX_SILENCE_MS,
    MIN_SILENCE_MS,
    EndOfTurnTable,
    completeness,
    features,
    shift_of,
)

TABLE = Path(__file__).resolve().parents[2] / "src" / "antiphon" / "turns" / "end_of_turn_table.py"
MAX_PAUSES = 10.0
# Prior of the weights, as (mean, standard deviation). The recordings have few fillers and hardly any dictation, so the
# weights of these stay close to the prior.
PRIOR: Mapping[str, tuple[float, float]] = {
    "bias": (0.0, 10.0),
    "sound": (0.5, 1.0),
    "sound sure": (0.0, 1.0),
    "stop": (0.5, 1.0),
    "question": (1.0, 1.0),
    "open": (-1.0, 1.0),
    "dangling": (-2.0, 1.0),
    "auxiliary": (-1.0, 1.0),
    "filler": (-2.0, 1.0),
    "dictating": (-1.5, 1.0),
    "listing": (-1.0, 1.0),
    "complete": (2.0, 1.0),
}
# By eagerness: upper limits, in seconds, of the median and of the 95th percentile of the wait at true ends of turns.
# The threshold is the highest one that keeps both limits for the fitted speakers.
WAITS_S = {"low": (0.8, 2.4), "medium": (0.4, 1.2), "high": (0.3, 0.8), "auto": (0.5, 2.0)}
KINDS = {"sound and words": (True, True), "sound": (True, False), "words": (False, True), "nothing": (False, False)}


def weights_of(pauses: Sequence[Pause]) -> np.ndarray:
    """Return the weight of each pause."""
    counts = Counter(p.recording for p in pauses if p.length_s is not None)
    return np.array([1.0 if p.length_s is None else min(1.0, MAX_PAUSES / counts[p.recording]) for p in pauses])


def logistic(pauses: Sequence[Pause], *, sound: bool = True, words: bool = True) -> dict[str, float]:
    """Return the most likely weights under the prior, by name, found by Newton's method.

    Without words or without sound, the features of that kind count as unknown for all pauses.
    """
    rows = [features(evidence_of(p, sound=sound, words=words)) for p in pauses]
    # A pause without a transcript has no word features.
    kept = [i for i, r in enumerate(rows) if not words or "stop" in r]
    names = [n for n in PRIOR if any(n in rows[i] for i in kept)]
    x = np.array([[rows[i][n] for n in names] for i in kept])
    y = np.array([pauses[i].length_s is None for i in kept], np.float64)
    weight = weights_of(pauses)[kept]
    mean, precision = np.array([PRIOR[n][0] for n in names]), np.array([PRIOR[n][1] ** -2.0 for n in names])

    def loss(w: np.ndarray) -> float:
        missed = (weight * np.logaddexp(0, np.where(y == 1, -1, 1) * (x @ w))).sum()
        return float(missed + 0.5 * (precision * (w - mean) ** 2).sum())

    w = mean.copy()
    for _ in range(50):
        p = 1 / (1 + np.exp(-x @ w))
        gradient = x.T @ (weight * (y - p)) - precision * (w - mean)
        hessian = (x * (weight * p * (1 - p))[:, None]).T @ x + np.diag(precision)
        step = np.linalg.solve(hessian, gradient)
        # A full step may go far beyond the optimum.
        while loss(w + step) > loss(w) and np.abs(step).max() > 1e-9:
            step = step / 2
        w = w + step
    return {n: round(float(v), 3) for n, v in zip(names, w, strict=True)}


def excess_s(pause: Pause) -> float:
    """Return the seconds from MIN_SILENCE_MS to the middle of the frame in which the pause ended."""
    assert pause.length_s is not None
    return max(0.0, pause.length_s - MIN_SILENCE_MS / 1000) + 0.016


def log_normal(pauses: Sequence[Pause]) -> tuple[float, float]:
    """Return the median of `excess_s` over these pauses, in seconds, and the standard deviation of its logarithm."""
    z, weight = np.log([excess_s(p) for p in pauses]), weights_of(pauses)
    location = np.average(z, weights=weight)
    spread = np.sqrt(np.average((z - location) ** 2, weights=weight))
    return round(float(np.exp(location)), 3), round(float(spread), 3)


def shrinkage(inner: Sequence[Pause]) -> float:
    """Return the number of a speaker's pauses that weigh as much as the prior, which is the same for all speakers.

    This is the variance of the logarithms within speakers, divided by the variance between speakers.
    """
    by_speaker: dict[str, list[float]] = {}
    for p in inner:
        by_speaker.setdefault(p.speaker, []).append(float(np.log(excess_s(p))))
    many = [np.array(v) for v in by_speaker.values() if len(v) >= 3]
    within = sum(((v - v.mean()) ** 2).sum() for v in many) / sum(len(v) - 1 for v in many)
    between = np.var([v.mean() for v in many], ddof=1) - within * np.mean([1 / len(v) for v in many])
    return round(float(np.clip(within / max(between, 1e-3), 1, 50)), 1)


def pauses_a_turn(pauses: Sequence[Pause]) -> float:
    """Return the number of real pauses in a turn."""
    real = [p for p in pauses if not p.mixed]
    is_end = np.array([p.length_s is None for p in real])
    weight = weights_of(real)
    return round(float(weight[~is_end].sum() / is_end.sum()), 2)


def turn_shrinkage(pauses: Sequence[Pause], table: EndOfTurnTable, typical: float) -> int:
    """Return the number of a speaker's turns that weigh as much as the typical number of pauses in a turn.

    It is the most likely one of 1 to 50. All pauses count the same here, because an answer may come into any of them.
    """
    real = renamed([p for p in pauses if not p.mixed])
    before = [earlier(p, real) for p in real]
    num_turns = [sum(p.length_s is None for p in found) for found in before]
    p = np.array([completeness(evidence_of(p), table) for p in real])
    logits = np.log(p / (1 - p))
    sides = np.array([-1 if p.length_s is None else 1 for p in real])

    def loss(shrinkage: int) -> float:
        counts = zip(before, num_turns, strict=True)
        shifts = np.array([shift_of(len(found) - turns, turns, typical, shrinkage) for found, turns in counts])
        return float(np.logaddexp(0, sides * (logits + shifts)).sum())

    return min(range(1, 51), key=loss)


def fit(pauses: Sequence[Pause]) -> dict[str, Any]:
    """Return the numbers fitted to the pauses of the fitted speakers, by their names in the table."""
    pauses = [p for p in pauses if is_fitted(p.speaker)]
    inner = [p for p in pauses if p.length_s is not None and not p.mixed]
    median_s, spread = log_normal(inner)
    found: dict[str, Any] = {
        "LOGISTIC": {name: logistic(pauses, sound=s, words=w) for name, (s, w) in KINDS.items()},
        "PAUSE_MEDIAN_S": median_s,
        "PAUSE_SPREAD": spread,
        "SPEAKER_SHRINKAGE": shrinkage(inner),
        "PAUSES_A_TURN": pauses_a_turn(pauses),
    }
    table = EndOfTurnTable(found["LOGISTIC"], median_s, spread)
    found["TURN_SHRINKAGE"] = turn_shrinkage(pauses, table, found["PAUSES_A_TURN"])
    return found | {"THRESHOLDS": thresholds(pauses, found)}


def thresholds(pauses: Sequence[Pause], numbers: Mapping[str, Any]) -> dict[str, float]:
    """Return the probability at which a turn ends, for each eagerness, in steps of 0.01."""
    table = EndOfTurnTable(numbers["LOGISTIC"], numbers["PAUSE_MEDIAN_S"], numbers["PAUSE_SPREAD"])
    pauses = renamed(pauses)
    ends = [p for p in pauses if p.length_s is None]
    own = speakers(pauses, numbers["PAUSES_A_TURN"], numbers["TURN_SHRINKAGE"])
    found = {}
    for eagerness, most_s in WAITS_S.items():
        for percent in range(99, 0, -1):
            speaker_of = own if eagerness == "auto" else lambda pause: Speaker()
            rule = listening(percent / 100, table, most_ms=MAX_SILENCE_MS[eagerness], speaker_of=speaker_of)
            waits = np.percentile([rule(p) / 1000 for p in ends], (50, 95))
            if all(waits <= np.array(most_s) + 1e-9):
                found[eagerness] = percent / 100
                break
    return found


def text_of(numbers: dict[str, Any], num_pauses: int, num_ends: int) -> str:
    """Return the source code of the module that has the table."""

    def rows(name: str) -> str:
        return "".join(f'    "{k}": {_literal(v)},\n' for k, v in numbers[name].items())

    return f'''"""The numbers of `end_of_turn.py`, made by `python -m bench.turn_taking.fit`; do not edit.

Fitted to {num_pauses} pauses inside turns and {num_ends} ends of turns in recordings
(bench/results/turns-pauses.json), of the speakers on one side of a split by speaker. The weights have a prior, which
decides if examples are few (bench/turn_taking/fit.py, PRIOR). `antiphon bench turns` measures the model on the other
speakers.
"""

from __future__ import annotations

from collections.abc import Mapping

# By the available evidence: the weight of each feature in the logit of the probability that the turn is over.
LOGISTIC: Mapping[str, Mapping[str, float]] = {{
{rows("LOGISTIC")}}}
# Of the pauses inside turns that last 0.2 s: the median of the seconds beyond, and the standard deviation of the
# natural logarithm of these seconds.
PAUSE_MEDIAN_S = {numbers["PAUSE_MEDIAN_S"]}
PAUSE_SPREAD = {numbers["PAUSE_SPREAD"]}
# The number of a speaker's pauses that weigh as much as the prior from all speakers.
SPEAKER_SHRINKAGE = {numbers["SPEAKER_SHRINKAGE"]}
# The number of pauses in a turn, and the number of a speaker's turns that weigh as much as this number.
PAUSES_A_TURN = {numbers["PAUSES_A_TURN"]}
TURN_SHRINKAGE = {numbers["TURN_SHRINKAGE"]}
# By eagerness: the probability that the turn is over at which it is ended.
THRESHOLDS: Mapping[str, float] = {{
{"".join(f'    "{k}": {v},{chr(10)}' for k, v in numbers["THRESHOLDS"].items())}}}
'''


def _literal(value: Any) -> str:
    if isinstance(value, dict):
        inner = "".join(f'        "{k}": {v},\n' for k, v in value.items())
        return "{\n" + inner + "    }"
    return str(value)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fit the end-of-turn model to the pauses of a turn detector.")
    parser.add_argument("--pauses", type=Path, default=PAUSES, help="file that pauses.py wrote")
    parser.add_argument("--out", type=Path, default=TABLE, help="module to write")
    args = parser.parse_args(argv)
    pauses = read(args.pauses)
    fitted = [p for p in pauses if is_fitted(p.speaker)]
    num_ends = sum(p.length_s is None for p in fitted)
    numbers = fit(pauses)
    args.out.write_text(text_of(numbers, len(fitted) - num_ends, num_ends), encoding="utf-8")
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
