"""Which measurements indicate that a server is too slow. One late value among five is not enough."""

from __future__ import annotations

import pytest

from antiphon.server.metrics import Evidence, Recent

FINALS = Evidence(long_s=30.0, short_s=10.0)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def measured(*values: tuple[float, float]) -> tuple[Recent, Clock]:
    """Return measurements, each added at its time, and the clock, which is then at 100 s."""
    clock = Clock()
    recent = Recent(clock)
    for at_s, value in values:
        clock.now_s = at_s
        recent.add("final", value)
    clock.now_s = 100.0
    return recent, clock


def test_one_late_final_of_five_is_chance() -> None:
    recent, _ = measured(*((90.0 + n, 0.5) for n in range(4)), (95.0, 9.0))
    assert recent.sustained("final", FINALS) == 0.5


def test_two_late_finals_within_the_short_window_are_evidence_until_they_are_old() -> None:
    recent, clock = measured((92.0, 9.0), (97.0, 8.0), (98.0, 0.5))
    assert recent.sustained("final", FINALS) == 8.0
    assert recent.falls_s("final", FINALS, 2.0) == pytest.approx(2.0)
    clock.now_s = 102.1
    assert recent.sustained("final", FINALS) == 0.5


def test_of_twenty_finals_the_95th_percentile_counts_over_the_long_window() -> None:
    recent, clock = measured(*((75.0, 9.0) for _ in range(2)), *((80.0, 0.5) for _ in range(18)))
    assert recent.sustained("final", FINALS) == 9.0
    assert recent.falls_s("final", FINALS, 2.0) == pytest.approx(5.0)
    clock.now_s = 105.1
    assert recent.sustained("final", FINALS) == 0.0, "eighteen are too few, and none is of the last ten seconds"


def test_nothing_measured_is_no_evidence() -> None:
    recent, _ = measured()
    assert recent.sustained("final", FINALS) == recent.p95("final", 30.0) == recent.falls_s("final", FINALS, 2.0) == 0.0
