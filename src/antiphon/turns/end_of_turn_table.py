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
        "bias": -2.524,
        "sound": 0.134,
        "sound sure": 0.358,
        "stop": 1.319,
        "question": 2.435,
        "open": -1.543,
        "dangling": -1.321,
        "auxiliary": -0.563,
        "filler": -2.0,
        "dictating": -1.5,
        "listing": -1.258,
        "complete": 1.526,
    },
    "sound": {
        "bias": -1.402,
        "sound": 0.232,
        "sound sure": 0.162,
    },
    "words": {
        "bias": -2.095,
        "stop": 1.648,
        "question": 2.214,
        "open": -1.587,
        "dangling": -1.404,
        "auxiliary": -0.666,
        "filler": -2.0,
        "dictating": -1.5,
        "listing": -1.223,
        "complete": 1.395,
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
# The number of pauses in a turn, and the number of a speaker's turns that weigh as much as this number.
PAUSES_A_TURN = 1.45
TURN_SHRINKAGE = 5
# By eagerness: the probability that the turn is over at which it is ended.
THRESHOLDS: Mapping[str, float] = {
    "low": 0.85,
    "medium": 0.63,
    "high": 0.49,
    "auto": 0.7,
}
