"""The numbers of `end_of_turn.py`, made by `python -m bench.turn_taking.fit`; do not edit.

Fitted to 280 pauses inside turns and 95 ends of turns in recordings
(bench/results/turns-pauses.json), of the speakers on one side of a split by speaker. The weights have a prior, which
decides if examples are few (bench/turn_taking/fit.py, PRIOR). `antiphon bench turns` measures the model on the other
speakers.
"""

from __future__ import annotations

from collections.abc import Mapping

# By the available evidence: the weight of each feature in the logit of the probability that the turn is over.
LOGISTIC: Mapping[str, Mapping[str, float]] = {
    "sound and words": {
        "bias": -2.539,
        "sound": 0.132,
        "sound sure": 0.36,
        "stop": 1.328,
        "question": 2.446,
        "open": -1.566,
        "dangling": -1.319,
        "auxiliary": -0.56,
        "filler": -2.0,
        "dictating": -1.5,
        "complete": 1.529,
    },
    "sound": {
        "bias": -1.402,
        "sound": 0.232,
        "sound sure": 0.162,
    },
    "words": {
        "bias": -2.109,
        "stop": 1.657,
        "question": 2.225,
        "open": -1.593,
        "dangling": -1.401,
        "auxiliary": -0.663,
        "filler": -2.0,
        "dictating": -1.5,
        "complete": 1.398,
    },
    "nothing": {
        "bias": -0.798,
    },
}
# Of the pauses inside turns that last 0.2 s: the median of the seconds beyond, and the standard deviation of the
# natural logarithm of these seconds.
PAUSE_MEDIAN_S = 0.214
PAUSE_SPREAD = 1.047
# The number of a speaker's pauses that weigh as much as the prior from all speakers.
SPEAKER_SHRINKAGE = 1.9
# By eagerness: the probability that the turn is over at which it is ended.
THRESHOLDS: Mapping[str, float] = {
    "low": 0.85,
    "medium": 0.64,
    "high": 0.49,
    "auto": 0.76,
}
