"""The numbers of `end_of_turn.py`, made by `python -m bench.turn_taking.fit`; do not edit.

Fitted to 280 pauses inside turns and 95 ends of turns in recordings (bench/results/turns-pauses.json), of the
speakers of one side of a split by speaker. The weights have a prior, which decides where there are few examples
(bench/turn_taking/fit.py, PRIOR). What the model is worth on the other speakers is measured by `antiphon bench turns`.
"""

from __future__ import annotations

from collections.abc import Mapping

# By what is known of a pause: the weight of each feature in the logit of the probability that the turn is over.
LOGISTIC: Mapping[str, Mapping[str, float]] = {
    "sound and words": {
        "bias": -3.035,
        "sound": 0.262,
        "stop": 1.143,
        "question": 2.392,
        "open": -1.636,
        "dangling": -1.315,
        "leaning": -0.252,
        "filler": -2.015,
        "dictating": -1.5,
        "complete": 1.958,
        "words": 0.36,
    },
    "sound": {
        "bias": -1.342,
        "sound": 0.287,
    },
    "words": {
        "bias": -2.695,
        "stop": 1.521,
        "question": 2.295,
        "open": -1.666,
        "dangling": -1.443,
        "leaning": -0.475,
        "filler": -2.016,
        "dictating": -1.5,
        "complete": 1.878,
        "words": 0.324,
    },
    "nothing": {
        "bias": -0.798,
    },
}
# By what the words are: the median, in seconds beyond 0.2, and the shape of the log-logistic distribution of pauses
# inside turns.
SURVIVAL: Mapping[str, tuple[float, float]] = {
    "unfinished": (0.189, 1.617),
    "finished": (0.228, 1.596),
    "unknown": (0.213, 1.599),
}
# So many pauses of a speaker weigh as much as what is known of all speakers.
SPEAKER_SHRINKAGE = 1.9
# By eagerness: the probability that the turn is over at which it is ended.
THRESHOLDS: Mapping[str, float] = {
    "low": 0.9,
    "medium": 0.8,
    "auto": 0.8,
    "high": 0.6,
}
