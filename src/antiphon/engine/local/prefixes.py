"""Sharing the KV of equal prefixes: with sessions of the same owner, and with closed ones whose KV is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from antiphon.engine.local.kv.cache import Extent, KvCache
from antiphon.engine.local.step import MIN_SHARE_ROWS, ScheduledSession
from antiphon.engine.rows import Rows


@dataclass(slots=True, eq=False)
class KeptPrefix:
    """A closed session's rows and their KV, for later sessions that begin with the same tokens."""

    rows: Rows
    extent: Extent


class KeptPrefixes:
    """The kept prefixes of one engine, whose memory `cache` holds. Belongs to the model's thread.

    `kept`: the prefixes, the newest last. Those that the cache has dropped to make room stay until `forget_dropped`.
    """

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self.kept: list[KeptPrefix] = []

    def share(
        self, session: ScheduledSession, sessions: Iterable[ScheduledSession], earlier: Sequence[ScheduledSession]
    ) -> bool:
        """Let a session without KV take over the KV of the longest equal prefix of its owner.

        `sessions`: all open ones. `earlier`: those that compute rows before it in this step. Returns False while one of
        these computes the prefix.
        """
        rows = session.rows
        if rows.owner is None:
            # These rows are equal to no others.
            return True
        best, extent, source = MIN_SHARE_ROWS - 1, None, None
        for kept in self.kept:
            if (common := rows.common_prefix(kept.rows, kept.rows.computed)) > best:
                best, extent, source = common, kept.extent, kept
        for other in (s for s in sessions if s is not session):
            common = rows.common_prefix(other.rows, other.rows.computed)
            if other.lease.extent and not other.failure and common > best:
                best, extent, source = common, other.lease.extent, None
        # An earlier session computes the prefix. Waiting for it takes no longer than computing it again.
        if any(o.rows.pending > 1 and rows.common_prefix(o.rows, len(o.rows.ids)) > best for o in earlier):
            return False
        if extent and self._cache.fits_another(extent):
            self._cache.share(extent, session.lease)
            # The last row is always computed: a generation needs its logits.
            rows.computed = session.cached = min(best, len(rows.ids) - 1)
            if source and best == len(source.rows.ids):
                self._drop(source)
        return True

    def keep(self, session: ScheduledSession) -> None:
        """Keep a closing session's tokens up to its first embedding: embeddings never equal another session's."""
        rows = session.rows
        first_embedding = min((span.start for span in rows.spans), default=rows.computed)
        length = min(first_embedding, rows.computed)
        if not length or not session.lease.extent or rows.dropped:
            return
        rows.rollback(length)
        # Prefixes that this one continues are no longer useful.
        for old in [k for k in self.kept if k.rows.common_prefix(rows, rows.computed) == len(k.rows.ids)]:
            self._drop(old)
        extent = self._cache.keep(session.lease)
        assert extent
        self.kept.append(KeptPrefix(rows, extent))

    def forget_dropped(self) -> None:
        """Forget the prefixes whose extents the cache has dropped to make room."""
        if len(self.kept) == len(self._cache.kept):
            return
        alive = {id(e) for e in self._cache.kept}
        self.kept = [k for k in self.kept if id(k.extent) in alive]

    def _drop(self, prefix: KeptPrefix) -> None:
        self.kept.remove(prefix)
        if prefix.extent in self._cache.kept:
            self._cache.drop_kept(prefix.extent)
