"""The vocabulary of conversations: what a client may ask of one, and what it is told. Beside events.py, whose turns it uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from antiphon.audio import Pcm
from antiphon.events.duplex import DuplexCommand, DuplexConfig, DuplexEvent
from antiphon.events.tools import Tool
from antiphon.events.transcription import TranscriptionConfig
from antiphon.events.words import Word

ItemKind = Literal["message", "function_call", "function_call_output"]
ItemRole = Literal["system", "user", "assistant"]
ContentPartKind = Literal["input_text", "input_audio", "input_image", "output_text", "output_audio"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "cancelled", "incomplete", "failed"]


@dataclass(slots=True)
class ContentPart:
    """One piece of a message's content. `text`: what was written or said. `image`: a data URI. `media`: its sound or image, for a partner that takes it.

    `audio_s` and `words` belong to `output_audio`: the length of its sound, and where each word lies in it.
    """

    kind: ContentPartKind
    text: str = ""
    image: str = ""
    audio_s: float = 0.0
    words: list[Word] = field(default_factory=list)
    # A MediaPart. It is not kept with an item, and what is kept is read by these types.
    media: Any = None
    # What it was before it was truncated: text, words, seconds.
    whole: tuple[str, tuple[Word, ...], float] | None = None


@dataclass(slots=True)
class Item:
    """One item of a conversation. `role` and `parts` belong to messages, the rest to calls and what they gave."""

    id: str
    kind: ItemKind = "message"
    role: ItemRole = "user"
    status: ItemStatus = "completed"
    parts: list[ContentPart] = field(default_factory=list)
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str = ""

    @property
    def text(self) -> str:
        """All of its text."""
        return " ".join(p.text for p in self.parts if p.text)


@dataclass(frozen=True, slots=True)
class ConversationConfig:
    """One conversation. `speaks`: answers are sound, else text. `voice` None: the default one.

    `create_response`: the end of a turn is answered. `interrupt_response`: speech ends an answer under way.
    `transcribes`: the client wants the user's transcripts. `idle_timeout_ms`: after an answer has sounded and nobody speaks for so
    long, the partner speaks again. `truncation`: see ReplyOptions. `weighs_overlap`: an acknowledgement over an answer
    does not end it. `duplex`: the client is told of epochs, overlap and turn states, and acknowledges what was played.
    """

    transcription: TranscriptionConfig
    instructions: str = ""
    audio_output: bool = True
    voice: str | None = None
    speed: float = 1.0
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    max_tokens: int | None = None
    create_response: bool = True
    interrupt_response: bool = True
    reports_transcripts: bool = False
    idle_timeout_ms: int | None = None
    truncation: Literal["auto", "disabled"] | float = "auto"
    allows_backchannels: bool = False
    duplex: DuplexConfig | None = None


# --- from the client --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConfigureConversation:
    """The conversation's configuration as a whole, at the start and after each change."""

    config: ConversationConfig


@dataclass(frozen=True, slots=True)
class CreateItem:
    """Put an item at the end, or behind `after` (`root`: at the front). `event_id` of each is the client's."""

    item: Item
    after: str | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class RetrieveItem:
    item_id: str
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class DeleteItem:
    item_id: str
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class TruncateItem:
    """The client heard a spoken answer up to `audio_end_ms`."""

    item_id: str
    content_index: int
    audio_end_ms: int
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class CreateResponse:
    """Answer now. None: as the conversation is configured. `stored` False: beside the conversation.

    `items`: what to answer instead of the conversation; ids in `references` are looked up in it, in the place of their index.
    """

    instructions: str | None = None
    audio_output: bool | None = None
    voice: str | None = None
    tools: tuple[Tool, ...] | None = None
    tool_choice: str | None = None
    max_tokens: int | None = None
    stored: bool = True
    items: tuple[Item | str, ...] | None = None
    metadata: Mapping[str, Any] | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class CancelResponse:
    """The client cancels the answer under way (`response_id` None: the conversation's)."""

    response_id: str | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class ClearOutputAudio:
    """What the server plays is to be silent at once; what was heard of it stays."""

    event_id: str | None = None


ConversationCommand = (
    ConfigureConversation
    | CreateItem
    | RetrieveItem
    | DeleteItem
    | TruncateItem
    | CreateResponse
    | CancelResponse
    | ClearOutputAudio
    | DuplexCommand
)

