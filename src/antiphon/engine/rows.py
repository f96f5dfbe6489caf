"""The rows of one session: given to the model or sampled from it, and the number of them that are in the KV.

A *row* is one position of the model's input: a token, or an embedding that an adapter made of audio or of an image.
`length` counts all rows since the session's start, including rows that a context cut dropped. Pure bookkeeping: this
module knows neither where the KV lies nor when it is computed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from antiphon.engine.api import EMBEDDED, Position, Row, Sink
from antiphon.engine.generation import Generation
from antiphon.errors import EngineError


@dataclass(frozen=True, slots=True)
class EmbeddingSpan:
    """Neighbouring rows that were given as embeddings in one call.

    `start`, `count`: the rows they occupy, in local indices. `rows`: the embeddings, float [count, width]. They are
    opaque here except for slicing and length. `sink`: receives the tapped layer's output for them. `sink_offset`: the
    index of the first of these rows among the rows of that call. Above 0 if a cut removed the head of the span.
    """

    start: int
    count: int
    rows: Any
    sink: Sink | None = None
    sink_offset: int = 0


@dataclass(frozen=True, slots=True)
class SinkRange:
    """Rows start .. start + count, in local indices, whose tapped outputs go to `sink`, numbered from `offset` on."""

    start: int
    count: int
    sink: Sink
    offset: int


@dataclass(slots=True, eq=False)
class Rows:
    """The rows of one session. Indices are *local*: rows that a context cut dropped are not counted."""

    # One token for each row, or EMBEDDED.
    ids: list[Row] = field(default_factory=list)
    # The embeddings of the EMBEDDED rows, in order.
    spans: list[EmbeddingSpan] = field(default_factory=list)
    # The position of each row on the three axes of M-RoPE (time, height, width); None if each row i is at position i. A
    # caller's positions count from the first free position.
    positions: list[Position] | None = None
    # The number of rows from the head whose KV is computed; the others are pending.
    computed: int = 0
    # The number of rows that left the context.
    dropped: int = 0
    # The number of rows at the head whose KV equals the KV of a fresh session with these rows. The later rows were
    # computed while rows that are now evicted were still visible. None: the KV of all rows is exact.
    exact_rows: int | None = None
    # The number of rows at the head that a cut keeps (the system prompt).
    pinned: int = 0
    # Rows that begin a turn. A cut prefers to fall on one of them.
    turn_starts: list[int] = field(default_factory=list)
    # Incremented whenever rows are taken back, so that the results of a step under way can be discarded.
    epoch: int = 0
    # Whether to compute the newest row too, even if no generation asks for it.
    compute_newest: bool = False
    # Whether a caller waits until the rows before the newest are computed.
    settling: bool = False
    # The owner of the rows. Only rows of the same owner may share KV; None: they share with no others.
    owner: Hashable | None = None
    # The generation under way, if any.
    generation: Generation | None = None
    # When a step last worked on these rows, in seconds of the engine's clock.
    last_used_s: float = 0.0

    @property
    def length(self) -> int:
        """The number of rows given since the start, including rows that left the context. Only `rollback` lowers it."""
        return len(self.ids) + self.dropped

    @property
    def pending(self) -> int:
        """The number of rows in the context whose KV is not computed yet, including rows that are not due."""
        return len(self.ids) - self.computed

    @property
    def busy(self) -> bool:
        """Whether the engine has work for these rows: some are due, or a generation can continue."""
        return self._generates or self.due > 0

    @property
    def due(self) -> int:
        """The number of rows whose KV is to be computed now. See `due_after`."""
        return self.due_after(self.computed)

    def due_after(self, computed: int) -> int:
        """Return the number of rows whose KV is to be computed when the first `computed` rows are in the KV.

        Leaves out the newest row, unless `compute_newest` is set, because the next generation needs its logits. A
        single row before the newest waits for the rows that follow it, unless `settling` is set: by itself it would
        take a pass, and together with them it takes none.
        """
        pending = len(self.ids) - computed
        if not pending or self.compute_newest or self._generates:
            return pending
        return pending - 1 if pending > 2 or self.settling else 0

    @property
    def next_position(self) -> Position:
        """The position of a token that is appended now, if the rows have positions."""
        return (max(self.positions[-1]) + 1 if self.positions else 0,) * 3

    @property
    def _generates(self) -> bool:
        return self.generation is not None and not self.generation.waits_for_row

    def copy(self, now_s: float) -> Rows:
        """Return a copy of the rows, of which none is in the KV. Its `last_used_s` is `now_s`."""
        return Rows(
            ids=list(self.ids),
            spans=list(self.spans),
            positions=None if self.positions is None else list(self.positions),
            dropped=self.dropped,
            exact_rows=self.exact_rows,
            pinned=self.pinned,
            turn_starts=list(self.turn_starts),
            owner=self.owner,
            last_used_s=now_s,
        )

    def append(self, ids: Sequence[int], positions: Sequence[Position] | None = None) -> None:
        """Add token rows at the end, pending. Raises ValueError if the numbers of positions and tokens differ."""
        self._place(len(ids), positions)
        self.ids.extend(ids)

    def append_embeddings(
        self, rows: Any, count: int, positions: Sequence[Position] | None = None, sink: Sink | None = None
    ) -> None:
        """Add `count` embedding rows at the end, pending. `rows`: float [count, width], not copied.

        Raises ValueError if the numbers of positions and rows differ.
        """
        if count:
            self._place(count, positions)
            self.spans.append(EmbeddingSpan(len(self.ids), count, rows, sink))
            self.ids.extend([EMBEDDED] * count)

    def replace_newest(self, row: Any) -> None:
        """Replace the newest row, which must be pending, by an embedding row, float [1, width]."""
        self.ids[-1] = EMBEDDED
        self.spans.append(EmbeddingSpan(len(self.ids) - 1, 1, row))

    def start_turn(self) -> None:
        """Mark the next row as the beginning of a turn, where a cut may fall. Idempotent."""
        if not self.turn_starts or self.turn_starts[-1] != len(self.ids):
            self.turn_starts.append(len(self.ids))

    def pin(self) -> None:
        """Keep all current rows in every later cut and eviction. A rollback can still take them back."""
        self.pinned = len(self.ids)

    def rollback(self, position: int) -> None:
        """Take back all rows from `position` on, counted from the session's start.

        A rollback into the pinned rows also resets the count of dropped rows. Raises EngineError if `position` does not
        exist or has left the context.
        """
        local = position if position <= self.pinned else position - self.dropped
        if not 0 <= position <= self.length:
            raise EngineError(f"cannot roll back to row {position} of {self.length}")
        if self.dropped and self.pinned < position < self.pinned + self.dropped:
            raise EngineError(
                f"row {position} left the context: rows {self.pinned} to {self.pinned + self.dropped} did"
            )
        if position <= self.pinned and self.dropped:
            self.dropped = 0
        self._truncate(local)

    def cut(self, keep: int) -> int:
        """Drop the oldest rows after the pinned ones so that at most `keep` rows stay. Returns the number dropped.

        The cut falls where a turn starts, unless fewer than half of the rows that may stay would be left. The rows
        after it are pending again, because their KV was computed with the dropped rows visible.
        """
        excess = len(self.ids) - keep
        if excess <= 0:
            return 0
        first = self.pinned + excess
        # A cut at the start of a turn must leave at least half of the rows that may stay.
        reach = len(self.ids) - (keep - self.pinned) // 2
        end = next((t for t in self.turn_starts if first <= t <= reach), first)
        self._drop(end)
        self.computed = min(self.computed, self.pinned)
        return end - self.pinned

    def evict(self, count: int, *, moved: bool) -> None:
        """Drop `count` rows after the pinned ones.

        `moved`: whether the KV of the later rows was moved to their new places and remains valid; otherwise these rows
        are pending again. Raises EngineError if there are fewer than `count` rows to drop.
        """
        end = self.pinned + count
        if not 0 < count <= len(self.ids) - self.pinned:
            raise EngineError(f"cannot evict {count} of {len(self.ids) - self.pinned} rows")
        computed = self.computed - count if moved else min(self.computed, self.pinned)
        self._drop(end)
        self.computed = computed
        if moved:
            self.exact_rows = self.pinned

    def embeddings(self, start: int, stop: int) -> list[tuple[int, Any]]:
        """Return the embeddings among rows start .. stop as (first row, float [n, width]), cut to fit, in order."""
        found = self._spans_between(start, stop)
        return [(low, span.rows[low - span.start : high - span.start]) for span, low, high in found]

    def sinks(self, start: int, stop: int) -> list[SinkRange]:
        """Return the ranges among rows start .. stop whose tapped outputs a sink receives, in order."""
        return [
            SinkRange(low, high - low, span.sink, span.sink_offset + low - span.start)
            for span, low, high in self._spans_between(start, stop)
            if span.sink
        ]

    def common_prefix(self, other: Rows, limit: int) -> int:
        """Return the number of rows at the head that are the same tokens at the same positions as in `other`.

        Compares only the first `limit` rows of `other`, and only rows whose KV is exact. Embeddings never compare
        equal, nor do rows of different owners.
        """
        if self.owner is None or self.owner != other.owner:
            return 0
        limit = min(len(self.ids), limit, limit if other.exact_rows is None else other.exact_rows)
        for i in range(limit):
            if self.ids[i] is EMBEDDED or self.ids[i] != other.ids[i]:
                return i
            if self.position(i) != other.position(i):
                return i
        return limit

    def position(self, row: int) -> Position:
        """Return a row's position on the three axes; (i, i, i) for row i if no positions were ever given."""
        return (row,) * 3 if self.positions is None else self.positions[row]

    def _spans_between(self, start: int, stop: int) -> list[tuple[EmbeddingSpan, int, int]]:
        """The spans that overlap rows start .. stop, in order, each with its overlap. Fast for the newest rows."""
        found: list[tuple[EmbeddingSpan, int, int]] = []
        for span in reversed(self.spans):
            if span.start + span.count <= start:
                break
            low, high = max(start, span.start), min(stop, span.start + span.count)
            if low < high:
                found.append((span, low, high))
        return found[::-1]

    def _place(self, count: int, positions: Sequence[Position] | None) -> None:
        if positions is not None and len(positions) != count:
            raise ValueError(f"{len(positions)} positions for {count} rows")
        if positions is not None and self.positions is None:
            self.positions = [(i, i, i) for i in range(len(self.ids))]
        if self.positions is not None:
            first = self.next_position[0]
            self.positions.extend(tuple(first + i for i in p) for p in positions or [(i,) * 3 for i in range(count)])

    def _drop(self, end: int) -> None:
        """Remove the rows from the pinned ones up to `end`, and shift the local indices of the later rows."""
        count = end - self.pinned
        if self.positions is not None:
            self._close_position_gap(end)
        del self.ids[self.pinned : end]
        self.spans = [s for span in self.spans for s in _without(span, self.pinned, end)]
        kept_turns = [t for t in self.turn_starts if t <= self.pinned or t >= end]
        self.turn_starts = sorted({t if t <= self.pinned else t - count for t in kept_turns})
        self.dropped += count
        self.epoch += 1

    def _truncate(self, local: int) -> None:
        del self.ids[local:]
        if self.positions is not None:
            del self.positions[local:]
        self.spans = [s for span in self.spans for s in _without(span, local, span.start + span.count)]
        self.turn_starts = [t for t in self.turn_starts if t <= local]
        self.pinned = min(self.pinned, local)
        self.computed = min(self.computed, local)
        if self.exact_rows is not None and local <= self.exact_rows:
            self.exact_rows = None
        self.epoch += 1

    def _close_position_gap(self, end: int) -> None:
        """Remove the positions of the rows up to `end`, and shift the later ones to follow the pinned rows."""
        assert self.positions is not None
        head, tail = self.positions[: self.pinned], self.positions[end:]
        start = max(head[-1]) + 1 if head else 0
        shift = (min(tail[0]) if tail else start) - start
        self.positions = head + [tuple(p - shift for p in position) for position in tail]

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself. Costs a pass over all rows; for tests."""
        assert 0 <= self.computed <= len(self.ids)
        assert 0 <= self.pinned <= len(self.ids)
        assert self.positions is None or len(self.positions) == len(self.ids)
        covered = [i for s in self.spans for i in range(s.start, s.start + s.count)]
        assert covered == [i for i, row in enumerate(self.ids) if row is EMBEDDED]
        assert self.turn_starts == sorted(set(self.turn_starts))
        assert all(t <= len(self.ids) for t in self.turn_starts)


def _without(span: EmbeddingSpan, low: int, high: int) -> list[EmbeddingSpan]:
    """The rest of a span after rows low .. high are removed and later rows have moved down by as many."""
    end, removed = span.start + span.count, high - low
    out: list[EmbeddingSpan] = []
    if span.start < low:
        count = min(end, low) - span.start
        out.append(EmbeddingSpan(span.start, count, span.rows[:count], span.sink, span.sink_offset))
    if end > high:
        start = max(span.start, high)
        skipped = start - span.start
        offset = span.sink_offset + skipped
        out.append(EmbeddingSpan(start - removed, end - start, span.rows[skipped:], span.sink, offset))
    return out
