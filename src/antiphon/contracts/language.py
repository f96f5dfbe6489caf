"""The contracts of language models, which answer with text, and of image readers, which read text on
images for them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, Self

from antiphon.audio import Pcm
from antiphon.events.tools import JsonSchema, NamedServer, Tool, ToolCall, ToolResult
from antiphon.vision.images import EncodedImage

MessageRole = Literal["system", "user", "assistant", "tool"]


class SoundTrack:
    """Identifies the sound of one turn or video in all its parts. Tracks are equal only if they are the same object."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, eq=False)
class AudioPart:
    """Audio in a message: float32 [num_samples], mono, 16 kHz. Two parts are equal only if they are the same object.

    - `turn`: the turn whose audio this is, from the turn's beginning. Of two parts with an equal `turn`, the shorter is
      a prefix of the longer, unless the beginning of the turn was lost. None: an independent clip.
    - `grows`: the turn is still open. Such a part may be prefilled as part of the last message, and is not answered.
    """

    pcm: Pcm
    turn: SoundTrack | None = None
    grows: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ImagePart:
    """An image in a message. Two parts are equal only if they are the same object, as with audio.

    `in_video`: the image is a frame of a VideoPart; a model may use other sizes for frames than for images.
    """

    image: EncodedImage
    in_video: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SoundWindow:
    """A window of a video's sound. Two windows are equal only if they are the same object.

    - `pcm`: float32 [num_samples], mono, 16 kHz: `num_before` samples before the window, the window's own samples, and
      `num_after` samples after the window. The window's first and last spectra extend into its neighbours.
    - `track`: shared by all windows of this sound. The `num_before` of the first window is 0.
    """

    pcm: Pcm
    track: SoundTrack
    num_before: int = 0
    num_after: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class VideoPart:
    """Frames and sound of one stretch of time in a message, for models that interleave them by time.

    - `frames`: images in order, each with its time in seconds since the stretch began.
    - `sound`: consecutive windows of sound. All except the last have the length in the model's profile.
    - `sound_at_s`: when the first window begins, in seconds since the stretch began.
    - `goes_on`: more sound will follow, so frames later than the sound are left out for now.
    """

    frames: tuple[tuple[float, ImagePart], ...]
    sound: tuple[SoundWindow, ...] = ()
    sound_at_s: float = 0.0
    goes_on: bool = False


MediaPart = AudioPart | ImagePart | SoundWindow
MessagePart = str | AudioPart | ImagePart | VideoPart


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, in the form that a model gets."""

    # Who the message is from.
    role: MessageRole
    # The message as text, for models that do not accept media.
    text: str = ""
    # The function calls that the assistant made in this message.
    tool_calls: tuple[ToolCall, ...] = ()
    # For a function's result (role "tool"): the id of the call that it belongs to.
    tool_call_id: str = ""
    # For a function's result: the name of the function.
    name: str = ""
    # For a message with audio or images: all of its content in order, for models that accept media.
    parts: tuple[MessagePart, ...] = ()

    def joined(self, other: Self) -> Self:
        """Return this message, followed by the text and the parts of `other`."""
        parts = (*(self.parts or (self.text,)), *(other.parts or (other.text,)))
        has_media = bool(self.parts or other.parts)
        return replace(self, text=f"{self.text} {other.text}".strip(), parts=parts if has_media else ())


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How to generate a reply. None stands for the model's own setting, unless the field says otherwise."""

    # The most tokens of the reply; None: as many as the context allows.
    max_tokens: int | None = None
    # The temperature of sampling; 0 chooses the likeliest token.
    temperature: float | None = None
    # Only the likeliest tokens, with this total probability (0 to 1), may be sampled.
    top_p: float | None = None
    # The number of likeliest tokens that may be sampled; 0: all.
    top_k: int | None = None
    # The least probability of a token, relative to the likeliest one.
    min_p: float | None = None
    # Values above 1 make tokens that already occurred less likely.
    repetition_penalty: float | None = None
    # The amount that is subtracted from the logits of tokens that already occurred in the reply.
    presence_penalty: float = 0.0
    # The amount that is subtracted from the logit of a token for each of its occurrences in the reply.
    frequency_penalty: float = 0.0
    # Seed of the random numbers; None: a random seed.
    seed: int | None = None
    # The reply ends before the first occurrence of any of these texts.
    stop: tuple[str, ...] = ()
    # Values that are added to logits, by token id.
    bias: Mapping[int, float] = field(default_factory=dict)
    # The functions that the model may call.
    tools: tuple[Tool, ...] = ()
    # "auto", "none", "required" or a function's name.
    tool_choice: str = "auto"
    # True if the reply may contain several calls. False: the reply ends with the first call.
    parallel_tool_calls: bool = True
    # What happens if the conversation has outgrown the context. "auto": its oldest rows are dropped. "disabled": the
    # reply is refused. A number: the newest messages are cut to this share of the context in one step, so that the next
    # replies reuse their KV.
    truncation: Literal["auto", "disabled"] | float = "auto"
    # A JSON schema that the whole text of the reply must match; None: any text.
    schema: JsonSchema | None = None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of the reply's text. It never ends within a character, but may end within a word."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """The model calls a function. Its arguments follow as ToolCallDelta."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next piece of the JSON text with the arguments of the latest call."""

    arguments: str


