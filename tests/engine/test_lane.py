"""A lane with work that a test blocks: order, batches, refusals, cancellation and failure."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from antiphon.audio import Pcm
from antiphon.engine.lane import BULK, MAX_RESTARTS, Lane
from antiphon.errors import ModelError, ModelLost, Refused
from antiphon.shares.places import current_owner


class Gate:
    """The work of a lane: waits until `open` is set, and records its batches."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.batches: list[list[int]] = []

    def __call__(self, jobs: list[int]) -> list[int]:
        self.batches.append(list(jobs))
        self.entered.set()
        assert self.open.wait(10)
        return [j * 10 for j in jobs]


async def submit_while_held(lane: Lane[int, int], gate: Gate, jobs: list[tuple[int, int, int]]) -> list[int]:
    first = asyncio.ensure_future(lane.run(0))
    await asyncio.to_thread(gate.entered.wait, 10)
    rest = [asyncio.ensure_future(lane.run(job, priority, key)) for job, priority, key in jobs]
    await asyncio.sleep(0)
    gate.open.set()
    return await asyncio.gather(first, *rest)


def test_jobs_run_by_priority_and_equal_keys_share_a_batch() -> None:
    gate = Gate()
    lane: Lane[int, int] = Lane("t", gate, max_batch=3)
    jobs = [(1, 1, 7), (2, 1, 8), (3, 1, 7), (4, 0, 7), (5, 2, 7)]
    assert asyncio.run(submit_while_held(lane, gate, jobs)) == [0, 10, 20, 30, 40, 50]
    assert gate.batches == [[0], [4], [1, 3], [2], [5]]
    assert (lane.stats.jobs, lane.depth, lane.running) == (6, 0, 0)
    lane.close()


def test_a_lane_is_overdue_while_a_job_of_the_first_priority_waits_past_its_deadline() -> None:
    gate = Gate()

    async def main() -> None:
        lane: Lane[int, int] = Lane("t", gate)
        now_s = time.monotonic()
        held = lane.submit(0, deadline_s=now_s - 60)
        await asyncio.to_thread(gate.entered.wait, 10)
        # Running jobs do not count as waiting, and jobs of lower priority do not count as overdue.
        waiting = [lane.submit(1, 1, deadline_s=now_s - 60), lane.submit(2, deadline_s=now_s + 600)]
        assert lane.overdue_s() == 0
        waiting.append(lane.submit(3, deadline_s=now_s - 5))
        assert 5 <= lane.overdue_s() < 60
        gate.open.set()
        await asyncio.gather(*map(asyncio.wrap_future, (held, *waiting)))
        assert lane.overdue_s() == 0
        lane.close()

    asyncio.run(main())


def test_when_jobs_have_deadlines_then_the_earliest_runs_first_and_one_without_is_due_soon() -> None:
    gate = Gate()

    async def main() -> None:
        lane: Lane[int, int] = Lane("t", gate)
        now_s = time.monotonic()
        held = lane.submit(0)
        await asyncio.to_thread(gate.entered.wait, 10)
        deadlines_s = {1: now_s + 600, 2: None, 3: now_s - 5, 4: now_s - 5}
        waiting = [lane.submit(job, deadline_s=due_s) for job, due_s in deadlines_s.items()]
        gate.open.set()
        for future in (held, *waiting):
            await asyncio.wrap_future(future)
        lane.close()

    asyncio.run(main())
    assert gate.batches == [[0], [3], [4], [2], [1]]


def test_when_a_waiting_job_is_replaced_then_the_new_one_runs_in_its_place_and_a_running_one_stays() -> None:
    gate = Gate()

    async def main() -> tuple[list[bool], list[int]]:
        lane: Lane[int, int] = Lane("t", gate, max_batch=2)
        held = lane.submit(0)
        await asyncio.to_thread(gate.entered.wait, 10)
        waiting = [lane.submit(job, key=job) for job in (1, 2)]
        replaced = [lane.replace(held, 9), lane.replace(waiting[0], 5, key=2), lane.replace(waiting[0], 6, key=2)]
        gate.open.set()
        results = [await asyncio.wrap_future(future) for future in (held, *waiting)]
        lane.close()
        return replaced, results

    assert asyncio.run(main()) == ([False, True, True], [0, 60, 20])
    # The key is replaced too.
    assert gate.batches == [[0], [6, 2]]


def test_when_files_are_many_then_they_leave_half_of_the_workers_to_live_jobs() -> None:
    running, entered, release = list[int](), threading.Semaphore(0), threading.Event()

    def work(jobs: Sequence[int]) -> Sequence[int]:
        running.extend(jobs)
        entered.release()
        assert release.wait(10)
        return jobs

    async def main() -> None:
        lane: Lane[int, int] = Lane("t", work, workers=4)
        files = [asyncio.ensure_future(lane.run(job, BULK)) for job in (10, 11, 12, 13)]
        for _ in range(2):
            assert await asyncio.to_thread(entered.acquire, timeout=10)
        live = [asyncio.ensure_future(lane.run(job, priority)) for job, priority in ((1, 0), (2, 1))]
        for _ in range(2):
            assert await asyncio.to_thread(entered.acquire, timeout=10)
        assert (sorted(running), lane.depth) == ([1, 2, 10, 11], 2)
        release.set()
        assert await asyncio.gather(*files, *live) == [10, 11, 12, 13, 1, 2]
        lane.close()

    asyncio.run(main())


