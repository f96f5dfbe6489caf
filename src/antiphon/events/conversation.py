"""Commands and events of conversations: items, content parts and responses. Turns are in events/transcription.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from antiphon.audio import Pcm
from antiphon.events.duplex import DuplexCommand, DuplexConfig, DuplexEvent
from antiphon.events.playback import PlaybackCleared, PlaybackHoldChanged, PlaybackStarted, PlaybackStopped
from antiphon.events.tools import CallOptions, NamedServer, Tool, ToolEvent, ToolFailure
from antiphon.events.transcription import TranscriptionConfig
from antiphon.events.words import Word

# Data that a client attaches to a response and gets back with it. No code here reads it.
Metadata = Mapping[str, Any]
ItemKind = Literal["message", "function_call", "function_call_output", "tool_list", "approval"]
ItemRole = Literal["system", "user", "assistant"]
ContentPartKind = Literal["input_text", "input_audio", "input_image", "output_text", "output_audio"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "cancelled", "incomplete", "failed"]
FALSE_START_MS = 2000.0  # The default of `ConversationConfig.false_start_ms`.


@dataclass(slots=True)
class ContentPart:
    """One content part of a message. It is stored with its conversation under these field names."""

    # Kind of content, and the direction in which it was sent.
    kind: ContentPartKind
    # The text that was written or spoken, or that was recognized in an image.
    text: str = ""
    # The image as a data URI.
    image: str = ""
    # For `output_audio`: duration of the audio, in seconds.
    audio_s: float = 0.0
    # For `output_audio`: the spoken words with their times.
    words: list[Word] = field(default_factory=list)
    # The audio or image as a MediaPart, for a model that accepts media. It is not stored. It is not declared as
    # MediaPart, because stored parts are decoded with these types.
    media: Any = None
    # Text, words and duration in seconds before the part was truncated; None if it was not truncated.
    whole: tuple[str, tuple[Word, ...], float] | None = None

    def snapshot(self) -> ContentPart:
        """Return a copy of the part in its current state. The copy shares the media, which never changes."""
        return replace(self, words=list(self.words))

    def produced(self) -> ContentPart:
        """Return a copy of the part as it was before any truncation."""
        text, words, audio_s = self.whole or (self.text, self.words, self.audio_s)
        return replace(self, text=text, words=list(words), audio_s=audio_s)

    def add(self, text: str = "", words: Sequence[Word] = (), audio_s: float = 0.0) -> None:
        """Append newly generated content. If the part was truncated, the content is not heard, so it is only added to
        `whole`.
        """
        if self.whole:
            before, known, length_s = self.whole
            self.whole = (before + text, (*known, *words), length_s + audio_s)
        else:
            self.text, self.audio_s = self.text + text, self.audio_s + audio_s
            self.words += words


@dataclass(slots=True)
class Item:
    """One item of a conversation's history. It is stored under these field names.

    Items of the history change while a response is generated and heard. Events contain a `snapshot` instead.
    """

    id: str  # The item's id on the wire.
    kind: ItemKind = "message"  # What the item is. An `approval` is the answer to a request for one.
    role: ItemRole = "user"  # For a message: the speaker or writer.
    status: ItemStatus = "completed"  # Whether the item is complete.
    parts: list[ContentPart] = field(default_factory=list)  # For a message: its content parts, in order.
    call_id: str = ""  # For a function call and its result: the id that links them.
    name: str = ""  # For a function call: the function's name.
    arguments: str = ""  # For a function call: the arguments, as JSON text.
    output: str = ""  # For the result of a function call, and a call that a tool server carried out: the return value.
    server: str = ""  # For a function call that a tool server carries out: its label. In progress until the result.
    failure: ToolFailure = ""  # For such a call: why it failed.
    # For such a call: it is only a request, in progress until the client answers it. If the client approves, the
    # request is `incomplete`, and another item is the call. If not, the request is `completed`, and `output` says so.
    needs_approval: bool = False
    # For the answer to such a request, and for the call that was approved: the id of the request.
    approval_id: str = ""
    approves: bool = False  # For such an answer: whether the call is approved. `output` may have the reason.
    tools: tuple[Tool, ...] = ()  # For a `tool_list`: the tools of `server`.
    result_after: str = ""  # For such a call, if the conversation had gone on: the item after which its result came.
    # For a user's turn: "other" if the voice is not the user's. The model neither sees such a turn nor responds to it.
    speaker: str = ""
    # The id of the item that it continues: for a user's turn, because the response to that item began too early; for a
    # response, because speech that was none had ended it. The model gets both as one message.
    continues: str = ""
    # True if the model does not see it: an item of a response that began before the user had finished, or a user's turn
    # after which a response that it had ended goes on.
    retracted: bool = False

    @property
    def text(self) -> str:
        """The text of all content parts, joined by spaces."""
        return " ".join(p.text for p in self.parts if p.text)

    def snapshot(self, *, produced: bool = False) -> Item:
        """Return a copy of the item in its current state, or with `produced` as it was before any truncation.

        Later changes do not affect the copy.
        """
        return replace(self, parts=[part.produced() if produced else part.snapshot() for part in self.parts])


@dataclass(frozen=True, slots=True)
class ConversationConfig:
    """The configuration of one conversation. It is always replaced as a whole."""

    transcription: TranscriptionConfig  # How the user's audio is transcribed, and how turns are detected.
    instructions: str = ""  # Instructions for the model, at the beginning of its prompt.
    audio_output: bool = True  # Whether responses are spoken. If not, they are text.
    voice: str | None = None  # Voice of the responses; None for the model's default.
    speed: float = 1.0  # Speaking rate; 1.0 is the voice's normal speed.
    tools: tuple[Tool, ...] = ()  # The client's functions that the model may call.
    # The tool servers that the client names, whose calls it can approve. If it names any of the operator's, the others
    # of these are not used.
    servers: tuple[NamedServer, ...] = ()
    tool_choice: str = "auto"  # "auto", "none", "required" or the name of a function.
    parallel_tool_calls: bool = True  # Whether a response may have several calls. If not, its first call ends it.
    calls: CallOptions | None = None  # Until the results of calls are known; None: as the operator has set it.
    # Maximum number of tokens in a response; None for the limit of the context.
    max_tokens: int | None = None
    create_response: bool = True  # Whether the end of a turn creates a response.
    interrupt_response: bool = True  # Whether speech ends the response in progress.
    # Whether a native model itself ends what it says. `interrupt_response` then applies to other models' responses.
    native_decides_interruptions: bool = False
    reports_transcripts: bool = False  # Whether the client receives the transcripts of the user's turns.
    # A response was a false start if the user goes on at most this number of milliseconds after it became audible. The
    # user's turn then continues. 0: it never does.
    false_start_ms: float = FALSE_START_MS
    # Silence after a response that creates another response, in milliseconds; None for never.
    idle_timeout_ms: float | None = None
    # How to shorten a history that exceeds the context; same as `ReplyOptions.truncation`.
    truncation: Literal["auto", "disabled"] | float = "auto"
    allows_backchannels: bool = False  # Whether a response continues if the user only says a backchannel.
    reports_ducking: bool = False  # Whether the client, which plays the responses itself, gets events about ducking.
    # Settings of full duplex, in which epochs, overlap and turn states are reported; None if it is not full duplex.
    duplex: DuplexConfig | None = None


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConfigureConversation:
    """Replace the whole configuration, at the start and after each change. A response in progress keeps its old one."""

    config: ConversationConfig


@dataclass(frozen=True, slots=True)
class CreateItem:
    """Add an item at the end of the history, or after the item `after` (`root`: at the front).

    In all commands, `event_id` is the id that the client gave to the command. Errors quote it.
    """

    item: Item
    after: str | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class RetrieveItem:
    """Request an item of the history. ItemRetrieved returns it."""

    item_id: str
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class DeleteItem:
    """Remove an item from the history, so that the model no longer sees it. ItemDeleted follows."""

    item_id: str
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class TruncateItem:
    """Truncate a spoken item to what the user heard: the first `audio_end_ms` of its audio, and the words in them."""

    item_id: str
    content_index: int
    audio_end_ms: int
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class CreateResponse:
    """Create a response now. If a field is None, the conversation's configuration applies."""

    instructions: str | None = None  # Instructions for the model, at the beginning of its prompt.
    audio_output: bool | None = None  # Whether the response is spoken. If not, it is text.
    voice: str | None = None  # The voice of the response.
    tools: tuple[Tool, ...] | None = None  # The functions that the model may call.
    servers: tuple[NamedServer, ...] = ()  # With `tools`: servers of the session whose tools it may call too.
    tool_choice: str | None = None  # "auto", "none", "required" or the name of a function.
    parallel_tool_calls: bool | None = None  # Whether the response may go on after its first function call.
    max_tokens: int | None = None  # Maximum number of tokens in the response.
    stored: bool = True  # Whether the response becomes part of the history. If not, it is out of band.
    # Items to respond to, instead of the history. A string is the id of an item in the history.
    items: tuple[Item | str, ...] | None = None
    metadata: Metadata | None = None  # The client's own data, which is returned with the response.
    event_id: str | None = None  # The id that the client gave to the command.
    # Behaviour if another response is in progress: the new response is refused, waits for its end, or cuts it off.
    when_busy: Literal["refuse", "wait", "cut"] = "refuse"