@dataclass(frozen=True, slots=True)
class ReplyDone:
    """The end of a reply: why it ended, and its token counts.

    `cached_tokens` counts the tokens among `prompt_tokens` that were already in the KV and were not computed again.
    """

    reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


Reply = TextDelta | ToolCallStarted | ToolCallDelta | ReplyDone


@dataclass(frozen=True, slots=True)
class LanguageProfile:
    """Facts of a language model, which do not change while it is loaded."""

    # The model's name for clients.
    id: str
    # The most tokens of a conversation before its oldest messages are dropped.
    context_tokens: int
    # True if it accepts audio and images in messages. Other models get text instead.
    accepts_media: bool = False
    # True if it runs on another server. Requests may cost money then, and the server may be temporarily unavailable.
    remote: bool = False
    # Limit of preemptive responses per conversation and minute; None: no limit.
    max_preemptive: int | None = None
    # True if calls and replies are constrained to the schemas of tools and of ReplyOptions. These must therefore
    # compile into a grammar.
    keeps_to_schemas: bool = False


@dataclass(frozen=True, slots=True)
class LanguageLoad:
    """The load of a language model."""

    # The number of open conversations.
    conversations: int
    # The number of conversations that are being answered.
    answering: int
    # The number of conversations whose KV is in host memory or on disk.
    parked: int
    # KV memory in use, in bytes.
    kv_bytes: int
    # Total KV memory, in bytes.
    kv_total_bytes: int
    # The size of all parked KV, in bytes.
    parked_bytes: int
    # KV memory that conversations hold or have reserved, in bytes. Excludes parked conversations.
    promised_bytes: int = 0
    # True if the model runs on another server that did not answer the last request for its state.
    is_away: bool = False


class LanguageStream(Protocol):
    """One conversation with a language model. Its KV is appended to and rolled back, but never
    recomputed as a whole.
    """

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Prefill the KV with these messages, before it is known how the conversation continues.

        Returns without waiting for the computation.

        Args:
            messages: The conversation so far.
            tools: The functions that the model may call in the reply.

        Raises:
            ModelError: The model failed.
        """
        ...

    def reply(self, messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        """Reply to the last message.

        Computes only the rows after the first difference from the messages of the previous call. Closing the generator
        ends the reply within one step.

        Args:
            messages: The conversation so far.
            options: How to generate the reply.

        Returns:
            The parts of the reply; ReplyDone is the last one.

        Raises:
            Refused: The model is full.
            ModelError: The model failed.
        """
        ...

    def close(self, *, keep: bool = False) -> None:
        """End the conversation.

        Args:
            keep: Keep the KV for a while, so that a later conversation with the same beginning can reuse it.
        """
        ...


class LanguageModel(Protocol):
    """One loaded language model, shared by all sessions."""

    @property
    def profile(self) -> LanguageProfile:
        """The model's facts, which do not change while it is loaded."""
        ...

    async def open(self, owner: Hashable | None = None) -> LanguageStream:
        """Open a conversation.

        Args:
            owner: The owner of the conversation. Conversations whose owners are equal share the KV of their common
                beginning, whose tokens `ReplyDone.cached_tokens` counts. None: this conversation shares KV with no
                other.

        Raises:
            Refused: There is no room for its KV.
        """
        ...

    def load(self) -> LanguageLoad:
        """Return the load of the model after its last step. Returns at once."""
        ...

    def close(self) -> None:
        """Stop the model's workers when the process ends. Conversations must not be used afterwards."""
        ...


class ImageReader(Protocol):
    """Reads the text on images for models without vision. All sessions share one reader."""

    async def read(self, image: EncodedImage) -> tuple[str, ...]:
        """Return the lines of text on an image from top to bottom; empty if the image has none.

        Waits in the reader's lane, which reads one image at a time.

        Raises:
            MediaError: The bytes are not an image.
            Refused: The lane is full.
            ModelError: The model failed.
        """
        ...


class ToolServers(Protocol):
    """The tool servers of one process: functions that its operator has added to all conversations.

    All sessions share them. Used in one event loop.
    """

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that the servers offer now, each with the label of its server. It changes when a server changes
        its list, is lost, or is reached again. If two servers have a tool of the same name, both have it.
        """
        ...

    async def call(self, server: str, name: str, arguments: str) -> ToolResult:
        """Call a tool and wait for its result, for a limited time. If the caller is cancelled, so is the call, where
        the server can cancel calls. Raises nothing: a failed call has a result that says so.

        `server` is the label of the tool's server. `name` is the tool's name, with or without that label. `arguments`
        is JSON text, as a model wrote it.
        """
        ...

    def connection(self, server: NamedServer) -> ToolConnection:
        """Return the connection to a server that a session names. One to a URL belongs to the caller, who has to `run`
        it. One of the operator's is shared, and already runs.
        """
        ...


class ToolConnection(Protocol):
    """The connection to one tool server."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that the server offers now, with their own names; () while it is not connected."""
        ...

    async def run(self) -> None:
        """Keep the server connected, until cancelled."""
        ...

    async def listed(self) -> bool:
        """Wait until the server's tools are known, or until it could not be reached. Return whether they are known."""
        ...

    async def call(self, name: str, arguments: str) -> ToolResult:
        """Call a tool and wait for its result, as `ToolServers.call` does. `name` is the tool's own name."""
        ...
