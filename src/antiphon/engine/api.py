"""The interface of an engine: the engine, the sessions that it opens, and the types of their arguments and results.

A model's adapter uses its engine only through `Engine` and `Session`. `Capabilities` lists what an
engine supports. This module uses no tensor library: embeddings, logits and hidden states are opaque here, and each
engine defines their types (`engine/local/` takes and returns torch tensors).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import Any, Literal, Protocol

from antiphon.engine.choosers import Chooser, StepProgram
from antiphon.errors import CapabilityError


class Capabilities(Flag):
    """Optional features of engines: those that an engine has, or those that an adapter requires.

    An adapter cannot run on an engine that lacks a feature it requires. A session raises CapabilityError when it is
    asked for a feature that its engine lacks.
    """

    # Rows can be given as embeddings, not only as tokens, and the caller can set the positions of rows.
    EMBEDDING_ROWS = auto()
    # After a rollback to any row, no row before it is computed again. Every engine can roll back; without this flag
    # some of the remaining rows are computed again.
    EXACT_ROLLBACK = auto()
    # Rows in the middle can be dropped. The keys of the later rows move to their new positions; if the model's keys
    # cannot be moved, the later rows are computed again.
    EVICT = auto()
    # A session can be branched. Both branches share the KV of the rows before the fork.
    FORK = auto()
    # Tokens carry the hidden state that they were sampled from, and a sink receives the hidden states of rows.
    HIDDEN_STATES = auto()
    # The adapter's own code chooses each token from its logits (`Chooser`, `StepProgram`).
    CHOOSER = auto()
    # Sampled tokens can be constrained by a grammar.
    GRAMMAR = auto()
    # Rows are computed as they are appended, before a generation asks for them.
    PREFILL_AHEAD = auto()
    # The KV of an idle session can be moved out of the budgeted memory and back.
    PARK = auto()


# The layout of the KV in memory and the sizes of decode steps; see EngineSettings.
KvLayout = Literal["auto", "session", "paged"]
DecodeShaping = Literal["auto", "exact", "bucketed", "captured"]
# The parts of models that a GPU replays as CUDA graphs; see EngineSettings.
GRAPHS = ("decode", "codes", "vocoder", "encoder")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """An engine's memory budgets and the sizes of its steps."""

    # Memory for the KV of the sessions that are not parked, in bytes, on the model's device.
    kv_bytes: int = 2 << 30
    # Host memory for the KV of parked sessions, in bytes.
    host_bytes: int = 1 << 30
    # Disk space for the KV of parked sessions, in bytes, used after `host_bytes`. If both are full, nothing is parked.
    disk_bytes: int = 8 << 30
    # The maximum number of rows in a session's context; 0: the limit that the model was trained with.
    context_rows: int = 0
    # The number of rows for which a session is promised room when it opens.
    reserve_rows: int = 512
    # The maximum number of pending rows that a step computes while sessions generate. More rows delay their tokens.
    prefill_rows: int = 64
    # The maximum number of pending rows that a step computes while no session generates.
    prefill_only_rows: int = 256
    # The maximum number of sessions that sample a token in one step.
    decode_rows: int = 64
    # Seconds without work after which a session is parked.
    park_after_s: float = 120.0
    # `session` keeps each session's KV in its own tensor, which is copied when it grows. `paged` keeps the KV of all
    # sessions in one pool of pages and allocates `kv_bytes` at the start. `auto`: `paged` on a CUDA device or if decode
    # steps are padded, else `session`.
    kv_layout: KvLayout = "auto"
    # `exact` computes only the rows that are due. `bucketed` pads a step in which every session has one row to one of a
    # few sizes, and samples on the device. `captured` also replays such a step as one CUDA graph. The last two need
    # `paged`. `auto`: `captured` on a CUDA device, else `exact`.
    decode_shapes: DecodeShaping = "auto"
    # The parts of a model that a CUDA device replays as graphs, a subset of GRAPHS: decode steps that are `captured`,
    # the codes of a frame of speech, calls of the vocoder, and passes of audio encoders.
    graphs: frozenset[str] = frozenset(GRAPHS)
    # Launch a step before the tokens of the step before it are read, and use CUDA streams for the parts of a model.
    step_ahead: bool = False

    def __post_init__(self) -> None:
        if self.decode_shapes in ("bucketed", "captured") and self.kv_layout == "session":
            raise ValueError(f"decode steps that are {self.decode_shapes} need a paged KV layout")

    def kv_on(self, device: str) -> tuple[KvLayout, DecodeShaping]:
        """Return the layout and the shapes, neither of them `auto`, for a type of device ("cpu", "cuda").

        A GPU gets `paged` and `captured`. Otherwise it waits for the host, which launches each session's kernels.
        """
        layout, shapes = self.kv_layout, self.decode_shapes
        if shapes == "auto":
            shapes = "captured" if device == "cuda" and layout != "session" else "exact"
        if layout == "auto":
            layout = "paged" if device == "cuda" or shapes != "exact" else "session"
        return layout, shapes


