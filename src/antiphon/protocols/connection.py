"""The interface between the server and the wire side of a connection, the same for every dialect.

docs/add-a-dialect.md shows how to write a dialect. `dialects.py` has the table of all dialects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import msgspec

from antiphon.contracts import TranscriberProfile, TuningCaps
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import ConversationCommand, ConversationEvent
from antiphon.events.transcription import AppendAudio, EnrolledVoice, TranscriptionCommand, TranscriptionEvent
from antiphon.protocols.fields import Unread
from antiphon.protocols.model_names import OTHER_VOICES, ModelNames, check_voice, loaded_voice, unknown_language
from antiphon.protocols.opening import Opening
from antiphon.protocols.realtime.items import CheckTools, take_tools
from antiphon.protocols.resume import Control
from antiphon.protocols.wire import Frame, NewId, Received, random_id

Command = TranscriptionCommand | ConversationCommand
Event = TranscriptionEvent | ConversationEvent
# `expires_at` is this far in the future if sessions do not expire.
YEAR_S = 365 * 86400
# Longest name of an uploaded voice.
MAX_VOICE_NAME_CHARS = 64


def no_voice(name: str, param: str) -> tuple[EnrolledVoice, ...]:
    """Raise RemoteProtocolError (`voice_not_found`): the default of `Context.enrolled_voices`."""
    raise RemoteProtocolError("voice_not_found", f"No voice `{name[:MAX_VOICE_NAME_CHARS]}` was uploaded.", param)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The inputs of a connection: names of the loaded models, limits, clocks and ids. The same for all dialects."""

    # Names of the transcriber.
    models: ModelNames
    # Wall clock, in Unix seconds.
    now_s: Callable[[], float]
    # Monotonic clock, in seconds.
    steady_s: Callable[[], float]
    # Names of the conversation model; None if none is loaded.
    conversation_models: ModelNames | None = None
    # Voices of the conversation model. The first is the default; without voices, responses are text.
    voices: tuple[str, ...] = ()
    # Languages that the voices speak; empty if unknown.
    spoken_languages: tuple[str, ...] = ()
    # Largest audio of one message, in decoded bytes.
    max_append_bytes: int = 15 << 20
    # Longest duration of a session, in seconds; 0 for no limit.
    session_s: float = 3600.0
    # Makes ids of sessions, events and items.
    new_id: NewId = random_id
    # Returns whether the transcriber knows a language, given by its ISO-639-1 code.
    knows_language: Callable[[str], bool] = lambda _: True
    # Profile of the transcriber. If None, sessions do not report which tuning is in effect.
    transcriber: TranscriberProfile | None = None
    # Upper limits of what a session's tuning may ask for.
    tuning_caps: TuningCaps = field(default_factory=TuningCaps)
    # Called with a name that is not loaded. The second argument names what serves it, unless it is the transcriber.
    log_alias: Callable[..., None] = lambda *_: None
    # The first resume token of a resumable session; None if the session ends with its connection.
    resume_token: str | None = None
    # Whether the session begins without a first message of the client.
    autostart: bool = False
    # Whether a speaker model is loaded.
    tells_voices: bool = False
    # Returns the vectors of a voice that the client has uploaded, by its name. The second argument is the path of the
    # field. Raises RemoteProtocolError that names the field if the voice is not available.
    enrolled_voices: Callable[[str, str], tuple[EnrolledVoice, ...]] = no_voice
    # Checks a client's tools; the arguments are the tools and the path of their field. Raises RemoteProtocolError that
    # names the field if the conversation model cannot be held to the tools. May take a second.
    check_tools: CheckTools = take_tools

    @property
    def expires_at(self) -> int:
        """Expiry of a session that begins now, in Unix seconds; a year from now if sessions have no limit."""
        return int(self.now_s() + (self.session_s or YEAR_S))

    @property
    def unit_ms(self) -> int:
        """Length of a native model's unit, in milliseconds; 0 for a cascade."""
        return self.conversation_models.unit_ms if self.conversation_models else 0

    def loaded_voice(self, name: str | None) -> str | None:
        """Return the loaded voice of this name, ignoring case. None for no name and for an unknown one."""
        return loaded_voice(name, self.voices)

    def check_voice(self, name: str, param: str) -> None:
        """Raise RemoteProtocolError (`voice_not_found`) that names `param` for an unknown voice.

        The first loaded voice serves the hosted service's names. Any name is accepted if no voice is loaded. Both are
        logged.
        """
        strict = self.conversation_models is not None and self.conversation_models.strict
        check_voice(name, self.voices, param, strict=strict)
        if name and not self.loaded_voice(name):
            self.log_alias(f"voice {name}", self.voices[0] if self.voices else "no voice")

    def check_language(self, language: str | None, param: str) -> None:
        """Raise RemoteProtocolError that names `param` for a language that the transcriber does not know."""
        if language and not self.knows_language(language):
            raise unknown_language(language, self.knows_language, param)

    def unspoken(self, language: str | None, param: str) -> list[Unread]:
        """Return a warning for a language that no loaded voice speaks: the user is understood, but a response in that
        language fails.
        """
        if not language or not self.spoken_languages or language in self.spoken_languages:
            return []
        spoken = ", ".join(self.spoken_languages)
        message = f"No loaded voice speaks '{language}'; there are: {spoken}; {OTHER_VOICES}."
        return [Unread("language_not_spoken", param, message)]

    def check_languages(self, languages: list[str] | None, param: str) -> list[str]:
        """Return the languages, [] for null. Raises RemoteProtocolError for one that the transcriber does not know."""
        for language in languages or ():
            self.check_language(language, param)
        return languages or []


