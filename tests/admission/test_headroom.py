"""Headroom on a virtual clock: sums, mixtures, bursts, hovering signals, and a machine that slows down as it fills."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.admission.certificate import KINDS, Certificate, CertifiedKind, Kind, Objective
from antiphon.admission.headroom import (
    DEPARTURES_S,
    FAR,
    GREEN,
    GREEN_AFTER_S,
    LIMITS,
    MAX_RETRY_S,
    MIN_RETRY_S,
    MOST_YOUNG,
    RED_AFTER_S,
    RETURN_S,
    SHEDS_S,
    YOUNG_PART,
    YOUNG_S,
    Headroom,
    OverloadSignal,
)
from antiphon.errors import Refused


def certificate(mixed: float = 0.85, **sessions: int) -> Certificate:
    kinds = {kind: CertifiedKind(n, Objective(1.5, "a delay"), ()) for kind, n in sessions.items()}
    return Certificate(1, "2026-11-26T00:00:00Z", {}, (), {}, kinds, mixed)


class Box:
    """A machine that holds the sessions that headroom admits. `now_s` is its clock."""

    def __init__(self, headroom: Headroom) -> None:
        self.headroom, self.held, self.now_s = headroom, Counter[Kind](), 0.0

    def tries(self, kind: Kind) -> bool:
        try:
            self.headroom.admit(kind, self.held, self.now_s)
        except Refused:
            return False
        self.held[kind] += 1
        return True

    def fill(self, kind: Kind, tries: int = 100) -> int:
        return sum(self.tries(kind) for _ in range(tries))


def test_a_burst_gets_as_many_places_as_were_certified() -> None:
    box = Box(Headroom(certificate(captions=7), 256))
    assert box.fill("captions") == 7
    box.held["captions"] -= 1
    assert box.fill("captions") == 1


def test_kinds_share_the_machine_up_to_what_their_mixture_was_measured_to_hold() -> None:
    box = Box(Headroom(certificate(0.8, captions=10, conversation=4), 256))
    assert box.fill("captions", 4) == 4
    # The load is 4 / 10 + 1 / 4; one more session would make it 0.9.
    assert box.fill("conversation") == 1
    assert box.fill("captions") == 1
    box.held.clear()
    assert box.fill("conversation") == 4


def test_a_kind_that_was_not_certified_takes_a_share_of_all_sessions() -> None:
    box = Box(Headroom(certificate(1.0, captions=2), 10))
    assert box.fill("video") == 10
    box.held["video"] = 5
    assert box.fill("captions") == 1


def test_a_kind_of_which_none_is_held_is_refused() -> None:
    assert Box(Headroom(certificate(video=0, captions=4), 256)).fill("video") == 0


def test_a_refusal_says_what_is_full_and_when_to_come_back() -> None:
    box = Box(Headroom(certificate(captions=1), 256))
    box.fill("captions")
    with pytest.raises(Refused, match=r"certified for \(captions\)") as refused:
        box.headroom.admit("captions", box.held, 0.0)
    assert refused.value.retry_after_s > 0
    assert not refused.value.by_own_limit


@given(
    st.fixed_dictionaries({kind: st.integers(1, 40) for kind in KINDS}),
    st.floats(0.3, 1.0),
    st.lists(st.tuples(st.sampled_from(KINDS), st.booleans()), max_size=200),
)
def test_no_order_of_comings_and_goings_overfills(
    sessions: Mapping[str, int], mixed: float, schedule: list[tuple[Kind, bool]]
) -> None:
    box = Box(Headroom(certificate(mixed, **sessions), 1000))
    for kind, comes in schedule:
        room = box.headroom.room(kind, box.held)
        assert room is not None
        if comes:
            assert box.tries(kind) == (room > 0)
        elif box.held[kind]:
            box.held[kind] -= 1
        # The load relative to its limit, which is lower for mixed kinds and stays 1 for a kind alone.
        load = box.headroom.load(box.held)
        assert load is not None
        assert load <= 1 + 1e-6


def test_without_a_certificate_a_burst_is_taken_in_as_a_slow_start() -> None:
    box = Box(Headroom(None, 256))
    assert box.fill("conversation") == MOST_YOUNG
    with pytest.raises(Refused, match="just begun"):
        box.headroom.admit("conversation", box.held, box.now_s)
    box.headroom.admit("conversation", box.held, box.now_s, resumes=True)
    box.now_s = YOUNG_S - 0.01
    assert not box.tries("conversation")
    for _ in range(9):
        box.now_s += YOUNG_S
        before = box.held.total()
        assert box.fill("conversation", 1000) == max(MOST_YOUNG, int(YOUNG_PART * before))


def test_while_a_light_is_red_nobody_comes_in_whatever_was_certified() -> None:
    box = Box(Headroom(certificate(captions=9), 256))
    for step in range(8):
        box.now_s = step * 0.25
        box.headroom.overload.see({"loop": 0.3}, box.now_s)
    assert box.headroom.overload.red == ("loop",)
    assert box.fill("captions") == 0
    assert box.headroom.room("captions", box.held) == 0
    with pytest.raises(Refused, match="no headroom now \\(loop\\)"):
        box.headroom.admit("captions", box.held, box.now_s)


def test_a_light_is_red_only_after_a_while_and_stays_so_until_it_is_well_below() -> None:
    light = OverloadSignal(1.0)
    light.see(5.0, 0.0)
    light.see(0.9, RED_AFTER_S / 2)
    light.see(5.0, RED_AFTER_S)
    assert not light.red, "one spike is none"
    light.see(1.0, 2 * RED_AFTER_S)
    assert light.red
    for step in range(40):
        # Hovers between the limits for red and for green.
        light.see(0.8 if step % 2 else 1.2, 10 + step)
        assert light.red
    light.see(GREEN - 0.01, 100)
    light.see(GREEN - 0.01, 100 + GREEN_AFTER_S - 0.1)
    assert light.red
    light.see(GREEN - 0.01, 100 + GREEN_AFTER_S)
    assert not light.red


def lag_of(sessions: float, holds: int) -> float:
    """Return the lag of a machine: almost none until it is full, then steep."""
    return 0.05 * sessions / holds if sessions <= holds else 0.2 * (sessions / holds) ** 4


@pytest.mark.parametrize("offered", [1.0, 1.5, 3.0, 10.0])
def test_without_a_certificate_an_overload_settles_and_does_not_swing(offered: float) -> None:
    """Callers arrive at `offered` times the capacity, stay 30 s, and affect the lag two seconds late."""
    holds, stay_s, step_s = 40, 30.0, 0.25
    box, leaves, history = Box(Headroom(None, 10_000, burst=4)), list[float](), list[int]()
    seen = 0.0
    due = 0.0
    turns_red = 0
    for step in range(int(600 / step_s)):
        box.now_s = step * step_s
        leaves = [at for at in leaves if at > box.now_s]
        box.held = Counter[Kind]({"conversation": len(leaves)})
        was = bool(box.headroom.overload.red)
        box.headroom.overload.see({"loop": seen}, box.now_s)
        turns_red += not was and bool(box.headroom.overload.red)
        due += offered * holds / stay_s * step_s
        while due >= 1:
            due -= 1
            if box.tries("conversation"):
                leaves.append(box.now_s + stay_s)
        history.append(len(leaves))
        seen += (lag_of(len(leaves), holds) - seen) * step_s / 2.0
    settled = history[len(history) // 3 :]
    limit = LIMITS["loop"]
    assert max(settled) <= 1.35 * holds, max(settled)
    if offered > 1:
        assert sum(settled) / len(settled) >= 0.6 * holds, "and the box is used"
    over = sum(lag_of(n, holds) > 2 * limit for n in settled) / len(settled)
    assert over < 0.1, over
    assert turns_red <= 600 / 15, "it goes red a few times a minute at most"


@pytest.mark.parametrize("offered", [1.0, 1.5, 3.0])
def test_with_a_certificate_nobody_who_is_in_is_slowed(offered: float) -> None:
    holds, stay_s = 40, 30.0
    box, leaves, due = Box(Headroom(certificate(conversation=holds), 10_000)), list[float](), 0.0
    most = 0
    for step in range(2400):
        box.now_s = step * 0.25
        leaves = [at for at in leaves if at > box.now_s]
        box.held = Counter[Kind]({"conversation": len(leaves)})
        box.headroom.overload.see({"loop": lag_of(len(leaves), holds)}, box.now_s)
        due += offered * holds / stay_s * 0.25
        while due >= 1:
            due -= 1
            if box.tries("conversation"):
                leaves.append(box.now_s + stay_s)
        most = max(most, len(leaves))
        assert not box.headroom.overload.red
    assert most == holds if offered > 1 else most >= 0.9 * holds


def test_who_is_gone_is_not_young_any_more() -> None:
    """Consecutive requests are not a burst."""
    box = Box(Headroom(None, 256, burst=2))
    for number in range(20):
        box.now_s = number * 0.1
        assert box.tries("speech")
        box.held.clear()
        box.headroom.left(box.now_s, box.now_s, "speech")
    assert box.fill("speech") == 2


def test_what_fills_is_green_again_a_little_below() -> None:
    headroom = Headroom(None, 256)
    for at_s in (0.0, 1.0):
        headroom.overload.see({"system": 0.98, "loop": 0.3}, at_s)
    for at_s in (2.0, 8.0):
        headroom.overload.see({"system": 0.9, "loop": 0.2}, at_s)
    assert headroom.overload.red == ("loop",)


def test_the_load_is_of_what_may_be_held() -> None:
    headroom = Headroom(certificate(0.5, captions=10, conversation=4), 256)
    assert headroom.load({"captions": 10}) == pytest.approx(1.0)
    assert headroom.load({"captions": 3, "conversation": 1}) == pytest.approx((0.3 + 0.25) / 0.5)
    assert headroom.room("conversation", {"captions": 1}) == 1
    assert Headroom(certificate(captions=100), 8).room("captions", {"captions": 5}) == 3


def turn_red(headroom: Headroom, name: str, now_s: float, falls_s: float = 0.0) -> None:
    for at_s in (now_s - RED_AFTER_S, now_s):
        headroom.overload.see({name: 10 * LIMITS.get(name, 2.0)}, at_s, {name: falls_s})


def test_a_client_that_comes_back_is_no_new_burden() -> None:
    headroom = Headroom(None, 256)
    turn_red(headroom, "finals", 10.0)
    headroom.left(0.0, 10.0, "captions", "Anna")
    for kind, client in (("captions", "Bob"), ("captions", ""), ("conversation", "Anna")):
        with pytest.raises(Refused, match="finals"):
            headroom.admit(kind, {}, 11.0, client=client)
    headroom.admit("captions", {}, 11.0, client="Anna")
    with pytest.raises(Refused):
        headroom.admit("captions", {"captions": 1}, 11.0, client="Anna")


def test_a_client_that_comes_back_late_is_new() -> None:
    headroom = Headroom(None, 256)
    turn_red(headroom, "finals", 10.0)
    headroom.left(0.0, 10.0, "captions", "Anna")
    with pytest.raises(Refused, match="finals"):
        headroom.admit("captions", {}, 10.0 + RETURN_S + 0.1, client="Anna")


def test_only_a_signal_far_over_its_limit_for_a_while_refuses_clients_that_come_back() -> None:
    for factor, is_refused in ((FAR - 0.1, False), (FAR, True)):
        headroom = Headroom(None, 256)
        for at_s in (0.0, RED_AFTER_S, SHEDS_S):
            headroom.overload.see({"loop": factor * LIMITS["loop"]}, at_s)
        headroom.left(0.0, SHEDS_S, "captions", "Anna")
        assert headroom.overload.red == ("loop",)
        if is_refused:
            with pytest.raises(Refused, match="loop"):
                headroom.admit("captions", {}, SHEDS_S, client="Anna")
        else:
            headroom.admit("captions", {}, SHEDS_S, client="Anna")


def test_memory_that_is_short_refuses_clients_that_come_back() -> None:
    headroom = Headroom(None, 256)
    for at_s in (0.0, RED_AFTER_S):
        headroom.overload.see({"system": LIMITS["system"]}, at_s)
    headroom.left(0.0, RED_AFTER_S, "captions", "Anna")
    with pytest.raises(Refused, match="system"):
        headroom.admit("captions", {}, RED_AFTER_S, client="Anna")


def test_clients_that_come_back_are_no_burst() -> None:
    headroom = Headroom(None, 256, burst=1)
    headroom.admit("captions", {}, 0.0, client="Bob")
    headroom.left(-9.0, 1.0, "captions", "Anna")
    headroom.admit("captions", {"captions": 1}, 1.5, client="Anna")
    with pytest.raises(Refused, match="just begun") as refused:
        headroom.admit("captions", {"captions": 2}, 1.5, client="Carla")
    assert refused.value.retry_after_s == pytest.approx(YOUNG_S - 1.5), "when Bob is young no longer"


def test_a_refusal_by_a_light_names_the_seconds_until_it_can_be_green() -> None:
    headroom = Headroom(None, 256)
    turn_red(headroom, "finals", 10.0, falls_s=7.0)
    with pytest.raises(Refused) as refused:
        headroom.check("captions", {}, 10.0)
    assert refused.value.retry_after_s == pytest.approx(7.0 + GREEN_AFTER_S)
    headroom.overload.see({"finals": 0.1}, 17.0)
    with pytest.raises(Refused) as refused:
        headroom.check("captions", {}, 20.0)
    assert refused.value.retry_after_s == pytest.approx(GREEN_AFTER_S - 3.0)


def test_a_full_server_names_the_time_that_its_sessions_take_to_end() -> None:
    headroom = Headroom(None, 256)
    assert headroom.next_end_s(0.0) == MAX_RETRY_S
    for at_s in range(20):
        headroom.left(0.0, float(at_s), "captions")
    assert headroom.next_end_s(20.0) == pytest.approx(DEPARTURES_S / 20)
    for _ in range(200):
        headroom.left(0.0, 20.0, "captions")
    assert headroom.next_end_s(20.0) == MIN_RETRY_S
    assert headroom.next_end_s(81.0) == MAX_RETRY_S


def test_without_a_certificate_load_and_room_are_not_known() -> None:
    bare, captions = Headroom(None, 256), Headroom(certificate(captions=10), 256)
    assert bare.load({"conversation": 13}) is None
    assert bare.room("conversation", {"conversation": 13}) is None
    assert captions.load({"conversation": 64}) == pytest.approx(0.25)
    assert captions.room("conversation", {}) is None, "not certified"