@dataclass(frozen=True, slots=True)
class EngineState:
    """An engine's use of its memory, measured between two steps."""

    # The number of open sessions, including parked ones.
    sessions: int = 0
    # The number of sessions that are generating.
    generating: int = 0
    # The number of sessions whose KV is parked.
    parked: int = 0
    # Bytes of KV in the budgeted memory, including kept prefixes.
    kv_bytes: int = 0
    # The limit of `kv_bytes`, rounded to whole pages.
    kv_total_bytes: int = 0
    # Bytes that sessions hold or were promised, not counting parked sessions.
    promised_bytes: int = 0
    # Bytes of KV of parked sessions, in host memory and on disk.
    parked_bytes: int = 0


# The id of a row that was given as an embedding instead of a token.
EMBEDDED: None = None
Row = int | None
# One coordinate for each axis of the model's positions: one, or three for M-RoPE (time, height, width).
Position = tuple[int, ...]


class Finish(Enum):
    """Why a generation ended: a stop token, the token limit, or a reader that closed it early."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A rule that the text of a generation must match, in a form that can be sent to any engine.

    `kind`: the language of `text`. `json_schema` allows JSON that matches the schema. `lark` is llguidance's dialect of
    Lark, with `%json` for a schema and `<[ID]>` for a token by its id.
    `trigger`: if empty, the rule holds from the first token on, and the generation ends with a stop token when the text
    is complete. Otherwise any text is allowed until it ends in `trigger`. The rule then holds until its text is
    complete, after which any text is allowed again.
    """

    kind: Literal["lark", "json_schema"]
    text: str
    trigger: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one generation are chosen, and when it ends."""

    # The generation ends after this number of tokens.
    max_tokens: int = 256
    # 0 or less chooses the likeliest token.
    temperature: float = 0.0
    # The number of likeliest tokens that may be sampled; 0: all.
    top_k: int = 0
    # Samples only from the likeliest of the tokens left by `top_k` whose probabilities add up to this share; 1: all.
    top_p: float = 1.0
    # The minimum probability of a token, as a fraction of that of the likeliest token; 0: no minimum.
    min_p: float = 0.0
    # Penalizes tokens that are among the last `repetition_window` rows, including the prompt: divides their logits if
    # positive, multiplies them if negative (CTRL, arXiv:1909.05858). 1: off.
    repetition_penalty: float = 1.0
    # The number of newest rows that `repetition_penalty` considers.
    repetition_window: int = 64
    # Subtracted once from the logits of each token that this generation has sampled (OpenAI's API).
    presence_penalty: float = 0.0
    # Subtracted from a token's logit once for each time that this generation has sampled it (OpenAI's API).
    frequency_penalty: float = 0.0
    # Seed of the random numbers; None draws one from the system's entropy.
    seed: int | None = None
    # Tokens that end the generation. The stop token that was sampled stays as the session's last row.
    stop: frozenset[int] = frozenset()
    # Tokens that are never sampled.
    forbid: tuple[int, ...] = ()
    # The only tokens that may be sampled; None: no restriction.
    allow: tuple[int, ...] | None = None
    # Values added to the logits, by token.
    bias: Mapping[int, float] = field(default_factory=dict)
    # A rule that the text must match. Needs GRAMMAR.
    grammar: Grammar | None = None
    # Whether tokens carry their log-probability.
    logprobs: bool = False
    # Whether tokens carry the hidden state that they were sampled from. Needs HIDDEN_STATES.
    hidden: bool = False
    # If given, it chooses the tokens, and no option above shapes the logits. Needs CHOOSER.
    chooser: Chooser | None = None
    # If given, it also chooses the tokens, and makes the row after each token except the last. Needs CHOOSER.
    program: StepProgram | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token.

    `logprob`: its natural log-probability under the model's own distribution, before any option shapes the logits; None
    unless `Sampling.logprobs` is set. `hidden`: the decoder's last hidden state, float [width]; None unless
    `Sampling.hidden` is set. `numbers`: the numbers that `Sampling.program` chose; empty without one.
    """

    id: int
    logprob: float | None = None
    hidden: Any = None
    numbers: Sequence[int] = ()


