"""Chooses the next number of sessions to try, and estimates from all trials how many a server holds. Pure.

The fraction of turns over the objective grows with the number of sessions, but a few dozen turns measure it poorly.
Therefore the fractions of neighbouring numbers are averaged if they do not increase (isotonic regression by pooling
adjacent violators). The edge is the number at which the result crosses the fraction of turns that the objective
allows to be over its limit: ALLOWED for a 95th percentile, 0 for native models, which must not miss a unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from antiphon.admission.certificate import Objective

ALLOWED = 0.05
# A number next to the edge gets EDGE_TRIALS trials of EDGE_TURNS turns, because a machine's speed varies by the minute.
# The numbers within the fraction NEAR of the edge get up to ENOUGH_TURNS turns in total, until both sides are clear.
EDGE_TURNS, EDGE_TRIALS, ENOUGH_TURNS, NEAR = 60, 2, 480, 0.08
# Turns of a trial away from the edge.
SEARCH_TURNS = 20
# A fraction is clear of ALLOWED if it differs by CLEAR standard errors: a one-sided confidence of 90 %.
CLEAR = 1.28


@dataclass(frozen=True, slots=True)
class Trial:
    """A number of sessions to try, and the turns to count. A trial with `is_edge` ends early only if it is hopeless."""

    sessions: int
    turns: int
    is_edge: bool


@dataclass(slots=True)
class Tried:
    """The trials of one number. `planned` also counts turns that were left out because a trial ended early."""

    planned: int = 0
    turns: int = 0
    over: float = 0.0

    @property
    def part(self) -> float:
        """The fraction of turns over the objective."""
        return self.over / self.turns if self.turns else 1.0

    def is_clear(self, allowed: float) -> bool:
        """Return whether `allowed` lies outside Wilson's confidence interval of the fraction.

        If no turn may be over, one that is over is clear, and none over in EDGE_TRIALS trials is.
        """
        if not allowed:
            return self.over > 0 or self.planned >= EDGE_TRIALS * EDGE_TURNS
        n, p, z = self.turns, self.part, CLEAR
        middle, half = (p + z * z / 2 / n), z * math.sqrt(p * (1 - p) / n + z * z / 4 / n / n)
        return not middle - half <= allowed * (1 + z * z / n) <= middle + half


class SessionSearch:
    """Finds the largest number of sessions that a server holds: doubles, bisects, then tries both sides of the edge
    until they are clear.

    `first` is the first number to try, and `most` the largest. `allowed` is the fraction of turns that may be over the
    objective's limit.
    """

    def __init__(self, first: int, most: int, allowed: float = ALLOWED) -> None:
        self._first, self._most, self._allowed = max(1, min(first, most)), most, allowed
        self.tried: dict[int, Tried] = {}

    def tell(self, trial: Trial, turns: int, over: int, *, ended_early: bool) -> None:
        """Record the result of a trial.

        With `ended_early`, the trial stopped at the turn that exceeded the limit. That turn is not counted, since
        stopping at it would bias the fraction upwards. If no turn may be over, that turn decides, and counts.
        """
        ended_early = ended_early and self._allowed > 0
        if not turns:
            # No turn ended.
            turns = over = 1
        tried = self.tried.setdefault(trial.sessions, Tried())
        tried.planned += trial.turns
        tried.turns += max(1, turns - ended_early)
        tried.over += max(0, over - ended_early) if turns > 1 else over

    @property
    def held(self) -> int:
        """The largest tried number whose fraction, averaged with its neighbours, is allowed; 0 if none is."""
        return max((number for number, part in self._parts().items() if part <= self._allowed), default=0)

    def next(self) -> Trial | None:
        """Return the next trial, or None if the edge is known."""
        held = self.held
        failed = min((n for n in self._parts() if n > held), default=None)
        if failed is None:
            if held < self._most:
                return self._short(min(2 * held, self._most) if held else self._first)
            return self._edge(held) if self.tried[held].planned < EDGE_TRIALS * EDGE_TURNS else None
        # Bisect with short trials first. After that, the curve predicts the edge.
        if failed - held > max(1, held // 8) and self.tried[failed].planned < EDGE_TURNS:
            return self._short((held + failed) // 2)
        guess = self._crossing(held, failed)
        sides = [n for n in (guess, guess + 1) if 1 <= n <= self._most]
        is_tried = all(n in self.tried and self.tried[n].planned >= EDGE_TRIALS * EDGE_TURNS for n in sides)
        if is_tried and guess == held and (self._near(held) >= ENOUGH_TURNS or all(self._is_clear(n) for n in sides)):
            return None
        return self._edge(min(sides, key=lambda n: self.tried[n].planned if n in self.tried else 0))

    def _is_clear(self, number: int) -> bool:
        return self.tried[number].is_clear(self._allowed)

    def _short(self, number: int) -> Trial:
        return Trial(number, SEARCH_TURNS, is_edge=False)

    def _edge(self, number: int) -> Trial:
        return Trial(number, EDGE_TURNS, is_edge=True)

    def _near(self, held: int) -> int:
        """Return the total of the planned turns of all numbers near the edge."""
        reach = max(1.0, NEAR * held)
        return sum(tried.planned for number, tried in self.tried.items() if abs(number - held - 0.5) <= reach)

    def _crossing(self, held: int, failed: int) -> int:
        """Return where a straight line between two numbers crosses what is allowed, rounded down; at least `held`."""
        parts = self._parts()
        low = parts.get(held, 0.0)
        return held + int((failed - held) * (self._allowed - low) / (parts[failed] - low))

    def _parts(self) -> dict[int, float]:
        """Return the fraction of each tried number. Fractions that do not increase are averaged, weighted by turns."""
        blocks: list[tuple[list[int], int, float]] = []
        for number in sorted(self.tried):
            one = self.tried[number]
            blocks.append(([number], one.turns, one.over))
            while len(blocks) > 1 and blocks[-2][2] * blocks[-1][1] >= blocks[-1][2] * blocks[-2][1]:
                (numbers, turns, over), (more, more_turns, more_over) = blocks[-2:]
                blocks[-2:] = [(numbers + more, turns + more_turns, over + more_over)]
        return {number: over / turns for numbers, turns, over in blocks for number in numbers}


def percentile(values: list[float], q: float) -> float | None:
    """Return the `q`th percentile by nearest rank, or None if there are no values. Infinite values are the largest."""
    return sorted(values)[max(0, math.ceil(len(values) * q / 100) - 1)] if values else None


def is_lost(delays: list[float], objective: Objective, turns: int, times: int = 1) -> bool:
    """Return whether more than `times` the allowed number of `turns` turns are already over the limit."""
    return sum(d > objective.p95_s for d in delays) > times * objective.most_over(max(turns, len(delays)))
