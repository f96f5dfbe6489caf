"""The contract of an engine: what steps one model, the sessions it opens, and what both take and give.

`Engine` and `Session` are all that a model's adapter knows of the engine it runs on; `Capabilities` says which of it an
engine can do. This module knows no tensor library: embeddings, logits and hidden states are opaque here, and the engine
that runs the model says what they are (`engine/local/` takes and gives torch tensors).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import Any, Literal, Protocol

from antiphon.errors import CapabilityError


class Capabilities(Flag):
    """What an engine can do for its sessions, and what an adapter needs of an engine. An adapter that needs more than
    an engine has cannot run on it. A session that is asked for what its engine cannot do raises CapabilityError.

    `EMBEDDING_ROWS`: rows are given as embeddings, not only as tokens, and rows have positions of the caller's.
    `EXACT_ROLLBACK`: after a rollback to any row, nothing before that row is computed again. Every engine rolls back;
    without this flag some of the rows that stay are computed again.
    `EVICT`: rows in the middle are dropped, and the keys of those behind them are moved to their new positions; where
    a model's keys cannot be moved, these rows are computed anew.
    `FORK`: a session is branched, and both branches share the KV of the rows before.
    `HIDDEN_STATES`: tokens carry the hidden state that they were sampled from, and a sink gets those of rows.
    `CHOOSER`: the adapter's own code chooses each token from its logits (`Chooser`, `StepProgram`).
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


# How the KV lies in memory, and which sizes decode steps have; see EngineSettings.
KvLayout = Literal["auto", "session", "paged"]
DecodeShaping = Literal["auto", "exact", "bucketed", "captured"]
# The parts of models that a GPU replays as CUDA graphs; see EngineSettings.
GRAPHS = ("decode", "codes", "vocoder")


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
    `kv_layout`: `session` keeps a session's KV in a tensor of its own, which grows by being copied; `paged` keeps all
    sessions' KV in one pool of pages, which takes `kv_bytes` from the start. `auto`: `paged` on a CUDA device, and
    where decode steps are padded.
    `decode_shapes`: `exact` computes just the rows there are; `bucketed` pads steps in which every session has one row
    to one of a few sizes, and chooses tokens on the device; `captured` also replays such a step as one CUDA graph. The
    last two need `paged`. `auto`: `captured` on a CUDA device, else `exact`.
    `graphs`: which parts of a model a CUDA device replays as graphs, of GRAPHS: decode steps that are `captured`, the
    codes of a frame of speech, and calls of the vocoder.
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
    kv_layout: KvLayout = "auto"
    decode_shapes: DecodeShaping = "auto"
    graphs: frozenset[str] = frozenset(GRAPHS)

    def __post_init__(self) -> None:
        if self.decode_shapes in ("bucketed", "captured") and self.kv_layout == "session":
            raise ValueError(f"decode steps that are {self.decode_shapes} need a paged KV layout")

    def kv_on(self, device: str) -> tuple[KvLayout, DecodeShaping]:
        """Return the layout and the shapes on a type of device ("cpu", "cuda"), neither of them `auto`.

        On a GPU the limit is the host, which else launches the kernels of each session.
        """
        layout, shapes = self.kv_layout, self.decode_shapes
        if shapes == "auto":
            shapes = "captured" if device == "cuda" and layout != "session" else "exact"
        if layout == "auto":
            layout = "paged" if device == "cuda" or shapes != "exact" else "session"
        return layout, shapes


@dataclass(frozen=True, slots=True)
class EngineState:
    """How full an engine is, as it was between two steps.

    `sessions`: open sessions, parked ones included; `generating` and `parked` are counted among them.
    `kv_bytes`: KV in the budgeted memory, kept prefixes included; `kv_total_bytes`: the budget, in whole pages.
    `promised_bytes`: what sessions that are not parked hold or were promised. `parked_bytes`: KV in host memory and on
    disk.
    """

    sessions: int = 0
    generating: int = 0
    parked: int = 0
    kv_bytes: int = 0
    kv_total_bytes: int = 0
    promised_bytes: int = 0
    parked_bytes: int = 0


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


