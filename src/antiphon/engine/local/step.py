"""The values that the scheduler, the runner and the engine exchange: sessions, chunks of a step, and limits.

Also contains pure functions that make chunks of a session's rows, and that share a step and the memory equally between
the owners of sessions. An owner is any value; None for sessions without one. `scheduler.py` decides the values, and an
implementation of `StepRunner` computes the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

from antiphon.engine.api import DecoderFacts, EngineSettings, Position, Row, Token
from antiphon.engine.generation import Generation
from antiphon.engine.local.kv.cache import Lease, Storage
from antiphon.engine.model_thread import DeviceStream
from antiphon.engine.rows import Rows, SinkRange

# A generation pauses when it is this number of tokens ahead of its reader, until the reader has caught up.
MAX_UNREAD_TOKENS = 64
# The minimum number of rows of a prefill in a step. Fewer rows take the same time.
MIN_SHARE_ROWS = 16

# Called once: with None when all rows of a session are in the KV, or with the error that prevented this.
SettledCallback = Callable[[Exception | None], None]


@dataclass(slots=True, eq=False)
class ScheduledSession:
    """One session as the scheduler sees it: its rows and its claim to memory. Belongs to the model's thread."""

    # The session's rows.
    rows: Rows
    # The session's claim to memory.
    lease: Lease
    # Sessions are numbered in the order in which they were opened.
    number: int
    # The number of the last step that took rows of this session. Sessions that have waited longest go first.
    last_step: int = 0
    # The number of rows at the head whose KV was taken over from another session.
    cached: int = 0
    # The number of rows at the time when the idle session lost its KV to another session. The rows are computed again
    # only after more rows or a generation arrive.
    idle_rows: int = 0
    # Callbacks for when nothing is pending.
    on_settled: list[SettledCallback] = field(default_factory=list)
    # Why the session can do no more work; None while it can.
    failure: Exception | None = None
    # Whether the last step failed and would fail again. The session waits for a rollback or for the next generation.
    stalled: bool = False
    # The session's newest rows that are launched, but not committed; None if there are none.
    launched: StepChunk | None = None

    @property
    def computed(self) -> int:
        """The number of rows that are in the KV after the step under way."""
        return self.launched.stop if self.launched else self.rows.computed

    @property
    def pending(self) -> int:
        """The number of rows in the context that neither are in the KV nor will be after the step under way."""
        return len(self.rows.ids) - self.computed

    @property
    def due(self) -> int:
        """The number of rows whose KV is to be computed after the step under way. See `Rows.due`."""
        return self.rows.due_after(self.computed)

    @property
    def goes_ahead(self) -> bool:
        """Whether the token that the step under way samples may become a row before the host has read it."""
        sampled = self.launched.sampled if self.launched else None
        return sampled is not None and sampled is self.rows.generation and sampled.goes_ahead

    @property
    def ready(self) -> bool:
        """Whether a step could do something for the session now, if there is room."""
        rows, generation = self.rows, self.rows.generation
        if self.failure or self.stalled or not rows.busy:
            return False
        if generation is None:
            return len(rows.ids) > self.idle_rows
        # A generation waits for a reader that is too far behind.
        return rows.pending > 1 or generation.delivered - generation.consumed < MAX_UNREAD_TOKENS


@dataclass(slots=True, eq=False)
class LaunchedToken:
    """Where the device has a sampled token that the host has not read: `tokens[index]`.

    `tokens`: set by the runner when it launches the step, opaque here; None if the row has no token.
    """

    tokens: Any = None
    index: int = 0


