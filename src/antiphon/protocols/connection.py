"""What the server asks of the wire side of a connection, whatever dialect it speaks, and what a dialect is given.

docs/add-a-dialect.md shows how a dialect is made; `dialects.py` has the table of those that there are.
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
# What a client is told where sessions do not expire.
YEAR_S = 365 * 86400
# No uploaded voice has a longer name.
MAX_VOICE_NAME_CHARS = 64


def no_voice(name: str, param: str) -> tuple[EnrolledVoice, ...]:
    """Raises RemoteProtocolError (`voice_not_found`) for the name of a voice that the client has not uploaded."""
    raise RemoteProtocolError("voice_not_found", f"No voice `{name[:MAX_VOICE_NAME_CHARS]}` was uploaded.", param)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a connection is made from: the loaded models' names, limits, clocks and ids. The same for all dialects."""

    # The names of the transcriber.
    models: ModelNames
    # Unix seconds.
    now_s: Callable[[], float]
    # Monotonic seconds.
    steady_s: Callable[[], float]
    # The names of the conversation model; None where none is loaded.
    conversation_models: ModelNames | None = None
    # Its voices; the first is the default, and with none, responses are text.
    voices: tuple[str, ...] = ()
    # The languages that these speak; empty where that is not known.
    spoken_languages: tuple[str, ...] = ()
    # The most audio of one message, decoded.
    max_append_bytes: int = 15 << 20
    # How long a session lasts, in seconds; 0 for no limit.
    session_s: float = 3600.0
    new_id: NewId = random_id
    # Whether the transcriber knows an ISO-639-1 code.
    knows_language: Callable[[str], bool] = lambda _: True
    # The transcriber's facts; None: what became of their tuning is not sent to sessions.
    transcriber: TranscriberProfile | None = None
    # The most that sessions may ask for.
    tuning_caps: TuningCaps = field(default_factory=TuningCaps)
    # Called with a name that is not loaded and, unless it is the transcriber, with what serves it instead.
    log_alias: Callable[..., None] = lambda *_: None
    # The first token of a session that can be resumed; None: it ends with its connection.
    resume_token: str | None = None
    # The session begins without a first message of the client.
    autostart: bool = False
    # A speaker model is loaded.
    tells_voices: bool = False
    # The vectors of a voice that the client has uploaded, by its name. Raises RemoteProtocolError that names the field,
    # its second argument, for a voice that cannot be had.
    enrolled_voices: Callable[[str, str], tuple[EnrolledVoice, ...]] = no_voice
    # Raises RemoteProtocolError that names the field, its second argument, for tools that the conversation model cannot
    # be held to. May take a second.
    check_tools: CheckTools = take_tools

    @property
    def expires_at(self) -> int:
        """When a session that begins now expires, in Unix seconds; without a limit, in a year."""
        return int(self.now_s() + (self.session_s or YEAR_S))

    @property
    def unit_ms(self) -> int:
        """The milliseconds of a native model's unit; 0 for a cascade."""
        return self.conversation_models.unit_ms if self.conversation_models else 0

    def loaded_voice(self, name: str | None) -> str | None:
        """The voice of this name, whatever its case; None for the default."""
        return loaded_voice(name, self.voices)

    def check_voice(self, name: str, param: str) -> None:
        """Raises RemoteProtocolError (`voice_not_found`) that names `param` for a voice that there is not. A voice of
        the hosted service is served by the first one, and any is where nothing is spoken, which is logged.
        """
        strict = self.conversation_models is not None and self.conversation_models.strict
        check_voice(name, self.voices, param, strict=strict)
        if name and not self.loaded_voice(name):
            self.log_alias(f"voice {name}", self.voices[0] if self.voices else "nobody")

    def check_language(self, language: str | None, param: str) -> None:
        """Raises RemoteProtocolError that names `param` for a language that the transcriber does not know."""
        if language and not self.knows_language(language):
            raise unknown_language(language, self.knows_language, param)

    def unspoken(self, language: str | None, param: str) -> list[Unread]:
        """What a client is told of a session in a language that no loaded voice speaks: it is heard, and an answer in
        it fails.
        """
        if not language or not self.spoken_languages or language in self.spoken_languages:
            return []
        spoken = ", ".join(self.spoken_languages)
        message = f"No loaded voice speaks '{language}'; there are: {spoken}; {OTHER_VOICES}."
        return [Unread("language_not_spoken", param, message)]

    def check_languages(self, languages: list[str] | None, param: str) -> list[str]:
        """The languages; none for null. Raises RemoteProtocolError as `check_language` does for any of them."""
        for language in languages or ():
            self.check_language(language, param)
        return languages or []