def test_when_jobs_are_arrays_then_those_of_another_key_stay_behind_in_the_queue() -> None:
    entered, release = threading.Event(), threading.Event()

    def work(jobs: Sequence[Pcm]) -> list[int]:
        entered.set()
        assert release.wait(10)
        return [len(jobs)] * len(jobs)

    async def scenario(lane: Lane[Pcm, int]) -> list[int]:
        first = lane.submit(np.zeros(2, np.float32))
        await asyncio.to_thread(entered.wait, 10)
        rest = [lane.submit(np.zeros(2, np.float32), 0, key) for key in ("a", "b", "a")]
        release.set()
        return [job.result(10) for job in (first, *rest)]

    lane: Lane[Pcm, int] = Lane("t", work, max_batch=2)
    assert asyncio.run(scenario(lane)) == [1, 2, 1, 2]
    lane.close()


def test_when_a_lane_is_full_it_refuses_with_a_retry_time() -> None:
    gate = Gate()
    lane: Lane[int, int] = Lane("t", gate, max_queue=1)

    async def scenario() -> None:
        first = asyncio.ensure_future(lane.run(0))
        await asyncio.to_thread(gate.entered.wait, 10)
        second = asyncio.ensure_future(lane.run(1))
        await asyncio.sleep(0)
        with pytest.raises(Refused) as refusal:
            await lane.run(2)
        assert refusal.value.retry_after_s >= 1
        gate.open.set()
        assert await asyncio.gather(first, second) == [0, 10]

    asyncio.run(scenario())
    lane.close()
    with pytest.raises(Refused):
        lane.submit(1)


def test_when_a_waiting_job_is_cancelled_it_never_runs() -> None:
    gate = Gate()
    lane: Lane[int, int] = Lane("t", gate)

    async def scenario() -> None:
        first = asyncio.ensure_future(lane.run(0))
        await asyncio.to_thread(gate.entered.wait, 10)
        second = asyncio.ensure_future(lane.run(1))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        gate.open.set()
        assert await first == 0
        assert await lane.run(2) == 20

    asyncio.run(scenario())
    assert gate.batches == [[0], [2]]
    lane.close()


def test_when_a_batch_fails_only_its_own_jobs_fail() -> None:
    def work(jobs: list[int]) -> list[int]:
        if jobs == [1]:
            raise RuntimeError("broken")
        return jobs

    lane: Lane[int, int] = Lane("t", work)

    async def scenario() -> None:
        with pytest.raises(ModelError, match="broken"):
            await lane.run(1)
        assert await lane.run(2) == 2

    asyncio.run(scenario())
    assert lane.stats.failures == 1
    lane.close()


def test_when_a_lane_is_closed_waiting_jobs_are_cancelled_and_its_threads_end() -> None:
    gate = Gate()
    lane: Lane[int, int] = Lane("t", gate)

    async def scenario() -> None:
        first = asyncio.ensure_future(lane.run(0))
        await asyncio.to_thread(gate.entered.wait, 10)
        second = asyncio.ensure_future(lane.run(1))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(asyncio.to_thread(lane.close))
        with pytest.raises(asyncio.CancelledError):
            await second
        gate.open.set()
        assert await first == 0
        await closing

    asyncio.run(scenario())
    assert not [t for t in threading.enumerate() if t.name == "lane-t-0"]


async def submit_by_owner(
    lane: Lane[int, int], gate: Gate, jobs: list[tuple[str, int]], key: int = 0
) -> list[int | BaseException]:
    """Submit jobs, each of an owner, while a job of "a" runs. Returns the results of the waiting jobs."""

    def begin(owner: str, job: int) -> asyncio.Task[int]:
        current_owner.set(owner)
        return asyncio.ensure_future(lane.run(job, 0, key))

    first = begin("a", 0)
    await asyncio.to_thread(gate.entered.wait, 10)
    rest = []
    for owner, job in jobs:
        rest.append(begin(owner, job))
        await asyncio.sleep(0)
    gate.open.set()
    await first
    return await asyncio.gather(*rest, return_exceptions=True)


def test_when_an_owner_has_many_jobs_waiting_then_anothers_wait_for_one_of_them_each() -> None:
    gate = Gate()
    lane: Lane[int, int] = Lane("t", gate)
    asyncio.run(submit_by_owner(lane, gate, [*(("a", n) for n in range(1, 7)), ("b", 11), ("b", 12), ("c", 21)]))
    assert gate.batches == [[0], [11], [21], [1], [12], [2], [3], [4], [5], [6]]
    lane.close()


