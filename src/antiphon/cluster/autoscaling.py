"""Decides how many hosts a service should have, from the loads that they report. Pure: the time is an argument.

A host with a certificate reports its load (`antiphon_load`): 1 means full. Hosts are added at once. They are removed
one at a time, after the remaining hosts would have been enough for a while: moving a session costs its caller a pause,
but a missing host costs the next caller the whole call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.errors import SettingsError


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """Rules for adding and removing hosts. Raises SettingsError for values that contradict each other."""

    # The minimum number of hosts, at least 1.
    fewest: int = 1
    # The maximum number of hosts.
    most: int = 100
    # Hosts are added until the load of each is at most this. It has to be above `low`, and at most 1.
    target: float = 0.75
    # The number of hosts to run in addition to those that the load requires.
    spare: int = 1
    # A host may be removed if the load of each remaining one would be at most this.
    low: float = 0.6
    # A host is removed after `low` has allowed it for this time, in seconds; also the minimum time between two
    # removals.
    after_s: float = 300.0

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.most:
            raise SettingsError(f"the least number of hosts, {self.fewest}, must be from 1 to the most, {self.most}")
        if not 0 < self.low < self.target <= 1:
            raise SettingsError("the load at which a host is removed must be below the target, which is at most 1")
        if self.spare < 0 or self.after_s < 0:
            raise SettingsError("the number of spare hosts and the seconds must not be negative")

    def check_certificate(self, certificate: str) -> None:
        """Check that hosts that are scaled by load have a certificate. Raises SettingsError if they have none."""
        if self.most > self.fewest and not certificate:
            raise SettingsError(
                f"scaling from {self.fewest} to {self.most} hosts by their load needs --certificate: without one a "
                "host does not know its load (antiphon certify)"
            )


class Autoscaler:
    """Computes the number of hosts for one service. Its only state is the time since which a host could be removed."""

    def __init__(self, rules: ScalingRules) -> None:
        self.rules = rules
        self._could_go_since_s: float | None = None

    def wanted(self, loads: Sequence[float], num_starting: int, now_s: float) -> int:
        """Return the number of hosts that the service should have.

        `loads`: the load of each host that serves. `num_starting`: the number of hosts that do not serve yet. `now_s`
        must not decrease between calls.
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
