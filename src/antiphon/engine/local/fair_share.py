"""Equal shares between owners: whose turn it is in a step, and how much of the memory each owner may claim.

An owner is whoever opened a session, by any value; sessions without one are of the owner None. Pure functions of the
scheduler's sessions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import zip_longest

from antiphon.engine.local.step import ScheduledSession


def queues_by_owner(sessions: Iterable[ScheduledSession]) -> list[list[ScheduledSession]]:
    """Return each owner's sessions, in the given order; the owner that has waited longest for a step comes first."""
    queues: dict[Hashable | None, list[ScheduledSession]] = {}
    for session in sessions:
        queues.setdefault(session.rows.owner, []).append(session)
    return sorted(queues.values(), key=lambda queue: max(s.last_step for s in queue))


def in_turns(sessions: Sequence[ScheduledSession]) -> Sequence[ScheduledSession]:
    """Return the sessions with one of each owner first, then a second of each, and so on.

    However many sessions an owner has, another owner's first one has at most as many before it as there are owners.
    """
    queues = queues_by_owner(sessions)
    if len(queues) < 2:
        return sessions
    return [s for turn in zip_longest(*queues) for s in turn if s]


def page_shares(
    sessions: Iterable[ScheduledSession], owner: Hashable | None, total_pages: int
) -> tuple[dict[Hashable | None, int], int]:
    """Return the pages that each owner claims, and the share that each may claim at the expense of others.

    The share is an equal part of `total_pages` for each owner with a session that claims memory or has work, and for
    `owner`, who asks for more.
    """
    held: dict[Hashable | None, int] = {owner: 0}
    for session in sessions:
        if session.lease.claim_pages or session.rows.busy:
            held[session.rows.owner] = held.get(session.rows.owner, 0) + session.lease.claim_pages
    return held, total_pages // len(held)