def test_when_jobs_of_several_owners_share_a_batch_then_each_has_a_part_of_it() -> None:
    gate = Gate()
    lane: Lane[int, int] = Lane("t", gate, max_batch=3)
    asyncio.run(submit_by_owner(lane, gate, [*(("a", n) for n in range(1, 5)), ("b", 11), ("b", 12)]))
    assert gate.batches == [[0], [11, 1, 12], [2, 3, 4]]
    lane.close()


def test_when_the_queue_is_full_then_the_owner_with_more_than_its_part_is_refused_and_never_one_below() -> None:
    gate = Gate()
    lane: Lane[int, int] = Lane("t", gate, max_queue=4)
    jobs = [*(("a", n) for n in range(1, 6)), ("b", 11), ("b", 12), ("b", 13)]
    results = asyncio.run(submit_by_owner(lane, gate, jobs))
    assert [r if isinstance(r, int) else type(r) for r in results] == [
        *(10, 20, Refused, Refused, Refused),
        *(110, 120, Refused),
    ]
    assert gate.batches == [[0], [11], [1], [12], [2]]
    lane.close()


def run_and_wait(lane: Lane[int, int], *jobs: int) -> list[int | BaseException]:
    async def main() -> list[int | BaseException]:
        return await asyncio.wait_for(asyncio.gather(*map(lane.run, jobs), return_exceptions=True), 10)

    return asyncio.run(main())


def end_on_odd(jobs: list[int]) -> list[int]:
    if jobs[0] % 2:
        raise SystemExit("the library gave up")
    return jobs


@pytest.mark.parametrize("workers", [1, 2])
def test_when_a_worker_ends_then_its_job_fails_by_name_and_a_new_one_runs_those_that_wait(workers: int) -> None:
    lane: Lane[int, int] = Lane("ears", end_on_odd, workers=workers)
    results = run_and_wait(lane, 1, 2, 3, 4, 5, 6)
    assert results[1::2] == [2, 4, 6]
    assert {type(error) for error in results[::2]} == {ModelError}
    assert str(results[0]) == "ears: its worker ended with SystemExit: the library gave up"
    lane.close()
    assert (lane.lost, lane.stats.restarts, lane.stats.failures, lane.running) == (None, 3, 3, 0)


def test_when_workers_end_too_often_then_all_jobs_fail_by_name_and_later_ones_at_once() -> None:
    lane: Lane[int, int] = Lane("ears", end_on_odd, workers=2)
    assert {type(error) for error in run_and_wait(lane, *[1] * MAX_RESTARTS)} == {ModelError}
    failed = run_and_wait(lane, 1)
    assert {type(error) for error in failed} == {ModelLost}
    assert str(failed[0]) == (
        "the model in the lane ears is lost: its worker ended with SystemExit: the library gave up"
    )
    with pytest.raises(ModelLost, match="ears"):
        lane.submit(4)
    assert lane.lost is not None
    lane.close()
    assert (lane.depth, lane.running) == (0, 0)


def test_when_work_hangs_then_its_age_is_known_and_declaring_the_lane_lost_frees_all_callers() -> None:
    gate = Gate()
    lane: Lane[int, int] = Lane("ears", gate)
    assert lane.busy_s() == 0

    async def main() -> None:
        calls = [asyncio.ensure_future(lane.run(job)) for job in (1, 2)]
        await asyncio.to_thread(gate.entered.wait, 10)
        assert lane.busy_s() > 0
        lane.fail("a step has run for 60 s")
        failed = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
        assert [str(e) for e in failed] == ["the model in the lane ears is lost: a step has run for 60 s"] * 2
        # The worker still hangs, but `close` does not wait for it.
        lane.close(timeout_s=60)
        assert not gate.open.is_set()

    asyncio.run(main())
    gate.open.set()


@pytest.mark.parametrize("results", [0, 2])
def test_when_work_returns_another_number_of_results_then_the_job_fails_and_the_worker_goes_on(results: int) -> None:
    lane: Lane[int, int] = Lane("t", lambda jobs: [9] * (results if jobs == [1] else 1))
    wrong, right = run_and_wait(lane, 1, 2)
    assert isinstance(wrong, ModelError)
    assert str(wrong) == f"t: {results} results for 1 jobs"
    assert (right, lane.lost) == (9, None)
    lane.close()


def test_when_the_observer_fails_then_the_job_has_its_result_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    def observe(priority: int, waited_s: float, took_s: float) -> None:
        raise KeyError("no such label")

    lane: Lane[int, int] = Lane("t", lambda jobs: jobs, observe=observe)
    assert run_and_wait(lane, 1, 2) == [1, 2]
    assert "the observer of the lane t failed" in caplog.text
    lane.close()
