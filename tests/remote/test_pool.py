"""The pool of a model's servers: which one is asked, when another one is, and what is counted. No sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from antiphon.errors import ModelError, Refused, RemoteError
from antiphon.remote.breaker import FAILURES_TO_OPEN
from antiphon.remote.pool import DEADLINE_FACTOR, MIN_DEADLINE_S, MIN_TIMES, Endpoint, Pool, Times

LIMIT_S = 20
Request = Callable[[Endpoint], AsyncGenerator[str, None]]


def run(coroutine: Awaitable[Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def pool(*names: str, **options: Any) -> Pool[Endpoint]:
    return Pool("transcriber", [Endpoint(f"http://{name}") for name in names], **options)


class Servers:
    """Answers of named servers: a list of items, an error, or None for a server that hangs."""

    def __init__(self, **answers: list[str] | Exception | None) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.closed: list[str] = []

    async def request(self, endpoint: Endpoint) -> AsyncGenerator[str, None]:
        self.asked.append(endpoint.host)
        try:
            match self.answers[endpoint.host]:
                case None:
                    await asyncio.Event().wait()
                case Exception() as error:
                    raise error
                case items:
                    for item in items or ():
                        yield item
        finally:
            self.closed.append(endpoint.host)

    async def one(self, endpoint: Endpoint) -> str:
        async for item in self.request(endpoint):
            return item
        return ""


def test_a_deadline_follows_the_measured_times_within_bounds() -> None:
    servers = pool("a", max_s=10.0)
    (a,) = servers.all
    for took_s in (0.3, *[0.5] * (MIN_TIMES - 2)):
        a.times.note(took_s)
    assert servers.deadline_s(a) == 10.0
    a.times.note(0.5)
    assert servers.deadline_s(a) == DEADLINE_FACTOR * 0.5
    assert servers.deadline_s(a, size=100.0) == 10.0
    assert servers.deadline_s(a, size=0.1) == MIN_DEADLINE_S
    assert pool("b", measures=False, max_s=3.0).deadline_s(a) == 3.0


def test_times_of_requests_are_compared_by_their_sizes() -> None:
    times = Times()
    for size in range(1, MIN_TIMES + 1):
        times.note(0.1 * size, size)
    assert times.quantile_s(0.95, 20.0) == pytest.approx(2.0)
    assert (times.count, times.sum_s) == (MIN_TIMES, pytest.approx(0.1 * sum(range(1, MIN_TIMES + 1))))


def test_the_least_loaded_server_is_asked_and_a_bound_one_is_preferred() -> None:
    servers = pool("a", "b")
    a, b = servers.all
    a.running = 1
    assert servers.choose(None) is b
    assert servers.choose(None, bound=a) is a
    assert servers.choose(None, bound=a, avoid=[a]) is b
    for _ in range(FAILURES_TO_OPEN):
        b.failed(None)
    assert servers.choose(None, avoid=[a]) is a
    for _ in range(FAILURES_TO_OPEN):
        a.failed(None)
    with pytest.raises(Refused, match="does not answer"):
        servers.choose(None)


@pytest.mark.parametrize("failure", [RemoteError("broken"), Refused("full", 60.0)])
def test_when_one_server_fails_the_next_one_is_asked(failure: Exception) -> None:
    found = Servers(a=failure, b=["yes"])
    servers = pool("a", "b")
    assert run(servers.ask(found.one)) == "yes"
    a, b = servers.all
    assert found.asked == ["a", "b"]
    assert (a.requests, a.failures, b.requests, b.second_attempts, b.failures) == (1, 1, 1, 1, 0)
    assert (a.running, b.running) == (0, 0)
    assert a.is_away == isinstance(failure, RemoteError)


def test_an_only_server_is_asked_twice_and_counts_one_failure() -> None:
    found = Servers(a=RemoteError("broken"))
    servers = pool("a")
    for _ in range(FAILURES_TO_OPEN):
        with pytest.raises(RemoteError, match="broken"):
            run(servers.ask(found.one))
    with pytest.raises(Refused):
        run(servers.ask(found.one))
    assert found.asked == ["a"] * 2 * FAILURES_TO_OPEN


def test_an_error_that_would_occur_elsewhere_too_is_not_tried_again() -> None:
    found = Servers(a=ModelError("the key"), b=["yes"])
    with pytest.raises(ModelError, match="the key"):
        run(pool("a", "b").ask(found.one))
    assert found.asked == ["a"]


def test_a_late_server_gets_company_and_loses_its_request() -> None:
    found = Servers(a=None, b=["yes"])
    servers = pool("a", "b", max_s=0.2)
    assert run(servers.ask(found.one)) == "yes"
    assert (found.asked, sorted(found.closed)) == (["a", "b"], ["a", "b"])
    assert servers.all[0].is_away


def test_a_hedged_request_is_sent_when_the_first_is_slower_than_usual_and_that_is_no_failure() -> None:
    found = Servers(a=None, b=["yes"])
    servers = pool("a", "b", max_s=60.0, hedges=True)
    for _ in range(MIN_TIMES):
        servers.all[0].times.note(0.01)
    assert run(servers.ask(found.one)) == "yes"
    assert not servers.all[0].is_away


def test_a_stream_is_passed_on_to_its_end_and_not_begun_again() -> None:
    async def read(servers: Pool[Endpoint], request: Request, next_s: float = 5.0) -> list[str]:
        return [item async for item in servers.stream(request, next_s=next_s)]

    assert run(read(pool("a", "b"), Servers(a=["x", "y", "z"]).request)) == ["x", "y", "z"]

    async def breaks(endpoint: Endpoint) -> AsyncGenerator[str, None]:
        yield "x"
        raise RemoteError("broken off")

    servers = pool("a", "b")
    with pytest.raises(RemoteError, match="broken off"):
        run(read(servers, breaks))
    assert [e.requests for e in servers.all] == [1, 0]
    assert (servers.all[0].failures, servers.all[0].running) == (1, 0)


def test_a_server_that_failed_is_asked_last_until_a_look_at_it_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.remote.pool.FIRST_PAUSE_S", 0.01)

    async def main() -> None:
        back = asyncio.Event()

        async def look(endpoint: Endpoint) -> str:
            if not back.is_set():
                raise RemoteError("still away")
            return "works"

        servers = pool("a", "b", look=look)
        a, b = servers.all
        found = Servers(a=RemoteError("broken"), b=["yes"])
        for _ in range(3):
            assert await servers.ask(found.one) == "yes"
        assert found.asked == ["a", "b", "b", "b"]
        for _ in range(FAILURES_TO_OPEN):
            a.failed(None)
        assert not servers.is_away
        back.set()
        looks = [t for t in asyncio.all_tasks() if "_look_until_back" in repr(t.get_coro())]
        await asyncio.wait(looks)
        # Its breaker had opened too.
        assert not a.is_away
        assert servers.choose(None) is a
        back.clear()
        assert await servers.report() == [(a, "still away", False), (b, "still away", False)]

    run(main())
