"""The thread of a model: what runs in it, in which order, and the handling of errors."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from antiphon.engine import model_thread
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import EngineError, ModelError, ModelLost, Refused


@pytest.fixture
def thread() -> Iterator[ModelThread]:
    made = ModelThread("vocoder")
    yield made
    made.close()


def test_calls_run_in_the_thread_in_the_order_in_which_they_came(thread: ModelThread) -> None:
    ran: list[object] = []

    async def main() -> None:
        for number in range(3):
            thread.post(lambda number=number: ran.append(number))
        ran.append(await thread.call(lambda: threading.current_thread().name))

    asyncio.run(main())
    assert ran == [0, 1, 2, "vocoder"]


def test_receivers_of_results_run_before_the_next_step_and_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # A loaded machine may take longer than the limit.
    monkeypatch.setattr(model_thread, "YIELD_S", 30.0)
    waiting, steps = list[int](), list[list[int]]()
    answered = threading.Event()

    def step() -> bool:
        if answered.is_set():
            steps.append(list(waiting))
        return False

    async def main() -> None:
        loop = asyncio.get_running_loop()
        thread = ModelThread("engine", step=step)

        async def say(number: int, asked: asyncio.Future[None]) -> None:
            await asked
            thread.post(lambda: waiting.append(number))

        answers = [loop.create_future() for _ in range(5)]
        tasks = [asyncio.ensure_future(say(number, answer)) for number, answer in enumerate(answers)]
        await asyncio.sleep(0)

        def answer() -> None:
            for future in answers:
                thread.deliver(loop, future.set_result, None)
            thread.yield_to(loop)
            answered.set()

        await thread.call(answer)
        await asyncio.gather(*tasks)
        await thread.call(lambda: None)
        thread.close()

    asyncio.run(main())
    assert steps[0] == [0, 1, 2, 3, 4]


def test_a_thread_does_not_wait_long_for_a_loop_that_does_not_run() -> None:
    loop = asyncio.new_event_loop()
    stepped = threading.Event()
    thread = ModelThread("engine", step=lambda: bool(stepped.set()))
    thread.post(lambda: thread.yield_to(loop))
    stepped.clear()
    thread.wake()
    assert stepped.wait(10)
    thread.close()
    loop.close()


def test_what_a_part_of_the_model_raises_becomes_a_model_error(thread: ModelThread) -> None:
    def fail(error: Exception) -> None:
        raise error

    async def main() -> None:
        with pytest.raises(ModelError, match="RuntimeError: no memory") as wrapped:
            await thread.call_model(lambda: fail(RuntimeError("no memory")))
        assert isinstance(wrapped.value.__cause__, RuntimeError)
        with pytest.raises(EngineError, match="as it is"):
            await thread.call_model(lambda: fail(EngineError("as it is")))
        with pytest.raises(KeyError):
            await thread.call(lambda: fail(KeyError("key")))
        # The thread continues.
        assert await thread.call_model(lambda: 5) == 5

    asyncio.run(main())


def test_when_a_posted_function_raises_it_is_logged_and_the_thread_goes_on(
    thread: ModelThread, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        with caplog.at_level(logging.ERROR):
            thread.post(lambda: [][0])
            assert await thread.call(lambda: 1) == 1

    asyncio.run(main())
    assert "vocoder" in caplog.text
    assert "IndexError" in caplog.text


def test_when_a_caller_is_cancelled_before_its_turn_its_call_is_skipped(thread: ModelThread) -> None:
    async def main() -> None:
        gate, ran = threading.Event(), list[int]()
        thread.post(lambda: gate.wait(10) and None)
        waiting = asyncio.create_task(thread.call(lambda: ran.append(1)))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        gate.set()
        await thread.call(lambda: ran.append(2))
        assert ran == [2]

    asyncio.run(main())


def test_behind_a_call_the_owner_steps_until_there_is_nothing_to_do() -> None:
    work, done, idle = deque("abc"), list[str](), threading.Event()

    def step() -> bool:
        done.append(work.popleft())
        if not work:
            idle.set()
        return bool(work)

    thread = ModelThread("engine", step=step, on_close=lambda: done.append("closed"))
    thread.post(lambda: done.append("call"))
    assert idle.wait(10)
    thread.close()
    assert done == ["call", "a", "b", "c", "closed"]


def test_a_wake_has_the_owner_step_again() -> None:
    steps, asleep = list[int](), threading.Semaphore(0)

    def step() -> bool:
        steps.append(len(steps))
        return False

    thread = ModelThread("engine", step=step, pause_s=asleep.release)
    for number in range(3):
        # The thread holds its lock until it sleeps, so the wake comes after that.
        assert asleep.acquire(timeout=10)
        assert len(steps) == number
        thread.wake()
    assert asleep.acquire(timeout=10)
    thread.close()
    assert steps == [0, 1, 2]


def test_results_of_one_step_come_to_a_loop_together(thread: ModelThread) -> None:
    async def main() -> None:
        loop, got, both = asyncio.get_running_loop(), list[int](), asyncio.Event()

        def deliver() -> None:
            thread.deliver(loop, lambda: got.append(1))
            thread.deliver(loop, lambda: (got.append(2), both.set()))  # type: ignore[arg-type, return-value]

        thread.post(deliver)
        await both.wait()
        assert got == [1, 2]

    asyncio.run(main())


def test_when_a_loop_is_gone_its_results_are_dropped_and_the_thread_goes_on(thread: ModelThread) -> None:
    gone = asyncio.new_event_loop()
    gone.close()

    async def main() -> None:
        thread.post(lambda: thread.deliver(gone, lambda: None))
        assert await thread.call(lambda: 1) == 1
        assert await thread.call(lambda: 2) == 2

    asyncio.run(main())


def test_when_it_is_closed_what_was_posted_still_runs_and_later_calls_are_refused() -> None:
    thread, gate, ran = ModelThread("vocoder"), threading.Event(), list[str]()
    thread.post(lambda: gate.wait(10) and None)
    thread.post(lambda: ran.append("posted"))
    closing = threading.Thread(target=thread.close)
    closing.start()
    with pytest.raises(Refused, match="the vocoder is shutting down"):
        while True:
            thread.post(lambda: None)
    gate.set()
    closing.join(10)
    assert ran == ["posted"]


def test_when_the_thread_ends_then_calls_that_wait_fail_by_name_and_later_ones_at_once() -> None:
    def step() -> bool:
        if begun.is_set():
            raise SystemExit("the library gave up")
        return False

    begun, gate = threading.Event(), threading.Event()
    thread = ModelThread("engine", step=step)

    async def main() -> None:
        thread.post(lambda: gate.wait(10) and begun.set())
        on_lost = asyncio.get_running_loop().create_future()
        with thread.waiting(lambda error: on_lost.get_loop().call_soon_threadsafe(on_lost.set_result, error) and None):
            gate.set()
            error = await asyncio.wait_for(on_lost, 10)
        assert str(error) == "the engine is lost: its thread ended with SystemExit: the library gave up"
        with pytest.raises(ModelLost, match="the engine is lost"):
            await thread.call(lambda: 1)
        with pytest.raises(ModelLost), thread.waiting(lambda _: None):
            pass

    asyncio.run(main())
    thread.close()


def test_when_a_call_hangs_then_its_age_is_known_and_declaring_the_thread_lost_frees_all_callers() -> None:
    thread, gate, entered = ModelThread("vocoder"), threading.Event(), threading.Event()
    assert thread.busy_s() == 0

    def hang() -> None:
        entered.set()
        assert gate.wait(10)

    async def main() -> None:
        ran = list[int]()
        calls = [asyncio.ensure_future(thread.call(hang)), asyncio.ensure_future(thread.call(lambda: ran.append(1)))]
        await asyncio.to_thread(entered.wait, 10)
        assert thread.busy_s() > 0
        thread.fail("a step has run for 60 s")
        failed = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
        assert [str(e) for e in failed] == ["the vocoder is lost: a step has run for 60 s"] * 2
        # The thread still hangs, but `close` does not wait for it.
        thread.close(timeout_s=60)
        assert not gate.is_set()
        assert ran == []

    asyncio.run(main())
    gate.set()


class Order:
    """A stream that records when the thread takes and gives."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        self.events.append("entered")
        yield
        self.events.append("left")

    def take(self) -> None:
        self.events.append("take")

    def give(self) -> None:
        self.events.append("give")


def test_a_stream_takes_what_calls_bring_and_gives_before_results_leave() -> None:
    order = Order()

    def step() -> bool:
        order.events.append("step")
        return False

    async def main() -> None:
        loop = asyncio.get_running_loop()
        delivered = loop.create_future()
        thread = ModelThread("engine", step=step, stream=order)

        def called() -> None:
            order.events.append("call")
            thread.deliver(loop, lambda: delivered.set_result(list(order.events)))

        seen = await asyncio.gather(thread.call(called), delivered)
        # The thread may have stepped once before the call came.
        events = [e for e in seen[1] if e != "step"]
        assert events == ["entered", "take", "call", "give", "give"]
        thread.close()
        assert order.events[-1] == "left"

    asyncio.run(main())
