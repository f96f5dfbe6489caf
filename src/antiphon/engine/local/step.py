"""What the scheduler, the runner and the engine hand each other: sessions, chunks of a step, limits, shares of owners.

Values, one protocol, and pure functions that share a step and the memory equally between the owners of sessions (by any
value; None for sessions without one). The rules that fill the values are in `scheduler.py`; what computes them
satisfies `StepRunner`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

from antiphon.engine.api import DecoderFacts, EngineSettings, Position, Row, Token
from antiphon.engine.generation import Generation
from antiphon.engine.local.kv.cache import Extent, Lease, Storage
from antiphon.engine.rows import Rows, SinkRange

# Tokens that a generation may be ahead of its reader; it goes on when the reader has caught up.
MAX_UNREAD_TOKENS = 64

# Called once with None when a session's rows are in the KV, or with the error that prevented it.
SettledCallback = Callable[[Exception | None], None]


@dataclass(slots=True, eq=False)
class ScheduledSession:
    """One session as the scheduler sees it: its rows and its claim to memory. Belongs to the model's thread.

    `last_step`: the number of the step that last took rows of it; sessions that waited longest go first.
    `cached`: rows at its head whose KV it took over from another session.
    `idle_rows`: how many rows it had when its KV was given up for another session while it was idle; they are computed
    anew once it has more, or a generation, and not before. `on_settled`: called once nothing is pending.
    `failure`: why nothing more is done for it. `stalled`: its last step failed, and would fail again; it waits for its
    rows to be rolled back, or for the next generation.
    """

    rows: Rows
    lease: Lease
    last_step: int = 0
    cached: int = 0
    idle_rows: int = 0
    on_settled: list[SettledCallback] = field(default_factory=list)
    failure: Exception | None = None
    stalled: bool = False

    @property
    def starved(self) -> bool:
        """Whether its generation waits for a reader that is MAX_UNREAD_TOKENS behind."""
        generation = self.rows.generation
        return (
            generation is not None
            and self.rows.pending == 1
            and generation.produced - generation.consumed >= MAX_UNREAD_TOKENS
        )

    @property
    def ready(self) -> bool:
        """Whether a step could do something for it now, provided there is room."""
        rows = self.rows
        if self.failure or self.stalled or self.starved or not rows.busy:
            return False
        return rows.generation is not None or len(rows.ids) > self.idle_rows


@dataclass(frozen=True, slots=True, eq=False)
class StepChunk:
    """Rows of one session in a step, with all that the runner needs of them: the session may change meanwhile.

    `session`: whose rows they are. `handle`: its KV memory, with room for the rows up to `stop`.
    `start`: rows of the session that are in the KV already; `ids`: the rows that follow them.
    `positions`: of these rows; None: start, start + 1, … `embeddings`: (row, float [n, width]) of the rows that were
    given as embeddings. `epoch`: of the rows when the chunk was planned; results for another epoch are discarded.
    `sampled`: the generation that gets a token from the last row. `recent`: the newest rows, the last one included, as
    many as that generation's penalties look back on. `sinks`: what receives the tapped outputs of embedding rows.
    """

    session: ScheduledSession
    handle: Any
    start: int
    ids: tuple[Row, ...]
    positions: tuple[Position, ...] | None
    embeddings: tuple[tuple[int, Any], ...]
    epoch: int
    sampled: Generation | None = None
    recent: tuple[Row, ...] = ()
    sinks: tuple[SinkRange, ...] = ()

    @property
    def count(self) -> int:
        """How many rows the chunk has, which is at least one."""
        return len(self.ids)

    @property
    def stop(self) -> int:
        """One past the last row: how many rows of the session are in the KV after the step."""
        return self.start + len(self.ids)


@dataclass(slots=True, eq=False)
class KeptPrefix:
    """A closed session's rows and their KV, for later sessions that begin with the same tokens."""

    rows: Rows
    extent: Extent


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How many rows a step may have, how many a session may have, and how long it may be idle before it is parked.

    `decode_rows`, `prefill_rows`, `prefill_only_rows`, `park_after_s`: as in EngineSettings. `context_rows`: the most
    rows of a session that are in the KV.
    """

    context_rows: int
    decode_rows: int = 64
    prefill_rows: int = 64
    prefill_only_rows: int = 256
    park_after_s: float = 120.0


@dataclass(slots=True)
class RunnerStats:
    """What a runner has computed since it was made. Written in the model's thread; times are wall-clock seconds.

    `steps`: forward passes; `rows`: rows computed in them. `step_s`: the passes with all that belongs to them, of which
    `forward_s` is the decoder itself and `sample_s` the choice of tokens. A step that failed is not counted.
    """

    steps: int = 0
    rows: int = 0
    step_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0


class StepRunner(DecoderFacts, Protocol):
    """What computes the steps of an engine. All of it but `embeddings` is called in the model's thread.

    Its `context_rows` are the positions that the model was made for.
    """

    @property
    def stats(self) -> RunnerStats:
        """What has been computed so far; the object is live, and written in the model's thread."""
        ...

    def storage(self, settings: EngineSettings) -> Storage:
        """Return memory for this model's keys and values. Called once, when the engine is made, before any step."""
        ...

    def embeddings(self, rows: Any) -> Any:
        """Return rows, float [n, width], as the model takes them. Called in a session's event loop.

        Raises ValueError for another shape.
        """
        ...

    def step(self, chunks: Sequence[StepChunk]) -> Sequence[Token | Exception | None]:
        """Compute the chunks' KV and return one result for each: a token where one is sampled, an error, or None."""
        ...


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
