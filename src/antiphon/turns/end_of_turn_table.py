"""The numbers of `end_of_turn.py`, made by `python -m bench.turn_taking.fit`; do not edit.

Fitted to 110 pauses inside turns and 122 ends of turns in recordings (bench/results/turns-pauses.json), of the
speakers of one side of a split by speaker. The weights have a prior, which decides where there are few examples
(bench/turn_taking/fit.py, PRIOR). What the model is worth on the other speakers is measured by `antiphon bench turns`.
"""

from __future__ import annotations

from collections.abc import Mapping

# By what is known of a pause: the weight of each feature in the logit of the probability that the turn is over.
LOGISTIC: Mapping[str, Mapping[str, float]] = {
    "sound and words": {
        "bias": -1.846,
        "sound": 0.206,
        "stop": 0.809,
        "question": 2.36,
        "open": -1.92,
        "dangling": -1.535,
        "leaning": 0.563,
        "filler": -2.039,
        "dictating": -0.729,
        "complete": 1.915,
        "words": 0.366,
    },
    "sound": {
        "bias": -0.295,
        "sound": 0.22,
    },
    "words": {
        "bias": -1.552,
        "stop": 1.048,
        "question": 2.196,
        "open": -1.981,
        "dangling": -1.609,
        "leaning": 0.137,
        "filler": -2.098,
        "dictating": -0.763,
        "complete": 1.809,
        "words": 0.345,
    },
    "nothing": {
        "bias": 0.122,
    },
}
# By what the words are: the median, in seconds beyond 0.2, and the shape of the log-logistic distribution of pauses
# inside turns.
SURVIVAL: Mapping[str, tuple[float, float]] = {
    "unfinished": (0.141, 1.412),
    "finished": (0.155, 1.949),
    "unknown": (0.15, 1.726),
}
# The median of all pauses inside turns, in seconds beyond 0.2.
TYPICAL_EXCESS_S = 0.168
# So many pauses of a speaker weigh as much as what is known of all speakers.
SPEAKER_SHRINKAGE = 5.9
# By eagerness: the probability that the turn is over at which it is ended.
THRESHOLDS: Mapping[str, float] = {
    "low": 0.9,
    "medium": 0.8,
    "auto": 0.8,
    "high": 0.6,
}
