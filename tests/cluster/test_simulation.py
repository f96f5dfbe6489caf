"""A small service on a virtual clock. The tests check what the simulation of a thousand hosts claims."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.simulate import TWO_PLACES, peak
from bench.simulation.leases import pauses
from bench.simulation.service import Service

from antiphon.cluster.autoscaling import Autoscaler, ScalingRules

PLACES, TALK_S = 16, 120.0


@pytest.mark.parametrize("policy", ["random", "two", "least", "doors"])
def test_no_host_is_filled_beyond_what_it_was_certified_for(policy: str) -> None:
    # Twice as many callers as there are places.
    service = Service(10, PLACES, lambda _: 2 * 10 * PLACES / TALK_S, policy=policy, talk_s=TALK_S)
    counts = service.run(1200.0)
    assert counts.most_load <= 1.0
    assert counts.turned_away > 0
    assert all(host.held["conversation"] == len(host.sessions) <= PLACES for host in service.hosts)


def test_the_emptier_of_two_is_nearly_as_even_as_the_emptiest_of_all() -> None:
    def spread(policy: str) -> float:
        service = Service(40, PLACES, lambda _: 0.8 * 40 * PLACES / TALK_S, policy=policy, tries=1, talk_s=TALK_S)
        counts = service.run(1200.0)
        late = [one for *_, one in counts.trace[len(counts.trace) // 2 :]]
        return sum(late) / len(late)

    random, two, least = spread("random"), spread("two"), spread("least")
    assert least < two < random
    assert two < 0.75 * random


def test_a_tenfold_peak_is_followed_without_swinging_and_nobody_is_lost() -> None:
    high = 0.75 * 40 * PLACES / TALK_S
    service = Service(
        6, PLACES, peak(high / 10, high, 300.0, 900.0, 600.0), policy="two", talk_s=TALK_S, start_s=30.0,
        scaler=Autoscaler(ScalingRules(fewest=2, most=80, spare=3, after_s=60.0)), most_rate=high, prefill_s=0.1,
    )  # fmt: skip
    counts = service.run(3 * 3600.0)
    assert counts.most_load <= 1.0
    assert (counts.lost, counts.turned_away) == (0, 0)
    num = [hosts for _, hosts, *_ in counts.trace]
    assert max(num) >= 40
    assert num[-1] <= 16
    # The number of hosts follows the peak up and down. Randomness may reverse it now and then.
    assert counts.reversals <= 12


def test_when_a_zone_is_gone_its_sessions_are_back_and_none_is_lost() -> None:
    service = Service(
        30, PLACES, lambda _: 0.6 * 30 * PLACES / TALK_S, policy="two", talk_s=TALK_S, prefill_s=0.5,
        scaler=Autoscaler(ScalingRules(fewest=30, most=60)), start_s=30.0,
    )  # fmt: skip
    service.run(600.0)
    gone = service.lose_zone(0, 5.0)
    counts = service.run(900.0)
    assert gone > 50
    assert counts.lost == 0
    assert counts.most_load <= 1.0
    # Sessions whose callers have hung up in the meantime do not return.
    assert 0.8 * gone <= len(counts.away_s) <= gone


@pytest.mark.parametrize("seed", range(3))
def test_hosts_that_stand_still_never_make_two_owners(tmp_path: Path, seed: int) -> None:
    counts = pauses(tmp_path, 6, 24, 60.0, seed)
    assert counts["hosts that hung"] > 3
    assert counts["claims"] > 5
    assert counts["late writes refused"] > 0
    assert counts["two owners"] == counts["sessions without an owner"] == 0


@pytest.mark.slow
def test_a_service_of_two_is_as_full_as_erlangs_formula_says() -> None:
    rate, talk_s = 5.0, 2.4
    service = Service(2, TWO_PLACES, lambda _: rate, policy="doors", tries=2, talk_s=talk_s, comes_again=0, num_doors=1)
    counts = service.run(20_000.0)
    blocked, offered = 1.0, rate * talk_s
    for places in range(1, 2 * TWO_PLACES + 1):
        blocked = offered * blocked / (places + offered * blocked)
    assert counts.turned_away / counts.came == pytest.approx(blocked, rel=0.05)
