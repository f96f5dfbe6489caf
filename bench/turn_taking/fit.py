"""Fits the end-of-turn model to the pauses that were found, and writes its table.

    python -m bench.turn_taking.fit

It needs no audio and no models: bench/results/turns-pauses.json has all it takes, and gives the same table on every
machine. Only speakers of `replay.is_fitted` count. The pauses of a recording weigh at most as much as MAX_PAUSES
pauses, so that no long reading outweighs the conversations.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.turn_taking.pauses import Pause, read
from bench.turn_taking.replay import evidence_of, is_fitted

from antiphon.turns.end_of_turn import MIN_SILENCE_MS, features
from antiphon.turns.unfinished import word_cues

TABLE = Path(__file__).resolve().parents[2] / "src" / "antiphon" / "turns" / "end_of_turn_table.py"
MAX_PAUSES = 10.0
# What a weight is before anything is measured, as mean and standard deviation. The recordings have few fillers and
# hardly any dictation, so these stay near what is said here.
PRIOR: Mapping[str, tuple[float, float]] = {
    "bias": (0.0, 10.0),
    "sound": (0.5, 1.0),
    "stop": (0.5, 1.0),
    "question": (1.0, 1.0),
    "open": (-1.0, 1.0),
    "dangling": (-2.0, 1.0),
    "leaning": (-1.0, 1.0),
    "filler": (-2.0, 1.0),
    "dictating": (-1.5, 1.0),
    "complete": (2.0, 1.0),
    "words": (0.0, 1.0),
}
# The probability at which a turn is ended, by eagerness; "medium" was chosen on the fitted speakers (`choose`).
THRESHOLDS = {"low": 0.9, "medium": 0.8, "auto": 0.8, "high": 0.6}
KINDS = {"sound and words": (True, True), "sound": (True, False), "words": (False, True), "nothing": (False, False)}


def weights_of(pauses: Sequence[Pause]) -> np.ndarray:
    """The weight of each pause."""
    counts = Counter(p.recording for p in pauses if p.length_s is not None)
    return np.array([1.0 if p.length_s is None else min(1.0, MAX_PAUSES / counts[p.recording]) for p in pauses])


def logistic(
    pauses: Sequence[Pause],
    *,
    sound: bool = True,
    words: bool = True,
    rows: Sequence[Mapping[str, float]] | None = None,
    prior: Mapping[str, tuple[float, float]] = PRIOR,
) -> dict[str, float]:
    """The most likely weights by name, given the prior, by Newton's method. Without words, or without sound, the
    pauses count as if those were not known. rows: the features of each pause; None: those of the model.
    """
    if rows is None:
        rows = [features(evidence_of(p, sound=sound, words=words)) for p in pauses]
        # A pause without a transcript has no features of words.
        kept = [i for i, r in enumerate(rows) if not words or "stop" in r]
    else:
        kept = list(range(len(rows)))
    names = [n for n in prior if any(n in rows[i] for i in kept)]
    x = np.array([[rows[i][n] for n in names] for i in kept])
    y = np.array([pauses[i].length_s is None for i in kept], np.float64)
    weight = weights_of(pauses)[kept]
    mean, precision = np.array([prior[n][0] for n in names]), np.array([prior[n][1] ** -2.0 for n in names])

    def loss(w: np.ndarray) -> float:
        missed = (weight * np.logaddexp(0, np.where(y == 1, -1, 1) * (x @ w))).sum()
        return float(missed + 0.5 * (precision * (w - mean) ** 2).sum())

    w = mean.copy()
    for _ in range(50):
        p = 1 / (1 + np.exp(-x @ w))
        gradient = x.T @ (weight * (y - p)) - precision * (w - mean)
        hessian = (x * (weight * p * (1 - p))[:, None]).T @ x + np.diag(precision)
        step = np.linalg.solve(hessian, gradient)
        # A whole step may overshoot far from the optimum.
        while loss(w + step) > loss(w) and np.abs(step).max() > 1e-9:
            step = step / 2
        w = w + step
    return {n: round(float(v), 3) for n, v in zip(names, w, strict=True)}


def excess_s(pause: Pause) -> float:
    """Seconds beyond MIN_SILENCE_MS, to the middle of the frame in which the pause ended."""
    assert pause.length_s is not None
    return max(0.0, pause.length_s - MIN_SILENCE_MS / 1000) + 0.016


def log_logistic(pauses: Sequence[Pause], weight: np.ndarray) -> tuple[float, float]:
    """The median in seconds, and the shape, of the log-logistic distribution of the excess of pauses inside turns."""
    z = np.log([excess_s(p) for p in pauses])
    # The logarithms are logistic; its location and scale by Newton's method on (location, log scale).
    location, log_scale = float(np.average(z, weights=weight)), float(np.log(z.std() / 1.8))
    for _ in range(200):
        scale = np.exp(log_scale)
        u = (z - location) / scale
        t = np.tanh(u / 2)
        gradient = np.array([(weight * t).sum() / scale, (weight * (u * t - 1)).sum()])
        slope = (1 - t**2) / 2
        curvature = np.array(
            [
                [(weight * slope).sum() / scale**2, (weight * (u * slope + t)).sum() / scale],
                [(weight * (u * slope + t)).sum() / scale, (weight * (u**2 * slope + u * t)).sum()],
            ]
        )
        step = np.linalg.solve(curvature + 1e-6 * np.eye(2), gradient)
        location, log_scale = location + 0.5 * step[0], log_scale + 0.5 * step[1]
    return round(float(np.exp(location)), 3), round(float(np.exp(-log_scale)), 3)


def shrinkage(inner: Sequence[Pause]) -> float:
    """How many pauses of a speaker weigh as much as what is known of all: the variance of the logarithms within
    speakers over that between speakers.
    """
    by_speaker: dict[str, list[float]] = {}
    for p in inner:
        by_speaker.setdefault(p.speaker, []).append(float(np.log(excess_s(p))))
    many = [np.array(v) for v in by_speaker.values() if len(v) >= 3]
    within = sum(((v - v.mean()) ** 2).sum() for v in many) / sum(len(v) - 1 for v in many)
    between = np.var([v.mean() for v in many], ddof=1) - within * np.mean([1 / len(v) for v in many])
    return round(float(np.clip(within / max(between, 1e-3), 1, 50)), 1)


def is_unfinished(pause: Pause) -> bool:
    return word_cues(pause.text, pause.language).unfinished


def fit(pauses: Sequence[Pause], *, every_speaker: bool = False) -> dict[str, Any]:
    """The fitted numbers by their names in the table, from the pauses of the speakers that are fitted, or of all."""
    pauses = [p for p in pauses if every_speaker or is_fitted(p.speaker)]
    inner = [p for p in pauses if p.length_s is not None and not p.mixed]
    weight = weights_of(inner)
    split = {"unfinished": [is_unfinished(p) for p in inner]}
    split |= {"finished": [not u for u in split["unfinished"]], "unknown": [True] * len(inner)}
    survival = {
        name: log_logistic([p for p, m in zip(inner, mask, strict=True) if m], weight[np.array(mask)])
        for name, mask in split.items()
    }
    return {
        "LOGISTIC": {name: logistic(pauses, sound=s, words=w) for name, (s, w) in KINDS.items()},
        "SURVIVAL": survival,
        "SPEAKER_SHRINKAGE": shrinkage(inner),
    }


def text_of(numbers: dict[str, Any], thresholds: Mapping[str, float], num_pauses: int, num_ends: int) -> str:
    """The source of the table's module."""

    def rows(name: str) -> str:
        return "".join(f'    "{k}": {_literal(v)},\n' for k, v in numbers[name].items())

    return f'''"""The numbers of `end_of_turn.py`, made by `python -m bench.turn_taking.fit`; do not edit.

Fitted to {num_pauses} pauses inside turns and {num_ends} ends of turns in recordings (bench/results/turns-pauses.json), of the
speakers of one side of a split by speaker. The weights have a prior, which decides where there are few examples
(bench/turn_taking/fit.py, PRIOR). What the model is worth on the other speakers is measured by `antiphon bench turns`.
"""

from __future__ import annotations

from collections.abc import Mapping

# By what is known of a pause: the weight of each feature in the logit of the probability that the turn is over.
LOGISTIC: Mapping[str, Mapping[str, float]] = {{
{rows("LOGISTIC")}}}
# By what the words are: the median, in seconds beyond 0.2, and the shape of the log-logistic distribution of pauses
# inside turns.
SURVIVAL: Mapping[str, tuple[float, float]] = {{
{rows("SURVIVAL")}}}
# So many pauses of a speaker weigh as much as what is known of all speakers.
SPEAKER_SHRINKAGE = {numbers["SPEAKER_SHRINKAGE"]}
# By eagerness: the probability that the turn is over at which it is ended.
THRESHOLDS: Mapping[str, float] = {{
{"".join(f'    "{k}": {v},{chr(10)}' for k, v in thresholds.items())}}}
'''


def _literal(value: Any) -> str:
    if isinstance(value, dict):
        inner = "".join(f'        "{k}": {v},\n' for k, v in value.items())
        return "{\n" + inner + "    }"
    return str(value)


def main() -> None:
    pauses = read()
    fitted = [p for p in pauses if is_fitted(p.speaker)]
    num_ends = sum(p.length_s is None for p in fitted)
    numbers = fit(pauses)
    TABLE.write_text(text_of(numbers, THRESHOLDS, len(fitted) - num_ends, num_ends), encoding="utf-8")
    print(f"written: {TABLE}")


if __name__ == "__main__":
    main()