# Receives the output of the decoder's tapped layer for embedding rows. Arguments: the offset of the first row among the
# rows of one `append_embeddings` call, and float [n, width], which the sink must copy to keep. Called in the model's
# thread, before any token that follows these rows is delivered, and again if the rows are computed again.
Sink = Callable[[int, Any], None]


class Session(Protocol):
    """One sequence of rows and its KV, which lives as long as a conversation. Its owner closes it.

    Rows are counted from the session's start. A session is used from one event loop. All methods except `settle`,
    `generate`, `collect` and `fork` return at once and take effect in the order of the calls.

    While a generation is under way, every method except `close` and `settle` raises EngineError. After the session is
    closed, every method except `close` does. After the engine is closed, they raise Refused. A method raises
    CapabilityError if it needs a capability that the engine lacks.
    """

    @property
    def length(self) -> int:
        """The number of rows that were given, or sampled and read. Includes rows that left the context."""
        ...

    @property
    def cached(self) -> int:
        """The number of rows at the head whose KV came from another session; 0 until the first rows are computed."""
        ...

    @property
    def context_start(self) -> int:
        """The first row after the pinned ones that is still in the context, as of the last step.

        Equal to the number of pinned rows until a cut or an eviction. Rows given since the last step may move it.
        """
        ...

    @property
    def finish(self) -> Finish | None:
        """Why the last generation ended. None before the first generation, during one, and after one that failed."""
        ...

    def append(self, ids: Sequence[int], positions: Sequence[Position] | None = None) -> None:
        """Add tokens at the end. With PREFILL_AHEAD all of them except the newest are computed at once.

        Args:
            ids: The tokens.
            positions: One for each token, relative to the first free position. None: consecutive. Needs EMBEDDING_ROWS.

        Raises:
            ValueError: The numbers of tokens and positions differ.
        """
        ...

    def append_embeddings(
        self, rows: Any, positions: Sequence[Position] | None = None, sink: Sink | None = None
    ) -> None:
        """Add embeddings at the end, as `append` adds tokens. Needs EMBEDDING_ROWS.

        Args:
            rows: float [n, width].
            positions: As for `append`.
            sink: Receives the tapped layer's output for these rows before any token that follows is delivered. Needs
                HIDDEN_STATES. If the decoder has no tapped layer, the session fails.

        Raises:
            ValueError: The rows have another shape.
        """
        ...

    def pin(self) -> None:
        """Keep all rows given so far (the system prompt) in every later context cut."""
        ...

    def start_turn(self) -> None:
        """Mark the next row as the beginning of a turn. A context cut falls on such a row if one is near enough."""
        ...

    def rollback(self, position: int) -> None:
        """Take back all rows from `position` on. With EXACT_ROLLBACK this is free: the KV before `position` stays.

        Raises EngineError if the row does not exist or has left the context.
        """
        ...

    def evict(self, count: int) -> None:
        """Drop the `count` oldest rows after the pinned ones. `length` still counts them. Needs EVICT.

        The KV of the later rows stays. Unlike after a context cut, these rows still carry traces of the dropped ones,
        because their keys and values were computed with them. If `count` exceeds the rows that can be dropped, the
        engine logs the caller's mistake and drops nothing.
        """
        ...

    async def settle(self, *, include_newest: bool = False) -> None:
        """Wait until the KV of the rows given so far is computed. Returns at once without PREFILL_AHEAD.

        Args:
            include_newest: Compute the newest row too. By default it is left for the generation that needs its logits.

        Raises:
            ModelError: A step failed.
            EngineError: The session or the engine was closed meanwhile.
        """
        ...

    def generate(self, params: Sampling) -> AsyncGenerator[Token, None]:
        """Sample tokens after the last row and yield each as it is sampled. Each becomes a row of the session.

        `finish` says afterwards why the generation ended. Closing the generator, or cancelling its task, ends the
        generation within one step; the session keeps exactly the tokens that were yielded. The engine runs at most a
        few dozen tokens ahead of the reader.

        Raises:
            ModelError: A step failed.
            EngineError: The session has no rows.
            GrammarError: The engine does not accept the grammar.
        """
        ...

    async def collect(
        self, params: Sampling, *, until: Callable[[Sequence[Token]], bool] | None = None, group: int = 16
    ) -> Sequence[Token]:
        """Sample tokens after the last row, and return all of them when the generation ends.

        Takes less time than `generate` for a caller that needs the whole list, because the engine delivers the tokens
        together. It does not wait for the caller. The returned tokens are rows of the session, and `finish` says why
        the generation ended. If the call raises or is cancelled, the session keeps none of the tokens, unless a cut of
        the context has dropped the row before the first of them.

        Args:
            params: How the tokens are chosen.
            until: Called in the event loop with the tokens so far, whenever `group` more have arrived. If it returns
                True, the generation ends with Finish.CANCELLED, and these tokens are returned. If it raises, so does
                this method.
            group: The number of tokens between two calls of `until`.

        Raises:
            As `generate`.
        """
        ...

    async def fork(self) -> Session:
        """Return another session with the same rows, which the caller closes. Needs FORK.

        The two share their KV until one of them writes. Raises Refused if there is no room for another session.
        """
        ...

    def close(self, *, keep: bool = False) -> None:
        """Give back the session's KV. A no-op if the session or the engine is closed already.

        Args:
            keep: Leave the KV to later sessions that begin with the same tokens, while there is room for it.
        """
        ...