@dataclass(frozen=True, slots=True)
class CancelResponse:
    """Cancel the response `response_id`. Without an id, cancel the conversation's response in progress."""

    response_id: str | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class ClearOutputAudio:
    """Stop the server's own playback at once. The history keeps the part of the response that was already heard."""

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

    `code` and `param` are the same as in the dialect's error. `event_id` is that of the command.
    """

    code: str
    message: str
    param: str | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class UserTurnStarted:
    """A turn of the user began. It will become the item `item_id`. `turn` is its number in transcription events."""

    turn: int
    item_id: str


@dataclass(frozen=True, slots=True)
class UserTurnCommitted:
    """A turn of the user is complete and became `item`. It follows the item `previous_id`; None if it is the first.

    The transcript may be reported later. `turn` is None for a silence that counts as a turn. `end_ms` is the end of the
    turn's speech, or the end of its audio if no pause ended the turn.
    """

    turn: int | None
    item: Item
    previous_id: str | None
    end_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ItemAdded:
    """An item was added to the history. It follows the item `previous_id`; None if it is the first."""

    item: Item
    previous_id: str | None


@dataclass(frozen=True, slots=True)
class ItemDone:
    """An item of the history is complete. Follows ItemAdded."""

    item: Item
    previous_id: str | None


@dataclass(frozen=True, slots=True)
class ItemRetrieved:
    """The item that a RetrieveItem requested, in its current state. It is truncated to what was heard."""

    item: Item


@dataclass(frozen=True, slots=True)
class ItemDeleted:
    """An item was removed from the history, so the model no longer sees it."""

    item_id: str


@dataclass(frozen=True, slots=True)
class ItemTruncated:
    """A spoken item was truncated to the first `audio_end_ms` of its audio, by the client or by an interruption."""

    item_id: str
    content_index: int
    audio_end_ms: int
    text: str = ""  # What is left of the content part's text: the words that were heard.


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of one response. `cached_tokens` counts the prompt tokens that were not computed again."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class Response:
    """One response and its state, which changes while the response is generated. Events contain a `snapshot`."""

    id: str  # The response's id on the wire.
    audio_output: bool  # Whether the response is spoken. If not, it is text.
    voice: str | None  # Voice of the response; None for the model's default.
    max_tokens: int | None  # Maximum number of tokens; None for the limit of the context.
    metadata: Metadata | None = None  # The client's own data, which is returned with the response.
    stored: bool = True  # Whether the response becomes part of the history. If not, it is out of band.
    status: ResponseStatus = "in_progress"  # The state of the response.
    reason: str = ""  # Why the response was cancelled or is incomplete.
    error: str = ""  # The error message of a failed response.
    code: str = "server_error"  # The error code of a failed response.
    output: list[Item] = field(default_factory=list)  # The response's items so far, in order.
    usage: Usage | None = None  # Token counts; None until the response is done.
    request: CreateResponse = field(default_factory=CreateResponse)  # The command that created the response.

    def snapshot(self) -> Response:
        """Return a copy of the response with its items so far, not truncated. Later changes do not affect the copy."""
        return replace(self, output=[item.snapshot(produced=True) for item in self.output])


@dataclass(frozen=True, slots=True)
class ResponseCreated:
    """A response began. A ResponseDone always follows, however the response ends."""

    response: Response


@dataclass(frozen=True, slots=True)
class ResponseDone:
    """A response ended. Its status is completed, cancelled, incomplete or failed. No event about it follows."""

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
    """The item at `index` of a response's output is complete or was cut off, as its status says."""

    response_id: str
    index: int
    item: Item
    previous_id: str | None


