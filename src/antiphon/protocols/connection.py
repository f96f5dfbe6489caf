"""The interface between the server and the wire side of a connection. All dialects implement it.

docs/add-a-dialect.md shows how to write a dialect. `dialects.py` has the table of all dialects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import msgspec

from antiphon.contracts import TranscriberProfile, TuningCaps
from antiphon.errors import LocalProtocolError, RemoteProtocolError
from antiphon.events.conversation import ConversationCommand, ConversationEvent
from antiphon.events.speech import SpeechCommand, SpeechEvent
from antiphon.events.transcription import (
    AppendAudio,
    EnrolledVoice,
    KnownVoice,
    TranscriptionCommand,
    TranscriptionEvent,
)
from antiphon.protocols.fields import Unread
from antiphon.protocols.model_names import OTHER_VOICES, ModelNames, check_voice, loaded_voice, unknown_language
from antiphon.protocols.opening import Opening
from antiphon.protocols.realtime.items import CheckTools, take_tools
from antiphon.protocols.realtime.tool_servers import CheckServer, no_servers
from antiphon.protocols.resume import Control, Notice, SessionResume, control, refused_frame
from antiphon.protocols.wire import Frame, NewId, Received, random_id

Command = TranscriptionCommand | ConversationCommand
Event = TranscriptionEvent | ConversationEvent
# If sessions do not expire, `expires_at` is YEAR_S seconds in the future.
YEAR_S = 365 * 86400
# WebSocket close code for a client that may try again.
TRY_LATER = 1013
# Maximum length of an uploaded voice's name, in characters.
MAX_VOICE_NAME_CHARS = 64


def no_voice(name: str, param: str) -> tuple[EnrolledVoice, ...]:
    """Raise RemoteProtocolError (`voice_not_found`): the default of `Context.enrolled_voices`."""
    raise RemoteProtocolError("voice_not_found", f"No voice `{name[:MAX_VOICE_NAME_CHARS]}` was uploaded.", param)


def no_speaker(name: str, param: str) -> KnownVoice:
    """Raise RemoteProtocolError (`speaker_not_found`): the default of `Context.known_voice`."""
    raise RemoteProtocolError("speaker_not_found", f"No speaker `{name[:MAX_VOICE_NAME_CHARS]}` is remembered.", param)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The inputs of a connection in any dialect: names of the loaded models, limits, clocks and ids."""

    # Names of the transcriber.
    models: ModelNames
    # Wall clock, in Unix seconds.
    now_s: Callable[[], float]
    # Monotonic clock, in seconds.
    steady_s: Callable[[], float]
    # Names of the conversation model; None if none is loaded.
    conversation_models: ModelNames | None = None
    # Voices of the conversation model. The first is the default. If there are none, responses are text.
    voices: tuple[str, ...] = ()
    # Languages that the voices speak; empty if unknown.
    spoken_languages: tuple[str, ...] = ()
    # Maximum size of the audio in one message, in decoded bytes.
    max_append_bytes: int = 15 << 20
    # Maximum duration of a session, in seconds; 0 for no limit.
    session_s: float = 3600.0
    # Makes ids of sessions, events and items.
    new_id: NewId = random_id
    # Returns whether the transcriber knows a language, given by its ISO-639-1 code.
    knows_language: Callable[[str], bool] = lambda _: True
    # Profile of the transcriber. If None, sessions do not report the tuning that is in effect.
    transcriber: TranscriberProfile | None = None
    # Upper limits for the values in a session's tuning.
    tuning_caps: TuningCaps = field(default_factory=TuningCaps)
    # Called with a requested name that is not loaded. The second argument is the loaded name that is used instead. It
    # is missing if that is the transcriber's.
    log_alias: Callable[..., None] = lambda *_: None
    # Called with the names of a client's parameters that have no effect, and the name of the dialect.
    log_ignored: Callable[[Collection[str], str], None] = lambda *_: None
    # The first resume token of a resumable session; None if the session ends with its connection.
    resume_token: str | None = None
    # Whether the session begins before the client sends a message.
    autostart: bool = False
    # Whether a speaker encoder is loaded, so that the server can tell voices apart.
    tells_voices: bool = False
    # Returns the vectors of an uploaded voice. The arguments are the voice's name and the path of the field that names
    # it. Raises RemoteProtocolError with that path if the voice is not available.
    enrolled_voices: Callable[[str, str], tuple[EnrolledVoice, ...]] = no_voice
    # Returns the voice of a remembered speaker. The arguments are the speaker's name and the path of the field that
    # names the speaker. Raises RemoteProtocolError with that path if the speaker is not available.
    known_voice: Callable[[str, str], KnownVoice] = no_speaker
    # Checks a client's tools. The arguments are the tools and the path of their field. Raises RemoteProtocolError with
    # that path if the conversation model's output cannot be constrained to the tools. May take a second.
    check_tools: CheckTools = take_tools
    # Checks a tool server that a client names. The second argument is the path of its tool. Raises RemoteProtocolError.
    check_server: CheckServer = no_servers

    @property
    def expires_at(self) -> int:
        """Expiry time of a session that begins now, in Unix seconds; a year from now if sessions have no limit."""
        return int(self.now_s() + (self.session_s or YEAR_S))

    @property
    def unit_ms(self) -> int:
        """Length of a native model's unit, in milliseconds; 0 for a cascade."""
        return self.conversation_models.unit_ms if self.conversation_models else 0

    def loaded_voice(self, name: str | None) -> str | None:
        """Return the loaded voice with this name, ignoring case. None if the name is None or unknown."""
        return loaded_voice(name, self.voices)

    def check_voice(self, name: str, param: str) -> None:
        """Raise RemoteProtocolError (`voice_not_found`) with `param` if no loaded voice can serve this name.

        For a voice of OpenAI's hosted service, the first loaded voice is used. If no voice is loaded, any name is
        accepted. Both cases are logged.
        """
        strict = self.conversation_models is not None and self.conversation_models.strict
        check_voice(name, self.voices, param, strict=strict)
        if name and not self.loaded_voice(name):
            self.log_alias(f"voice {name}", self.voices[0] if self.voices else "no voice")

    def check_language(self, language: str | None, param: str) -> None:
        """Raise RemoteProtocolError with `param` for a language that the transcriber does not know."""
        if language and not self.knows_language(language):
            raise unknown_language(language, self.knows_language, param)

    def unspoken(self, language: str | None, param: str) -> list[Unread]:
        """Return a warning if no loaded voice speaks the language. The user is then understood, but a spoken response
        in the language fails.
        """
        if not language or not self.spoken_languages or language in self.spoken_languages:
            return []
        spoken = ", ".join(self.spoken_languages)
        message = f"No loaded voice speaks '{language}'; there are: {spoken}; {OTHER_VOICES}."
        return [Unread("language_not_spoken", param, message)]

    def check_languages(self, languages: list[str] | None, param: str) -> list[str]:
        """Return the languages; [] for None. Raises RemoteProtocolError if the transcriber does not know one."""
        for language in languages or ():
            self.check_language(language, param)
        return languages or []


