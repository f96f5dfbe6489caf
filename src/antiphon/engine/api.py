"""The types that an engine and the models on it share: settings, rows, sampling parameters, generations, statistics.

Pure data and protocols. This module knows no tensor library: embeddings, logits and hidden states are opaque here, and
the engine that runs the model says what they are (`engine/local/` takes and gives torch tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import Any, Protocol


class Capabilities(Flag):
    """What an engine can do for its sessions, and what an adapter needs of an engine. An adapter that needs more than
    an engine has cannot run on it.

    `EMBEDDING_ROWS`: rows are given as embeddings, not only as tokens, with positions of the caller's.
    `EXACT_ROLLBACK`: the newest rows are taken back to any row, and nothing before it is computed again.
    `EVICT`: rows in the middle are dropped, and the keys of those behind them are moved to their new positions.
    `FORK`: a session is branched, and both branches share the KV of the rows before.
    `HIDDEN_STATES`: tokens carry the hidden state that they were sampled from, and a sink gets those of rows.
    `CHOOSER`: the adapter's own code chooses each token from its logits.
    `GRAMMAR`: tokens keep to a grammar.
    `PREFILL_AHEAD`: rows are computed as they are appended, before a generation asks for them.
    `PARK`: the KV of an idle session is moved out of the budgeted memory and back.
    """

    EMBEDDING_ROWS = auto()
    EXACT_ROLLBACK = auto()
    EVICT = auto()
    FORK = auto()
    HIDDEN_STATES = auto()
    CHOOSER = auto()
    GRAMMAR = auto()
    PREFILL_AHEAD = auto()
    PARK = auto()


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How much memory an engine may use, and how many rows it computes in one step.

    `kv_bytes`: memory for the KV of the sessions that are not parked, on the model's device.
    `host_bytes`, `disk_bytes`: host memory and disk for the KV of parked sessions; past both, nothing is parked.
    `context_rows`: most rows a session has in its context; 0: as many as the model was made for.
    `reserve_rows`: room that a session is promised when it opens.
    `prefill_rows`: most pending rows of a step in which some session generates. A step's time grows with it, and so
    does the gap between that session's tokens.
    `prefill_only_rows`: most pending rows of a step in which no session generates.
    `decode_rows`: most sessions that get a token in one step.
    `park_after_s`: seconds without work after which a session is parked.
    """

    kv_bytes: int = 2 << 30
    host_bytes: int = 1 << 30
    disk_bytes: int = 8 << 30
    context_rows: int = 0
    reserve_rows: int = 512
    prefill_rows: int = 64
    prefill_only_rows: int = 256
    decode_rows: int = 64
    park_after_s: float = 120.0


@dataclass(frozen=True, slots=True)
class EngineState:
    """How full an engine is, as it was between two steps.

    `sessions`: open sessions, parked ones included; `generating` and `parked` are counted among them.
    `kv_bytes`: KV in the budgeted memory, kept prefixes included; `kv_total_bytes`: the budget, in whole pages.
    `parked_bytes`: KV in host memory and on disk.
    """

    sessions: int = 0
    generating: int = 0
    parked: int = 0
    kv_bytes: int = 0
    kv_total_bytes: int = 0
    parked_bytes: int = 0


@dataclass(slots=True)
class RunnerStats:
    """What a runner has computed since it was made. Written in the engine's thread; times are wall-clock seconds.

    `steps`: forward passes; `rows`: rows computed in them. `step_s`: the passes with all that belongs to them, of which
    `forward_s` is the decoder itself and `sample_s` the choice of tokens. A step that failed is not counted.
    """

    steps: int = 0
    rows: int = 0
    step_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0


# The id of a row that was given as an embedding and not as a token.
EMBEDDED: None = None
Row = int | None
# One coordinate for each axis of the model's positions: one, or three for M-RoPE (time, height, width).
Position = tuple[int, ...]


class Finish(Enum):
    """Why a generation ended: a stop token, the limit of tokens, or the reader, which closed it before its end."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class Constraint(Protocol):
    """A grammar, or another rule about which tokens may follow. One object serves one generation.

    Both methods are called in the engine's thread, between steps: what they take delays every session.
    """

    def allowed(self) -> Any:
        """Return the tokens that may come next as uint32 [ceil(vocabulary / 32)], bit t % 32 of word t // 32.

        None allows all tokens.
        """
        ...

    def accept(self, token: int) -> None:
        """Advance past a token that was sampled. Raises ValueError where the rule does not allow that token."""
        ...


class Chooser(Protocol):
    """A model's own way from logits to a token, in place of everything else that `Sampling` offers.

    It is called in the engine's thread, between steps, once for each token, and may keep what it chose.
    """

    def __call__(self, logits: Any) -> int:
        """Return the next token. `logits`: float32 [vocabulary], not to be changed. Raises ModelError for none."""
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one generation are chosen, and when it ends.

    `max_tokens`: the generation ends after so many tokens.
    `temperature`: 0 or less chooses the likeliest token.
    `top_k`, `top_p`, `min_p`: 0, 1 and 0 leave every token in. `top_p` counts among what `top_k` leaves.
    `repetition_penalty`: divides positive and multiplies negative logits of the tokens among the last
    `repetition_window` rows, the prompt's included (CTRL, arXiv:1909.05858).
    `presence_penalty`, `frequency_penalty`: subtracted from the logits of tokens of this generation, once and for each
    occurrence (OpenAI's API).
    `seed`: of the random numbers; None draws one from the system's entropy.
    `stop`: a token of these ends the generation, and stays its last row.
    `forbid`: tokens that are never sampled. `allow`: where given, no other token is sampled.
    `bias`: added to the logits of its tokens.
    `constraint`: a rule that each token has to keep.
    `logprobs`, `hidden`: whether tokens carry their log-probability, and the hidden state they were sampled from.
    `chooser`: where given, it chooses, and nothing of the above shapes the logits.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: frozenset[int] = frozenset()
    forbid: tuple[int, ...] = ()
    allow: tuple[int, ...] | None = None
    bias: Mapping[int, float] = field(default_factory=dict)
    constraint: Constraint | None = None
    logprobs: bool = False
    hidden: bool = False
    chooser: Chooser | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token.

    `logprob`: its natural log-probability under the model's own distribution, before any shaping; None where
    `Sampling.logprobs` is off. `hidden`: the decoder's last hidden state, float [width]; None where `hidden` is off.
    """

    id: int
    logprob: float | None = None
    hidden: Any = None


@dataclass(slots=True)
class Generation:
    """A generation that is under way, shared by the engine's thread and its reader.

    `deliver`: called in the engine's thread with each token, then with one Finish or the error that ended it; it must
    not block. `start`: the session's rows when it began. `produced`: tokens sampled, counted by the engine's thread.
    `consumed`: tokens read, counted by the reader; the engine waits for a reader that falls too far behind.
    """

    params: Sampling
    deliver: Callable[[Token | Finish | Exception], None]
    start: int
    produced: int = 0
    consumed: int = 0
    # The runner's own state of the generation (a random number generator); opaque here.
    sampler: Any = None


# Receives what the decoder's tapped layer made of embedding rows: the offset of the first among the rows that were
# given together, and float [n, width], which it has to copy if it keeps it. Called in the engine's thread, before any
# token that follows these rows is delivered, and again for rows that are computed again.
Sink = Callable[[int, Any], None]
