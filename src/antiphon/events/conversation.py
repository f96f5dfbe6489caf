"""Commands and events of conversations: items, content parts and responses. A conversation's turns are those of
events/transcription.py.
"""

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

# What a client attaches to a response, and gets back with it: nothing here looks into it.
Metadata = Mapping[str, Any]
ItemKind = Literal["message", "function_call", "function_call_output"]
ItemRole = Literal["system", "user", "assistant"]
ContentPartKind = Literal["input_text", "input_audio", "input_image", "output_text", "output_audio"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "cancelled", "incomplete", "failed"]


@dataclass(slots=True)
class ContentPart:
    """One content part of a message. It is stored with its conversation, by these field names.

    - `text`: what was written or said, or read on an image.
    - `image`: a data URI.
    - `audio_s`, `words`: of `output_audio`, the length of its audio in seconds, and where each word lies in it.
    - `media`: its audio or image as a MediaPart, for a model that accepts media; not stored.
    - `whole`: text, words and seconds before the part was truncated; None where it was not.
    """

    kind: ContentPartKind
    text: str = ""
    image: str = ""
    audio_s: float = 0.0
    words: list[Word] = field(default_factory=list)
    # Not typed as MediaPart, because what is stored is read back by these types.
    media: Any = None
    whole: tuple[str, tuple[Word, ...], float] | None = None

    def snapshot(self) -> ContentPart:
        """The part as it is now. Its media is the same object, which is never changed."""
        return replace(self, words=list(self.words))

    def produced(self) -> ContentPart:
        """The part as it was produced, whatever was truncated of it."""
        text, words, audio_s = self.whole or (self.text, self.words, self.audio_s)
        return replace(self, text=text, words=list(words), audio_s=audio_s)

    def add(self, text: str = "", words: Sequence[Word] = (), audio_s: float = 0.0) -> None:
        """Add what is produced of the part. Of one that was truncated meanwhile, it is not heard: it is in `whole`."""
        if self.whole:
            before, known, length_s = self.whole
            self.whole = (before + text, (*known, *words), length_s + audio_s)
        else:
            self.text, self.audio_s = self.text + text, self.audio_s + audio_s
            self.words += words


@dataclass(slots=True)
class Item:
    """One item of a conversation's history. It is stored by these field names.

    `role` and `parts` belong to messages; `call_id`, `name` and `arguments` to a function call; `call_id` and `output`
    to a call's result. Items of the history are changed while a response is produced and heard: events carry a
    `snapshot`, so that what a client is told does not depend on when it is encoded.
    """

    id: str
    kind: ItemKind = "message"
    role: ItemRole = "user"
    status: ItemStatus = "completed"
    parts: list[ContentPart] = field(default_factory=list)
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str = ""
    # Of a turn of the user's: "other" where it was another's voice, who was not answered and the model is not told of.
    speaker: str = ""

    @property
    def text(self) -> str:
        """The texts of all its content parts, joined by spaces; parts without text are left out."""
        return " ".join(p.text for p in self.parts if p.text)

    def snapshot(self, *, produced: bool = False) -> Item:
        """The item as it is now, or as it was `produced`: what becomes of this one does not change it."""
        return replace(self, parts=[part.produced() if produced else part.snapshot() for part in self.parts])


@dataclass(frozen=True, slots=True)
class ConversationConfig:
    """The configuration of one conversation.

    - `transcription`: how the user's audio is transcribed, and how turns are found.
    - `instructions`: what the model is told first.
    - `audio_output`: responses are spoken; otherwise they are text.
    - `voice`: the voice of responses; None: the model's default.
    - `speed`: 1.0 is the voice's own tempo.
    - `tools`, `tool_choice`: the functions that the model may call; "auto", "none", "required" or a function's name.
    - `parallel_tool_calls`: a response may hold several calls; otherwise it ends with its first one.
    - `max_tokens`: the most tokens of a response; None: as the context allows.
    - `create_response`: the end of a turn gets a response.
    - `interrupt_response`: speech ends the response that is under way.
    - `reports_transcripts`: the client wants the transcripts of the user's turns.
    - `idle_timeout_ms`: after a response was heard and nobody speaks for this long, another one is made; None: never.
    - `truncation`: what happens when the history outgrows the context; as in ReplyOptions.
    - `allows_backchannels`: a backchannel during a response does not end it.
    - `reports_ducking`: the client plays the responses by itself, and wants to be told when to pause that.
    - `duplex`: the conversation is full duplex, so epochs, overlap and turn states are reported; None: it is not.
    """

    transcription: TranscriptionConfig
    instructions: str = ""
    audio_output: bool = True
    voice: str | None = None
    speed: float = 1.0
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    max_tokens: int | None = None
    create_response: bool = True
    interrupt_response: bool = True
    reports_transcripts: bool = False
    idle_timeout_ms: float | None = None
    truncation: Literal["auto", "disabled"] | float = "auto"
    allows_backchannels: bool = False
    reports_ducking: bool = False
    duplex: DuplexConfig | None = None


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConfigureConversation:
    """Set the conversation's configuration as a whole, at the start and after each change. A response that is under way
    keeps its own.
    """

    config: ConversationConfig


