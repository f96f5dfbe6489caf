"""What answers in text: language models, and what reads images for them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from antiphon.audio import Pcm
from antiphon.events.tools import Tool, ToolCall
from antiphon.vision.images import EncodedImage

MessageRole = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, eq=False)
class AudioPart:
    """Sound in a message, the same only as itself. pcm: float32 [num_samples], mono, 16 kHz."""

    pcm: Pcm


@dataclass(frozen=True, slots=True, eq=False)
class ImagePart:
    """An encoded image in a message, the same only as itself."""

    image: EncodedImage


MediaPart = AudioPart | ImagePart
MessagePart = str | AudioPart | ImagePart


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `tool_call_id` and `name` belong to a tool's answer.

    `parts`: where there is sound or an image in it, all that it is made of, in order, for who hears and sees; `text` is what others are told.
    """

    role: MessageRole
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    parts: tuple[MessagePart, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How to answer. None: as the model's own settings say; `max_tokens` None: as the context allows.

    `tool_choice`: "auto", "none", "required" or a tool's name. `schema`: the whole text must be JSON of this schema. `truncation`: where the
    conversation has outgrown the context, "auto" lets its oldest rows leave, "disabled" refuses to answer, and a share of the context is what the newest
    messages are cut back to at once, so that the next answers find their KV.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    truncation: Literal["auto", "disabled"] | float = "auto"
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """The model calls a tool; its arguments follow."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the arguments' JSON text of the call started last."""

    arguments: str


@dataclass(frozen=True, slots=True)
class ReplyDone:
    """The end of an answer. Counts of tokens; `cached_tokens` of the prompt's were not computed for it."""

    reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


Reply = TextDelta | ToolCallStarted | ToolCallDelta | ReplyDone


@dataclass(frozen=True, slots=True)
class LanguageProfile:
    """Facts of a language model. `context_tokens`: most a conversation may have before its oldest turns are cut."""

    id: str
    context_tokens: int


@dataclass(frozen=True, slots=True)
class LanguageLoad:
    """How full a language model is: conversations, those being answered, those parked; bytes of KV held, in all, and parked."""

    conversations: int
    answering: int
    parked: int
    kv_bytes: int
    kv_total_bytes: int
    parked_bytes: int


class LanguageStream(Protocol):
    """One conversation with a language model, over one KV that is appended to and rolled back, never rebuilt."""

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Bring the KV to these messages, before it is known how they go on. Does not wait for it. Raises ModelError."""
        ...

    def reply(self, messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        """Answer the last message. Only what differs from the last call is computed.

        Closing the generator ends the answer within a step. Raises Refused, ModelError.
        """
        ...

    def close(self, *, keep: bool = False) -> None:
        """End it. `keep`: a later conversation that begins alike may go on from its KV."""
        ...


class LanguageModel(Protocol):
    """One loaded language model, shared by all sessions."""

    @property
    def profile(self) -> LanguageProfile: ...

    async def open(self) -> LanguageStream:
        """A new conversation. Raises Refused where there is no room for its KV."""
        ...

    def load(self) -> LanguageLoad:
        """How full it is, as of its last step. Does not wait."""
        ...

    def close(self) -> None:
        """Stop its workers."""
        ...


class ImageReader(Protocol):
    """Reads the text on images, shared by all sessions."""

    async def read(self, image: EncodedImage) -> tuple[str, ...]:
        """The lines of text on an encoded image, from the top; empty where there is none.

        Raises MediaError for what is no image, Refused, ModelError.
        """
        ...
