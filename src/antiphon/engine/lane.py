"""A lane: the bounded queue of one model and the worker threads that empty it.

Many sessions share one copy of the weights through a lane. Jobs are ordered by priority, 0 first. Within a priority,
owners (API keys) take turns, and each owner's jobs run in the order of their deadlines. `workers` threads run
them in batches of at most `max_batch` jobs with equal keys. A job whose caller was cancelled is dropped before it runs.
If the job is already running, it finishes, and its result is discarded.

If a worker ends, it is restarted, and only the jobs that it was running fail. A lane is *lost* if its workers end too
often, or if a watchdog declares it lost (`fail`). All its jobs then fail, and it accepts no more.

The lane knows neither models nor audio: jobs and results are opaque.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from antiphon.errors import AntiphonError, ModelError, ModelLost, Refused
from antiphon.shares.fair_queue import FairQueue
from antiphon.shares.places import current_owner

log = logging.getLogger(__name__)

Job = TypeVar("Job")
Result = TypeVar("Result")
# The priorities are 0 for finals, 1 for partials and 2 for files.
NUM_PRIORITIES = 3
# The priority of jobs without a live listener. At most half of the workers run such jobs at once, so that the models of
# live sessions find a free core. If all cores are busy, a step of a model that computes on several cores takes ten
# times as long.
BULK = 2
# The default deadline of a job, in seconds after it was queued. Jobs with it run in the order of their arrival.
DEFAULT_DUE_S = 1.0
# The maximum number of worker restarts within RESTART_WINDOW_S. With more, the cause is not a single job.
MAX_RESTARTS, RESTART_WINDOW_S = 3, 3600.0


@dataclass(slots=True)
class LaneStats:
    """A lane's counters since it started, as `/metrics` reports them. Written in the worker threads."""

    # Jobs that succeeded.
    jobs: int = 0
    # Batches that succeeded.
    batches: int = 0
    # Jobs that failed.
    failures: int = 0
    # Workers that were restarted.
    restarts: int = 0
    # Wall-clock seconds spent in `work`, summed over workers.
    busy_s: float = 0.0
    # Seconds that the longest-waiting job of each batch had waited, summed over batches.
    waited_s: float = 0.0


# Compared by identity, because jobs may hold arrays, and comparing two arrays does not return a bool.
@dataclass(slots=True, eq=False)
class _QueuedJob(Generic[Job, Result]):
    # The caller's job, passed to `work`.
    job: Job
    # Jobs with equal keys may share a batch.
    key: Hashable
    # The owner (API key) whose turn the job takes.
    owner: Hashable
    # When the job was queued, in monotonic seconds.
    since_s: float
    # When the result is due, in monotonic seconds.
    deadline_s: float
    # The caller's future.
    result: Future[Result] = field(default_factory=Future)

    def resolve(self, result: Result) -> None:
        """Set the caller's result, unless the job already failed with its lane."""
        with suppress(InvalidStateError):
            self.result.set_result(result)

    def fail(self, error: Exception) -> None:
        """Set the caller's error, unless the job was cancelled or already failed with its lane."""
        with suppress(InvalidStateError):
            self.result.set_exception(error)


@dataclass(slots=True, eq=False)
class _Batch(Generic[Job, Result]):
    """A batch that one worker is running, and its start in monotonic seconds."""

    priority: int
    jobs: list[_QueuedJob[Job, Result]]
    since_s: float