class Capable(Protocol):
    """An object with a name and capabilities, such as an engine.

    `name`: the kind of engine, in errors and in settings. `capabilities`: constant for the object's lifetime.
    """

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...


class DecoderFacts(Protocol):
    """Facts of a decoder, or of an engine that steps it.

    `context_rows`: the maximum number of rows of a session in the KV, as limited by the model, the settings and the
    memory. `vocabulary_size`: the number of tokens of the model's head, which may exceed the tokenizer's. `width`:
    length of an embedding row. `eos_tokens`: the tokens that end a text by the model's configuration. They end a
    generation only if they are in `Sampling.stop`.
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
    """Steps one model for all its sessions, from construction until `close`. Used from any event loop."""

    @property
    def last_state(self) -> EngineState:
        """The engine's state after its last step. Returns without waiting."""
        ...

    async def state(self) -> EngineState:
        """Return the engine's state now, after the step under way. Raises Refused if the engine is closed."""
        ...

    async def open(self, reserve_rows: int | None = None, *, owner: Hashable | None = None) -> Session:
        """Return a new session without rows, which the caller closes. Waits for the step under way.

        A caller that is cancelled while it waits leaves no session behind.

        Args:
            reserve_rows: The number of rows for which room is promised. None: `EngineSettings.reserve_rows`.
            owner: Identifies the owner of the rows. Only sessions of equal owners share KV, so neither `Session.cached`
                nor the time of a step reveals another owner's text. None: the session shares KV with no other.

        Raises:
            Refused: There is no room, or the engine is closed.
        """
        ...

    async def prepare_grammar(self, grammar: Grammar, stop: frozenset[int]) -> None:
        """Compile a grammar, so that a generation with it and the stop tokens `stop` begins at once. Needs GRAMMAR.

        Optional: a generation compiles a grammar that was not prepared.

        Raises:
            CapabilityError: The engine lacks GRAMMAR.
            GrammarError: The engine does not accept the grammar. Some engines raise it only when a generation begins.
        """
        ...

    def close(self, timeout_s: float = 10.0) -> None:
        """End the engine after the step under way, and block until it has ended or `timeout_s` has passed.

        Generations under way and calls that wait raise EngineError; later calls raise Refused.
        """
        ...


def require(engine: Capable, needed: Capabilities) -> None:
    """Raise CapabilityError, with the engine's name and the missing capabilities, unless it has all of `needed`."""
    if missing := needed & ~engine.capabilities:
        names = ", ".join(str(capability.name) for capability in missing)
        raise CapabilityError(f"the engine {engine.name!r} has no {names}")
