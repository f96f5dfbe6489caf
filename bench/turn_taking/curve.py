"""The section `curve` of `antiphon bench turns`: early ends of turns against waiting, by eagerness.

It replays the pauses that pauses.py found, for the speakers that the model was not fitted to. It needs no audio.
"""

from __future__ import annotations

from typing import Any

from bench.common import table
from bench.turn_taking.pauses import Pause, read
from bench.turn_taking.replay import WORDS_MS, at_eagerness, is_fitted, outcome, renamed, turn_detector_alone

# Kinds of recordings that are not turns of a conversation: a page that is read aloud, or ten unrelated sentences. A
# listener could take the floor at many of their pauses.
MONOLOGUES = ("longform", "asr_8k_native", "asr_spontaneous_min")
EAGERNESS = ("low", "medium", "high", "auto")


def curve(words_ms: float = WORDS_MS) -> dict[str, Any]:
    """Return the outcome of each eagerness and of Smart Turn alone ("as today"), for each group of pauses."""
    tested = renamed([p for p in read() if not is_fitted(p.speaker)])

    def is_dialogue(pause: Pause) -> bool:
        return pause.kind not in MONOLOGUES

    inner, ends = [p for p in tested if p.length_s is not None], [p for p in tested if p.length_s is None]
    real = [p for p in inner if not p.mixed]
    groups = {
        "real": (real, ends),
        "real, without monologues": (list(filter(is_dialogue, real)), list(filter(is_dialogue, ends))),
        "mixed in": ([p for p in inner if p.mixed], ends),
    }
    rules = {"as today": turn_detector_alone(0.5)}
    rules |= {eagerness: at_eagerness(eagerness, tested, words_ms=words_ms) for eagerness in EAGERNESS}
    out: dict[str, Any] = {}
    for group, (between, behind) in groups.items():
        out[group] = {name: outcome(rule, between, behind).row() for name, rule in rules.items()}
        heads = (
            "",
            "cut off, %",
            "95 %: low",
            "high",
            "talked into, %",
            "wait p50",
            "wait p95",
            "mean",
            "pauses",
            "ends",
        )
        table(group, heads, [(name, *row.values()) for name, row in out[group].items()])
    return {"words_known_ms": words_ms, "settings": out}
