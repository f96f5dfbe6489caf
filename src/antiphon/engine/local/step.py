"""What the scheduler, the runner and the engine hand each other: sessions, chunks of a step, limits.

Values and one protocol. The rules that fill them are in `scheduler.py`; what computes them satisfies `StepRunner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from antiphon.engine.api import EngineSettings, Position, Row, Token
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


class StepRunner(Protocol):
    """What computes the steps of an engine. All of it but `embeddings` is called in the model's thread."""

    @property
    def context_rows(self) -> int:
        """How many positions the model was made for."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """How many tokens the model's head has."""
        ...

    @property
    def width(self) -> int:
        """How many numbers a row has that is given as an embedding."""
        ...

    @property
    def eos_tokens(self) -> frozenset[int]:
        """The tokens that end a text, by the model's configuration."""
        ...

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
