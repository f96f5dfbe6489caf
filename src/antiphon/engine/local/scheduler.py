"""Which rows of which sessions go into the next forward pass, and what its results mean. Pure: no torch, no clock.

Every step takes one row of each session that generates, and a bounded number of pending rows of sessions that prefill,
shared evenly among them. So a prefill of any length delays nobody's next token by more than the step it shares. The rules of
room (leases, parking, context cuts) are applied here, before the rows are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from antiphon.engine.api import Finish, Generation, Position, Row, Sink, Token
from antiphon.engine.local.kv_cache import PAGE_ROWS, Extent, KvCache, Lease
from antiphon.engine.rows import Rows
from antiphon.errors import EngineError, Refused

# A consumer that is this many tokens behind is generated for no further until it reads.
MAX_UNREAD = 64
# A cut leaves this much of the context, so that it is not cut again at the next row.
CUT_TO = 0.75
# No prefill gets fewer rows of a step than this: smaller ones cost as much.
MIN_SHARE = 16


@dataclass(slots=True, eq=False)
class ScheduledSession:
    """One session in the engine: its rows and its lease. `served`: the step that last took rows of it.

    `cached`: rows whose KV it found computed. `waiting`: whom to tell when nothing is pending. `failed`: nothing more is done for
    it. `stalled`: a step of it failed, and would again: it waits for rows to be taken back, or for the next attempt.
    """

    rows: Rows
    lease: Lease
    served: int = 0
    cached: int = 0
    waiting: list[Callable[[Exception | None], None]] = field(default_factory=list)
    failed: Exception | None = None
    stalled: bool = False

    @property
    def starved(self) -> bool:
        """It generates, and the reader is too far behind to go on."""
        generation = self.rows.generation
        return (
            generation is not None
            and self.rows.pending == 1
            and generation.produced - generation.consumed >= MAX_UNREAD
        )

    @property
    def ready(self) -> bool:
        """A step could do something for it."""
        return self.rows.busy and self.failed is None and not self.stalled and not self.starved


@dataclass(frozen=True, slots=True, eq=False)
class StepChunk:
    """Some rows of `seat` in a step, with all that the runner needs of them: the session may change under way.

    `handle`: its KV memory. `positions` None: start, start + 1 … `embeddings`: (row, float [n, width]) of the rows that are no
    tokens. `sampled`: the generation that a token is owed to; `recent` are then the rows before it, newest last.
    """

    seat: ScheduledSession
    handle: Any
    start: int
    ids: tuple[Row, ...]
    positions: tuple[Position, ...] | None
    embeddings: tuple[tuple[int, Any], ...]
    epoch: int
    sampled: Generation | None = None
    recent: tuple[Row, ...] = ()
    # (row, how many from it on, who is told what the tapped layer makes of them, which of theirs the first is)
    sinks: tuple[tuple[int, int, Sink, int], ...] = ()

    @property
    def count(self) -> int:
        return len(self.ids)

    @property
    def stop(self) -> int:
        """One past its last row: how long the session's KV is after the step."""
        return self.start + len(self.ids)


