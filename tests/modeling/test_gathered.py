"""The tick that gathers requests of several sessions, on a loop whose clock the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from antiphon.modeling.gathered import Moment, Tick


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

    def begin(self, waits: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
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


def test_sessions_of_a_moment_meet_after_their_work() -> None:
    loop, tick = Clock(), Tick(0.04)
    first, *others = (loop.begin(tick.wait(session)) for session in ("one", "two", "three", "four", "one"))
    loop.goes_on(0.04)
    moments = [task.result() for task in others]
    # The first request was alone.
    assert first.result() is not moments[0]
    assert all(moment is moments[0] for moment in moments)
    (moment, *_) = moments
    two, one = loop.begin(moment.meet("two", 1)), loop.begin(moment.meet("one", 1))
    moment.leave("three")
    moment.leave("three")
    loop.goes_on(0.1)
    assert not two.done()
    four = loop.begin(moment.meet("four", 1))
    assert all(task.done() for task in (one, two, four))
    loop.close()


def test_a_meeting_does_not_wait_for_long_and_not_for_a_request_that_was_cancelled() -> None:
    loop, tick = Clock(), Tick(0.04)
    loop.begin(tick.wait("zero"))
    one, two, three = (loop.begin(tick.wait(session)) for session in ("one", "two", "three"))
    three.cancel()
    loop.goes_on(0.04)
    meets = loop.begin(one.result().meet("one", 0.5))
    loop.goes_on(0.4)
    assert not meets.done()
    loop.goes_on(0.2)
    assert meets.done()
    assert loop.begin(two.result().meet("two", 0.5)).done()
    loop.close()


def test_a_session_that_was_alone_meets_nobody() -> None:
    loop = Clock()
    moment: Moment = loop.begin(Tick(0.04).wait("one")).result()
    assert loop.begin(moment.meet("one", 1)).done()
    loop.close()