@dataclass(frozen=True, slots=True)
class Grammar:
    """A rule that the text of a generation keeps to, as text that any engine can be sent.

    `kind`: what `text` is. A `json_schema` allows JSON that fits it. A `lark` grammar is in the form of the llguidance
    library, with `%json` for a schema and `<[ID]>` for a token by its id.
    `trigger`: where it is empty, the rule holds from the first token on, and once the text is all that the rule asks
    for, a stop token of the generation ends it. Otherwise any text is allowed until it ends in `trigger`; then the rule
    holds until the text is complete, and any text is allowed again.
    """

    kind: Literal["lark", "json_schema"]
    text: str
    trigger: str = ""


# In place of a token, where logits are not numbers or leave none: the row fails when its token is read.
NO_TOKEN = -1


class Chooser(Protocol):
    """A model's own way from logits to a token, in place of everything else that `Sampling` offers.

    One object is the state of one session, which the host keeps; the tokens of all sessions are chosen at once, on the
    device of their logits. Both methods are called in the thread that runs the model, in turn, once for each token.
    """

    @staticmethod
    def choose(choosers: Sequence[Any], logits: Any) -> Any:
        """Return what is chosen for each session, int64 [n], on the device of the logits and without waiting for it.

        `choosers`: objects of one class. `logits`: float32 [n, vocabulary], a row for each, not to be changed. NO_TOKEN
        stands for logits that are not numbers. Raises ModelError.
        """
        ...

    def accept(self, chosen: int) -> int:
        """Return the token that `chosen`, once it is read, stands for, and remember it. Raises ModelError for none."""
        ...


