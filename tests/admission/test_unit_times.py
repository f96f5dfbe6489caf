"""Native sessions on a virtual clock: a machine whose units take longer with each session, and who is admitted."""

from __future__ import annotations

import pytest

from antiphon.admission.headroom import LIMITS, MOST_UNMEASURED, Headroom
from antiphon.admission.unit_times import ACTIVE_S, KEPT_S, UnitTimes
from antiphon.errors import Refused
from tests.admission.test_headroom import Box, certificate


def test_the_expected_time_is_the_lowest_limit_of_the_measured_numbers() -> None:
    times = UnitTimes()
    assert times.expected(1, 0.0) is None
    times.add("a", 0.2, 0.0)
    assert times.expected(1, 0.0) == pytest.approx(0.2)
    assert times.expected(4, 0.0) == pytest.approx(0.8)
    for session in "bcd":
        times.add(session, 0.3, 0.1)
    # While two to four were active, not each of them had a unit.
    assert times.expected(8, 0.1) == pytest.approx(1.6)
    for session in "abcd":
        times.add(session, 0.3, 1.0)
    assert times.expected(8, 1.0) == pytest.approx(0.6)
    assert times.expected(3, 1.0) == pytest.approx(0.3)


def test_sessions_that_send_nothing_do_not_count_as_measured() -> None:
    times = UnitTimes()
    for unit in range(8):
        times.add(unit % 4, 0.4, 0.0)
    times.add(0, 0.1, ACTIVE_S + 0.1)
    # One session is active, and all four may be.
    assert times.expected(4, ACTIVE_S + 0.1) == pytest.approx(0.4)
    assert times.expected(8, ACTIVE_S + 0.1) == pytest.approx(0.8)


def test_old_units_are_forgotten() -> None:
    times = UnitTimes()
    times.add("a", 0.2, 0.0)
    assert times.expected(1, KEPT_S + 0.1) is None


@pytest.mark.parametrize(("base", "each", "holds"), [(0.05, 0.02, 37), (0.3, 0.01, 50), (0.1, 0.2, 3), (0.02, 0.75, 1)])
def test_newcomers_are_refused_before_a_unit_of_those_inside_is_late(base: float, each: float, holds: int) -> None:
    box, most = Box(Headroom(None, 256, burst=64)), 0.0
    for second in range(120):
        box.now_s = float(second)
        for _ in range(8):
            box.tries("native")
        count = box.held["native"]
        for session in range(count):
            delay = base + each * count
            most = max(most, delay)
            box.headroom.units.add(session, delay, box.now_s)
    assert most <= 1.0
    # The last session is not refused long before the limit.
    assert 0.7 * holds <= box.held["native"] <= holds


def test_before_a_unit_is_measured_a_few_sessions_are_admitted() -> None:
    box = Box(Headroom(None, 256, burst=64))
    assert box.fill("native") == MOST_UNMEASURED
    with pytest.raises(Refused, match="not measured yet"):
        box.headroom.admit("native", box.held, 0.0)
    assert box.fill("captions", 4) == 4
    box.headroom.units.add("one", 0.5, 1.0)
    with pytest.raises(Refused, match="with one more session, units would take"):
        box.headroom.admit("native", box.held, 1.0)


def test_a_certificate_admits_by_its_number_whatever_was_measured() -> None:
    box = Box(Headroom(certificate(native=5), 256))
    box.headroom.units.add("one", 0.5, 0.0)
    assert box.fill("native") == 5


def test_units_that_take_nearly_all_of_their_time_admit_nobody() -> None:
    box = Box(Headroom(certificate(native=5), 256))
    for step in range(8):
        box.now_s = step * 0.25
        box.headroom.overload.see({"units": LIMITS["units"]}, box.now_s)
    assert box.headroom.overload.red == ("units",)
    assert not box.tries("native")