class Lane(Generic[Job, Result]):
    """Runs jobs of one model in `workers` threads, which start at once and end with `close`.

    `name`: the threads' name, also used in errors. `work`: takes a batch of jobs and returns a result for each, in a
    worker thread. `max_queue`: the maximum number of waiting jobs. If the queue is full, a job of an owner that holds
    more than an equal share of it is refused, even a job that is already waiting. `observe`: called in the worker's
    thread after each batch that succeeded, with its priority, the seconds its oldest job waited and the seconds the
    batch took. Its exceptions are logged. `lost`: why the lane no longer runs jobs; None while it is alive.
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
        # Bound: max_queue jobs in all. If it is exceeded, `_make_room` refuses one, with an estimate of when to try
        # again.
        self._queues = tuple(FairQueue[_QueuedJob[Job, Result]]() for _ in range(NUM_PRIORITIES))
        self._changed = threading.Condition()
        self._closed = False
        self.lost: str | None = None
        # When workers were last restarted, in monotonic seconds.
        self._restarts_s: deque[float] = deque(maxlen=MAX_RESTARTS)
        # At most one for each worker.
        self._batches: list[_Batch[Job, Result]] = []
        self._threads = [
            threading.Thread(target=self._serve, name=f"lane-{name}-{i}", daemon=True) for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    async def run(
        self, job: Job, priority: int = 0, key: Hashable = None, *, deadline_s: float | None = None
    ) -> Result:
        """Queue a job and wait for its result. Jobs with equal `key` may share a batch.

        `priority`: 0 (first) to 2. `deadline_s`: when the result is due, in monotonic seconds; None: DEFAULT_DUE_S from
        now. The deadline orders the owner's jobs of one priority. A job that misses it still runs. The job's owner is
        `current_owner`. If the caller is cancelled, the job is dropped unless it is running.

        Raises Refused if the lane is closed. Also raises Refused if the queue is full and the owner holds its share of
        it, or if the queue fills up while the job waits and the owner then holds more than its share. Raises ModelError
        if `work` fails, ModelLost if the lane is lost before the result is available, CancelledError if the lane is
        closed while the job waits.
        """
        return await asyncio.wrap_future(self.submit(job, priority, key, deadline_s=deadline_s))

    def submit(
        self, job: Job, priority: int = 0, key: Hashable = None, *, deadline_s: float | None = None
    ) -> Future[Result]:
        """Queue a job from any thread and return its future at once. `close` cancels the future.

        Raises Refused and ModelLost as `run` does. If `work` fails, the future gets a ModelError.
        """
        now_s = time.monotonic()
        due_s = now_s + DEFAULT_DUE_S if deadline_s is None else deadline_s
        waiting = _QueuedJob[Job, Result](job, key, current_owner.get(), now_s, due_s)
        displaced: _QueuedJob[Job, Result] | None = None
        with self._changed:
            if self._closed:
                raise Refused(f"{self.name} is shutting down", 5.0)
            if self.lost:
                raise self._lost_error()
            if self.depth >= self._max_queue:
                displaced = self._make_room(waiting.owner)
            self._queues[priority].append(waiting)
            self._changed.notify()
        if displaced:
            displaced.fail(self._full_error())
        return waiting.result

    def replace(self, future: Future[Result], job: Job, key: Hashable = None) -> bool:
        """Replace the job whose future `submit` returned, unless it is running already.

        The new job takes over the old one's place in the queue, its deadline and its future. Returns whether the new
        job will run.
        """
        with self._changed:
            for waiting in (job for queue in self._queues for job in queue):
                if waiting.result is future:
                    waiting.job, waiting.key = job, key
                    return True
        return False

    @property
    def depth(self) -> int:
        """The number of waiting jobs, not counting running ones. Read without the lock, so it may be outdated."""
        return sum(queue.num_waiting for queue in self._queues)

    @property
    def running(self) -> int:
        """The number of jobs that the workers are running now, counting each job of a batch. Takes the queue's lock."""
        with self._changed:
            return sum(len(batch.jobs) for batch in self._batches)

    def oldest_age_s(self) -> float:
        """Return the seconds that the longest-waiting job has waited; 0 if no job waits. Takes the queue's lock."""
        with self._changed:
            since_s = min((job.since_s for queue in self._queues for job in queue), default=None)
            return 0.0 if since_s is None else time.monotonic() - since_s

    def overdue_s(self) -> float:
        """Return by how many seconds the most overdue job of the first priority has missed its deadline.

        0 if none is overdue. Takes the queue's lock.
        """
        with self._changed:
            deadline_s = min((job.deadline_s for job in self._queues[0]), default=math.inf)
        return max(0.0, time.monotonic() - deadline_s)

    def busy_s(self) -> float:
        """Return how long the longest-running batch has been running, in seconds; 0 if none runs. Takes the lock."""
        with self._changed:
            return max((time.monotonic() - batch.since_s for batch in self._batches), default=0.0)

    def fail(self, reason: str) -> None:
        """Declare the lane lost. Waiting and running jobs fail with ModelLost at once, and later jobs when they are
        queued.

        May be called from any thread. `reason`: a clause for the error and the log. A worker that hangs is left alone
        until the process ends. If the worker returns after all, it ends, and its results are discarded. A no-op if the
        lane is already lost.
        """
        with self._changed:
            if self.lost:
                return
            self.lost = reason
            failed = [job for queue in self._queues for job in queue]
            failed += [job for batch in self._batches for job in batch.jobs]
            for queue in self._queues:
                queue.clear()
            self._batches.clear()
            self._changed.notify_all()
        log.critical("the model in the lane %s is lost: %s; %d jobs failed", self.name, reason, len(failed))
        for job in failed:
            job.fail(self._lost_error())

    def close(self, timeout_s: float = 10.0) -> None:
        """Refuse new jobs, cancel the waiting ones, and block until the running ones are done.

        `timeout_s`: the longest wait for each worker. A worker that still runs then is left until the process ends.
        Does not wait for the workers of a lost lane.
        """
        with self._changed:
            self._closed = True
            for queue in self._queues:
                for job in queue:
                    job.result.cancel()
                queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(0 if self.lost else timeout_s)

    def _lost_error(self) -> ModelLost:
        return ModelLost(f"the model in the lane {self.name} is lost: {self.lost}")

    def _full_error(self) -> Refused:
        return Refused(f"{self.name} has {self.depth} jobs waiting", self._drain_estimate_s())

    def _make_room(self, owner: Hashable) -> _QueuedJob[Job, Result]:
        """Make room in the full queue for this owner's next job: remove another owner's job and return it.

        Chooses the least urgent job, by priority and then by deadline, of the owner that holds the most jobs. Raises
        Refused if this owner already holds an equal share, or if no other owner holds more than that.
        """
        held = Counter(job.owner for queue in self._queues for job in queue)
        share = self._max_queue // len(held | {owner: 1})
        largest, most = held.most_common(1)[0]
        if held[owner] >= share or most <= share:
            raise self._full_error()
        for queue in reversed(self._queues):
            if jobs := [job for job in queue if job.owner == largest]:
                queue.remove(jobs[-1])
                return jobs[-1]
        raise AssertionError("the owner that holds most holds a job")

    def _drain_estimate_s(self) -> float:
        step_s = self.stats.busy_s / self.stats.jobs if self.stats.jobs else 0.5
        return max(1.0, self.depth * step_s / self.workers)

    def _serve(self) -> None:
        batch: _Batch[Job, Result] | None = None
        while True:
            try:
                while batch := self._next_batch():
                    self._run_batch(batch)
                    with self._changed:
                        if not self.lost:
                            self._batches.remove(batch)
                return
            except BaseException as error:
                # The jobs of a dead thread would otherwise wait forever.
                log.critical("a worker of the lane %s ended", self.name, exc_info=True)
                if not self._restart(batch, f"its worker ended with {type(error).__name__}: {error}"):
                    return

    def _restart(self, batch: _Batch[Job, Result] | None, reason: str) -> bool:
        """Fail the batch that ended a worker. Returns whether the worker continues; otherwise the lane is lost."""
        with self._changed:
            now_s = time.monotonic()
            too_often = len(self._restarts_s) == MAX_RESTARTS and now_s - self._restarts_s[0] < RESTART_WINDOW_S
            if not too_often and not self.lost:
                self._restarts_s.append(now_s)
                self.stats.restarts += 1
                self.stats.failures += len(batch.jobs) if batch else 0
                if batch in self._batches:
                    self._batches.remove(batch)
        if too_often:
            self.fail(reason)
        for waiting in batch.jobs if batch else ():
            # A no-op for jobs that failed with the lane.
            waiting.fail(ModelError(f"{self.name}: {reason}"))
        return not self.lost

    def _next_batch(self) -> _Batch[Job, Result] | None:
        """Wait for jobs and return the next batch, marked as running; None if the lane is closed or lost."""
        with self._changed:
            while True:
                while not self._closed and not self.lost and self._next_priority() is None:
                    self._changed.wait()
                if self._closed or self.lost:
                    return None
                priority, jobs = self._take_jobs()
                if jobs:
                    batch = _Batch(priority, jobs, time.monotonic())
                    self._batches.append(batch)
                    return batch

    def _next_priority(self) -> int | None:
        """The first priority with a job that a worker may run now; None if no job may run."""
        num_bulk = sum(batch.priority == BULK for batch in self._batches)
        has_bulk_room = num_bulk < max(1, self.workers // 2)
        return next((p for p, q in enumerate(self._queues) if q.num_waiting and (p != BULK or has_bulk_room)), None)

    def _take_jobs(self) -> tuple[int, list[_QueuedJob[Job, Result]]]:
        """The next job of the first priority that has a runnable job, and the jobs that share its key."""
        priority = self._next_priority()
        assert priority is not None
        queue, batch = self._queues[priority], list[_QueuedJob[Job, Result]]()
        for waiting in queue.in_turns():
            if len(batch) == self._max_batch:
                break
            if batch and waiting.key != batch[0].key:
                continue
            queue.remove(waiting)
            if waiting.result.set_running_or_notify_cancel():
                queue.take_turn(waiting.owner)
                batch.append(waiting)
        return priority, batch

    def _run_batch(self, batch: _Batch[Job, Result]) -> None:
        jobs, started = batch.jobs, batch.since_s
        try:
            results = self._work([w.job for w in jobs])
            if len(results) != len(jobs):
                raise ModelError(f"{self.name}: {len(results)} results for {len(jobs)} jobs")
        except Exception as error:
            # A model's library may raise any exception. It fails only these jobs.
            self.stats.failures += len(jobs)
            wrapped = error if isinstance(error, AntiphonError) else ModelError(f"{self.name}: {error}")
            wrapped.__cause__ = None if wrapped is error else error
            for waiting in jobs:
                waiting.fail(wrapped)
            return
        took = time.monotonic() - started
        waited = started - min(w.since_s for w in jobs)
        # Updated before the callers wake, so that a caller with a result finds it in the stats.
        with self._changed:
            self.stats.jobs += len(jobs)
            self.stats.batches += 1
            self.stats.busy_s += took
            self.stats.waited_s += waited
        self._report(batch.priority, waited, took)
        for waiting, result in zip(jobs, results, strict=True):
            waiting.resolve(result)

    def _report(self, priority: int, waited_s: float, took_s: float) -> None:
        try:
            if self._observe:
                self._observe(priority, waited_s, took_s)
        except Exception:
            log.exception("the observer of the lane %s failed", self.name)
