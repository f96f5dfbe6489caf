"""Commands and events of conversations: items, content parts and responses. For turns, see events/transcription.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from antiphon.audio import Pcm
from antiphon.events.duplex import DuplexCommand, DuplexConfig, DuplexEvent
from antiphon.events.playback import PlaybackCleared, PlaybackHoldChanged, PlaybackStarted, PlaybackStopped
from antiphon.events.tools import Tool
from antiphon.events.transcription import TranscriptionConfig
from antiphon.events.words import Word

# Data that a client attaches to a response and gets back with it. No code here reads it.
Metadata = Mapping[str, Any]
ItemKind = Literal["message", "function_call", "function_call_output"]
ItemRole = Literal["system", "user", "assistant"]
ContentPartKind = Literal["input_text", "input_audio", "input_image", "output_text", "output_audio"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "cancelled", "incomplete", "failed"]


@dataclass(slots=True)
class ContentPart:
    """One content part of a message. It is stored with its conversation, by these field names."""

    # What the part contains, and in which direction it was sent.
    kind: ContentPartKind
    # The text that was written or spoken, or read on an image.
    text: str = ""
    # A data URI.
    image: str = ""
    # Of `output_audio`: the length of its audio in seconds.
    audio_s: float = 0.0
    # Of `output_audio`: its words with their times.
    words: list[Word] = field(default_factory=list)
    # Its audio or image as a MediaPart, for a model that accepts media; not stored. The type is not MediaPart because
    # stored parts are read back by these types.
    media: Any = None
    # Text, words and seconds before the part was truncated; None if it was not truncated.
    whole: tuple[str, tuple[Word, ...], float] | None = None

    def snapshot(self) -> ContentPart:
        """Return a copy of the part as it is now. The media is shared, and never changes."""
        return replace(self, words=list(self.words))

    def produced(self) -> ContentPart:
        """Return a copy of the part as it was produced, before any truncation."""
        text, words, audio_s = self.whole or (self.text, self.words, self.audio_s)
        return replace(self, text=text, words=list(words), audio_s=audio_s)

    def add(self, text: str = "", words: Sequence[Word] = (), audio_s: float = 0.0) -> None:
        """Append newly produced content. If the part has been truncated, the content is not heard and goes to `whole`
        only.
        """
        if self.whole:
            before, known, length_s = self.whole
            self.whole = (before + text, (*known, *words), length_s + audio_s)
        else:
            self.text, self.audio_s = self.text + text, self.audio_s + audio_s
            self.words += words


@dataclass(slots=True)
class Item:
    """One item of a conversation's history. It is stored by these field names.

    Items of the history change while a response is produced and heard. Events carry a `snapshot`, so that their content
    does not depend on when they are encoded.
    """

    id: str  # The item's id on the wire.
    kind: ItemKind = "message"  # A message, a function call, or a call's result.
    role: ItemRole = "user"  # For a message: who it is from.
    status: ItemStatus = "completed"  # Whether the item is complete.
    parts: list[ContentPart] = field(default_factory=list)  # For a message: its content parts in order.
    call_id: str = ""  # Of a function call and of its result: the id that links them.
    name: str = ""  # For a function call: the function.
    arguments: str = ""  # For a function call: JSON text.
    output: str = ""  # Of a call's result: what the function returned.
    # Of a user's turn: "other" if it was another person's voice. Such a turn is not answered, and the model does not
    # see it.
    speaker: str = ""

    @property
    def text(self) -> str:
        """The texts of all its content parts that have text, joined by spaces."""
        return " ".join(p.text for p in self.parts if p.text)

    def snapshot(self, *, produced: bool = False) -> Item:
        """Return a copy of the item as it is now, or as it was `produced`. Later changes do not affect the copy."""
        return replace(self, parts=[part.produced() if produced else part.snapshot() for part in self.parts])


@dataclass(frozen=True, slots=True)
class ConversationConfig:
    """The configuration of one conversation, set as a whole."""

    # How the user's audio is transcribed, and how turns are found.
    transcription: TranscriptionConfig
    # The text that the model is given first.
    instructions: str = ""
    # Responses are spoken; otherwise they are text.
    audio_output: bool = True
    # The voice of responses; None: the model's default.
    voice: str | None = None
    # The tempo; 1.0 is the voice's own.
    speed: float = 1.0
    # The functions that the model may call.
    tools: tuple[Tool, ...] = ()
    # "auto", "none", "required" or a function's name.
    tool_choice: str = "auto"
    # A response may contain several calls; otherwise it ends with its first one.
    parallel_tool_calls: bool = True
    # The most tokens of a response; None: as many as the context allows.
    max_tokens: int | None = None
    # The end of a turn creates a response.
    create_response: bool = True
    # Speech ends the response in progress.
    interrupt_response: bool = True
    # The client receives the transcripts of the user's turns.
    reports_transcripts: bool = False
    # Another response is created if nobody speaks for this time after a response was heard; None: never.
    idle_timeout_ms: float | None = None
    # What happens if the history outgrows the context; same as `ReplyOptions.truncation`.
    truncation: Literal["auto", "disabled"] | float = "auto"
    # A backchannel during a response does not end it.
    allows_backchannels: bool = False
    # The client plays the responses itself, and is notified when to pause and continue.
    reports_ducking: bool = False
    # Full duplex: epochs, overlap and turn states are reported. None: the conversation is not full duplex.
    duplex: DuplexConfig | None = None


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConfigureConversation:
    """Replace the whole configuration, at the start and after each change. A response in progress keeps its own."""

    config: ConversationConfig


@dataclass(frozen=True, slots=True)
class CreateItem:
    """Add an item at the end of the history, or after the item `after` (`root`: at the front).

    `event_id` is the client's id for the command, in this and all other commands here. An error refers to it.
    """

    item: Item
    after: str | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class RetrieveItem:
    """Ask for an item of the history. ItemRetrieved returns it."""

    item_id: str
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class DeleteItem:
    """Remove an item from the history, so that the model no longer sees it. ItemDeleted follows."""

    item_id: str
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class TruncateItem:
    """Cut a spoken item to what the user heard: the first `audio_end_ms` of its audio, and the words within them."""

    item_id: str
    content_index: int
    audio_end_ms: int
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class CreateResponse:
    """Respond now. None uses the conversation's configuration."""

    instructions: str | None = None  # The text that the model is given first.
    audio_output: bool | None = None  # The response is spoken; otherwise it is text.
    voice: str | None = None  # The voice of the response.
    tools: tuple[Tool, ...] | None = None  # The functions that the model may call.
    tool_choice: str | None = None  # "auto", "none", "required" or a function's name.
    # The response may contain several calls; otherwise it ends with its first one.
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = None  # The most tokens of the response.
    stored: bool = True  # The response becomes part of the history; otherwise it is out of band.
    # What to respond to, instead of the history. A string is the id of an item of the history.
    items: tuple[Item | str, ...] | None = None
    metadata: Metadata | None = None  # The client's own data, returned with the response.
    event_id: str | None = None  # The client's id for the command.
    # What happens if the conversation has a response in progress: this one is refused, waits for the end of that one,
    # or cuts it off.
    when_busy: Literal["refuse", "wait", "cut"] = "refuse"