class StepProgram(Protocol):
    """A model's own way from the decoder's output to a token, and from there to the session's next input row.

    For decoders whose tokens are a part of what the next row is made of, such as the first code of a frame of audio. It
    runs within the step, so no event loop lies between two rows of a session. One object is the state of one
    generation. All methods are called in the thread that runs the model: `run` and `accept` in turn, once for each
    token, then `next_row` until it returns a row.
    """

    @staticmethod
    def run(programs: Sequence[Any], logits: Any, hidden: Any) -> Any:
        """Return the numbers that a step chooses for each session, int64 [n, k], without waiting for the device.

        `programs`: objects of one class. `logits`: float32 [n, vocabulary]. `hidden`: the hidden states [n, width] that
        they were made of. Neither is to be changed. NO_TOKEN stands for numbers that cannot be chosen. Raises
        ModelError.
        """
        ...

    def accept(self, numbers: Sequence[int]) -> int:
        """Return the token of the numbers, once they are read, and remember them. Raises ModelError for NO_TOKEN."""
        ...

    def next_row(self) -> Any | None:
        """Return the row that follows the token, float [1, width].

        None: it needs something that has not come. The session waits, and is asked again before each step.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one generation are chosen, and when it ends."""

    # The generation ends after this number of tokens.
    max_tokens: int = 256
    # 0 or less chooses the likeliest token.
    temperature: float = 0.0
    # The number of likeliest tokens that may be sampled; 0: all.
    top_k: int = 0
    # The share of probability, among what `top_k` leaves, that may be sampled; 1: all.
    top_p: float = 1.0
    # The least probability of a token, relative to the likeliest one; 0 leaves every token in.
    min_p: float = 0.0
    # Divides positive and multiplies negative logits of the tokens among the last `repetition_window` rows, the
    # prompt's included (CTRL, arXiv:1909.05858).
    repetition_penalty: float = 1.0
    repetition_window: int = 64
    # Subtracted from the logits of tokens of this generation, once and for each occurrence (OpenAI's API).
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Of the random numbers; None draws one from the system's entropy.
    seed: int | None = None
    # A token of these ends the generation, and stays its last row.
    stop: frozenset[int] = frozenset()
    # Tokens that are never sampled.
    forbid: tuple[int, ...] = ()
    # Where given, no other token is sampled.
    allow: tuple[int, ...] | None = None
    # Added to the logits of its tokens.
    bias: Mapping[int, float] = field(default_factory=dict)
    # A rule that the text keeps to. Needs GRAMMAR.
    grammar: Grammar | None = None
    # Tokens carry their log-probability.
    logprobs: bool = False
    # Tokens carry the hidden state that they were sampled from. Needs HIDDEN_STATES.
    hidden: bool = False
    # Where given, it chooses, and nothing of the above shapes the logits. Needs CHOOSER.
    chooser: Chooser | None = None
    # Where given, it chooses likewise, and makes the row that follows each token but the last. Needs CHOOSER.
    program: StepProgram | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token.

    `logprob`: its natural log-probability under the model's own distribution, before any shaping; None where
    `Sampling.logprobs` is off. `hidden`: the decoder's last hidden state, float [width]; None where `hidden` is off.
    `numbers`: all that `Sampling.program` chose with it; empty without one.
    """

    id: int
    logprob: float | None = None
    hidden: Any = None
    numbers: Sequence[int] = ()


# Receives what the decoder's tapped layer made of embedding rows: the offset of the first among the rows that were
# given together, and float [n, width], which it has to copy if it keeps it. Called in the thread that runs the model,
# before any token that follows these rows is delivered, and again for rows that are computed again.
Sink = Callable[[int, Any], None]


class Session(Protocol):
    """One sequence of rows that lives as long as a conversation, with its KV. Closed by its owner.

    Rows are counted from its start. It is used from one event loop. Everything but `settle`, `generate` and `fork`
    returns at once, and takes effect in the order of the calls. While a generation is under way, every call but `close`
    and `settle` raises EngineError; once the session is closed, every call but `close` does. Once the engine is closed,
    they raise Refused.
    """

    @property
    def length(self) -> int:
        """Rows given, and sampled and read, so far; rows that left the context are counted too."""
        ...

    @property
    def cached(self) -> int:
        """Rows at the head whose KV was there when the session came to them: those of another session, or kept ones.

        Known once the first rows are computed, and 0 before.
        """
        ...

    @property
    def context_start(self) -> int:
        """The first row behind the pinned ones that is still in the context.

        Equal to the number of pinned rows until a cut or an eviction. Of the last step: rows given since may move it.
        """
        ...

    @property
    def finish(self) -> Finish | None:
        """Why the last generation ended; None before the first, while one is under way, and after one that failed."""
        ...

    def append(self, ids: Sequence[int], positions: Sequence[Position] | None = None) -> None:
        """Add tokens at the end. With PREFILL_AHEAD they are computed at once, but for the newest one.

        `positions`: one for each token, counted from the first free one; None: each follows the one before it. Raises
        ValueError where their number differs, CapabilityError for positions without EMBEDDING_ROWS.
        """
        ...

    def append_embeddings(
        self, rows: Any, positions: Sequence[Position] | None = None, sink: Sink | None = None
    ) -> None:
        """Add embeddings, float [n, width], at the end, as `append` adds tokens. Needs EMBEDDING_ROWS.

        `sink` receives what the decoder's tapped layer makes of them, before any token that follows is delivered; it
        needs HIDDEN_STATES, and a decoder without such a layer fails the session then. Raises ValueError for another
        shape, CapabilityError.
        """
        ...

    def pin(self) -> None:
        """Keep all rows so far (the system prompt) whenever the context is cut."""
        ...

    def start_turn(self) -> None:
        """Mark the next row as the beginning of a turn, where a context cut falls if one is in reach."""
        ...

    def rollback(self, position: int) -> None:
        """Take back all rows from `position` on. With EXACT_ROLLBACK it costs nothing: the KV before it stays.

        Raises EngineError for a row that is not there or has left the context.
        """
        ...

    def evict(self, count: int) -> None:
        """Drop the `count` oldest rows after the pinned ones; `length` still counts them. Needs EVICT.

        The KV of the rows behind them stays. So, unlike after a context cut, these rows still carry what was dropped:
        their keys and values were computed with it. Raises CapabilityError. Fewer rows than `count` are a mistake of
        the caller, which is logged, and nothing is dropped.
        """
        ...

    async def settle(self, *, include_newest: bool = False) -> None:
        """Wait until the rows given so far are in the KV. Without PREFILL_AHEAD it returns at once.

        The newest row is left for the generation that needs its logits, unless `include_newest`. Raises ModelError
        where a step failed, EngineError where the session or the engine was closed meanwhile.
        """
        ...

    def generate(self, params: Sampling) -> AsyncGenerator[Token, None]:
        """Sample tokens after the last row and yield them as they come; each becomes a row of the session.

        `finish` says why it ended. Closing the generator, or cancelling its task, ends the generation within a step and
        leaves the session with just the tokens that were yielded. The engine may be a few dozen tokens ahead of the
        reader, and no more. Raises ModelError where a step failed, EngineError where there are no rows, CapabilityError
        for what the engine cannot do, GrammarError for a grammar that it does not accept.
        """
        ...

    async def fork(self) -> Session:
        """Return another session with the same rows, which the caller closes. Needs FORK.

        Its KV is shared until one of the two writes. Raises Refused where there is no room for another session,
        CapabilityError.
        """
        ...

    def close(self, *, keep: bool = False) -> None:
        """Give back the session's KV. Closing it again, or after the engine, changes nothing.

        `keep`: leave the KV to later sessions that begin with the same tokens, while there is room for it.
        """
        ...


class Capable(Protocol):
    """What says what it can do.

    `name`: of this kind of engine, in errors and in settings. `capabilities`: they do not change while it lives.
    """

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...


class DecoderFacts(Protocol):
    """Facts of a decoder, or of an engine that steps it.

    `context_rows`: the most rows of a session that are in the KV: the model's, the settings', or what the memory holds.
    `vocabulary_size`: tokens of the model's head, which may be more than its tokenizer knows. `width`: numbers of an
    embedding that is given as a row. `eos_tokens`: the tokens that end a text by the model's configuration; they end a
    generation only if `Sampling.stop` has them.
    """

    @property
    def context_rows(self) -> int: ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def eos_tokens(self) -> frozenset[int]: ...


class Engine(Capable, DecoderFacts, Protocol):
    """What steps one model for all its sessions, from its construction until `close`. Used from any event loop."""

    @property
    def last_state(self) -> EngineState:
        """How full the engine was after its last step. Read without waiting."""
        ...

    async def state(self) -> EngineState:
        """Return how full the engine is now. Waits for the step under way. Raises Refused after `close`."""
        ...

    async def open(self, reserve_rows: int | None = None, *, owner: Hashable | None = None) -> Session:
        """Return a session without rows, with room promised for `reserve_rows` (None: as the settings say).

        `owner`: whose rows they are, by any value. Sessions that begin alike share their KV only where their owners are
        equal, so that neither `Session.cached` nor the time of a step tells what others have said; None: with nobody.
        The caller closes it. Waits for the step under way. A caller that is cancelled meanwhile leaves no session
        behind. Raises Refused where there is no room, or after `close`.
        """
        ...

    async def prepare_grammar(self, grammar: Grammar, stop: frozenset[int]) -> None:
        """Have a grammar ready, so that a generation with it and the stop tokens `stop` begins at once. Needs GRAMMAR.

        A generation prepares what was not prepared. Raises CapabilityError, and GrammarError for a grammar that the
        engine does not accept; an engine that learns of that later raises it with the generation.
        """
        ...

    def close(self, timeout_s: float = 10.0) -> None:
        """End the engine after the step under way, and block until it ended or `timeout_s` passed.

        Generations that are read and calls that wait get an EngineError; later calls raise Refused.
        """
        ...


def require(engine: Capable, needed: Capabilities) -> None:
    """Raise CapabilityError where `engine` cannot do all of `needed`; it names the engine and what is missing."""
    if missing := needed & ~engine.capabilities:
        names = ", ".join(str(capability.name) for capability in missing)
        raise CapabilityError(f"the engine {engine.name!r} has no {names}")