# --- to the client ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CommandRejected:
    """What the client asked for cannot be."""

    code: str
    message: str
    param: str | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class UserTurnStarted:
    """A turn of the user begins, which will be the item of this id. Turns are those of SpeechStarted and of transcripts."""

    turn: int
    item_id: str


@dataclass(frozen=True, slots=True)
class UserTurnCommitted:
    """A turn of the user is complete and is this item."""

    turn: int
    item: Item
    previous_id: str | None


@dataclass(frozen=True, slots=True)
class ItemAdded:
    item: Item
    previous_id: str | None


@dataclass(frozen=True, slots=True)
class ItemDone:
    item: Item
    previous_id: str | None


@dataclass(frozen=True, slots=True)
class ItemRetrieved:
    item: Item


@dataclass(frozen=True, slots=True)
class ItemDeleted:
    item_id: str


@dataclass(frozen=True, slots=True)
class ItemTruncated:
    item_id: str
    content_index: int
    audio_end_ms: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens of one response."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class Response:
    """One answer. `reason`, `error` and its `code` say why it is not completed."""

    id: str
    audio_output: bool
    voice: str | None
    max_tokens: int | None
    metadata: Mapping[str, Any] | None = None
    stored: bool = True
    status: ResponseStatus = "in_progress"
    reason: str = ""
    error: str = ""
    code: str = "server_error"
    output: list[Item] = field(default_factory=list)
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class ResponseCreated:
    response: Response


@dataclass(frozen=True, slots=True)
class ResponseDone:
    response: Response


@dataclass(frozen=True, slots=True)
class OutputItemAdded:
    """The item in `response.output[index]` begins. `previous_id` None also where it is beside the conversation."""

    response: Response
    index: int
    item: Item
    previous_id: str | None


@dataclass(frozen=True, slots=True)
class OutputItemDone:
    response: Response
    index: int
    item: Item
    previous_id: str | None


@dataclass(frozen=True, slots=True)
class ContentPosition:
    """Where something of a response belongs."""

    response_id: str
    item_id: str
    output_index: int
    content_index: int = 0


@dataclass(frozen=True, slots=True)
class ContentPartAdded:
    at: ContentPosition
    part: ContentPart


@dataclass(frozen=True, slots=True)
class ContentPartDone:
    """The part is complete: its sound, its text, then itself."""

    at: ContentPosition
    part: ContentPart


@dataclass(frozen=True, slots=True)
class ResponseTextDelta:
    """More of a part's text; `spoken`: it is the transcript of its sound."""

    at: ContentPosition
    text: str
    spoken: bool


@dataclass(frozen=True, slots=True)
class ResponseAudioDelta:
    """More of a part's sound. pcm: float32 [num_samples], mono, at `rate_hz`."""

    at: ContentPosition
    pcm: Pcm
    rate_hz: int
    # Words that begin in it, with their places in the part's sound.
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments."""

    at: ContentPosition
    call_id: str
    text: str


@dataclass(frozen=True, slots=True)
class ArgumentsDone:
    at: ContentPosition
    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class PlaybackStarted:
    """The server plays a response itself, and its first sound is heard now."""

    response_id: str


@dataclass(frozen=True, slots=True)
class PlaybackStopped:
    """All of the response's sound was played."""

    response_id: str


@dataclass(frozen=True, slots=True)
class PlaybackCleared:
    """The response's sound was cut short."""

    response_id: str


@dataclass(frozen=True, slots=True)
class IdleTimedOut:
    """`idle_timeout_ms` passed; an empty turn, `item_id`, is answered. Milliseconds of session audio."""

    item_id: str
    start_ms: int
    end_ms: int


ConversationEvent = (
    CommandRejected
    | PlaybackStarted
    | PlaybackStopped
    | PlaybackCleared
    | IdleTimedOut
    | UserTurnStarted
    | UserTurnCommitted
    | ItemAdded
    | ItemDone
    | ItemRetrieved
    | ItemDeleted
    | ItemTruncated
    | ResponseCreated
    | ResponseDone
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | ResponseTextDelta
    | ResponseAudioDelta
    | ArgumentsDelta
    | ArgumentsDone
    | DuplexEvent
)
