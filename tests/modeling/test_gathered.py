"""The tick that gathers requests of several sessions, on a loop whose clock the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from antiphon.modeling.gathered import Tick


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time is `now_s` and does not pass by itself."""

    now_s = 100.005

    def time(self) -> float:
        return self.now_s

    def goes_on(self, seconds: float) -> None:
        """Let time pass, and run everything that is due then."""
        self.now_s += seconds
        for _ in range(5):
            self.run_until_complete(asyncio.sleep(0))

    def begin(self, waits: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.create_task(waits)
        self.goes_on(0)
        return task


def test_a_session_that_is_alone_does_not_wait() -> None:
    loop, tick = Clock(), Tick(0.04)
    for _ in range(3):
        assert loop.begin(tick.wait("one")).done()
        loop.goes_on(0.5)
    loop.close()


def test_the_requests_of_active_sessions_wait_for_the_same_moment() -> None:
    loop, tick = Clock(), Tick(0.04)
    assert loop.begin(tick.wait("one")).done()
    loop.goes_on(0.01)
    second = loop.begin(tick.wait("two"))
    loop.goes_on(0.02)
    third, first = loop.begin(tick.wait("three")), loop.begin(tick.wait("one"))
    assert not any(task.done() for task in (first, second, third))
    loop.goes_on(0.011)
    assert all(task.done() for task in (first, second, third))
    later = loop.begin(tick.wait("two"))
    assert not later.done()
    loop.goes_on(0.04)
    assert later.done()
    loop.close()


def test_a_session_does_not_wait_for_others_that_have_stopped() -> None:
    loop, tick = Clock(), Tick(0.04)
    loop.begin(tick.wait("one"))
    waits = loop.begin(tick.wait("two"))
    loop.goes_on(Tick.ACTIVE_S + 0.1)
    assert waits.done()
    assert loop.begin(tick.wait("two")).done()
    loop.close()


def test_a_cancelled_request_leaves_the_others_waiting() -> None:
    loop, tick = Clock(), Tick(0.04)
    loop.begin(tick.wait("one"))
    cancelled, waits = loop.begin(tick.wait("two")), loop.begin(tick.wait("one"))
    cancelled.cancel()
    loop.goes_on(0)
    assert cancelled.cancelled()
    assert not waits.done()
    loop.goes_on(0.04)
    assert waits.done()
    loop.close()


def test_without_an_interval_no_request_waits() -> None:
    loop, tick = Clock(), Tick(0.0)
    for session in ("one", "two", "one"):
        assert loop.begin(tick.wait(session)).done()
    loop.close()


def test_a_loop_that_was_closed_before_its_moment_holds_up_no_other() -> None:
    tick = Tick(0.04)
    for _ in range(2):
        loop = Clock()
        first, second = loop.begin(tick.wait("one")), loop.begin(tick.wait("two"))
        assert not second.done()
        for task in (first, second):
            task.cancel()
        loop.goes_on(0)
        loop.close()