@dataclass(frozen=True, slots=True)
class CancelResponse:
    """Cancel the response `response_id`, or without an id the conversation's response in progress."""

    response_id: str | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class ClearOutputAudio:
    """Stop the server's own playback at once. What was already heard of the response stays in the history."""

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

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CommandRejected:
    """A command of the client failed and changed nothing.

    `code` and `param` are those of the dialect's error. `event_id` is the command's.
    """

    code: str
    message: str
    param: str | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class UserTurnStarted:
    """A turn of the user began, which will become the item `item_id`. `turn` is its number in events
    of transcription.
    """

    turn: int
    item_id: str


@dataclass(frozen=True, slots=True)
class UserTurnCommitted:
    """A turn of the user is complete and became `item`, after the item `previous_id` (None: it is the first).

    Its transcript may follow later. `turn` is None for a silence that counts as a turn. `end_ms` is the end of its
    speech, or of its audio if no pause ended it.
    """

    turn: int | None
    item: Item
    previous_id: str | None
    end_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ItemAdded:
    """An item was added to the history, after the item `previous_id` (None: it is the first)."""

    item: Item
    previous_id: str | None


@dataclass(frozen=True, slots=True)
class ItemDone:
    """An item of the history is complete. Follows ItemAdded."""

    item: Item
    previous_id: str | None


@dataclass(frozen=True, slots=True)
class ItemRetrieved:
    """The item that a RetrieveItem asked for, in its current state: truncated to what was heard."""

    item: Item


