"""How many hosts a service should have, by the loads that they tell. Pure: the time is an argument.

A load is what a host with a certificate says of itself (`antiphon_load`): 1 when it is full. Hosts are added at once,
and taken away one at a time, once what is left has been enough for a while: a session that has to move costs its caller
a pause, and a host that is missing costs the next caller everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.errors import SettingsError


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """`fewest`, `most`: hosts. `target`: the load of each that hosts are added for. `spare`: hosts beside those.

    `low`: the load of each that would be left, below which one may go. `after_s`: for so long that was so before one
    goes, and so long is waited between two. Raises SettingsError for numbers that cannot be held together.
    """

    fewest: int = 1
    most: int = 100
    target: float = 0.75
    spare: int = 1
    low: float = 0.6
    after_s: float = 300.0

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.most:
            raise SettingsError(f"at least {self.fewest} hosts and at most {self.most} cannot be")
        if not 0 < self.low < self.target <= 1:
            raise SettingsError("the load below which a host goes has to be less than the target, which is 1 at most")
        if self.spare < 0 or self.after_s < 0:
            raise SettingsError("neither spare hosts nor seconds can be less than none")

    def check_certificate(self, certificate: str) -> None:
        """Raise SettingsError where hosts would be added by their load, and have no certificate that tells it."""
        if self.most > self.fewest and not certificate:
            raise SettingsError(
                f"from {self.fewest} to {self.most} hosts by their load needs --certificate: without one a host does "
                "not know its load (antiphon certify)"
            )


class Autoscaler:
    """Decides for one service. It remembers since when a host could go, and nothing else."""

    def __init__(self, rules: ScalingRules) -> None:
        self.rules = rules
        self._could_go_since_s: float | None = None

    def wanted(self, loads: Sequence[float], num_starting: int, now_s: float) -> int:
        """Return how many hosts there should be. `loads`: of those that serve. `num_starting`: those that do not yet.

        Times have to rise.
        """
        rules, total, num = self.rules, sum(loads), len(loads) + num_starting
        needed = math.ceil(total / rules.target - 1e-9) + rules.spare
        needed = min(max(needed, rules.fewest), rules.most)
        left = num - 1 - rules.spare
        could_go = num > needed and (total == 0 or (left > 0 and total / left <= rules.low))
        if needed >= num or not could_go:
            self._could_go_since_s = None
            return max(needed, min(num, rules.most))
        if self._could_go_since_s is None:
            self._could_go_since_s = now_s
        if now_s - self._could_go_since_s < rules.after_s:
            return num
        self._could_go_since_s = now_s
        return num - 1
