"""When the breaker of a server opens, for one key and for all keys, and which pauses a server may ask for."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest

from antiphon.errors import Refused
from antiphon.remote.breaker import (
    FAILURES_TO_OPEN,
    FIRST_PAUSE_S,
    MAX_OWNERS,
    MAX_PAUSE_S,
    PROBE,
    Breaker,
    ServerBreaker,
    retry_after_s,
)


def is_open(breaker: ServerBreaker, owner: object, now_s: float) -> bool:
    try:
        breaker.check(owner, now_s)
    except Refused as error:
        return 0 < error.retry_after_s <= MAX_PAUSE_S
    return False


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("3", 3.0),
        ("0.5", 0.5),
        (" 7 ", 7.0),
        ("0", 0.0),
        ("-5", 0.0),
        ("-inf", 0.0),
        ("31", MAX_PAUSE_S),
        ("86400", MAX_PAUSE_S),
        ("inf", MAX_PAUSE_S),
        ("Infinity", MAX_PAUSE_S),
        ("1e400", MAX_PAUSE_S),
        ("9" * 5000, MAX_PAUSE_S),
        ("nan", 1.0),
        ("", 1.0),
        ("soon", 1.0),
        ("60s", 1.0),
        ("1, 2", 1.0),
        ("0x10", 1.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("Thu, 01 Jan 2099 00:00:00 GMT", MAX_PAUSE_S),
        ("Thu, 01 Jan 2099 00:00:00", MAX_PAUSE_S),
        ("Thu, 01 Jan 99999 00:00:00 GMT", 1.0),
        ("Thu, 01 Jan 99999999999999999999 00:00:00 GMT", 1.0),
        ("Thu, 01 Jan 0001 00:00:00 +2359", 0.0),
        ("Thu, 32 Jan 2099 00:00:00 GMT", 1.0),
        ("Thu, 01 Jan 2099 00:00:00 +9999999", 1.0),
        ("\u0663", 3.0),
    ],
)
def test_a_pause_that_a_server_names_is_a_number_within_bounds(header: str, seconds: float) -> None:
    assert retry_after_s(header) == seconds


def test_a_date_in_the_near_future_is_the_time_until_then() -> None:
    assert 8 <= retry_after_s(formatdate(time.time() + 10, usegmt=True)) <= 10


def test_it_lets_one_through_and_closes_when_that_succeeds() -> None:
    breaker = ServerBreaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.check("a", 0)
        breaker.failed("a", 0)
    with pytest.raises(Refused) as error:
        breaker.check("a", FIRST_PAUSE_S / 2)
    assert error.value.retry_after_s == FIRST_PAUSE_S / 2
    breaker.check("a", FIRST_PAUSE_S)
    # Only one request; the others wait for its result.
    assert is_open(breaker, "a", FIRST_PAUSE_S)
    breaker.succeeded("a")
    assert not is_open(breaker, "a", FIRST_PAUSE_S)
    assert not is_open(breaker, "a", FIRST_PAUSE_S)


def test_pauses_double_up_to_the_longest() -> None:
    breaker, now_s = Breaker(), 0.0
    pauses = []
    for _ in range(12):
        breaker.failed(now_s)
        try:
            breaker.check(now_s)
        except Refused as error:
            pauses.append(error.retry_after_s)
            now_s += error.retry_after_s
            breaker.check(now_s)
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == MAX_PAUSE_S


def test_failures_of_one_owner_never_stop_another() -> None:
    breaker = ServerBreaker()
    for now_s in range(200):
        if not is_open(breaker, "a", now_s):
            breaker.failed("a", now_s)
        assert not is_open(breaker, "b", now_s)
    assert is_open(breaker, "a", 199.5)


def test_failures_of_several_owners_stop_all_and_one_that_succeeds_lets_all_go_on() -> None:
    breaker = ServerBreaker()
    for owner in ("a", "a", "b"):
        assert not is_open(breaker, owner, 0)
        breaker.failed(owner, 0)
    assert is_open(breaker, "c", FIRST_PAUSE_S / 2)
    # Two owners try after the pause, with one request each. The others wait.
    tries = ("a", "a", "c", "d", "c")
    assert [is_open(breaker, owner, FIRST_PAUSE_S) for owner in tries] == [False, True, False, True, True]
    # One failure does not make all owners wait; one success lets all continue.
    breaker.failed("a", FIRST_PAUSE_S)
    breaker.succeeded("c")
    assert not any(is_open(breaker, owner, FIRST_PAUSE_S) for owner in ("c", "d", "d"))


def test_when_those_that_try_fail_then_all_wait_twice_as_long() -> None:
    breaker = ServerBreaker()
    for owner in ("a", "b", "c"):
        breaker.failed(owner, 0)
    now_s = FIRST_PAUSE_S
    for owner in ("d", "e"):
        assert not is_open(breaker, owner, now_s)
        breaker.failed(owner, now_s)
    assert is_open(breaker, "f", now_s + 1.5 * FIRST_PAUSE_S)
    assert not is_open(breaker, "f", now_s + 2 * FIRST_PAUSE_S)


def test_whoever_tries_and_is_never_heard_of_again_holds_up_the_others_for_the_longest_pause_at_most() -> None:
    breaker, now_s = ServerBreaker(), 0.0
    for _ in range(20):
        for owner in ("a", "b", "c"):
            breaker.failed(owner, now_s)
        now_s += MAX_PAUSE_S
    assert not is_open(breaker, "d", now_s)
    assert not is_open(breaker, "e", now_s)
    assert is_open(breaker, "f", now_s)
    assert not is_open(breaker, "f", now_s + MAX_PAUSE_S)


def test_one_owner_that_keeps_failing_cannot_keep_it_open_for_the_others() -> None:
    breaker = ServerBreaker()
    for owner in ("a", "a", "b"):
        breaker.failed(owner, 0)
    for now_s in range(1, 300):
        if not is_open(breaker, "a", now_s):
            breaker.failed("a", now_s)
    assert not is_open(breaker, "c", 300)


def test_a_failed_probe_of_our_own_and_one_owner_stop_all() -> None:
    breaker = ServerBreaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(PROBE, 0)
        breaker.failed("a", 0)
    assert is_open(breaker, "b", 0)


def test_a_probe_that_succeeds_says_nothing_of_the_model() -> None:
    breaker = ServerBreaker()
    breaker.failed("a", 0)
    breaker.failed(PROBE, 0)
    breaker.succeeded(PROBE)
    breaker.failed("a", 0)
    breaker.failed("a", 0)
    assert not is_open(breaker, "b", 0)
    assert is_open(breaker, "a", 0)


def test_a_server_without_room_for_one_owner_is_asked_for_others_until_several_get_that() -> None:
    breaker = ServerBreaker()
    breaker.refused("a", 0, 20)
    assert is_open(breaker, "a", 19)
    assert not is_open(breaker, "b", 1)
    breaker.refused("b", 1, 10)
    assert is_open(breaker, "c", 10)
    assert not is_open(breaker, "c", 11)
    assert not is_open(breaker, "a", 20)


def test_only_so_many_owners_are_remembered_and_the_one_that_failed_longest_ago_is_forgotten() -> None:
    breaker = ServerBreaker()
    for number in range(MAX_OWNERS + 1):
        for _ in range(FAILURES_TO_OPEN):
            breaker.failed(number, 0)
    # The success opens the server for all owners, but each keeps its own failures.
    breaker.succeeded("anybody")
    assert [is_open(breaker, number, 0) for number in (0, 1, MAX_OWNERS)] == [False, True, True]


def test_when_a_server_was_seen_to_work_each_owner_may_try_and_fails_into_a_longer_pause() -> None:
    breaker = ServerBreaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed("a", 0.0)
    assert is_open(breaker, "a", 0.5)
    breaker.end_pauses()
    assert not is_open(breaker, "a", 0.5)
    assert is_open(breaker, "a", 0.6)
    breaker.failed("a", 0.7)
    assert is_open(breaker, "a", 0.7 + 1.5 * FIRST_PAUSE_S)
    breaker.refused("b", 1.0, 10.0)
    breaker.end_pauses()
    assert is_open(breaker, "b", 5.0)