@dataclass(frozen=True, slots=True)
class ContentPosition:
    """A position in a response: the index of an item in its output, and of a content part in the item."""

    response_id: str
    item_id: str
    output_index: int
    content_index: int = 0


@dataclass(frozen=True, slots=True)
class ContentPartAdded:
    """A content part of a response began. `part` is still empty."""

    at: ContentPosition
    part: ContentPart


@dataclass(frozen=True, slots=True)
class ContentPartDone:
    """A content part is complete. Clients receive the end of its audio, then of its text, then of the part."""

    at: ContentPosition
    part: ContentPart


@dataclass(frozen=True, slots=True)
class ResponseTextDelta:
    """Further text of a content part. `spoken`: the text is the transcript of the part's audio."""

    at: ContentPosition
    text: str
    spoken: bool


@dataclass(frozen=True, slots=True)
class ResponseAudioDelta:
    """Further audio of a content part. `pcm`: float32 [num_samples], mono, at `rate_hz`.

    `words` are the words that begin in this audio. Their times are seconds from the start of the part's audio.
    """

    at: ContentPosition
    pcm: Pcm
    rate_hz: int
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """Further JSON text of a function call's arguments. `server` is the item's."""

    at: ContentPosition
    call_id: str
    text: str
    server: str = ""


@dataclass(frozen=True, slots=True)
class ArgumentsDone:
    """The arguments of a function call are complete. `arguments` is their whole JSON text. `server` is the item's."""

    at: ContentPosition
    call_id: str
    name: str
    arguments: str
    server: str = ""


@dataclass(frozen=True, slots=True)
class IdleTimeoutReached:
    """The user was silent for `idle_timeout_ms` after a response was heard: from `start_ms` to `end_ms` of the audio.
    The silence becomes an empty turn, the item `item_id`, and gets another response.
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
    | ToolEvent
    | DuplexEvent
)
