"""Chooses the rows of each forward pass, and applies the results to the sessions.

Every step takes one row of each session that generates. It also takes a bounded number of pending rows, shared evenly
among the sessions that prefill. So a prefill of any length delays another session's token by at most the step that they
share. If sessions need more than a step or the memory can give, owners get equal shares, and so do an owner's sessions.
The rules of memory (leases, parking, context cuts) are applied before the rows are chosen, here and in `room.py`.

A step may be planned while the step before it is *under way*: launched, but not committed. Rows whose content is known
then follow those under way. A token that the step under way samples becomes a row too, if nothing on the host decides
it. If the generation turns out to have ended with that token, or its session failed, this row is discarded. Memory that
the rows of a step under way need is never taken from them.

Pure: no tensors, no clock, no threads. Times are arguments, and the forward pass runs between `plan` and `commit`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

from antiphon.engine.api import Finish, Position, Sink, Token
from antiphon.engine.generation import Generation
from antiphon.engine.local.kv.cache import PAGE_ROWS, KvCache, pages_of
from antiphon.engine.local.prefixes import KeptPrefixes
from antiphon.engine.local.room import Room
from antiphon.engine.local.step import (
    MIN_SHARE_ROWS,
    ScheduledSession,
    SettledCallback,
    StepChunk,
    StepLimits,
    in_turns,
    queues_by_owner,
    row_ahead,
    rows_until,
)
from antiphon.engine.rows import Rows
from antiphon.errors import EngineError, ModelError, Refused

log = logging.getLogger(__name__)
Planned = TypeVar("Planned")
Given = ParamSpec("Given")

# The share of the context that a cut leaves, so that the next row does not cause another cut.
CUT_TO_SHARE = 0.75


class Scheduler:
    """All sessions of one engine. Not thread-safe: it belongs to the model's thread.

    A planned step is launched at once, and committed before or after the next one is planned. All other methods may be
    called between `plan` and `commit`. No method waits, except for `land`. `limits` may be replaced between steps.
    `context_cuts` counts the context cuts since the start, `generating` the generations now. `land`: commits the step
    under way, if there is one. Called before a request that depends on its results.

    A step looks only at the *active* sessions, so idle ones cost it nothing. A session becomes active with every call
    that may give it work. It stays active as long as it generates or has rows that are due.
    """

    def __init__(self, cache: KvCache, limits: StepLimits) -> None:
        self.cache = cache
        self.limits = replace(limits, context_rows=min(limits.context_rows, cache.total_pages * PAGE_ROWS))
        self.sessions: list[ScheduledSession] = []
        self.prefixes = KeptPrefixes(cache)
        self.land: Callable[[], None] = lambda: None
        self._room = Room(cache, self.sessions, self._suspended)
        self.context_cuts = self.generating = 0
        self._active: set[ScheduledSession] = set()
        self._opened = self._step = 0
        # The chunks of the step that is being planned. If a session is suspended meanwhile, its chunk is removed.
        self._chunks: list[StepChunk] = []

    # Requests of sessions.

    def open(self, reserve_rows: int, now_s: float, owner: Hashable | None = None) -> ScheduledSession:
        """Return a new session with room promised for `reserve_rows`, or for a whole context if that is less.

        If necessary, parks idle sessions. Also parks busy ones of an owner that holds more than its share, if `owner`
        holds less than its own. Raises Refused if other sessions claim all the room.
        """
        reserve = min(reserve_rows, self.limits.context_rows)
        while (lease := self.cache.open(reserve)) is None:
            self.land()
            room = self._room
            if not room.park_longest_idle(exclude=None) and not room.take_from_largest(owner, pages_of(reserve)):
                busy = sum(1 for s in self.sessions if not s.lease.asleep)
                raise Refused(f"no room for the KV of another session: {busy} are active", 2.0)
        self._opened += 1
        session = ScheduledSession(Rows(owner=owner, last_used_s=now_s), lease, self._opened)
        self.sessions.append(session)
        return session

    def fork(self, session: ScheduledSession, now_s: float) -> ScheduledSession:
        """Return a new session with the same rows. The two share KV until one of them writes. Raises Refused."""
        self._land(session)
        old = session.rows
        twin = self.open(session.lease.reserve_pages * PAGE_ROWS, now_s, old.owner)
        twin.rows = old.copy(now_s)
        # A parked session's KV stays parked, so the new session computes its own KV, or finds an equal prefix.
        if session.lease.extent and self.cache.fits_another(session.lease.extent):
            self.cache.share(session.lease.extent, twin.lease)
            twin.rows.computed = old.computed
        self._active.add(twin)
        return twin

    def append(
        self, session: ScheduledSession, ids: Sequence[int], positions: Sequence[Position] | None = None
    ) -> None:
        """Add token rows at the end, as `Rows.append` does."""
        session.rows.append(ids, positions)
        self._active.add(session)

    def append_embeddings(
        self, session: ScheduledSession, rows: Any, positions: Sequence[Position] | None, sink: Sink | None
    ) -> None:
        """Add all of the embedding rows at the end, as `Rows.append_embeddings` does."""
        session.rows.append_embeddings(rows, len(rows), positions, sink)
        self._active.add(session)

    def generate(self, session: ScheduledSession, generation: Generation) -> None:
        """Begin to generate after the last row, in the next step.

        Raises EngineError if the session has no rows, has failed, or is generating already.
        """
        if session.failure:
            raise EngineError(f"the session failed: {session.failure}")
        if session.rows.generation:
            raise EngineError("the session is generating already")
        if not session.rows.ids:
            raise EngineError("there is nothing to continue: append rows first")
        self._land(session)
        # The generation needs the last row's logits, so that row is computed again if it was computed already.
        session.rows.computed = min(session.rows.computed, len(session.rows.ids) - 1)
        session.rows.generation, session.stalled = generation, False
        self.generating += 1
        self._active.add(session)

    def cancel(self, session: ScheduledSession, generation: Generation, kept: int) -> None:
        """End a generation and take back its tokens except the first `kept`.

        If it has ended by itself, the tokens are taken back all the same. A no-op if the session is closed.
        """
        if session.lease.closed:
            return
        self._land(session)
        rows = session.rows
        self._end(session, None)
        read = generation.start + kept
        if read < rows.length:
            rows.rollback(max(read, rows.pinned + rows.dropped) if rows.dropped else read)
            # If that row has left the context, only the pinned rows are left.
            rows.dropped = min(rows.dropped, read - rows.pinned)

    def rollback(self, session: ScheduledSession, position: int) -> None:
        """Take back all rows from `position` on. A session whose last step failed may continue afterwards.

        Raises EngineError if the row left the context, or if the session is generating.
        """
        if session.rows.generation:
            raise EngineError("the session is generating: end that first")
        self._land(session)
        session.rows.rollback(position)
        if session.stalled:
            # Rows that were computed together with a row of NaN may have NaN in their keys and values.
            session.rows.computed = 0
        session.stalled = False
        self._active.add(session)
        self.cache.truncate_parked(session.lease, session.rows.computed)
        _report_if_settled(session)

    def evict(self, session: ScheduledSession, count: int) -> None:
        """Drop the `count` oldest rows after the pinned ones.

        The KV of the later rows is moved down if the model's keys can be moved; otherwise it is computed again. Raises
        EngineError if the session is generating or has fewer rows.
        """
        rows, lease = session.rows, session.lease
        if rows.generation:
            raise EngineError("the session is generating: end that first")
        self._land(session)
        first, end = rows.pinned, rows.pinned + count
        computed = rows.positions is None and end <= rows.computed and lease.extent is not None
        moved = (
            computed and self._room.make(session, rows.computed) and self.cache.evict(lease, first, end, rows.computed)
        )
        rows.evict(count, moved=moved)
        self._active.add(session)
        self.cache.truncate_parked(lease, rows.computed)

    def settle(self, session: ScheduledSession, on_settled: SettledCallback, *, include_newest: bool = False) -> None:
        """Call `on_settled` when all rows except the newest are in the KV, or all rows with `include_newest`.

        It is called at once if nothing is pending, and with the error if a step of the session fails.
        """
        rows = session.rows
        rows.compute_newest = rows.compute_newest or (include_newest and bool(rows.pending))
        rows.settling = True
        session.idle_rows = 0
        self._active.add(session)
        if session.failure or session.stalled or not rows.busy:
            rows.settling = bool(session.on_settled)
            on_settled(session.failure or (EngineError("the session's last step failed") if session.stalled else None))
        else:
            session.on_settled.append(on_settled)

    def close(self, session: ScheduledSession, keep: bool) -> None:
        """Remove the session. Its generation and its callbacks get an EngineError. A no-op if it is closed already.

        `keep`: its tokens up to the first embedding stay for sessions that begin with them, while there is room.
        """
        if session not in self.sessions:
            return
        self._land(session)
        self.sessions.remove(session)
        self._active.discard(session)
        _report_settled(session, EngineError("the session was closed"))
        self._end(session, EngineError("the session was closed"))
        if keep and not session.failure:
            self.prefixes.keep(session)
        self.cache.close(session.lease)

    # The step.

    def plan(self, now_s: float) -> list[StepChunk]:
        """Return the rows of the next step; empty if there is nothing to do, or no room to do it.

        Makes room for these rows: parks other sessions, and cuts contexts. If that needs the results of the step under
        way, a session waits for them, and `needs_landing` is True.
        """
        self._step += 1
        self._room.refused = False
        self.prefixes.forget_dropped()
        ready: list[ScheduledSession] = []
        for session in sorted(self._active, key=attrgetter("number")):
            generation = session.rows.generation
            if generation and generation.waits_for_row:
                self._planned(session, self._continue, generation)
            if not session.ready:
                if not session.rows.generation:
                    self._active.discard(session)
            elif self._planned(session, self._bring_in, ready):
                ready.append(session)
                # All rows that were due may have been taken over from another session.
                _report_if_settled(session)
        ready.sort(key=attrgetter("last_step"))
        decoding, prefilling = list[ScheduledSession](), list[ScheduledSession]()
        for session in ready:
            if session.goes_ahead or (session.rows.generation and session.pending == 1):
                decoding.append(session)
            elif session.due:
                prefilling.append(session)
        self._chunks = []
        for session in in_turns(decoding)[: self.limits.decode_rows]:
            self._add_chunk(session, 1)
        self._add_prefill(prefilling, self.limits.prefill_rows if self._chunks else self.limits.prefill_only_rows)
        chunks, self._chunks = self._chunks, []
        for chunk in chunks:
            chunk.session.last_step, chunk.session.launched = self._step, chunk
            chunk.session.rows.last_used_s = now_s
        return chunks

    @property
    def needs_landing(self) -> bool:
        """Whether a session found no room in the last `plan` that it may find when no step is under way."""
        return self._room.refused

    def commit(self, chunks: Iterable[StepChunk], results: Iterable[Token | Exception | None]) -> None:
        """Apply a step's results, one for each chunk: the sampled token, an error, or None.

        Results of sessions that were closed or rolled back during the step are discarded, and so are those of rows that
        were planned ahead for a generation that has ended since.
        """
        for chunk, result in zip(chunks, results, strict=True):
            session, rows = chunk.session, chunk.session.rows
            if session.launched is chunk:
                session.launched = None
            if session.lease.closed or rows.epoch != chunk.epoch:
                continue
            if isinstance(result, Exception):
                self._fail(session, result)
                continue
            rows.computed = chunk.stop
            rows.compute_newest = rows.compute_newest and bool(rows.pending)
            _report_if_settled(session)
            if chunk.sampled and rows.generation is chunk.sampled and isinstance(result, Token):
                self._produce(session, chunk.sampled, result)

    def fail_all(self, error: Exception) -> None:
        """Fail every open session permanently: their generations and callbacks get `error`. They stay open."""
        for session in self.sessions:
            session.failure = session.failure or error
            _report_settled(session, error)
            self._end(session, error)

    @property
    def has_ready(self) -> bool:
        """Whether a step could do something for a session, if there is room."""
        return any(session.ready for session in self._active)

    def park_idle(self, now_s: float) -> None:
        """Park sessions that have been idle for `park_after_s`. Copies their KV, so call it when there is time."""
        for session in self.sessions:
            idle = not session.rows.busy and not session.lease.asleep and session.lease.extent
            if idle and now_s - session.rows.last_used_s >= self.limits.park_after_s:
                self.cache.park(session.lease, session.rows.computed)

    # Applying the rules.

    def _planned(
        self,
        session: ScheduledSession,
        plan: Callable[Concatenate[ScheduledSession, Given], Planned | None],
        *given: Given.args,
        **named: Given.kwargs,
    ) -> Planned | None:
        """Return the result of `plan` for the session. If it raises, fail the session and return None."""
        try:
            return plan(session, *given, **named)
        except Exception as error:
            # Planning allocates memory, and the device may be out of it. Other sessions may need none, and continue.
            log.exception("a session's rows could not be planned")
            self._fail(session, ModelError(f"the session's next step could not be planned: {error}"))
            return None

    def _add_prefill(self, sessions: list[ScheduledSession], room: int) -> None:
        """Add rows of sessions that prefill to the step: `room` rows, shared evenly by owners and then by sessions."""
        # Among an owner's sessions, those with a generation go before sessions that only prefill.
        sessions.sort(key=lambda s: s.rows.generation is None)
        queues = queues_by_owner(sessions)[: max(1, room // MIN_SHARE_ROWS)]
        # Smallest first, so that the rest of their shares goes to the larger ones.
        queues.sort(key=lambda queue: sum(s.due for s in queue))
        for i, queue in enumerate(queues):
            left = share = room // (len(queues) - i)
            for k, session in enumerate(queue):
                if left <= 0:
                    break
                left -= self._add_chunk(session, min(left, max(MIN_SHARE_ROWS, left // (len(queue) - k))))
            room -= share - left

    def _add_chunk(self, session: ScheduledSession, max_rows: int) -> int:
        """Add the session's next rows to the step, at most `max_rows`. Returns their number, 0 if there is no room."""
        chunk = self._planned(session, self._chunk, max_rows)
        if chunk is None:
            return 0
        self._chunks.append(chunk)
        return chunk.count

    def _produce(self, session: ScheduledSession, generation: Generation, token: Token) -> None:
        params = generation.params
        session.rows.append((token.id,))
        generation.add(token)
        if token.id in params.stop:
            self._end(session, Finish.STOP)
        elif generation.produced >= params.max_tokens:
            self._end(session, Finish.LENGTH)
        elif params.program:
            self._planned(session, self._continue, generation)

    def _continue(self, session: ScheduledSession, generation: Generation) -> None:
        """Replace the newest token's row by the row that the generation's program makes, if it has one yet."""
        assert generation.params.program
        row = generation.params.program.next_row()
        generation.waits_for_row = row is None
        if row is not None:
            session.rows.replace_newest(row)

    def _end(self, session: ScheduledSession, reason: Finish | Exception | None) -> None:
        """End the session's generation, if it has one, and tell its reader the reason, if there is one."""
        generation, session.rows.generation = session.rows.generation, None
        self.generating -= generation is not None
        if session.launched:
            # Its rows were planned before this end was known. Without their results, later rows overwrite them.
            session.launched, session.rows.epoch = None, session.rows.epoch + 1
        if generation and reason is not None:
            generation.end(reason)

    def _fail(self, session: ScheduledSession, error: Exception) -> None:
        """End the session's current work after a model error. Its rows stay, for the caller to roll back."""
        session.stalled = True
        _report_settled(session, error)
        self._end(session, error)

    def _chunk(self, session: ScheduledSession, max_rows: int) -> StepChunk | None:
        """The session's next rows, at most `max_rows`; None if there is no room for them."""
        if session.launched:
            return self._chunk_ahead(session, max_rows)
        if session.lease.asleep:
            # The session was suspended for another owner since it was found ready.
            return None
        self._cut(session, self.limits.context_rows)
        stop = self._stop(session, max_rows)
        if not self._room.make(session, stop):
            # An open session never fails for lack of room: this one continues with a shorter context.
            self._cut(session, session.lease.claim_pages * PAGE_ROWS - 1)
            stop = self._stop(session, max_rows)
            if not self._room.make(session, stop):
                return None
        return rows_until(session, stop)

    def _chunk_ahead(self, session: ScheduledSession, max_rows: int) -> StepChunk | None:
        """The rows that follow those of the step under way; None if they have to wait for its results.

        They wait if the context has to be cut, or if other sessions would have to give room. A row that may be
        discarded also waits for a page of its own, because a session that ends keeps its pages.
        """
        rows, lease, launched = session.rows, session.lease, session.launched
        assert launched
        assert lease.extent
        if not session.goes_ahead:
            stop = self._stop(session, max_rows)
            fits = len(rows.ids) < self.limits.context_rows and self.cache.ensure(lease, stop, launched.stop)
            return rows_until(session, stop) if fits else None
        stop, extent = launched.stop + 1, lease.extent
        if stop >= self.limits.context_rows or extent.holders > 1 or extent.pages < pages_of(stop):
            return None
        return row_ahead(session)

    def _stop(self, session: ScheduledSession, max_rows: int) -> int:
        return session.computed + min(max_rows, session.due)

    def _suspended(self, session: ScheduledSession) -> None:
        """Leave a session that is about to be parked out of the step. It stays active, until it is brought back."""
        self._chunks = [c for c in self._chunks if c.session is not session]
        self._active.add(session)

    def _land(self, session: ScheduledSession) -> None:
        """Commit the step under way if it has rows of the session, except for a row that is discarded if it is late."""
        if session.launched and not session.launched.follows:
            self.land()

    def _cut(self, session: ScheduledSession, limit: int) -> None:
        """If the session has `limit` rows or more, drop the oldest ones after the pinned rows, until fewer are left."""
        rows = session.rows
        if len(rows.ids) < limit:
            return
        keep = int(limit * CUT_TO_SHARE)
        # Pinned rows that fill the context by themselves cannot all be kept.
        rows.pinned = min(rows.pinned, keep // 2)
        if rows.cut(keep):
            self.context_cuts += 1

    def _bring_in(self, session: ScheduledSession, earlier: list[ScheduledSession]) -> bool:
        """Bring the session's KV into memory, and share what other sessions have computed of it.

        `earlier`: the sessions that were found ready before it in this step. Returns False if it has to wait.
        """
        rows = session.rows
        if session.lease.asleep:
            self.cache.truncate_parked(session.lease, rows.computed)
            while not self.cache.wake(session.lease, min(rows.computed + 1, self.limits.context_rows)):
                if not self._room.give(session, rows.computed + 1):
                    return False
        if session.lease.extent is None:
            rows.computed = 0
            return self.prefixes.share(session, self.sessions, earlier)
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError if rows, leases and memory contradict each other. Costs a pass over all rows."""
        self.cache.check_integrity()
        assert {id(s.lease) for s in self.sessions} == {id(x) for x in self.cache.leases}
        for session in self.sessions:
            session.rows.check_integrity()
            lease = session.lease
            held = lease.extent.pages * PAGE_ROWS if lease.extent else lease.parked.rows if lease.parked else 0
            assert session.rows.computed <= held
            assert session.rows.settling == bool(session.on_settled)
            assert session in self._active or not (session.ready or session.rows.generation)
        assert self._active <= set(self.sessions)
        assert self.generating == sum(session.rows.generation is not None for session in self.sessions)


def _report_if_settled(session: ScheduledSession) -> None:
    if session.on_settled and not session.rows.busy:
        _report_settled(session, None)


def _report_settled(session: ScheduledSession, error: Exception | None) -> None:
    callbacks, session.on_settled = session.on_settled, []
    session.rows.settling = False
    for callback in callbacks:
        callback(error)
