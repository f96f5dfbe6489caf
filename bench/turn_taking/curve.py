"""The section `curve` of `antiphon bench turns`: false cut-offs against waiting, for rules that end turns.

It replays the pauses that pauses.py found, on speakers that were never fitted, and needs no audio.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench.common import table
from bench.turn_taking.fit import fit
from bench.turn_taking.pauses import Pause, read
from bench.turn_taking.replay import (
    WORDS_MS,
    Rule,
    at_eagerness,
    is_fitted,
    listening,
    outcome,
    renamed,
    scales,
    silence_alone,
    turn_detector_alone,
)

from antiphon.turns.end_of_turn import FITTED, EndOfTurnTable

TARGETS_S = (0.3, 0.6)
# Of these no kind is a turn of a conversation: somebody reads a page, or ten sentences that have nothing to do with
# each other, and a listener could take the floor at many of their pauses.
MONOLOGUES = ("longform", "asr_8k_native", "asr_spontaneous_min")
EAGERNESS = ("low", "medium", "high", "auto")
FOLDS = 5
THRESHOLDS = tuple(1 / (1 + np.exp(-x)) for x in np.linspace(-5, 9, 141))
SILENCES_MS = tuple(range(200, 4001, 50))


TODAY, SOUND, WORDS, SPEAKER = (
    "Smart Turn alone",
    "sound and pause length",
    "and words",
    "and the speaker's own pauses",
)
# The median and the 95th percentile of the wait that the default setting is to keep to, in seconds.
GOAL_S = (0.4, 1.2)


def _rules(
    pauses: Sequence[Pause], words_ms: float = WORDS_MS, table_of: Callable[[Pause], EndOfTurnTable] = lambda p: FITTED
) -> dict[str, Callable[[float], Iterable[Rule]]]:
    """The rules of each method, for a median wait in seconds that is wanted, where that changes them."""
    own = scales(pauses)

    def model(threshold: float, **options: Any) -> Rule:
        return lambda pause: listening(threshold, table_of(pause), words_ms=words_ms, **options)(pause)

    return {
        "silence alone": lambda target: (silence_alone(ms) for ms in (*SILENCES_MS, 1000 * target)),
        TODAY: lambda target: (turn_detector_alone(t, 1000 * target) for t in THRESHOLDS),
        SOUND: lambda target: (model(t, words=False) for t in THRESHOLDS),
        WORDS: lambda target: (model(t) for t in THRESHOLDS),
        SPEAKER: lambda target: (model(t, scale_of=own) for t in THRESHOLDS),
    }


def best_at(
    rules: Iterable[Rule], inner: Sequence[Pause], ends: Sequence[Pause], p50_s: float, p95_s: float = 100.0
) -> dict[str, Any]:
    """The outcome of the rule with the fewest false cut-offs whose wait is at most `p50_s` in the median and `p95_s` in
    the 95th percentile. It is chosen on the pauses that it is judged by, for every method alike.
    """
    tried = [(outcome(rule, inner, ends, interval=False), rule) for rule in rules]
    kept = [
        (o.cut_off, o.wait_p95_s, i)
        for i, (o, _) in enumerate(tried)
        if o.wait_p50_s <= p50_s + 1e-9 and o.wait_p95_s <= p95_s + 1e-9
    ]
    return outcome(tried[min(kept)[2]][1], inner, ends).row() if kept else {}


def groups(pauses: Sequence[Pause]) -> dict[str, tuple[list[Pause], list[Pause]]]:
    """The pauses inside turns and the true ends, of each group that is reported."""
    inner = [p for p in pauses if p.length_s is not None]
    ends = [p for p in pauses if p.length_s is None]
    real = [p for p in inner if not p.mixed]
    return {
        "real": (real, ends),
        "real, without monologues": (
            [p for p in real if p.kind not in MONOLOGUES],
            [p for p in ends if p.kind not in MONOLOGUES],
        ),
        "mixed in": ([p for p in inner if p.mixed], ends),
    }


def fold_of(speaker: str) -> int:
    return hashlib.sha256(f"fold {speaker}".encode()).digest()[0] % FOLDS


def crossed(pauses: Sequence[Pause]) -> Callable[[Pause], EndOfTurnTable]:
    """For each pause, the numbers that are fitted to the speakers of the other folds."""
    tables = []
    for fold in range(FOLDS):
        found = fit([p for p in pauses if fold_of(p.speaker) != fold], every_speaker=True)
        tables.append(EndOfTurnTable(found["LOGISTIC"], found["PAUSE_MEDIAN_S"], found["PAUSE_SPREAD"]))
    # A recording of the crowd has a name of its own in intervals, and the crowd's fold.
    return lambda p: tables[fold_of("barista" if p.corpus == "Picovoice barista" else p.speaker)]


def targets_of(
    rules: dict[str, Callable[[float], Iterable[Rule]]], inner: Sequence[Pause], ends: Sequence[Pause]
) -> dict[str, dict[str, Any]]:
    """What each method does at each target."""
    out = {
        f"a median wait of {target} s": {
            name: best_at(make(target), inner, ends, target) for name, make in rules.items()
        }
        for target in TARGETS_S
    }
    p50, p95 = GOAL_S
    # With both bounds, Smart Turn's patience is the second.
    both = rules | {TODAY: lambda target: (turn_detector_alone(t, 1000 * p50, 1000 * p95) for t in THRESHOLDS)}
    out[f"waits of {p50} s in the median and {p95} s in the 95th percentile"] = {
        name: best_at(make(p50), inner, ends, p50, p95) for name, make in both.items()
    }
    return out


def curve(words_ms: float = WORDS_MS) -> dict[str, Any]:
    """Measure all methods, print the tables, and return the figures."""
    every = read()
    tested = renamed([p for p in every if not is_fitted(p.speaker)])
    out: dict[str, Any] = {"words_known_ms": words_ms, "at": {}, "settings": {}, "all_speakers": {}, "words_later": {}}
    rules = _rules(tested, words_ms)
    for group, (inner, ends) in groups(tested).items():
        out["at"][group] = targets_of(rules, inner, ends)
        out["settings"][group] = {
            "as today": outcome(turn_detector_alone(0.5), inner, ends).row(),
            **{e: outcome(at_eagerness(e, tested, words_ms=words_ms), inner, ends).row() for e in EAGERNESS},
        }
    together = renamed(every)
    rules = _rules(together, words_ms, crossed(every))
    for group, (inner, ends) in groups(together).items():
        out["all_speakers"][group] = targets_of(rules, inner, ends)
    inner, ends = groups(tested)["real"]
    for later in (256.0, 400.0, 600.0):
        make = _rules(tested, later)[WORDS]
        out["words_later"][f"{later:.0f} ms"] = {
            f"{target} s": best_at(make(target), inner, ends, target) for target in TARGETS_S
        }
    out["kinds"] = _kinds(tested)
    _print(out)
    return out


def _kinds(tested: Sequence[Pause]) -> dict[str, Any]:
    """The real pauses by kind of recording, as today and at the eagerness "auto"."""
    found = {}
    auto, today = at_eagerness("auto", tested), turn_detector_alone(0.5)
    for kind in sorted({p.kind for p in tested}):
        pauses = [p for p in tested if p.kind == kind and not p.mixed]
        inner, ends = groups(pauses)["real"]
        ended = [sum(rule(p) <= 1000 * (p.length_s or 0) for p in inner) for rule in (today, auto)]
        waits = [float(np.median([rule(p) for p in ends])) / 1000 if ends else None for rule in (today, auto)]
        found[kind] = {
            "pauses": len(inner),
            "ended_today": ended[0],
            "ended_auto": ended[1],
            "ends": len(ends),
            "wait_p50_today_s": waits[0],
            "wait_p50_auto_s": waits[1],
        }
    return found


def _print(out: dict[str, Any]) -> None:
    head = ("", "cut off, %", "95 %", "wait p50", "wait p95", "pauses", "ends")

    def line(name: str, row: dict[str, Any]) -> tuple[Any, ...]:
        if not row:
            return (name, "-", "-", "-", "-", "-", "-")
        interval = f"{row['low']}-{row['high']}"
        return (
            name,
            row["cut_off_percent"],
            interval,
            row["wait_p50_s"],
            row["wait_p95_s"],
            row["pauses"],
            row["ends"],
        )

    for group, targets in out["at"].items():
        for target, methods in targets.items():
            table(f"{group}: at {target}", head, [line(n, r) for n, r in methods.items()])
        table(f"{group}: settings", head, [line(n, r) for n, r in out["settings"][group].items()])
    for group, targets in out["all_speakers"].items():
        for target, methods in targets.items():
            title = f"all speakers, fitted to others: {group}, at {target}"
            table(title, head, [line(n, r) for n, r in methods.items()])
    for later, targets in out["words_later"].items():
        table(f"words known at {later}, real", head, [line(n, r) for n, r in targets.items()])
    kinds = out["kinds"]
    table("by kind", ("", *next(iter(kinds.values()))), [(k, *r.values()) for k, r in kinds.items()])


def points(
    name: str, make: Callable[[float], Iterable[Rule]], inner: Sequence[Pause], ends: Sequence[Pause]
) -> list[tuple[float, float]]:
    """The curve of a method: median wait in seconds, and false cut-offs in percent."""
    if name == TODAY:
        # Both of its numbers are free: for each silence that ends a complete turn, the best threshold.
        made = [best_at(make(ms / 1000), inner, ends, ms / 1000) for ms in range(200, 1001, 50)]
        return [(r["wait_p50_s"], r["cut_off_percent"]) for r in made if r]
    found = [outcome(rule, inner, ends, interval=False) for rule in make(0.3)]
    return sorted((o.wait_p50_s, 100 * o.cut_off) for o in found)


def plot(document: dict[str, Any], folder: Path) -> None:
    """Write turns-curve.png: false cut-offs against the median wait, for real pauses of speakers never fitted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tested = renamed([p for p in read() if not is_fitted(p.speaker)])
    figure, both = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axes, group in zip(both, ("real", "real, without monologues"), strict=True):
        inner, ends = groups(tested)[group]
        for name, make in _rules(tested).items():
            xy = points(name, make, inner, ends)
            axes.plot([x for x, _ in xy], [y for _, y in xy], label=name)
        row = document["curve"]["settings"][group]
        for setting, mark in (("as today", "x"), ("medium", "o"), ("auto", "s")):
            axes.plot(row[setting]["wait_p50_s"], row[setting]["cut_off_percent"], mark, color="black", label=setting)
        axes.set(xlabel="median wait at true ends, s", title=f"{group}: {len(inner)} pauses, {len(ends)} ends")
        axes.set_xlim(0.15, 1.0)
        axes.set_ylim(bottom=0)
    both[0].set_ylabel("pauses inside turns that were ended, %")
    both[0].legend()
    figure.tight_layout()
    figure.savefig(folder / "turns-curve.png", dpi=110)
