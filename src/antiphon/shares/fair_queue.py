"""Jobs that wait, shared equally between owners: those of one priority of a lane, those that wait for a place.

Owners have their turns one after another, and each has its own jobs run by their deadlines, the earliest first. No
locks: whatever has the queue has one.
"""

from __future__ import annotations

from bisect import insort_right
from collections.abc import Hashable, Iterator
from itertools import zip_longest
from typing import Generic, Protocol, TypeVar


class OwnedJob(Protocol):
    """A job, whose it is and by when it is wanted. Jobs are compared by identity."""

    @property
    def owner(self) -> Hashable:
        """Whose job it is, by any value; jobs that are nobody's have the owner None, and count as those of one."""
        ...

    @property
    def deadline_s(self) -> float:
        """By when its result is wanted, in seconds of any clock that is the same for all jobs. It never changes."""
        ...


Owned = TypeVar("Owned", bound=OwnedJob)


class FairQueue(Generic[Owned]):
    """The waiting jobs of one priority. `num_waiting`: how many there are."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self._by_owner: dict[Hashable, list[Owned]] = {}
        # The number of each owner's last turn. It is kept while an owner has no job, so that one with a single job at
        # a time does not pass those with many. Owners are API keys, and few.
        self._last_turn: dict[Hashable, int] = {}
        self._num_turns = 0

    def __iter__(self) -> Iterator[Owned]:
        """Iterate over the jobs, owner by owner, each owner's by their deadlines."""
        return (job for jobs in self._by_owner.values() for job in jobs)

    def append(self, job: Owned) -> None:
        """Add a job behind those of its owner whose deadlines are not later."""
        insort_right(self._by_owner.setdefault(job.owner, []), job, key=lambda waiting: waiting.deadline_s)
        self.num_waiting += 1

    def remove(self, job: Owned) -> None:
        """Take a job out, whether it runs or not. Raises KeyError or ValueError for one that is not there."""
        jobs = self._by_owner[job.owner]
        jobs.remove(job)
        self.num_waiting -= 1
        if not jobs:
            del self._by_owner[job.owner]

    def clear(self) -> None:
        """Take all jobs out."""
        self._by_owner.clear()
        self.num_waiting = 0

    def take_turn(self, owner: Hashable) -> None:
        """Note that a job of this owner runs: its next one comes after a job of each other owner."""
        self._num_turns += 1
        self._last_turn[owner] = self._num_turns

    def in_turns(self) -> list[Owned]:
        """Return all jobs in the order they are to run: the first of each owner, then the next of each, and so on.

        The owner whose last turn is longest ago comes first.
        """
        owners = sorted(self._by_owner, key=lambda owner: self._last_turn.get(owner, 0))
        turns = zip_longest(*(self._by_owner[owner] for owner in owners))
        return [job for turn in turns for job in turn if job is not None]
