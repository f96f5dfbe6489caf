"""Hosts die and hang while callers talk: a small run of `tests/cluster/chaos.py`. `make chaos` does it 500 times."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.cluster.chaos import SERVERS, run


@pytest.mark.heavy
@pytest.mark.server
@pytest.mark.parametrize(
    ("kind", "kills", "hangs", "handovers"), [("redis", 14, 2, 0), ("postgres", 6, 0, 0), ("redis", 0, 0, 10)]
)
def test_when_hosts_are_killed_in_turns_then_all_that_was_said_is_there_once(
    kind: str, kills: int, hangs: int, handovers: int
) -> None:
    if missing := SERVERS[kind].missing():
        pytest.skip(missing)
    found = run(kind, kills, hangs, num_callers=8, seed=11, handovers=handovers, num_listeners=3, num_speakers=2)
    assert found.befell == Counter(kill=kills, hang=hangs, handover=handovers)
    # Each of these hit a caller who was talking, so the checked sessions really lost their host.
    assert found.num_hit >= 2 * (kills + handovers)
    assert found.how["claimed"] >= kills
    assert found.turns["Speaker"] >= 2
