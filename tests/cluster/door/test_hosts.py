"""The order in which a door tries its hosts, which are those of its settings and those in the store."""

from __future__ import annotations

from antiphon.cluster.door.hosts import SHUNNED_S, Hosts
from antiphon.store.sessions import Host

A, B, C = (f"http://127.0.0.1:{port}" for port in (1, 2, 3))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_host_with_the_fewest_sessions_comes_first_and_equal_ones_in_turn() -> None:
    hosts = Hosts((A, B), Clock())
    assert {hosts.in_order()[0] for _ in range(2)} == {A, B}
    with hosts.session_at(A):
        assert [hosts.in_order()[0] for _ in range(3)] == [B] * 3
    assert {hosts.in_order()[0] for _ in range(2)} == {A, B}


def test_a_host_that_failed_comes_last_for_a_while_even_where_it_is_wanted_first() -> None:
    clock = Clock()
    hosts = Hosts((A, B), clock)
    hosts.failed(A)
    assert hosts.in_order(first=A) == [B, A]
    clock.now_s = SHUNNED_S
    assert hosts.in_order(first=A) == [A, B]
    hosts.failed(A)
    with hosts.session_at(A):
        assert hosts.in_order(first=A) == [A, B]


def test_hosts_of_a_store_come_and_go_and_those_that_drain_come_last() -> None:
    hosts = Hosts((), Clock())
    assert hosts.in_order() == []
    hosts.found([Host("a/1", A), Host("b/1", B, draining=True), Host("hidden/1", "")])
    assert hosts.in_order(first=B) == [A, B]
    hosts.found([Host("b/1", B), Host("c/1", C)])
    assert sorted(hosts.in_order()) == [B, C]
    assert hosts.in_order(first=B)[0] == B


def test_hosts_that_a_door_was_given_stay_whatever_a_store_knows() -> None:
    hosts = Hosts((A,), Clock())
    hosts.found([Host("a/1", A), Host("b/1", B)])
    assert sorted(hosts.in_order()) == [A, B]
    hosts.found([])
    assert hosts.in_order() == [A]
