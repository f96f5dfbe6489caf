"""How many partials a server of windows gets at once, and how long a session rests."""

from __future__ import annotations

import asyncio

import pytest

from antiphon.remote.transcriber.pace import Pace


def run_one(pace: Pace, took_s: float | None, size: float = 1.0) -> float:
    asyncio.run(pace.begin())
    return pace.end(took_s, size)


def test_a_fast_server_gets_more_partials_at_once_and_a_slow_one_fewer() -> None:
    pace = Pace()
    for _ in range(12):
        run_one(pace, 0.1)
    grown = pace.limit
    assert grown > 2
    for _ in range(3):
        run_one(pace, 0.3)
    assert pace.limit < grown
    for _ in range(20):
        run_one(pace, 1.0)
    assert pace.limit == 1


def test_times_count_by_the_size_of_the_window() -> None:
    pace = Pace()
    for size in range(1, 10):
        run_one(pace, 0.1 * size, size)
    assert pace.limit > 2


def test_a_session_rests_as_long_as_its_partial_took_and_not_after_a_failure() -> None:
    pace = Pace()
    assert run_one(pace, 0.25) == pytest.approx(0.25)
    assert run_one(pace, None) == 0.0


def test_partials_wait_for_each_other_in_their_order_and_a_cancelled_one_passes_its_turn_on() -> None:
    async def main() -> list[int]:
        pace, order = Pace(), list[int]()

        async def partial(number: int) -> None:
            await pace.begin()
            order.append(number)

        await pace.begin()
        tasks = [asyncio.create_task(partial(number)) for number in range(4)]
        await asyncio.sleep(0)
        assert pace.num_waiting == 4
        pace.end(None, 1.0)
        # The first one has been woken, and is cancelled before it runs.
        tasks[0].cancel()
        await asyncio.sleep(0.01)
        assert order == [1]
        pace.end(None, 1.0)
        await tasks[2]
        pace.end(None, 1.0)
        await tasks[3]
        return order

    assert asyncio.run(main()) == [1, 2, 3]


def test_two_places_that_become_free_at_once_go_to_two_partials() -> None:
    async def main() -> None:
        pace = Pace()
        for _ in range(6):
            await pace.begin()
            pace.end(0.1, 1.0)
        assert pace.limit == 3
        for _ in range(3):
            await pace.begin()
        waiting = [asyncio.create_task(pace.begin()) for _ in range(2)]
        await asyncio.sleep(0)
        pace.end(None, 1.0)
        pace.end(None, 1.0)
        await asyncio.wait_for(asyncio.gather(*waiting), 5)

    asyncio.run(main())
