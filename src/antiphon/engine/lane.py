"""A lane: one shared, bounded, batched worker a model. Many sessions, one copy of the weights.

Jobs wait by priority (0 first), first come first served among equals. `workers`
threads take them in batches of at most `max_batch` with equal keys. A cancelled caller's job is dropped before it runs;
one that is already running finishes and its result is thrown away. Knows no model and no audio.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from antiphon.errors import AntiphonError, ModelError, Refused

Job = TypeVar("Job")
Result = TypeVar("Result")
PRIORITIES = 3


@dataclass(slots=True)
class LaneStats:
    """What a lane has done since it started; read by /metrics. Times in seconds."""

    jobs: int = 0
    batches: int = 0
    failures: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0


@dataclass(slots=True)
class _Waiting(Generic[Job, Result]):
    job: Job
    key: Hashable
    since_s: float
    result: Future[Result] = field(default_factory=Future)


class Lane(Generic[Job, Result]):
    """`work` gets a batch of jobs and returns as many results; it runs in one of `workers` threads.

    Observers get (priority, seconds waited, seconds of the step) after each batch, in the worker's thread.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[Job]], Sequence[Result]],
        *,
        workers: int = 1,
        max_batch: int = 1,
        max_queue: int = 256,
        observe: Callable[[int, float, float], None] | None = None,
    ) -> None:
        self.name = name
        self.stats = LaneStats()
        self.workers = workers
        self._work = work
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._observe = observe
        # Bound: max_queue jobs in all; a job past it is refused with the time the queue needs.
        self._queues: tuple[deque[_Waiting[Job, Result]], ...] = tuple(deque() for _ in range(PRIORITIES))
        self._changed = threading.Condition()
        self._closed = False
        self._running = 0
        self._threads = [
            threading.Thread(target=self._serve, name=f"lane-{name}-{i}", daemon=True) for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, job: Job, priority: int = 0, key: Hashable = None) -> Result:
        """Wait for the job's result. Jobs with equal `key` may share a batch.

        Raises Refused when the queue is full or the lane is closed, ModelError when the step fails.
        """
        return await asyncio.wrap_future(self.submit(job, priority, key))

    def submit(self, job: Job, priority: int = 0, key: Hashable = None) -> Future[Result]:
        """Queue a job from any thread. Raises as `run` does; does not wait."""
        waiting = _Waiting[Job, Result](job, key, time.monotonic())
        with self._changed:
            if self._closed:
                raise Refused(f"{self.name} is shutting down", 5.0)
            if self.depth >= self._max_queue:
                raise Refused(f"{self.name} has {self.depth} jobs waiting", self._drain_estimate_s())
            self._queues[priority].append(waiting)
            self._changed.notify()
        return waiting.result

    @property
    def depth(self) -> int:
        """Jobs waiting, not counting those in a worker."""
        return sum(len(q) for q in self._queues)

    @property
    def running(self) -> int:
        """Jobs in a worker now."""
        return self._running

    def oldest_age_s(self) -> float:
        """Seconds the job that waits longest has waited; 0 when none waits."""
        with self._changed:
            return max((time.monotonic() - q[0].since_s for q in self._queues if q), default=0.0)

    def close(self, timeout_s: float = 10.0) -> None:
        """Refuse new jobs, cancel waiting ones, and wait for the running ones."""
        with self._changed:
            self._closed = True
            for queue in self._queues:
                while queue:
                    queue.popleft().result.cancel()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)

    def _drain_estimate_s(self) -> float:
        step_s = self.stats.busy_s / self.stats.jobs if self.stats.jobs else 0.5
        return max(1.0, self.depth * step_s / self.workers)

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self.depth:
                    self._changed.wait()
                if self._closed:
                    return
                priority, batch = self._take()
                self._running += len(batch)
            if batch:
                self._step(priority, batch)
            with self._changed:
                self._running -= len(batch)

    def _take(self) -> tuple[int, list[_Waiting[Job, Result]]]:
        priority = next(p for p, q in enumerate(self._queues) if q)
        queue, batch = self._queues[priority], list[_Waiting[Job, Result]]()
        for waiting in list(queue):
            if len(batch) == self._max_batch:
                break
            if batch and waiting.key != batch[0].key:
                continue
            queue.remove(waiting)
            if waiting.result.set_running_or_notify_cancel():
                batch.append(waiting)
        return priority, batch

    def _step(self, priority: int, batch: list[_Waiting[Job, Result]]) -> None:
        started = time.monotonic()
        try:
            results = self._work([w.job for w in batch])
        except Exception as error:
            # The edge of a model: whatever a library raises fails these jobs and nothing else.
            self.stats.failures += len(batch)
            wrapped = error if isinstance(error, AntiphonError) else ModelError(f"{self.name}: {error}")
            wrapped.__cause__ = None if wrapped is error else error
            for waiting in batch:
                waiting.result.set_exception(wrapped)
            return
        took = time.monotonic() - started
        waited = started - min(w.since_s for w in batch)
        # Counted before the callers wake, so that whoever has a result finds it in the stats.
        with self._changed:
            self.stats.jobs += len(batch)
            self.stats.batches += 1
            self.stats.busy_s += took
            self.stats.waited_s += waited
        if self._observe:
            self._observe(priority, waited, took)
        for waiting, result in zip(batch, results, strict=True):
            waiting.result.set_result(result)
