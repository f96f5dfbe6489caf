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
    silence_alone,
    turn_detector_alone,
)

from antiphon.turns.end_of_turn import EndOfTurnTable

TARGETS_S = (0.3, 0.6)
# Of these no kind is a turn of a conversation: somebody reads a page, or ten sentences that have nothing to do with
# each other, and a listener could take the floor at many of their pauses.
MONOLOGUES = ("longform", "asr_8k_native", "asr_spontaneous_min")
EAGERNESS = ("low", "medium", "high", "auto")
FOLDS = 5
THRESHOLDS = tuple(1 / (1 + np.exp(-x)) for x in np.linspace(-5, 9, 141))
SILENCES_MS = tuple(range(200, 4001, 50))


def _rules(words_ms: float) -> dict[str, Callable[[float], Iterable[Rule]]]:
    """The rules of each method, for a median wait in seconds that is wanted, where that changes them."""
    return {
        "silence alone": lambda target: (silence_alone(ms) for ms in (*SILENCES_MS, 1000 * target)),
        "Smart Turn alone": lambda target: (turn_detector_alone(t, 1000 * target) for t in THRESHOLDS),
        "sound and pause length": lambda target: (listening(t, words=False) for t in THRESHOLDS),
        "sound, words, and pause length": lambda target: (listening(t, words_ms=words_ms) for t in THRESHOLDS),
    }


def best_at(rules: Iterable[Rule], inner: Sequence[Pause], ends: Sequence[Pause], target_s: float) -> dict[str, Any]:
    """The outcome of the rule with the fewest false cut-offs whose median wait is at most `target_s`."""
    tried = [(outcome(rule, inner, ends, interval=False), rule) for rule in rules]
    fit_in = [(o.cut_off, o.wait_p95_s, i) for i, (o, _) in enumerate(tried) if o.wait_p50_s <= target_s + 1e-9]
    if not fit_in:
        return {}
    return outcome(tried[min(fit_in)[2]][1], inner, ends).row()


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


def crossed(pauses: Sequence[Pause], words_ms: float) -> Callable[[float], Iterable[Rule]]:
    """The model, each pause judged by numbers fitted to the speakers of the other folds."""
    tables = []
    for fold in range(FOLDS):
        found = fit([p for p in pauses if fold_of(p.speaker) != fold], every_speaker=True)
        tables.append(EndOfTurnTable(found["LOGISTIC"], found["SURVIVAL"]))

    def rule(threshold: float) -> Rule:
        rules = [listening(threshold, t, words_ms=words_ms) for t in tables]
        # A recording of the crowd has a name of its own in intervals, and the crowd's fold.
        return lambda p: rules[fold_of("barista" if p.corpus == "Picovoice barista" else p.speaker)](p)

    return lambda target: (rule(t) for t in THRESHOLDS)


def curve(words_ms: float = WORDS_MS) -> dict[str, Any]:
    """Measure all methods, print the tables, and return the figures."""
    every = read()
    tested = renamed([p for p in every if not is_fitted(p.speaker)])
    out: dict[str, Any] = {"words_known_ms": words_ms, "at": {}, "settings": {}, "all_speakers": {}, "words_later": {}}
    rules = _rules(words_ms)
    for group, (inner, ends) in groups(tested).items():
        out["at"][group] = {
            f"{target} s": {name: best_at(make(target), inner, ends, target) for name, make in rules.items()}
            for target in TARGETS_S
        }
        out["settings"][group] = {
            "today": outcome(turn_detector_alone(0.5), inner, ends).row(),
            **{e: outcome(at_eagerness(e, tested, words_ms=words_ms), inner, ends).row() for e in EAGERNESS},
        }
    together = rules | {"sound, words, and pause length": crossed(every, words_ms)}
    for group, (inner, ends) in groups(renamed(every)).items():
        out["all_speakers"][group] = {
            f"{target} s": {name: best_at(make(target), inner, ends, target) for name, make in together.items()}
            for target in TARGETS_S
            if group != "mixed in"
        }
    inner, ends = groups(tested)["real"]
    for later in (256.0, 400.0, 600.0):
        make = _rules(later)["sound, words, and pause length"]
        out["words_later"][f"{later:.0f} ms"] = {
            f"{target} s": best_at(make(target), inner, ends, target) for target in TARGETS_S
        }
    _print(out)
    return out


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
            table(f"{group}: at a median wait of {target}", head, [line(n, r) for n, r in methods.items()])
        table(f"{group}: settings", head, [line(n, r) for n, r in out["settings"][group].items()])
    for group, targets in out["all_speakers"].items():
        for target, methods in targets.items():
            title = f"all speakers, fitted to others: {group}, at {target}"
            table(title, head, [line(n, r) for n, r in methods.items()])
    for later, targets in out["words_later"].items():
        table(f"words known at {later}, real", head, [line(n, r) for n, r in targets.items()])


def points(name: str, inner: Sequence[Pause], ends: Sequence[Pause]) -> list[tuple[float, float]]:
    """The curve of a method: median wait in seconds, and false cut-offs in percent."""
    if name == "Smart Turn alone":
        # Both of its numbers are free: for each silence that ends a complete turn, the best threshold.
        made = [best_at(_rules(WORDS_MS)[name](ms / 1000), inner, ends, ms / 1000) for ms in range(200, 1001, 50)]
        return [(r["wait_p50_s"], r["cut_off_percent"]) for r in made if r]
    found = [outcome(rule, inner, ends, interval=False) for rule in _rules(WORDS_MS)[name](0.3)]
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
        for name in _rules(WORDS_MS):
            xy = points(name, inner, ends)
            axes.plot([x for x, _ in xy], [y for _, y in xy], label=name)
        row = document["curve"]["settings"][group]
        for setting, mark in (("today", "x"), ("medium", "o")):
            axes.plot(row[setting]["wait_p50_s"], row[setting]["cut_off_percent"], mark, color="black", label=setting)
        axes.set(xlabel="median wait at true ends, s", title=f"{group}: {len(inner)} pauses, {len(ends)} ends")
        axes.set_xlim(0.15, 1.0)
        axes.set_ylim(bottom=0)
    both[0].set_ylabel("pauses inside turns that were ended, %")
    both[0].legend()
    figure.tight_layout()
    figure.savefig(folder / "turns-curve.png", dpi=110)
