"""What an engine is to the models on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`kv_bytes`: memory for the KV of sessions that are awake. `host_bytes`, `disk_bytes`: for parked ones.

    `context_rows` 0: as many as the model was made for. `reserve_rows`: room a session is promised when it opens.
    """

    kv_bytes: int = 2 << 30
    host_bytes: int = 1 << 30
    disk_bytes: int = 8 << 30
    context_rows: int = 0
    reserve_rows: int = 512
    prefill_rows: int = 64
    alone_rows: int = 256
    decode_rows: int = 64
    park_after_s: float = 120.0


@dataclass(frozen=True, slots=True)
class EngineState:
    """A look at the engine. `sessions` counts the parked ones too; bytes are of KV."""

    sessions: int = 0
    generating: int = 0
    parked: int = 0
    kept_prefixes: int = 0
    kv_bytes: int = 0
    kv_total_bytes: int = 0
    parked_bytes: int = 0
    context_cuts: int = 0


# The id of a row that was given as an embedding.
EMBEDDED: None = None
Row = int | None
Position = tuple[int, ...]


class Finish(Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class Constraint(Protocol):
    """A grammar, or any other rule over tokens. Called in the engine's thread, between steps."""

    def allowed(self) -> Any:
        """Which tokens may come next: uint32 [ceil(vocabulary / 32)], bit t % 32 of word t // 32; None allows all."""
        ...

    def accept(self, token: int) -> None:
        """The token was sampled. Raises ValueError where it must not have been."""
        ...


class Chooser(Protocol):
    """A model's own way from logits to a token. Called in the engine's thread, between steps; it may keep count of what it chose."""

    def __call__(self, logits: Any) -> int:
        """The next token, of float32 logits [vocabulary] that it may not change. Raises ModelError where there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens. Greedy at temperature 0.

    `top_k` 0, `top_p` 1 and `min_p` 0 leave everything in. `repetition_penalty` (CTRL, arXiv:1909.05858) divides positive
    logits and multiplies negative ones of tokens among the last `repetition_window` rows. `presence_penalty` and
    `frequency_penalty` count the tokens of this generation (OpenAI). `seed` None draws one. `forbid` tokens are never
    sampled; of `allow`, where given, nothing else is. `stop` tokens end the generation and stay its last row.
    `logprobs`, `hidden`: tokens come with their log-probability, with the last hidden state they were sampled from.
    `chooser`, where given, chooses, and nothing of the rest shapes the logits.
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
    """One sampled token. Where asked for: `logprob`, natural, under the model's own distribution; `hidden`, float [width]."""

    id: int
    logprob: float | None = None
    hidden: Any = None


@dataclass(slots=True)
class Generation:
    """A generation under way. `deliver` takes tokens, then one Finish or the error it failed with; it must not block."""

    params: Sampling
    deliver: Callable[[Token | Finish | Exception], None]
    start: int
    produced: int = 0
    consumed: int = 0
    # The sampler's own state (a random generator); opaque here.
    sampler: Any = None


# Takes what the decoder's tapped layer made of embedding rows: the number of the first among those it was given with, and float [n, width].
# Called in the engine's thread, and again for rows that are computed again.
Sink = Callable[[int, Any], None]