@dataclass(frozen=True, slots=True)
class CreateItem:
    """Put an item at the end of the history, or behind the item `after` (`root`: at the front). As in all commands
    here, `event_id` is the client's name for the command, given back with an error.
    """

    item: Item
    after: str | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class RetrieveItem:
    """Ask for an item of the history, which is reported as ItemRetrieved."""

    item_id: str
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class DeleteItem:
    """Remove an item from the history; the model no longer sees it. ItemDeleted follows."""

    item_id: str
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class TruncateItem:
    """Cut a spoken item to what the client's user heard of it, the first `audio_end_ms` of its audio. Its text is cut
    to the words that lie in them.
    """

    item_id: str
    content_index: int
    audio_end_ms: int
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class CreateResponse:
    """Respond now. A field that is None is as the conversation is configured.

    - `stored`: the response becomes part of the history; otherwise it is made beside the conversation.
    - `items`: what to respond to, instead of the history. A string is the id of an item of the history.
    - `metadata`: the client's own, given back with the response.
    - `when_busy`: what becomes of it while the conversation has a response under way: it is refused, or it waits for
      that one's end, or cuts it.
    """

    instructions: str | None = None
    audio_output: bool | None = None
    voice: str | None = None
    tools: tuple[Tool, ...] | None = None
    tool_choice: str | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = None
    stored: bool = True
    items: tuple[Item | str, ...] | None = None
    metadata: Metadata | None = None
    event_id: str | None = None
    when_busy: Literal["refuse", "wait", "cut"] = "refuse"


@dataclass(frozen=True, slots=True)
class CancelResponse:
    """Cancel the response `response_id`, or without an id the response of the conversation that is under way."""

    response_id: str | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class ClearOutputAudio:
    """Silence what the server itself plays, at once. What was already heard of the response stays in the history."""

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
    """A command of the client could not be carried out, and nothing changed. `code` and `param` are those of the
    dialect's error, `event_id` is the command's.
    """

    code: str
    message: str
    param: str | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class UserTurnStarted:
    """A turn of the user began, which will be the item `item_id`. `turn` is its number in SpeechStarted and in
    transcripts.
    """

    turn: int
    item_id: str


@dataclass(frozen=True, slots=True)
class UserTurnCommitted:
    """A turn of the user is complete and is `item`, behind the item `previous_id` (None: it is the first). Its
    transcript may come later. `turn`: None for a silence that counts as one. `end_ms`: of its speech, or of its audio
    where it ended in no pause.
    """

    turn: int | None
    item: Item
    previous_id: str | None
    end_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ItemAdded:
    """An item was put into the history, behind the item `previous_id` (None: it is the first)."""

    item: Item
    previous_id: str | None


@dataclass(frozen=True, slots=True)
class ItemDone:
    """An item of the history is complete; it follows ItemAdded."""

    item: Item
    previous_id: str | None


@dataclass(frozen=True, slots=True)
class ItemRetrieved:
    """The item that a RetrieveItem asked for, as it is now: truncated to what was heard."""

    item: Item


@dataclass(frozen=True, slots=True)
class ItemDeleted:
    """An item was removed from the history."""

    item_id: str


@dataclass(frozen=True, slots=True)
class ItemTruncated:
    """A spoken item was cut to the first `audio_end_ms` of its audio, by the client or because it was interrupted."""

    item_id: str
    content_index: int
    audio_end_ms: int


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of one response: of the prompt, of those the ones that were not computed again, and
    of the response.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class Response:
    """One response and its state, which is changed while the response is produced: events carry a `snapshot`.

    - `audio_output`, `voice`, `max_tokens`, `metadata`, `stored`: as in CreateResponse.
    - `status`: one of ResponseStatus; `reason`, `error` and `code` say why it is cancelled, incomplete or failed.
    - `output`: its items so far, in order.
    - `usage`: counts of tokens, once it is done.
    - `request`: what it was asked for with.
    """

    id: str
    audio_output: bool
    voice: str | None
    max_tokens: int | None
    metadata: Metadata | None = None
    stored: bool = True
    status: ResponseStatus = "in_progress"
    reason: str = ""
    error: str = ""
    code: str = "server_error"
    output: list[Item] = field(default_factory=list)
    usage: Usage | None = None
    request: CreateResponse = field(default_factory=CreateResponse)

    def snapshot(self) -> Response:
        """The response and its items as they were produced so far: what becomes of this one does not change it."""
        return replace(self, output=[item.snapshot(produced=True) for item in self.output])


@dataclass(frozen=True, slots=True)
class ResponseCreated:
    """A response began. Its ResponseDone follows, however it ends."""

    response: Response


@dataclass(frozen=True, slots=True)
class ResponseDone:
    """A response ended: completed, cancelled, incomplete or failed, as its status says. Nothing of it follows."""

    response: Response


@dataclass(frozen=True, slots=True)
class OutputItemAdded:
    """The item at `index` of a response's output began. `previous_id` is the item of the history before it; None where
    it is the first, or where the response is beside the conversation.
    """

    response_id: str
    index: int
    item: Item
    previous_id: str | None


@dataclass(frozen=True, slots=True)
class OutputItemDone:
    """The item at `index` of a response's output is complete, or was cut off, as its status says."""

    response_id: str
    index: int
    item: Item
    previous_id: str | None


@dataclass(frozen=True, slots=True)
class ContentPosition:
    """The place of something in a response: the item's index in its output, and the content part's
    index in the item.
    """

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
    """A content part is complete: clients are told that its audio is, then its text, then the part."""

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
    """More of a content part's audio. pcm: float32 [num_samples], mono, at `rate_hz`. `words`: the words that begin in
    it, with their times in seconds from the start of the part's audio.
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
    """The arguments of a function call are complete; `arguments` is all of their JSON text."""

    at: ContentPosition
    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class IdleTimeoutReached:
    """Nobody spoke for `idle_timeout_ms` after a response was heard. An empty turn, the item `item_id`, gets another
    response; it lies from `start_ms` to `end_ms` of session audio.
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