@dataclass(slots=True, eq=False)
class StepChunk:
    """Rows of one session in a step, with everything the runner needs: the session may change during the step.

    Not changed after it is made. It is not frozen, because a step makes one for each session and that takes longer.
    """

    # The session that the rows belong to.
    session: ScheduledSession
    # The session's KV memory, with room for the rows up to `stop`.
    handle: Any
    # The number of the session's rows that are in the KV already.
    start: int
    # The rows to compute, which follow the first `start` rows.
    ids: tuple[Row, ...]
    # The positions of these rows; None: start, start + 1, …
    positions: tuple[Position, ...] | None
    # The rows that were given as embeddings, as pairs (first row, float [n, width]).
    embeddings: tuple[tuple[int, Any], ...]
    # `Rows.epoch` when the chunk was planned. If it has changed since, the results are discarded.
    epoch: int
    # The generation that samples a token from the last row, if any.
    sampled: Generation | None = None
    # The newest rows, including the last one, as many as that generation's penalties consider.
    recent: tuple[Row, ...] = ()
    # The receivers of the tapped outputs of embedding rows.
    sinks: tuple[SinkRange, ...] = ()
    # The token that this chunk samples, for the chunk that follows it.
    token: LaunchedToken = field(default_factory=LaunchedToken)
    # The token that is this chunk's only row, if the host has not read it yet. `ids` and `recent` then lack it.
    follows: LaunchedToken | None = None

    @property
    def count(self) -> int:
        """The number of rows in the chunk, at least one."""
        return len(self.ids)

    @property
    def stop(self) -> int:
        """One past the last row: the number of the session's rows in the KV after the step."""
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The maximum number of rows in a step and in a session, and the idle time before a session is parked.

    `decode_rows`, `prefill_rows`, `prefill_only_rows`, `park_after_s`: as in EngineSettings. `context_rows`: the
    maximum number of rows of a session in the KV.
    """

    context_rows: int
    decode_rows: int = 64
    prefill_rows: int = 64
    prefill_only_rows: int = 256
    park_after_s: float = 120.0


@dataclass(slots=True)
class RunnerStats:
    """A runner's counters since its construction. Written in the model's thread; times are wall-clock seconds.

    `steps`: forward passes. `rows`: rows computed in them. `step_s`: whole steps, of which `forward_s` is the decoder
    and `sample_s` the choice of tokens. Failed steps are not counted.
    """

    steps: int = 0
    rows: int = 0
    step_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0


class LaunchedStep(Protocol):
    """A step that is being computed."""

    def read(self) -> Sequence[Token | Exception | None]:
        """Wait for the step. Returns for each chunk the sampled token, an error, or None if it samples none.

        Called once.
        """
        ...


class StepRunner(DecoderFacts, Protocol):
    """Computes the steps of an engine. Steps are launched and read in the model's thread.

    `context_rows` is the number of positions that the model supports.
    """

    @property
    def stats(self) -> RunnerStats:
        """The runner's live counters, written in the model's thread."""
        ...

    def stream(self) -> DeviceStream | None:
        """Return a stream for the model's thread, for an engine that runs one step ahead; None on a CPU."""
        ...

    def storage(self, settings: EngineSettings) -> Storage:
        """Return memory for this model's keys and values. Called once, before any step."""
        ...

    def embeddings(self, rows: Any) -> Any:
        """Return rows, float [n, width], in the form that the model takes. Called in a session's event loop.

        Raises ValueError if the rows have another shape.
        """
        ...

    def launch(self, chunks: Sequence[StepChunk]) -> LaunchedStep:
        """Begin to compute the chunks' KV and tokens. At most one step before it has not been read."""
        ...


def rows_until(session: ScheduledSession, stop: int) -> StepChunk:
    """Return the session's next rows, up to `stop`, for which its extent has room."""
    rows, start = session.rows, session.computed
    assert session.lease.extent
    sampled = rows.generation if stop == len(rows.ids) else None
    lookback = sampled.lookback_rows if sampled else 0
    return StepChunk(
        session=session,
        handle=session.lease.extent.handle,
        start=start,
        ids=tuple(rows.ids[start:stop]),
        positions=None if rows.positions is None else tuple(rows.positions[start:stop]),
        embeddings=tuple(rows.embeddings(start, stop)) if rows.spans else (),
        epoch=rows.epoch,
        sampled=sampled,
        recent=tuple(rows.ids[-lookback:]) if lookback else (),
        sinks=tuple(rows.sinks(start, stop)) if rows.spans else (),
    )


def row_ahead(session: ScheduledSession) -> StepChunk:
    """Return the row of the token that the step under way samples. The session goes ahead, and its extent has room."""
    rows, launched = session.rows, session.launched
    assert launched
    assert launched.sampled
    assert session.lease.extent
    lookback = launched.sampled.lookback_rows - 1
    return StepChunk(
        session=session,
        handle=session.lease.extent.handle,
        start=launched.stop,
        ids=(0,),
        positions=None if rows.positions is None else (rows.next_position,),
        embeddings=(),
        epoch=rows.epoch,
        sampled=launched.sampled,
        recent=tuple(rows.ids[-lookback:]) if lookback > 0 else (),
        follows=launched.token,
    )


def queues_by_owner(sessions: Iterable[ScheduledSession]) -> list[list[ScheduledSession]]:
    """Return each owner's sessions, in the given order. The owner that has waited longest for a step is first."""
    queues: dict[Hashable | None, list[ScheduledSession]] = {}
    for session in sessions:
        queues.setdefault(session.rows.owner, []).append(session)
    return sorted(queues.values(), key=lambda queue: max(s.last_step for s in queue))


def in_turns(sessions: Sequence[ScheduledSession]) -> Sequence[ScheduledSession]:
    """Return the sessions interleaved: one of each owner, then a second of each, and so on.

    An owner's first session is preceded by at most one session of each other owner, however many sessions they have.
    """
    queues = queues_by_owner(sessions)
    if len(queues) < 2:
        return sessions
    return [s for turn in zip_longest(*queues) for s in turn if s]


def page_shares(
    sessions: Iterable[ScheduledSession], owner: Hashable | None, total_pages: int
) -> tuple[dict[Hashable | None, int], int]:
    """Return the pages that each owner claims, and the share that each may claim at the expense of others.

    The share is `total_pages` divided by the number of owners. Owners count if they have a session that claims memory
    or has work; `owner`, which asks for more, always counts.
    """
    held: dict[Hashable | None, int] = {owner: 0}
    for session in sessions:
        if session.lease.claim_pages or session.rows.busy:
            held[session.rows.owner] = held.get(session.rows.owner, 0) + session.lease.claim_pages
    return held, total_pages // len(held)
