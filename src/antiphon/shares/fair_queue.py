"""A queue that serves owners equally, for the jobs of one priority of a lane, or for requests that wait for a place.

Owners take turns, and each owner's jobs run in the order of their deadlines. The queue has no lock of its own: its user
holds a lock.
"""

from __future__ import annotations

from bisect import insort_right
from collections.abc import Hashable, Iterator
from itertools import zip_longest
from typing import Generic, Protocol, TypeVar


class OwnedJob(Protocol):
    """A job with its owner and its deadline. Jobs are compared by identity."""

    @property
    def owner(self) -> Hashable:
        """The job's owner, any value. Jobs without an owner have None, and count as jobs of one owner."""
        ...

    @property
    def deadline_s(self) -> float:
        """When the result is due, in seconds of a clock that is the same for all jobs. Never changes."""
        ...


Owned = TypeVar("Owned", bound=OwnedJob)


class FairQueue(Generic[Owned]):
    """The waiting jobs of one priority. `num_waiting`: their number."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self._by_owner: dict[Hashable, list[Owned]] = {}
        # The number of each owner's last turn. Kept while the owner has no job, so that an owner with one job at a time
        # does not overtake owners with many. Bound: owners are API keys, of which there are few.
        self._last_turn: dict[Hashable, int] = {}
        self._num_turns = 0

    def __iter__(self) -> Iterator[Owned]:
        """Iterate over the jobs, owner by owner, each owner's jobs in the order of their deadlines."""
        return (job for jobs in self._by_owner.values() for job in jobs)

    def append(self, job: Owned) -> None:
        """Add a job, after the jobs of its owner with the same or an earlier deadline."""
        insort_right(self._by_owner.setdefault(job.owner, []), job, key=lambda waiting: waiting.deadline_s)
        self.num_waiting += 1

    def remove(self, job: Owned) -> None:
        """Remove a job, for example to run it. Raises KeyError or ValueError if it is not in the queue."""
        jobs = self._by_owner[job.owner]
        jobs.remove(job)
        self.num_waiting -= 1
        if not jobs:
            del self._by_owner[job.owner]

    def clear(self) -> None:
        """Remove all waiting jobs of all owners."""
        self._by_owner.clear()
        self.num_waiting = 0

    def take_turn(self, owner: Hashable) -> None:
        """Record that a job of this owner runs. Its next job follows a job of each other owner."""
        self._num_turns += 1
        self._last_turn[owner] = self._num_turns

    def in_turns(self) -> list[Owned]:
        """Return all jobs in the order in which they are to run: the first of each owner, then the next of each, etc.

        The owner whose last turn is longest ago is first.
        """
        owners = sorted(self._by_owner, key=lambda owner: self._last_turn.get(owner, 0))
        turns = zip_longest(*(self._by_owner[owner] for owner in owners))
        return [job for turn in turns for job in turn if job is not None]