@dataclass(slots=True, eq=False)
class KeptPrefix:
    """A closed session's rows, for others that begin alike."""

    rows: Rows
    extent: Extent


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Rows of a step: `decode_rows` sessions that generate; `prefill_rows` beside them, `alone_rows` where none generates.

    `context_rows`: most rows a session may have in the KV. `park_after_s`: idle seconds before a session is parked.
    """

    context_rows: int
    decode_rows: int = 64
    prefill_rows: int = 64
    alone_rows: int = 256
    park_after_s: float = 120.0


class Scheduler:
    """All sessions of one engine. Not thread-safe: the engine's thread owns it.

    `plan` and `commit` alternate; everything else may come between them.
    """

    def __init__(self, cache: KvCache, limits: StepLimits) -> None:
        self.cache = cache
        self.limits = replace(limits, context_rows=min(limits.context_rows, cache.total_pages * PAGE_ROWS))
        self.seats: list[ScheduledSession] = []
        self.kept: list[KeptPrefix] = []
        self.cuts = 0
        self._step = 0

    # What sessions ask for.

    def open(self, reserve_rows: int, now_s: float) -> ScheduledSession:
        """A new session with room for `reserve_rows`. Parks idle ones where that makes room. Raises Refused."""
        reserve = min(reserve_rows, self.limits.context_rows)
        while (lease := self.cache.open(reserve)) is None:
            if not self._park_one(exclude=None):
                busy = sum(1 for s in self.seats if not s.lease.asleep)
                raise Refused(f"no room for another session's KV: {busy} are at work", 2.0)
        seat = ScheduledSession(Rows(used_s=now_s), lease)
        self.seats.append(seat)
        return seat

    def fork(self, seat: ScheduledSession, now_s: float) -> ScheduledSession:
        """A new session with the same rows; its KV is shared until one of the two writes. Raises Refused."""
        twin = self.open(seat.lease.reserve_pages * PAGE_ROWS, now_s)
        old = seat.rows
        twin.rows = Rows(
            ids=list(old.ids),
            spans=list(old.spans),
            positions=None if old.positions is None else list(old.positions),
            dropped=old.dropped,
            exact=old.exact,
            pinned=old.pinned,
            turns=list(old.turns),
            used_s=now_s,
        )
        # A parked session's KV stays where it is: the twin computes its own, or finds an equal prefix.
        if seat.lease.extent and self._fits_another(seat.lease.extent):
            self.cache.share(seat.lease.extent, twin.lease)
            twin.rows.computed = old.computed
        return twin

    def generate(self, seat: ScheduledSession, generation: Generation) -> None:
        """Begin to generate after the last row. Raises EngineError where there is none, or one is under way."""
        if seat.failed:
            raise EngineError(f"the session failed: {seat.failed}")
        if seat.rows.generation:
            raise EngineError("the session is generating already")
        if not seat.rows.ids:
            raise EngineError("there is nothing to continue: append rows first")
        # The last row's logits are owed: it is computed (again, where it was).
        seat.rows.computed = min(seat.rows.computed, len(seat.rows.ids) - 1)
        seat.rows.generation, seat.stalled = generation, False

    def cancel(self, seat: ScheduledSession, generation: Generation) -> None:
        """End a generation, or take back what its reader left unread of one that has ended by itself."""
        rows = seat.rows
        rows.generation = None
        read = generation.start + generation.consumed
        if read < rows.length:
            rows.rollback(max(read, rows.pinned + rows.dropped) if rows.dropped else read)

    def rollback(self, seat: ScheduledSession, position: int) -> None:
        """Take back rows from `position` on. Raises EngineError for a dropped row or a generating session."""
        if seat.rows.generation:
            raise EngineError("the session is generating: end that first")
        seat.rows.rollback(position)
        seat.stalled = False
        self.cache.forget(seat.lease, seat.rows.computed)
        if not seat.rows.busy:
            _tell(seat, None)

    def evict(self, seat: ScheduledSession, count: int) -> None:
        """Drop the `count` oldest rows after the pinned ones; what follows them keeps its KV, moved down, where the model's keys can be
        moved, and is computed anew where not. Raises EngineError for a generating session, or fewer rows.
        """
        rows, lease = seat.rows, seat.lease
        if rows.generation:
            raise EngineError("the session is generating: end that first")
        first, end = rows.pinned, rows.pinned + count
        whole = rows.positions is None and end <= rows.computed and lease.extent is not None
        moved = whole and self._room(seat, rows.computed) and self.cache.evict(lease, first, end, rows.computed)
        rows.evict(count, moved=moved)
        self.cache.forget(lease, rows.computed)

    def settle(self, seat: ScheduledSession, told: Callable[[Exception | None], None], *, whole: bool = False) -> None:
        """Call `told` once nothing but the newest row is pending (`whole`: nothing), or with the error that came in the way."""
        seat.rows.whole = seat.rows.whole or (whole and bool(seat.rows.pending))
        if seat.failed or seat.stalled or not seat.rows.busy:
            told(seat.failed or (EngineError("its last step failed") if seat.stalled else None))
        else:
            seat.waiting.append(told)

    def close(self, seat: ScheduledSession, keep: bool) -> None:
        """Leave. `keep`: others that begin alike may share the KV while there is room."""
        if seat not in self.seats:
            return
        self.seats.remove(seat)
        rows = seat.rows
        _tell(seat, EngineError("the session was closed"))
        if generation := rows.generation:
            rows.generation = None
            generation.deliver(EngineError("the session was closed"))
        begins = min((span.start for span in rows.spans), default=rows.computed)
        if keep and not seat.failed and seat.lease.extent and min(begins, rows.computed) and not rows.dropped:
            # Nobody shares rows that are no tokens.
            rows.rollback(min(begins, rows.computed))
            # What the new one continues is of no more use.
            for old in [k for k in self.kept if k.rows.shared(rows, rows.computed) == len(k.rows.ids)]:
                self._drop(old)
            extent = self.cache.keep(seat.lease)
            assert extent
            self.kept.append(KeptPrefix(rows, extent))
        self.cache.close(seat.lease)

    # The step.

    def plan(self, now_s: float) -> list[StepChunk]:
        """The next step's rows, none where nothing is to do."""
        self._step += 1
        self._forget_kept()
        ready: list[ScheduledSession] = []
        for seat in self.seats:
            if seat.ready and self._awake(seat, ready):
                ready.append(seat)
        ready.sort(key=lambda s: s.served)
        decoding = [s for s in ready if s.rows.generation and s.rows.pending == 1][: self.limits.decode_rows]
        prefilling = [s for s in ready if s.rows.due and not (s.rows.generation and s.rows.pending == 1)]
        # Whoever waits for an answer goes before whoever only prefills.
        prefilling.sort(key=lambda s: s.rows.generation is None)
        chunks = [c for s in decoding if (c := self._chunk(s, 1))]
        room = self.limits.prefill_rows if chunks else self.limits.alone_rows
        for i, seat in enumerate(prefilling):
            if room <= 0:
                break
            share = max(MIN_SHARE, room // (len(prefilling) - i))
            if chunk := self._chunk(seat, min(room, share)):
                chunks.append(chunk)
                room -= chunk.count
        for chunk in chunks:
            chunk.seat.served = self._step
            chunk.seat.rows.used_s = now_s
        return chunks

    def commit(self, chunks: Iterable[StepChunk], results: Iterable[Token | Exception | None]) -> None:
        """Take the step's results, one a chunk: a token where one was owed, an error where the chunk failed."""
        for chunk, result in zip(chunks, results, strict=True):
            seat, rows = chunk.seat, chunk.seat.rows
            if seat.lease.closed or rows.epoch != chunk.epoch:
                continue
            if isinstance(result, Exception):
                self._fail(seat, result)
                continue
            rows.computed = chunk.stop
            rows.whole = rows.whole and bool(rows.pending)
            if not rows.busy:
                _tell(seat, None)
            if chunk.sampled and rows.generation is chunk.sampled and isinstance(result, Token):
                self._produce(seat, chunk.sampled, result)

    def end(self, error: Exception) -> None:
        """Nothing more will be done for anyone who is in."""
        for seat in self.seats:
            seat.failed = seat.failed or error
            _tell(seat, error)
            if generation := seat.rows.generation:
                seat.rows.generation = None
                generation.deliver(error)

    def rest(self, now_s: float) -> None:
        """Park what has been idle for long. Called when there is time."""
        for seat in self.seats:
            idle = not seat.rows.busy and not seat.lease.asleep and seat.lease.extent
            if idle and now_s - seat.rows.used_s >= self.limits.park_after_s:
                self.cache.park(seat.lease, seat.rows.computed)

    # What follows from the rules.

    def _produce(self, seat: ScheduledSession, generation: Generation, token: Token) -> None:
        params = generation.params
        seat.rows.append((token.id,))
        generation.produced += 1
        generation.deliver(token)
        if token.id in params.stop:
            self._finish(seat, generation, Finish.STOP)
        elif generation.produced >= params.max_tokens:
            self._finish(seat, generation, Finish.LENGTH)

    def _finish(self, seat: ScheduledSession, generation: Generation, reason: Finish) -> None:
        seat.rows.generation = None
        generation.deliver(reason)

    def _fail(self, seat: ScheduledSession, error: Exception) -> None:
        """A model error ends what the session was doing. Its rows stay, for the caller to take back."""
        rows = seat.rows
        generation, rows.generation = rows.generation, None
        seat.stalled = True
        _tell(seat, error)
        if generation:
            generation.deliver(error)

    def _chunk(self, seat: ScheduledSession, most: int) -> StepChunk | None:
        rows, generation = seat.rows, seat.rows.generation
        self._cut(seat, self.limits.context_rows)
        stop = self._stop(seat, most)
        if not self._room(seat, stop):
            # Nobody who is in fails for want of room: this one goes on with a shorter context.
            self._cut(seat, seat.lease.claim_pages * PAGE_ROWS - 1)
            stop = self._stop(seat, most)
            if not self._room(seat, stop):
                return None
        assert seat.lease.extent
        start, last = rows.computed, stop == len(rows.ids)
        owed = generation if last else None
        return StepChunk(
            seat,
            seat.lease.extent.handle,
            start,
            tuple(rows.ids[start:stop]),
            None if rows.positions is None else tuple(rows.positions[start:stop]),
            tuple(rows.embeddings(start, stop)),
            rows.epoch,
            owed,
            tuple(rows.ids[-_memory(owed) :]) if owed and _memory(owed) else (),
            tuple(rows.sinks(start, stop)),
        )

    def _stop(self, seat: ScheduledSession, most: int) -> int:
        return seat.rows.computed + min(most, seat.rows.due)

    def _room(self, seat: ScheduledSession, rows: int) -> bool:
        while not self.cache.ensure(seat.lease, rows, seat.rows.computed):
            if not self._park_one(exclude=seat, discard=True):
                return False
        return True

    def _cut(self, seat: ScheduledSession, limit: int) -> None:
        """Bring the session's rows below `limit`, by the context policy."""
        rows = seat.rows
        if len(rows.ids) < limit:
            return
        keep = int(limit * CUT_TO)
        # A head that fills the context by itself cannot be kept whole.
        rows.pinned = min(rows.pinned, keep // 2)
        if rows.cut(keep):
            self.cuts += 1

    def _awake(self, seat: ScheduledSession, before: list[ScheduledSession]) -> bool:
        """Its KV is in memory, and as much of it as others have computed is shared. `before`: who goes first this step."""
        rows = seat.rows
        if seat.lease.asleep:
            self.cache.forget(seat.lease, rows.computed)
            while not self.cache.wake(seat.lease, min(rows.computed + 1, self.limits.context_rows)):
                if not self._park_one(exclude=seat, discard=True):
                    return False
        if seat.lease.extent is None:
            rows.computed = 0
            return self._share_prefix(seat, before)
        return True

    def _share_prefix(self, seat: ScheduledSession, before: list[ScheduledSession]) -> bool:
        """Take over the KV of the longest equal prefix. False while another session is computing just that."""
        best, extent, source = MIN_SHARE - 1, None, None
        for kept in self.kept:
            if (common := seat.rows.shared(kept.rows, kept.rows.computed)) > best:
                best, extent, source = common, kept.extent, kept
        for other in (s for s in self.seats if s is not seat):
            common = seat.rows.shared(other.rows, other.rows.computed)
            if other.lease.extent and not other.failed and common > best:
                best, extent, source = common, other.lease.extent, None
        # Whoever came first computes; the wait is no longer than the work would be.
        if any(o.rows.pending > 1 and seat.rows.shared(o.rows, len(o.rows.ids)) > best for o in before):
            return False
        if extent and self._fits_another(extent):
            self.cache.share(extent, seat.lease)
            # The last row is always computed: a generation needs its logits.
            seat.rows.computed = seat.cached = min(best, len(seat.rows.ids) - 1)
            if source and best == len(source.rows.ids):
                self._drop(source)
        return True

    def _fits_another(self, extent: Extent) -> bool:
        return self.cache.claimed_pages + extent.pages <= self.cache.total_pages

    def _park_one(self, exclude: ScheduledSession | None, *, discard: bool = False) -> bool:
        """Park the session that has been idle longest. False where none is idle.

        `discard`: where nothing can be parked any more, its KV is given up, and computed anew when it goes on: who is in and has
        work would else wait for ever for who has none.
        """
        idle = [s for s in self.seats if s is not exclude and not s.rows.busy and not s.lease.asleep]
        idle = [s for s in idle if s.lease.claim_pages]
        for seat in sorted(idle, key=lambda s: s.rows.used_s):
            if self.cache.park(seat.lease, seat.rows.computed):
                return True
        for seat in sorted(idle, key=lambda s: s.rows.used_s) if discard else ():
            if self.cache.park(seat.lease, 0):
                seat.rows.computed = 0
                return True
        return False

    def _drop(self, kept: KeptPrefix) -> None:
        self.kept.remove(kept)
        if kept.extent in self.cache.kept:
            self.cache.drop_kept(kept.extent)

    def _forget_kept(self) -> None:
        """The cache gives kept extents back by itself when it needs the room."""
        alive = {id(e) for e in self.cache.kept}
        self.kept = [k for k in self.kept if id(k.extent) in alive]

    def check_integrity(self) -> None:
        """Raises AssertionError where the bookkeeping contradicts itself."""
        self.cache.check_integrity()
        assert {id(s.lease) for s in self.seats} == {id(x) for x in self.cache.leases}
        for seat in self.seats:
            seat.rows.check_integrity()
            lease = seat.lease
            held = lease.extent.pages * PAGE_ROWS if lease.extent else lease.parked.rows if lease.parked else 0
            assert seat.rows.computed <= held


def _tell(seat: ScheduledSession, error: Exception | None) -> None:
    waiting, seat.waiting = seat.waiting, []
    for call in waiting:
        call(error)


def _memory(generation: Generation) -> int:
    """How many of the newest rows the sampler looks back on."""
    params = generation.params
    window = params.repetition_window if params.repetition_penalty != 1.0 else 0
    counted = generation.produced if params.presence_penalty or params.frequency_penalty else 0
    return max(window, counted)
