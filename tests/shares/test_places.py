"""Places and threads that keys share equally: turns, bounds, and tasks that leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from antiphon.shares import threads
from antiphon.shares.places import Places, current_owner
from antiphon.shares.threads import in_thread


class Bench:
    """Tasks that each hold a place until they are released, and the order in which they got it."""

    def __init__(self, places: Places) -> None:
        self.places, self.order = places, list[str]()
        self.gates = dict[str, asyncio.Event]()
        self.tasks = dict[str, asyncio.Task[None]]()

    async def add(self, *names: str) -> None:
        for name in names:
            self.gates[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._hold(name))
            await settle()

    async def _hold(self, name: str) -> None:
        current_owner.set(name[0])
        async with self.places.held():
            self.order.append(name)
            await self.gates[name].wait()

    async def let_go(self, *names: str) -> None:
        for name in names:
            self.gates[name].set()
            await settle()

    async def finish(self) -> None:
        for gate in self.gates.values():
            gate.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def settle() -> None:
    """Let all tasks run as far as they can without one another."""
    for _ in range(10):
        await asyncio.sleep(0)


def on_a_bench(places: Places, work: Callable[[Bench], object]) -> list[str]:
    async def main() -> list[str]:
        bench = Bench(places)
        await work(bench)  # type: ignore[misc]
        await bench.finish()
        return bench.order

    return asyncio.run(main())


def test_when_keys_wait_then_each_has_its_turn_and_a_key_that_is_alone_has_all() -> None:
    async def work(bench: Bench) -> None:
        await bench.add("a1", "a2", "a3", "a4", "b1", "b2", "c1")
        assert bench.order == ["a1", "a2"]
        await bench.let_go("a1", "a2", "b1", "c1", "a3")
        assert bench.order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]

    on_a_bench(Places(2), work)


def test_when_a_key_has_its_share_then_a_free_place_is_for_others() -> None:
    async def work(bench: Bench) -> None:
        await bench.add("a1", "a2", "a3", "b1")
        assert bench.order == ["a1", "a2", "b1"]
        # Nor does its turn delay those behind it.
        await bench.let_go("b1")
        await bench.add("c1")
        assert bench.order == ["a1", "a2", "b1", "c1"]
        await bench.let_go("a1")
        assert bench.order[-1] == "a3"

    on_a_bench(Places(3, per_owner=2), work)


def test_when_tasks_leave_while_they_wait_or_hold_then_their_places_are_free_again() -> None:
    places = Places(1)

    async def work(bench: Bench) -> None:
        await bench.add("a1", "b1", "c1")
        bench.tasks["b1"].cancel()
        await settle()
        bench.tasks["a1"].cancel()
        await settle()
        assert bench.order == ["a1", "c1"]
        await bench.add("d1", "e1")
        # One is cancelled at the very moment when it gets the place.
        bench.gates["c1"].set()
        bench.tasks["c1"].cancel()
        bench.tasks["d1"].cancel()
        await settle()
        assert bench.order == ["a1", "c1", "e1"]

    on_a_bench(places, work)
    # And in another event loop.
    assert on_a_bench(places, lambda bench: bench.add("a1")) == ["a1"]


def test_when_a_key_has_filled_its_threads_then_other_keys_and_the_server_still_have_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads.THREADS, "per_owner", 3)
    gate, owners = threading.Event(), list[object]()

    def waits() -> None:
        owners.append(current_owner.get())
        assert gate.wait(10)

    async def run_as(owner: str | None, work: Callable[[], object]) -> None:
        current_owner.set(owner)
        await in_thread(work)

    async def main() -> None:
        slow = [asyncio.create_task(run_as("a", waits)) for _ in range(50)]
        await settle()
        for owner in ("b", None):
            await asyncio.create_task(run_as(owner, lambda: owners.append(current_owner.get())))
        assert [owner for owner in owners if owner != "a"] == ["b", None]
        assert owners.count("a") <= 3
        gate.set()
        await asyncio.gather(*slow)

    asyncio.run(main())
    assert owners.count("a") == 50


def test_when_a_task_is_cancelled_then_its_thread_has_its_place_until_it_ends() -> None:
    places, begun, gate, ended = Places(1), threading.Event(), threading.Event(), list[str]()

    def work(name: str) -> None:
        begun.set()
        assert gate.wait(10)
        ended.append(name)

    async def main() -> None:
        first = asyncio.create_task(in_thread(work, "first", places=places))
        await settle()
        assert begun.wait(10)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(in_thread(ended.append, "second", places=places))
        await settle()
        assert ended == []
        gate.set()
        await second

    asyncio.run(main())
    assert ended == ["first", "second"]
