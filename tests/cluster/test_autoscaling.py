"""The number of hosts of a service rises at once, falls slowly, and does not oscillate. No processes are started."""

from __future__ import annotations

import math
import random
from contextlib import nullcontext

import pytest

from antiphon.cluster.autoscaling import Autoscaler, ScalingRules
from antiphon.errors import SettingsError


def scaler(**rules: float) -> Autoscaler:
    return Autoscaler(ScalingRules(**({"after_s": 60.0} | rules)))  # type: ignore[arg-type]


def test_hosts_are_added_at_once_for_the_load_and_one_is_spare() -> None:
    assert scaler().wanted([0.7], 0, 0.0) == 2
    assert scaler().wanted([0.9, 0.9, 0.9], 0, 0.0) == math.ceil(2.7 / 0.75) + 1
    # Hosts that are still starting count.
    assert scaler().wanted([0.7], 1, 0.0) == 2
    assert scaler(most=3).wanted([1.0] * 3, 0, 0.0) == 3
    assert scaler(fewest=4).wanted([], 0, 0.0) == 4


def test_a_host_goes_only_when_the_rest_has_been_enough_for_a_while_and_one_by_one() -> None:
    one = scaler(fewest=1)
    loads = [0.1] * 5
    assert [one.wanted(loads, 0, t) for t in (0.0, 30.0, 59.0, 60.0)] == [5, 5, 5, 4]
    loads = [0.125] * 4
    assert [one.wanted(loads, 0, t) for t in (61.0, 100.0, 119.0, 120.0)] == [4, 4, 4, 3]


def test_a_load_that_comes_back_starts_the_wait_anew() -> None:
    one = scaler()
    assert one.wanted([0.1] * 5, 0, 0.0) == 5
    assert one.wanted([0.9] * 5, 0, 30.0) == 7
    assert one.wanted([0.1] * 5, 0, 59.0) == 5
    assert one.wanted([0.1] * 5, 0, 100.0) == 5
    assert one.wanted([0.1] * 5, 0, 119.0) == 4


@pytest.mark.parametrize("seed", range(20))
def test_a_load_that_hovers_anywhere_does_not_make_the_number_swing(seed: int) -> None:
    drawn, one, num = random.Random(seed), scaler(), 6
    total = drawn.uniform(0.5, 5.0)
    changes = list[int]()
    for step in range(2000):
        now = max(0.0, total + drawn.uniform(-0.1, 0.1))
        wanted = one.wanted([min(1.0, now / num)] * num, 0, 5.0 * step)
        if wanted != num:
            changes.append(wanted - num)
        num = wanted
    # The number falls to what is needed, and may then rise again only once.
    settled = [change for change in changes[1:] if change > 0]
    assert len(settled) <= 1, changes
    assert total / 0.75 <= num <= math.ceil(total / 0.6) + 2


@pytest.mark.parametrize(
    "rules",
    [{"fewest": 0}, {"fewest": 5, "most": 4}, {"low": 0.8}, {"target": 1.1}, {"spare": -1}, {"after_s": -1.0}],
)
def test_rules_that_cannot_be_held_together_are_refused(rules: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        scaler(**rules)


@pytest.mark.parametrize(
    ("most", "certificate", "refused"), [(3, "", True), (3, "certificate.json", False), (1, "", False)]
)
def test_hosts_are_not_scaled_by_a_load_that_they_do_not_know(most: int, certificate: str, refused: bool) -> None:
    with pytest.raises(SettingsError, match="--certificate") if refused else nullcontext():
        ScalingRules(most=most).check_certificate(certificate)