@dataclass(frozen=True, slots=True)
class ItemDeleted:
    """An item was removed from the history; the model no longer sees it."""

    item_id: str


@dataclass(frozen=True, slots=True)
class ItemTruncated:
    """A spoken item was cut to the first `audio_end_ms` of its audio, by the client or by an interruption."""

    item_id: str
    content_index: int
    audio_end_ms: int


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of one response. `cached_tokens` are those of the prompt that were not computed again."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class Response:
    """One response and its state, which changes while the response is produced. Events carry a `snapshot`."""

    id: str  # The response's id on the wire.
    audio_output: bool  # The response is spoken; otherwise it is text.
    voice: str | None  # The voice of the response; None: the model's default.
    max_tokens: int | None  # The most tokens of the response; None: as many as the context allows.
    metadata: Metadata | None = None  # The client's own data, returned with the response.
    stored: bool = True  # The response becomes part of the history; otherwise it is out of band.
    status: ResponseStatus = "in_progress"  # The state of the response.
    reason: str = ""  # Why the response is cancelled or incomplete.
    error: str = ""  # The error message of a failed response.
    code: str = "server_error"  # The error code of a failed response.
    output: list[Item] = field(default_factory=list)  # Its items so far, in order.
    usage: Usage | None = None  # Its token counts, after it is done.
    request: CreateResponse = field(default_factory=CreateResponse)  # The command that created it.

    def snapshot(self) -> Response:
        """Return a copy of the response with its items as produced so far. Later changes do not affect the copy."""
        return replace(self, output=[item.snapshot(produced=True) for item in self.output])


@dataclass(frozen=True, slots=True)
class ResponseCreated:
    """A response began. Its ResponseDone follows, however it ends."""

    response: Response


@dataclass(frozen=True, slots=True)
class ResponseDone:
    """A response ended. Its status is completed, cancelled, incomplete or failed. No event of it follows."""

    response: Response


@dataclass(frozen=True, slots=True)
class OutputItemAdded:
    """The item at `index` of a response's output began.

    `previous_id` is the item before it in the history; None if it is the first, or if the response is out of band.
    """

    response_id: str
    index: int
    item: Item
    previous_id: str | None


@dataclass(frozen=True, slots=True)
class OutputItemDone:
    """The item at `index` of a response's output is complete or was cut off; see its status."""

    response_id: str
    index: int
    item: Item
    previous_id: str | None


@dataclass(frozen=True, slots=True)
class ContentPosition:
    """A position in a response: the item's index in its output, and the content part's index in the item."""

    response_id: str
    item_id: str
    output_index: int
    content_index: int = 0


@dataclass(frozen=True, slots=True)
class ContentPartAdded:
    """A content part of a response began; `part` is still empty."""

    at: ContentPosition
    part: ContentPart


@dataclass(frozen=True, slots=True)
class ContentPartDone:
    """A content part is complete. Clients are sent the end of its audio, then of its text, then of the part."""

    at: ContentPosition
    part: ContentPart


@dataclass(frozen=True, slots=True)
class ResponseTextDelta:
    """More of a content part's text. `spoken`: the text is the transcript of the part's audio."""

    at: ContentPosition
    text: str
    spoken: bool


@dataclass(frozen=True, slots=True)
class ResponseAudioDelta:
    """More of a content part's audio. pcm: float32 [num_samples], mono, at `rate_hz`.

    `words` begin in this audio; their times are seconds from the start of the part's audio.
    """

    at: ContentPosition
    pcm: Pcm
    rate_hz: int
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the JSON text of a function call's arguments."""

    at: ContentPosition
    call_id: str
    text: str


@dataclass(frozen=True, slots=True)
class ArgumentsDone:
    """The arguments of a function call are complete. `arguments` is their whole JSON text."""

    at: ContentPosition
    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class IdleTimeoutReached:
    """Nobody spoke for `idle_timeout_ms` after a response was heard.

    An empty turn, the item `item_id`, gets another response. It lies from `start_ms` to `end_ms` of session audio.
    """

    item_id: str
    start_ms: int
    end_ms: int


ConversationEvent = (
    CommandRejected
    | PlaybackStarted
    | PlaybackStopped
    | PlaybackCleared
    | PlaybackHoldChanged
    | IdleTimeoutReached
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
