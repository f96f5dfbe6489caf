"""Which number of sessions to try next, and how many are held by what all trials say together. Pure.

The part of the turns that are over the objective grows with the sessions, and a few dozen turns tell it badly. So
neighbouring numbers are read together: their parts are averaged wherever they do not grow (isotonic regression by
pooling adjacent violators), and the edge is where the result passes ALLOWED, the part that a 95th percentile allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ALLOWED = 0.05
# A number that decides has so many turns a trial, and so many trials: a machine has better minutes and worse. And the
# numbers within NEAR of the edge have so many turns together, unless both sides of the edge are clear before.
EDGE_TURNS, EDGE_TRIALS, ENOUGH_TURNS, NEAR = 60, 2, 480, 0.08
# Turns of a trial far from the edge.
SEARCH_TURNS = 20
# A part is clear of ALLOWED where it is by so many standard errors: one-sided, nine of ten.
CLEAR = 1.28


@dataclass(frozen=True, slots=True)
class Trial:
    """A number of sessions to try, for so many turns. `is_edge`: it decides, and ends early only where hopeless."""

    sessions: int
    turns: int
    is_edge: bool


@dataclass(slots=True)
class Tried:
    """What is known of a number. `planned`: turns, with those that trials which ended early did not need."""

    planned: int = 0
    turns: int = 0
    over: float = 0.0

    @property
    def part(self) -> float:
        """The part of its turns that were over the objective."""
        return self.over / self.turns if self.turns else 1.0

    @property
    def is_clear(self) -> bool:
        """Whether its part is surely below ALLOWED, or surely above: by Wilson's interval."""
        n, p, z = self.turns, self.part, CLEAR
        middle, half = (p + z * z / 2 / n), z * math.sqrt(p * (1 - p) / n + z * z / 4 / n / n)
        return not middle - half <= ALLOWED * (1 + z * z / n) <= middle + half


class SessionSearch:
    """Finds the largest number that is held: doubles, halves between, then tries the edge until it is known.

    `first`: the number that is tried first. `most`: none is larger.
    """

    def __init__(self, first: int, most: int) -> None:
        self._first, self._most = max(1, min(first, most)), most
        self.tried: dict[int, Tried] = {}

    def tell(self, trial: Trial, turns: int, over: int, *, ended_early: bool) -> None:
        """Say how a trial went. `ended_early`: with the turn that made it too many, which is not counted then: where
        the end is chosen by what came, the part would be too large.
        """
        if not turns:
            # Nothing came at all.
            turns = over = 1
        tried = self.tried.setdefault(trial.sessions, Tried())
        tried.planned += trial.turns
        tried.turns += max(1, turns - ended_early)
        tried.over += max(0, over - ended_early) if turns > 1 else over

    @property
    def held(self) -> int:
        """The largest number that was tried whose part, read together with the others, is within ALLOWED; 0: none."""
        return max((number for number, part in self._parts().items() if part <= ALLOWED), default=0)

    def next(self) -> Trial | None:
        """Return what to try next; None where the edge is known."""
        held = self.held
        failed = min((n for n in self._parts() if n > held), default=None)
        if failed is None:
            if held < self._most:
                return self._short(min(2 * held, self._most) if held else self._first)
            return self._edge(held) if self.tried[held].planned < EDGE_TRIALS * EDGE_TURNS else None
        # Where short trials have narrowed it down, the curve itself says where to look.
        if failed - held > max(1, held // 8) and self.tried[failed].planned < EDGE_TURNS:
            return self._short((held + failed) // 2)
        guess = self._crossing(held, failed)
        sides = [n for n in (guess, guess + 1) if 1 <= n <= self._most]
        is_tried = all(n in self.tried and self.tried[n].planned >= EDGE_TRIALS * EDGE_TURNS for n in sides)
        if is_tried and guess == held and (self._near(held) >= ENOUGH_TURNS or all(self._is_clear(n) for n in sides)):
            return None
        return self._edge(min(sides, key=lambda n: self.tried[n].planned if n in self.tried else 0))

    def _is_clear(self, number: int) -> bool:
        return self.tried[number].is_clear

    def _short(self, number: int) -> Trial:
        return Trial(number, SEARCH_TURNS, is_edge=False)

    def _edge(self, number: int) -> Trial:
        return Trial(number, EDGE_TURNS, is_edge=True)

    def _near(self, held: int) -> int:
        """The turns that were planned at numbers near the edge."""
        reach = max(1.0, NEAR * held)
        return sum(tried.planned for number, tried in self.tried.items() if abs(number - held - 0.5) <= reach)

    def _crossing(self, held: int, failed: int) -> int:
        """Where a straight line between two numbers passes ALLOWED, rounded down; at least `held`."""
        parts = self._parts()
        low = parts.get(held, 0.0)
        return held + int((failed - held) * (ALLOWED - low) / (parts[failed] - low))

    def _parts(self) -> dict[int, float]:
        """The part of each number that was tried, averaged by turns with its neighbours where it does not grow."""
        blocks: list[tuple[list[int], int, float]] = []
        for number in sorted(self.tried):
            one = self.tried[number]
            blocks.append(([number], one.turns, one.over))
            while len(blocks) > 1 and blocks[-2][2] * blocks[-1][1] >= blocks[-1][2] * blocks[-2][1]:
                (numbers, turns, over), (more, more_turns, more_over) = blocks[-2:]
                blocks[-2:] = [(numbers + more, turns + more_turns, over + more_over)]
        return {number: over / turns for numbers, turns, over in blocks for number in numbers}


def percentile(values: list[float], q: float) -> float | None:
    """The value that `q` percent of all are not above (nearest rank); None of none. Infinities are the largest."""
    return sorted(values)[max(0, math.ceil(len(values) * q / 100) - 1)] if values else None


def is_lost(delays: list[float], limit_s: float, turns: int, times: int = 1) -> bool:
    """Whether so many delays are over the limit that they are more than ALLOWED of `turns`, `times` over."""
    count = max(turns, len(delays))
    return sum(d > limit_s for d in delays) > times * (count - math.ceil((1 - ALLOWED) * count))