class WireSnapshot(msgspec.Struct):
    """The stored state of a conversation, without its items.

    `dialect` is the name in the table of dialects, `session` the dialect's own JSON.
    """

    session_id: str
    dialect: str
    session: msgspec.Raw


class Resume(Enum):
    """Whether a session of a dialect outlives its connection: never, if the URL asks for it, or always."""

    NEVER = "never"
    ON_REQUEST = "on request"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One row of the table of dialects (`dialects.py`)."""

    # Name in stored sessions and in lists of dialects.
    name: str
    # Returns whether an opening asks for this dialect. The first row that matches is taken.
    matches: Callable[[Opening], bool]
    # Makes the wire side of a connection.
    connect: Callable[[Opening, Context], WireConnection]
    # URLs of its own, in addition to /v1/realtime.
    paths: tuple[str, ...] = ()
    # Whether its sessions outlive their connection.
    resume: Resume = Resume.NEVER
    # Whether the server waits for a first message, which may resume a session.
    client_first: bool = False
    # WebSocket subprotocol that the server accepts if a client offers it.
    subprotocol: str | None = None
    # Returns whether the client secret in an opening was made for this dialect. By default no secret opens it.
    opens_secret: Callable[[Opening], bool] = lambda _: False


class WireConnection(Protocol):
    """The wire side of one connection: reads the client's frames into commands and writes events as frames.

    It never waits and knows no socket. Call `open` first. A wrong frame is answered with an error and leads to no
    command. Only `open` and `restore` raise errors for a client's input.
    """

    # The opening and the context that the connection was made from.
    opening: Opening
    context: Context

    @property
    def id(self) -> str:
        """The session's id as the client knows it; a restored session keeps its earlier id."""
        ...

    @property
    def dialect(self) -> str:
        """The dialect's name in metrics and stored sessions."""
        ...

    @property
    def epoch(self) -> int:
        """The current epoch. Words and audio of older epochs are not sent. 0 in a dialect without epochs."""
        ...

    @property
    def idle_s(self) -> float | None:
        """Idle timeout: the session ends after this number of seconds without a client's frame. None for no timeout."""
        ...

    @property
    def closing(self) -> bool:
        """Whether the client has asked to end the session. The server then ends it at once and drops the audio that is
        not yet transcribed or spoken.
        """
        ...

    @property
    def min_commit_ms(self) -> int:
        """Least audio of a commit, in milliseconds."""
        ...

    def open(self) -> list[Frame]:
        """Return the first frames to the client. Raises RemoteProtocolError for an opening that cannot be served."""
        ...

    def feed(self, data: str | bytes | AppendAudio) -> Received[Command]:
        """Read one frame of the client, or audio that arrived outside the frames."""
        ...

    def too_large(self, data: str | bytes, max_bytes: int) -> list[Frame]:
        """Return the answer to a frame, `data`, of more than `max_bytes`, which was not read. The session continues."""
        ...

    def refuse(self, error: RemoteProtocolError, event_id: str | None) -> list[Frame]:
        """Return an error for the client. `event_id` is the client's id of the message. The session continues."""
        ...

    def send(self, event: Event) -> list[Frame]:
        """Return the frames of an event; [] if the dialect does not report it, or if its epoch has passed.

        Raises LocalProtocolError for an event that no session of this dialect reports.
        """
        ...

    def close(self) -> list[Frame]:
        """Return the last frames to the client, after the server has carried out the end it asked for (`closing`)."""
        ...

    def control(self, data: str | bytes) -> Control | None:
        """Return the message if it is about the connection itself, such as `session.resume`; None for any other."""
        ...

    def resumed(self, token: str, **facts: Any) -> Frame:
        """Return the first frame to a client that has resumed the session, with its new token and `facts` as fields.

        Raises LocalProtocolError if sessions cannot be resumed.
        """
        ...

    def replaced(self) -> Frame:
        """Return the last frame to a connection whose session another connection has resumed. Raises as `resumed`."""
        ...

    def snapshot(self) -> WireSnapshot | None:
        """Return the state to store, without the items; None if there is nothing to restore."""
        ...

    def restore(self, kept: WireSnapshot) -> None:
        """Continue a session of an earlier process. Call it after `open`, and do not send the frames of `open`.

        Raises LocalProtocolError if sessions are not stored.
        """
        ...
