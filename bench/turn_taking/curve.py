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

from antiphon.turns.ending.end_of_turn import FITTED, EndOfTurnTable

TARGETS_S = (0.3, 0.6)
MEANS_S = (0.5, 0.7, 1.0)
# Of these no kind is a turn of a conversation: somebody reads a page, or ten sentences that have nothing to do with
# each other, and a listener could take the floor at many of their pauses.
MONOLOGUES = ("longform", "asr_8k_native", "asr_spontaneous_min")
EAGERNESS = ("low", "medium", "high", "auto")
FOLDS = 5
THRESHOLDS = tuple(1 / (1 + np.exp(-x)) for x in np.linspace(-5, 9, 141))
STEP_THRESHOLDS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.96, 0.97, 0.975, 0.98)
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
    rules: Iterable[Rule],
    inner: Sequence[Pause],
    ends: Sequence[Pause],
    *,
    p50_s: float = 100.0,
    p95_s: float = 100.0,
    mean_s: float = 100.0,
) -> dict[str, Any]:
    """The outcome of the rule with the fewest false cut-offs whose waits are at most so many seconds. It is chosen on
    the pauses that it is judged by, for every method alike.
    """
    tried = [(outcome(rule, inner, ends, interval=False), rule) for rule in rules]
    kept = [
        (o.cut_off, o.wait_mean_s, i)
        for i, (o, _) in enumerate(tried)
        if o.wait_p50_s <= p50_s + 1e-9 and o.wait_p95_s <= p95_s + 1e-9 and o.wait_mean_s <= mean_s + 1e-9
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
            name: best_at(make(target), inner, ends, p50_s=target) for name, make in rules.items()
        }
        for target in TARGETS_S
    }
    # A median says nothing of half of the ends, which a rule of two steps lets wait for seconds: hence the mean.
    stepped = rules | {TODAY: lambda target: _steps()}
    for mean_s in MEANS_S:
        out[f"a mean wait of {mean_s} s"] = {
            name: best_at(make(mean_s), inner, ends, mean_s=mean_s) for name, make in stepped.items()
        }
    p50, p95 = GOAL_S
    out[f"waits of {p50} s in the median and {p95} s in the 95th percentile"] = {
        name: best_at(make(p50), inner, ends, p50_s=p50, p95_s=p95) for name, make in stepped.items()
    }
    return out


def _steps() -> Iterable[Rule]:
    """Smart Turn alone with all of its numbers free: the threshold, and both silences."""
    for threshold in STEP_THRESHOLDS:
        for complete_ms in (256, 300, 400, 500):
            for patience_ms in (800, 1200, 2000, 4000):
                yield turn_detector_alone(threshold, complete_ms, patience_ms)


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
            f"{target} s": best_at(make(target), inner, ends, p50_s=target) for target in TARGETS_S
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
    head = ("", "cut off, %", "95 %", "wait p50", "wait p95", "mean", "pauses", "ends")

    def line(name: str, row: dict[str, Any]) -> tuple[Any, ...]:
        if not row:
            return (name, *"-------")
        interval = f"{row['low']}-{row['high']}"
        return (
            name,
            row["cut_off_percent"],
            interval,
            row["wait_p50_s"],
            row["wait_p95_s"],
            row["wait_mean_s"],
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


def plot(document: dict[str, Any], folder: Path) -> None:
    """Write turns-curve.png: false cut-offs against the median and the mean wait, for the real pauses of speakers never
    fitted, without monologues.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tested = renamed([p for p in read() if not is_fitted(p.speaker)])
    group = "real, without monologues"
    inner, ends = groups(tested)[group]
    rows = document["curve"]["settings"][group]
    figure, both = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axes, which in zip(both, ("wait_p50_s", "wait_mean_s"), strict=True):
        for name, make in _rules(tested).items():
            rules = _steps() if name == TODAY else make(0.3)
            found = [outcome(rule, inner, ends, interval=False).row() for rule in rules]
            xy = _frontier([(r[which], r["cut_off_percent"]) for r in found])
            axes.plot([x for x, _ in xy], [y for _, y in xy], label=name)
        for setting, mark in (("as today", "x"), ("medium", "o"), ("auto", "s")):
            row = rows[setting]
            axes.plot(row[which], row["cut_off_percent"], mark, color="black", label=setting)
        axes.set(xlabel=f"{'median' if which == 'wait_p50_s' else 'mean'} wait at true ends, s")
        axes.set_xlim(0.2, 1.5)
        axes.set_ylim(bottom=0)
    both[0].set_ylabel("pauses inside turns that were ended, %")
    both[1].legend()
    figure.suptitle(f"{len(inner)} real pauses and {len(ends)} ends of speakers never fitted, without monologues")
    figure.tight_layout()
    figure.savefig(folder / "turns-curve.png", dpi=110)


def _frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of points (wait, cut-offs), those that no other beats in both."""
    kept: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not kept or y < kept[-1][1]:
            kept.append((x, y))
    return kept
