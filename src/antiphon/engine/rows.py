"""One session's rows: what the model has been given and has said, and how much of it is in the KV. No torch.

A *row* is one position of the model's input: a token, or an embedding that an adapter made (sound, an image). Rows are
counted from the session's start, and go on being counted when a context cut drops some: `length` never jumps back by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from antiphon.engine.api import EMBEDDED, Generation, Position, Row, Sink
from antiphon.errors import EngineError


@dataclass(frozen=True, slots=True)
class EmbeddingSpan:
    """Embeddings of rows start..start + count: `rows` float [count, width], opaque here. `sink`: see Sink; `before`: rows of what it was given with."""

    start: int
    count: int
    rows: Any
    sink: Sink | None = None
    before: int = 0


@dataclass(slots=True, eq=False)
class Rows:
    """The rows of one session. Indices here are *local*: what a context cut dropped is not counted.

    `computed` rows from the head are in the KV; the others are pending. `epoch` changes when rows are taken back, so that a
    step that was under way then can be told from one that still counts. `exact`: rows at the head whose KV is what a fresh session of these
    rows would hold; what follows them was computed after rows that have been evicted. None: all are.
    """

    ids: list[Row] = field(default_factory=list)
    spans: list[EmbeddingSpan] = field(default_factory=list)
    # None: row i is at position i. Else one tuple a row (M-RoPE: time, height, width); those that are given count from the first free one.
    positions: list[Position] | None = None
    computed: int = 0
    dropped: int = 0
    exact: int | None = None
    # Rows at the head that a cut keeps (the system prompt), and where turns start.
    pinned: int = 0
    turns: list[int] = field(default_factory=list)
    epoch: int = 0
    # All rows are wanted in the KV, the newest too.
    whole: bool = False
    generation: Generation | None = None
    # Seconds on the engine's clock when it last had something to do.
    used_s: float = 0.0

    @property
    def length(self) -> int:
        """Rows since the session's start, dropped ones too."""
        return len(self.ids) + self.dropped

    @property
    def pending(self) -> int:
        """Rows whose KV is still to be computed."""
        return len(self.ids) - self.computed

    @property
    def busy(self) -> bool:
        """The engine has something to do for it."""
        return self.due > 0 or self.generation is not None

    @property
    def due(self) -> int:
        """Rows whose KV is to be computed now. The newest is left for the generation to come, whose logits it gives, but where all are wanted."""
        return self.pending if self.whole or self.generation else max(0, self.pending - 1)

    def append(self, ids: Sequence[int], positions: Sequence[Position] | None = None) -> None:
        """Add tokens at the end."""
        self._place(len(ids), positions)
        self.ids.extend(ids)

    def append_embeddings(
        self, rows: Any, count: int, positions: Sequence[Position] | None = None, sink: Sink | None = None
    ) -> None:
        """Add `count` embedding rows at the end."""
        if count:
            self._place(count, positions)
            self.spans.append(EmbeddingSpan(len(self.ids), count, rows, sink))
            self.ids.extend([EMBEDDED] * count)

    def start_turn(self) -> None:
        """The next row begins a turn: a place where a cut may fall."""
        if not self.turns or self.turns[-1] != len(self.ids):
            self.turns.append(len(self.ids))

    def pin(self) -> None:
        """All rows so far are kept by every cut."""
        self.pinned = len(self.ids)

    def rollback(self, position: int) -> None:
        """Take back all rows from `position` (counted from the session's start) on. Raises EngineError for a dropped row."""
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
        """Drop the oldest rows after the pinned ones so that at most `keep` rows stay; returns how many went.

        The cut falls where a turn starts, if one does in reach; what stays after it is pending again.
        """
        excess = len(self.ids) - keep
        if excess <= 0:
            return 0
        first = self.pinned + excess
        # A turn is kept whole where that still leaves half of what may stay.
        reach = len(self.ids) - (keep - self.pinned) // 2
        end = next((t for t in self.turns if first <= t <= reach), first)
        self._drop(end)
        self.computed = min(self.computed, self.pinned)
        return end - self.pinned

    def evict(self, count: int, *, moved: bool) -> None:
        """Drop `count` rows after the pinned ones. `moved`: the KV of what follows them was moved; else it is pending again."""
        end = self.pinned + count
        if not 0 < count <= len(self.ids) - self.pinned:
            raise EngineError(f"cannot evict {count} of {len(self.ids) - self.pinned} rows")
        computed = self.computed - count if moved else min(self.computed, self.pinned)
        self._drop(end)
        self.computed = computed
        if moved:
            self.exact = self.pinned

    def embeddings(self, start: int, stop: int) -> list[tuple[int, Any]]:
        """(row, embeddings from that row on) of the spans in start..stop, cut to fit."""
        out: list[tuple[int, Any]] = []
        for span in self.spans:
            low, high = max(start, span.start), min(stop, span.start + span.count)
            if low < high:
                out.append((low, span.rows[low - span.start : high - span.start]))
        return out

    def sinks(self, start: int, stop: int) -> list[tuple[int, int, Sink, int]]:
        """(row, how many from it on, their sink, which of its rows the first is) of the spans in start..stop that have one."""
        out: list[tuple[int, int, Sink, int]] = []
        for span in self.spans:
            low, high = max(start, span.start), min(stop, span.start + span.count)
            if span.sink and low < high:
                out.append((low, high - low, span.sink, span.before + low - span.start))
        return out

    def shared(self, other: Rows, among: int) -> int:
        """How many rows from the head are the same tokens at the same positions as the first `among` of `other`."""
        limit = min(len(self.ids), among, among if other.exact is None else other.exact)
        for i in range(limit):
            if self.ids[i] is EMBEDDED or self.ids[i] != other.ids[i]:
                return i
            if self._position(i) != other._position(i):
                return i
        return limit

    def _position(self, row: int) -> Position:
        return (row,) * 3 if self.positions is None else self.positions[row]

    def _place(self, count: int, positions: Sequence[Position] | None) -> None:
        if positions is not None and len(positions) != count:
            raise ValueError(f"{len(positions)} positions for {count} rows")
        if positions is not None and self.positions is None:
            self.positions = [(i, i, i) for i in range(len(self.ids))]
        if self.positions is not None:
            first = max(self.positions[-1]) + 1 if self.positions else 0
            self.positions.extend(tuple(first + i for i in p) for p in positions or [(i,) * 3 for i in range(count)])

    def _drop(self, end: int) -> None:
        """Rows from the pinned ones up to `end` are no more."""
        gone = end - self.pinned
        if self.positions is not None:
            self._close_gap(end)
        del self.ids[self.pinned : end]
        self.spans = [s for span in self.spans for s in _without(span, self.pinned, end)]
        self.turns = sorted({t if t <= self.pinned else t - gone for t in self.turns if t <= self.pinned or t >= end})
        self.dropped += gone
        self.epoch += 1

    def _truncate(self, local: int) -> None:
        del self.ids[local:]
        if self.positions is not None:
            del self.positions[local:]
        self.spans = [s for span in self.spans for s in _without(span, local, span.start + span.count)]
        self.turns = [t for t in self.turns if t <= local]
        self.pinned = min(self.pinned, local)
        self.computed = min(self.computed, local)
        if self.exact is not None and local <= self.exact:
            self.exact = None
        self.epoch += 1

    def _close_gap(self, end: int) -> None:
        assert self.positions is not None
        head, tail = self.positions[: self.pinned], self.positions[end:]
        start = max(head[-1]) + 1 if head else 0
        shift = (min(tail[0]) if tail else start) - start
        self.positions = head + [tuple(p - shift for p in position) for position in tail]

    def check_integrity(self) -> None:
        """Raises AssertionError where the bookkeeping contradicts itself."""
        assert 0 <= self.computed <= len(self.ids)
        assert 0 <= self.pinned <= len(self.ids)
        assert self.positions is None or len(self.positions) == len(self.ids)
        covered = [i for s in self.spans for i in range(s.start, s.start + s.count)]
        assert covered == [i for i, row in enumerate(self.ids) if row is EMBEDDED]
        assert self.turns == sorted(set(self.turns))
        assert all(t <= len(self.ids) for t in self.turns)


def _without(span: EmbeddingSpan, low: int, high: int) -> list[EmbeddingSpan]:
    """The span once rows low..high are gone and what follows them has moved down."""
    end, gone = span.start + span.count, high - low
    out: list[EmbeddingSpan] = []
    if span.start < low:
        count = min(end, low) - span.start
        out.append(EmbeddingSpan(span.start, count, span.rows[:count], span.sink, span.before))
    if end > high:
        start = max(span.start, high)
        skipped = start - span.start
        out.append(EmbeddingSpan(start - gone, end - start, span.rows[skipped:], span.sink, span.before + skipped))
    return out