class WireSnapshot(msgspec.Struct):
    """The stored state of a session, without its items.

    `dialect` is the name in the table of dialects. `session` is JSON that only the dialect can read.
    """

    session_id: str
    dialect: str
    session: msgspec.Raw


class Resume(Enum):
    """When the sessions of a dialect outlive their connection: never, if the URL requests it, or always."""

    NEVER = "never"
    ON_REQUEST = "on request"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class FirstFrame:
    """What the first frame of a client asks for, in a dialect whose clients send first."""

    # The session that it resumes; None for a new session.
    resumes: SessionResume | None = None
    # Whether the new session can be resumed later.
    resumable: bool = True
    # Whether the resumed session reads the frame as well, because it also has settings.
    is_read: bool = False


def first_frame(data: str | bytes) -> FirstFrame:
    """Return what a first frame asks for in the dialects that have a `session.resume`."""
    message = control(data)
    return FirstFrame(message if isinstance(message, SessionResume) else None)


def refusal(error: RemoteProtocolError, code: int) -> tuple[list[Frame], tuple[int, str]]:
    """Return the answer to a client whose session cannot begin, in OpenAI's format: an error, then the close frame.

    `code`: the close code. TRY_LATER marks the error as retryable.
    """
    frame = refused_frame(lambda prefix: f"{prefix}0", error, retryable=code == TRY_LATER)
    return [frame], (code, error.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One row of the table of dialects (`dialects.py`)."""

    # Name of the dialect, in stored sessions and in lists of dialects.
    name: str
    # Returns whether an opening requests this dialect. The server uses the first row that matches.
    matches: Callable[[Opening], bool]
    # Makes the wire side of a connection.
    connect: Callable[[Opening, Context], WireConnection]
    # URL paths that the dialect serves in addition to /v1/realtime.
    paths: tuple[str, ...] = ()
    # Names of the query parameters that its clients may send, with the path's own; others are ignored, and logged. Its
    # sessions are refused before the upgrade. None: the parameters and refusals of /v1/realtime.
    parameters: frozenset[str] | None = None
    # When its sessions outlive their connection. A door resumes those that do so on request, for clients that do not
    # resume themselves. All other sessions behind a door end with their host, unless their client resumes them.
    resume: Resume
    # Whether the client sends the first message, which may resume a session.
    client_first: bool = False
    # Reads the first frame of a client that sends first.
    first_frame: Callable[[str | bytes], FirstFrame] = first_frame
    # The last frames, close code and reason for a client that sends first, if its session cannot begin or be resumed.
    # The arguments are the error, and the close code in OpenAI's dialects.
    refusal: Callable[[RemoteProtocolError, int], tuple[list[Frame], tuple[int, str]]] = refusal
    # WebSocket subprotocol that the server accepts if a client offers it.
    subprotocol: str | None = None
    # Returns whether the client secret in an opening was made for this dialect. The default accepts no client secret.
    opens_secret: Callable[[Opening], bool] = lambda _: False


class WireConnection(Protocol):
    """The wire side of one connection: reads the client's frames into commands and writes events as frames.

    It never waits and does not use the socket. Call `open` first. The answer to an invalid frame is an error without
    any command. Only `open` and `restore` raise errors for a client's input.
    """

    # The arguments with which the connection was made.
    opening: Opening
    context: Context

    @property
    def id(self) -> str:
        """The session's id as the client knows it. A restored session keeps its id."""
        ...

    @property
    def dialect(self) -> str:
        """The dialect's name in metrics and stored sessions."""
        ...

    @property
    def epoch(self) -> int:
        """The current epoch; 0 in a dialect without epochs. Text and audio of older epochs are not sent."""
        ...

    @property
    def idle_s(self) -> float | None:
        """Idle timeout: seconds without a client's frame after which the session ends. None for no timeout."""
        ...

    @property
    def closing(self) -> bool:
        """Whether the client has requested the end of the session. The server then ends the session at once, and drops
        audio that was not transcribed or played yet.
        """
        ...

    @property
    def finishing(self) -> tuple[int, str] | None:
        """The close code and reason with which the session is to end, after a request, an error or a SessionEnding.

        The server then reads no more, sends the results of what it has received, and the frames of `close`. None if
        the session goes on, or if the server chooses the code.
        """
        ...

    @property
    def min_commit_ms(self) -> int:
        """Minimum duration of the audio in a commit, in milliseconds."""
        ...

    def open(self) -> list[Frame]:
        """Return the first frames to the client. Raises RemoteProtocolError if the opening cannot be served."""
        ...

    def feed(self, data: str | bytes | AppendAudio) -> Received[Command]:
        """Read one frame of the client, or audio that arrived outside the frames."""
        ...

    def too_large(self, data: str | bytes, max_bytes: int) -> list[Frame]:
        """Return the answer to the frame `data`, which exceeds `max_bytes` and was not read. The session continues."""
        ...

    def refuse(self, error: RemoteProtocolError, event_id: str | None) -> list[Frame]:
        """Return an error for the client. `event_id` is the id that the client gave to the message at fault.

        The session continues.
        """
        ...

    def send(self, event: Event) -> list[Frame]:
        """Return the frames of an event; [] if the dialect does not report it or its epoch has passed.

        Raises LocalProtocolError for an event that cannot occur in this dialect.
        """
        ...

    def close(self) -> list[Frame]:
        """Return the last frames to the client. Call it after the session has ended by `closing` or `finishing`."""
        ...

    def control(self, data: str | bytes) -> Control | None:
        """Return the message if it concerns the connection itself, such as `session.resume`. Otherwise return None."""
        ...

    def resumed(self, token: str, **facts: Any) -> Frame:
        """Return the first frame to a client that resumed the session. Its fields include the new token and `facts`.

        Raises LocalProtocolError if sessions cannot be resumed.
        """
        ...

    def notice(self, notice: Notice) -> list[Frame]:
        """Return the frames that report `notice` about the connection to the client; [] in a dialect without any."""
        ...

    def snapshot(self) -> WireSnapshot | None:
        """Return the state to store, without the items. None if the session cannot be restored."""
        ...

    def restore(self, kept: WireSnapshot) -> None:
        """Continue a session from its stored state. Call it after `open`, but do not send the frames of `open`.

        Raises LocalProtocolError if sessions are not stored.
        """
        ...


class SpeechStreamWire(Protocol):
    """The wire side of a speech stream: reads the client's messages into commands, and writes events as frames.

    It never waits and does not use the socket. No method raises errors for a client's input.
    """

    @property
    def configured(self) -> bool:
        """Whether the voice and the format are known. Until then, any error ends the connection."""
        ...

    @property
    def closing(self) -> bool:
        """Whether to close the connection after the returned frames."""
        ...

    @property
    def finishing(self) -> tuple[int, str] | None:
        """The close code and reason with which to close the connection after all text is spoken; None if it goes on."""
        ...

    @property
    def idle_s(self) -> float | None:
        """Seconds without a message after which the connection is closed; None for the server's own timeout."""
        ...

    def feed(self, data: str | bytes) -> Received[SpeechCommand]:
        """Read one message of the client."""
        ...

    def send(self, output: SpeechEvent) -> list[Frame]:
        """Return the frames of an event of the session."""
        ...

    def refuse(self, reason: str) -> Frame:
        """Return an error for the client."""
        ...


class NeverResumed:
    """The methods of a WireConnection whose session cannot be resumed and is not stored."""

    def control(self, data: str | bytes) -> Control | None:
        """Return None: no messages are about the connection."""
        return None

    def notice(self, notice: Notice) -> list[Frame]:
        """Return no frames: nothing is reported about the connection."""
        return []

    def snapshot(self) -> WireSnapshot | None:
        """Return None: nothing of the session is stored."""
        return None

    def resumed(self, token: str, **facts: Any) -> Frame:
        """Raise LocalProtocolError: sessions cannot be resumed."""
        raise LocalProtocolError(f"a {type(self).__name__} cannot be resumed")

    def restore(self, kept: WireSnapshot) -> None:
        """Raise LocalProtocolError: sessions are not stored."""
        raise LocalProtocolError(f"a {type(self).__name__} is not stored")