class WireSnapshot(msgspec.Struct):
    """What is stored of a conversation besides its items. `dialect`: its name in the table. `session`: the dialect's
    own JSON.
    """

    session_id: str
    dialect: str
    session: msgspec.Raw


class Resume(Enum):
    """Whether a session of a dialect outlives its connection: never, where the URL asks for it, or always."""

    NEVER = "never"
    ON_REQUEST = "on request"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One row of the table of dialects (`dialects.py`).

    `name`: in stored sessions, and where the table is listed. `matches`: whether an opening asks for this dialect; the
    first row that matches is taken. `connect`: makes the wire side of a connection. `paths`: URLs of its own, beside
    /v1/realtime. `client_first`: the server waits for a first message, which may resume a session instead.
    `subprotocol`: the WebSocket subprotocol that is accepted where a client offers it. `opens_secret`: whether it is
    the dialect of the session that the client secret in an opening was made for; without it, no secret opens it.
    """

    name: str
    matches: Callable[[Opening], bool]
    connect: Callable[[Opening, Context], WireConnection]
    paths: tuple[str, ...] = ()
    resume: Resume = Resume.NEVER
    client_first: bool = False
    subprotocol: str | None = None
    opens_secret: Callable[[Opening], bool] = lambda _: False


class WireConnection(Protocol):
    """The wire side of one connection: it reads the client's frames into commands, and writes events as frames.

    Nothing here waits or knows a socket. Call `open` first. A frame that is wrong is answered and asks nothing of the
    session: no method but `open` and `restore` raises for what a client sends.
    """

    # How the connection was opened, and what it was made from.
    opening: Opening
    context: Context

    @property
    def id(self) -> str:
        """The session's id as the client knows it; of a restored session it is the earlier one."""
        ...

    @property
    def dialect(self) -> str:
        """The dialect's name in metrics and stored sessions."""
        ...

    @property
    def epoch(self) -> int:
        """Words and audio of a response of an older epoch are not sent any more; 0 where a dialect has no epochs."""
        ...

    @property
    def idle_s(self) -> float | None:
        """Seconds without a frame of the client after which its session ends; None: never."""
        ...

    @property
    def closing(self) -> bool:
        """Whether the client has asked for the end of the session. The server then ends it at once: what is still to be
        transcribed or spoken is not sent.
        """
        ...

    @property
    def min_commit_ms(self) -> int:
        """How many milliseconds of audio a commit must at least have."""
        ...

    def open(self) -> list[Frame]:
        """What the client is told first. Raises RemoteProtocolError for an opening that cannot be served."""
        ...

    def feed(self, data: str | bytes | AppendAudio) -> Received[Command]:
        """Read one frame of the client, or audio that came beside the frames."""
        ...

    def too_large(self, data: str | bytes, max_bytes: int) -> list[Frame]:
        """The answer to a frame, `data`, that was larger than `max_bytes` and was not read. The session goes on."""
        ...

    def refuse(self, error: RemoteProtocolError, event_id: str | None) -> list[Frame]:
        """An error for the client, with its name for the message at fault. The session goes on."""
        ...

    def send(self, event: Event) -> list[Frame]:
        """The frames of an event; none where the dialect does not tell it, or where its epoch has passed.

        Raises LocalProtocolError for an event that no session of this dialect reports.
        """
        ...

    def close(self) -> list[Frame]:
        """What the client is told when the end that it asked for (`closing`) was carried out."""
        ...

    def control(self, data: str | bytes) -> Control | None:
        """The message, where it is about the connection itself, such as `session.resume`; None for any other."""
        ...

    def resumed(self, token: str, **facts: Any) -> Frame:
        """The first frame to a client that has resumed the session, with its new token; `facts` are further fields.

        Raises LocalProtocolError where sessions cannot be resumed.
        """
        ...

    def replaced(self) -> Frame:
        """The last frame to a connection whose session another one has resumed. Raises as `resumed`."""
        ...

    def snapshot(self) -> WireSnapshot | None:
        """What is stored of the session besides its items; None where there is nothing to restore."""
        ...

    def restore(self, kept: WireSnapshot) -> None:
        """Continue a session of an earlier process. Call it after `open`, whose frames are not sent then.

        Raises LocalProtocolError where sessions are not stored.
        """
        ...
