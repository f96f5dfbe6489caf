"""The contracts of language models, which answer in text, and of image readers, which read images for them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from antiphon.audio import Pcm
from antiphon.events.tools import JsonSchema, Tool, ToolCall
from antiphon.vision.images import EncodedImage

MessageRole = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, eq=False)
class AudioPart:
    """Audio in a message: float32 [num_samples], mono, 16 kHz. Two parts are equal only if they are the same object;
    samples are never compared.

    - `turn`: the turn that the audio is of, from its beginning on: of two parts with an equal one, the shorter is where
      the longer begins, unless the turn's own beginning was lost. None: a clip by itself.
    - `grows`: the turn goes on. Such a part may be prefilled, in the last message, and is not answered.
    """

    pcm: Pcm
    turn: object | None = None
    grows: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ImagePart:
    """An image in a message. Two parts are equal only if they are the same object, as with audio.

    `in_video`: it is a frame of a VideoPart, for which a model may have other sizes than for images.
    """

    image: EncodedImage
    in_video: bool = False


class SoundTrack:
    """Stands for the sound of one video, whose windows share it. Two are equal only if they are the same object."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, eq=False)
class SoundWindow:
    """A window of a video's sound. Two are equal only if they are the same object.

    `pcm`: float32 [num_samples], mono, 16 kHz: the window's own samples, with the last `num_before` of those before it
    and the first `num_after` of those behind it, which its first and last spectra reach into. `track`: that of all
    windows of this sound, of which the first has nothing before it.
    """

    pcm: Pcm
    track: SoundTrack
    num_before: int = 0
    num_after: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class VideoPart:
    """Frames and sound of one stretch of time in a message, for models that interleave them by time.

    - `frames`: times in seconds since the stretch began, and images, in order.
    - `sound`: windows that follow one another, all but the last as long as the model's profile says. The first begins
      at `sound_at_s`.
    - `goes_on`: more sound will follow, so frames that belong behind it are left out yet.
    """

    frames: tuple[tuple[float, ImagePart], ...]
    sound: tuple[SoundWindow, ...] = ()
    sound_at_s: float = 0.0
    goes_on: bool = False


MediaPart = AudioPart | ImagePart | SoundWindow
MessagePart = str | AudioPart | ImagePart | VideoPart


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    - `text`: what models without ears and eyes are given.
    - `tool_calls`: the function calls that the assistant made in it.
    - `tool_call_id`, `name`: of a function's result (role "tool"), the call and the function that it belongs to.
    - `parts`: of a message with audio or images, all of its content in order, for models that accept media.
    """

    role: MessageRole
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    parts: tuple[MessagePart, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How to reply. None is as the model's own settings have it; `max_tokens` None: as the context allows.

    - `bias`: token id to what is added to its logit.
    - `tool_choice`: "auto", "none", "required" or a function's name.
    - `parallel_tool_calls`: the reply may hold several calls; otherwise it ends with its first one.
    - `schema`: all of the text must be JSON of this schema.
    - `truncation`: what happens where the conversation has outgrown the context. "auto": its oldest rows leave.
      "disabled": the reply is refused. A number: the newest messages are cut back to this share of the context at once,
      so that the next replies find their KV.
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
    parallel_tool_calls: bool = True
    truncation: Literal["auto", "disabled"] | float = "auto"
    schema: JsonSchema | None = None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the reply's text. It ends at a whole character, not necessarily at a whole word."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """The model calls a function. Its arguments follow as ToolCallDelta."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the JSON text of the arguments of the call that started last."""

    arguments: str


@dataclass(frozen=True, slots=True)
class ReplyDone:
    """The end of a reply, why it ended, and its counts of tokens. Of the `prompt_tokens`, `cached_tokens` were in the
    KV and not computed again.
    """

    reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


Reply = TextDelta | ToolCallStarted | ToolCallDelta | ReplyDone


@dataclass(frozen=True, slots=True)
class LanguageProfile:
    """Facts of a language model.

    - `context_tokens`: the most tokens that a conversation may have before its oldest messages leave.
    - `accepts_media`: it hears audio and sees images in messages; other models are given text in their place.
    - `remote`: it runs on another server, where a request may cost money and which may be away for a while.
    - `keeps_to_schemas`: calls and replies are held to the schemas of tools and of ReplyOptions, which must therefore
      compile into a grammar.
    - `max_preemptive`: the responses that a conversation may begin in a minute before they are asked for; None: any
      number.
    """

    id: str
    context_tokens: int
    accepts_media: bool = False
    remote: bool = False
    max_preemptive: int | None = None
    keeps_to_schemas: bool = False


@dataclass(frozen=True, slots=True)
class LanguageLoad:
    """How full a language model is.

    - `conversations`, `answering`, `parked`: how many are open, how many of them are being answered, and how many have
      their KV in host memory or on disk.
    - `kv_bytes`, `kv_total_bytes`: KV memory in use, and in all.
    - `parked_bytes`: the size of all parked KV.
    - `promised_bytes`: KV memory that conversations which are not parked hold or were promised.
    - `is_away`: the model runs on another server, which did not answer when it was asked last.
    """

    conversations: int
    answering: int
    parked: int
    kv_bytes: int
    kv_total_bytes: int
    parked_bytes: int
    promised_bytes: int = 0
    is_away: bool = False


class LanguageStream(Protocol):
    """One conversation with a language model, over one KV that is appended to and rolled back, and never computed anew
    as a whole.
    """

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Bring the KV to these messages before it is known how they go on. Returns without waiting for the
        computation. Raises ModelError.
        """
        ...

    def reply(self, messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        """Reply to the last message. Only the rows that differ from the last call's are computed, from the first
        difference on.

        Closing the generator ends the reply within one step. Raises Refused where the model is full, ModelError.
        """
        ...

    def close(self, *, keep: bool = False) -> None:
        """End the conversation. With `keep`, its KV stays for a while, and a later conversation that begins alike goes
        on from it.
        """
        ...


class LanguageModel(Protocol):
    """One loaded language model, shared by all sessions."""

    @property
    def profile(self) -> LanguageProfile:
        """The model's facts, which do not change while it is loaded."""
        ...

    async def open(self, owner: Hashable | None = None) -> LanguageStream:
        """Open a conversation. Those of an equal `owner` that begin alike share the KV of it, and tell so by
        `ReplyDone.cached_tokens`; None: it shares with no other. Raises Refused where there is no room for its KV.
        """
        ...

    def load(self) -> LanguageLoad:
        """How full the model is, as of its last step. Returns at once."""
        ...

    def close(self) -> None:
        """Stop the model's workers, when the process ends. Conversations must not be used afterwards."""
        ...


class ImageReader(Protocol):
    """Reads the text on images, for all sessions, so that a model without eyes can be told of it."""

    async def read(self, image: EncodedImage) -> tuple[str, ...]:
        """The lines of text on an image, from the top down; empty where there is none.

        Waits in the reader's lane, where images are read one after another. Raises MediaError for what is no image,
        Refused, ModelError.
        """
        ...
