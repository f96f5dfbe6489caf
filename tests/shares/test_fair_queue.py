"""The order in which owners take turns, without a lane."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.shares.fair_queue import FairQueue


@dataclass(frozen=True, eq=False)
class Job:
    owner: str
    number: int
    deadline_s: float = 0.0


def served(queue: FairQueue[Job]) -> str:
    job = queue.in_turns()[0]
    queue.remove(job)
    queue.take_turn(job.owner)
    return f"{job.owner}{job.number}"


def test_when_an_owner_has_one_job_at_a_time_then_it_does_not_pass_one_that_has_many() -> None:
    queue = FairQueue[Job]()
    for number in range(4):
        queue.append(Job("a", number))
    order = [served(queue)]
    for number in range(3):
        queue.append(Job("b", number))
        order += [served(queue), served(queue)]
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2", "a3"]
    assert (queue.num_waiting, [*queue]) == (0, [])


def test_when_a_job_is_taken_out_without_a_turn_then_its_owner_still_has_its_turn() -> None:
    queue = FairQueue[Job]()
    cancelled = Job("b", 0)
    for job in (Job("a", 0), cancelled, Job("b", 1)):
        queue.append(job)
    assert served(queue) == "a0"
    queue.append(Job("a", 1))
    queue.remove(cancelled)
    assert [served(queue), served(queue)] == ["b1", "a1"]


def test_when_jobs_have_deadlines_then_each_owners_run_by_them_and_the_owners_still_have_turns() -> None:
    queue = FairQueue[Job]()
    for job in (Job("a", 0, 9.0), Job("a", 1, 2.0), Job("a", 2, 9.0), Job("a", 3, 1.0), Job("b", 0, 50.0)):
        queue.append(job)
    assert [served(queue) for _ in range(5)] == ["a3", "b0", "a1", "a0", "a2"]
