"""Makes room for a session's rows: at the expense of idle sessions, and of owners that hold more than a share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from antiphon.engine.local.kv.cache import KvCache, pages_of
from antiphon.engine.local.step import ScheduledSession, page_shares


class Room:
    """The rules by which the sessions of one engine share its memory. Belongs to the model's thread.

    `sessions`: the open sessions, in the order in which they were opened; the scheduler changes the list. `on_suspend`:
    called for a busy session before it is parked. `refused`: whether a session found no room only because the step
    under way computes the rows of those that would have to give it; the scheduler resets it.
    """

    def __init__(
        self, cache: KvCache, sessions: Sequence[ScheduledSession], on_suspend: Callable[[ScheduledSession], None]
    ) -> None:
        self._cache, self._sessions, self._on_suspend = cache, sessions, on_suspend
        self.refused = False

    def make(self, session: ScheduledSession, rows: int) -> bool:
        """Give the session its own extent for `rows` rows, parking others if necessary. Returns False if that fails."""
        while not self._cache.ensure(session.lease, rows, session.computed):
            if not self.give(session, rows):
                return False
        return True

    def give(self, session: ScheduledSession, rows: int) -> bool:
        """Park or suspend another session to free memory for `rows` rows of this one. Returns False if none yields."""
        if self.park_longest_idle(exclude=session, discard=True):
            return True
        lease = session.lease
        more = max(lease.reserve_pages, pages_of(rows)) - lease.claim_pages
        return self.take_from_largest(session.rows.owner, more)

    def take_from_largest(self, owner: Hashable | None, pages: int) -> bool:
        """Suspend a session of the owner that holds most, so that `owner` gets `pages` more within its share.

        Returns False if no owner holds more than a share, or if `owner` would. So two owners never take from each other
        in turn: an owner that gained room this way holds at most a share. Also returns False while a step is under way,
        because the rows that it computes cannot be parked yet.
        """
        if any(session.launched for session in self._sessions):
            self.refused = True
            return False
        held, share = page_shares(self._sessions, owner, self._cache.total_pages)
        largest = max(held, key=lambda other: held[other])
        if held[owner] + pages > share or held[largest] <= share:
            return False
        self._suspend(next(s for s in reversed(self._sessions) if s.rows.owner == largest and s.lease.claim_pages))
        return True

    def park_longest_idle(self, exclude: ScheduledSession | None, *, discard: bool = False) -> bool:
        """Park the session that has been idle longest. Returns False if none is idle.

        Sessions of owners that hold more than a share go first. `discard`: if nothing more can be parked, drop the KV
        of that session, which is computed again when it continues. Otherwise a session with work would wait forever for
        an idle one.
        """
        idle = [s for s in self._sessions if s is not exclude and not s.rows.busy and not s.lease.asleep]
        idle = [s for s in idle if s.lease.claim_pages]
        if not idle:
            return False
        held, share = page_shares(self._sessions, exclude.rows.owner if exclude else None, self._cache.total_pages)
        idle.sort(key=lambda s: (held[s.rows.owner] <= share, s.rows.last_used_s))
        for session in idle:
            if self._cache.park(session.lease, session.rows.computed):
                return True
        for session in idle if discard else ():
            if self._cache.park(session.lease, 0):
                session.rows.computed, session.idle_rows = 0, len(session.rows.ids)
                return True
        return False

    def _suspend(self, session: ScheduledSession) -> None:
        """Park a session even if it is busy, without its KV if no copy fits. It continues when there is room."""
        self._on_suspend(session)
        if not self._cache.park(session.lease, session.rows.computed):
            self._cache.park(session.lease, 0)
            session.rows.computed = 0
