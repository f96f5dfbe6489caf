"""Cartesia's transcription: turns (`/stt/turns/websocket`), and commits by the client (`/stt/websocket`).

See docs/wire/cartesia.md. In both, audio comes in binary frames.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import msgspec

from antiphon.audio.incoming import Encoding
from antiphon.errors import RemoteProtocolError
from antiphon.events.languages import language_code
from antiphon.events.transcription import (
    CommitAudio,
    CommitRefused,
    GuessDropped,
    SessionEnding,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptGuessed,
    TranscriptionConfig,
)
from antiphon.protocols.connection import Command, Context, Dialect, Event, Resume
from antiphon.protocols.fields import decode
from antiphon.protocols.hearing import HearingConnection
from antiphon.protocols.opening import Opening
from antiphon.protocols.wire import Frame, Received, message
from antiphon.turns.end_of_turn import semantic_vad

TURNS, MANUAL = "/stt/turns/websocket", "/stt/websocket"
# The encodings of a client's audio.
ENCODINGS: Mapping[str, Encoding] = {
    "pcm_s16le": "s16",
    "pcm_f32le": "f32",
    "pcm_mulaw": "ulaw",
    "pcm_alaw": "alaw",
}
DEFAULT_HZ = 16_000
# The status in an error, by its code here; 400 for the errors of a client.
_STATUS = {"model_not_found": 404, "resource_exhausted": 429, "rate_limit_exceeded": 429, "server_error": 500}
# Query parameters that are read here.
PARAMETERS = frozenset(("model", "encoding", "sample_rate", "language", "keyterm", "cartesia_version"))


class _Command(msgspec.Struct):
    """A message in JSON. `type`: `close` ends the session; `config` is accepted, and has no effect."""

    type: str


class _CartesiaHearing(HearingConnection):
    """The common part of both paths."""

    def read_audio_fields(self) -> tuple[str | None, tuple[str, ...]]:
        """Set the encoding of the audio; return the language and the keyterms. Raises RemoteProtocolError."""
        query = self.query
        self.check_model(query.get("model", ""))
        encoding = ENCODINGS.get(query.get("encoding", "pcm_s16le"))
        if encoding is None:
            raise RemoteProtocolError("invalid_value", f"The encoding is one of {', '.join(ENCODINGS)}.", "encoding")
        self.decode_as(encoding, int(self.number("sample_rate", DEFAULT_HZ, 1, 1_000_000)))
        language = language_code(query["language"]) if query.get("language") else None
        self.context.check_language(language, "language")
        terms = tuple(value.strip() for name, value in self.opening.query if name == "keyterm" and value.strip())
        return language, terms

    def refuse(self, error: RemoteProtocolError, event_id: str | None) -> list[Frame]:
        """Return an error, which ends the session."""
        status = _STATUS.get(error.code, 400)
        self.finishing = 1008 if status < 500 else 1011, error.code
        return [
            message(
                type="error",
                error_code=error.code,
                title=error.code.replace("_", " "),
                message=error.message,
                status_code=status,
                request_id=self.id,
            )
        ]

    def read(self, data: str) -> Received[Command]:
        """Read a message: a word, or JSON with a type. Raises RemoteProtocolError."""
        kind = data.strip()
        if kind.startswith("{"):
            kind = decode(data, _Command).type
        match kind:
            case "close" | "done":
                return self.end()
            case "finalize":
                return Received([CommitAudio()])
            case "config":
                return Received()
            case _:
                raise RemoteProtocolError("invalid_value", f"There is no command '{kind[:40]}'.", "type")

    def _ending(self, event: SessionEnding) -> list[Frame]:
        return self.refuse(RemoteProtocolError(event.code, event.message), None)


class CartesiaTurns(_CartesiaHearing):
    """One connection with turns. The server decides when a turn ends, and guesses it before."""

    dialect = "cartesia_turns"

    def __init__(self, opening: Opening, context: Context) -> None:
        super().__init__(opening, context)
        # The text so far of each turn that has begun, and has not ended.
        self._texts: dict[int, str] = {}

    def configure(self) -> TranscriptionConfig:
        """Read the parameters of the URL. Raises RemoteProtocolError if one is invalid."""
        language, terms = self.read_audio_fields()
        return TranscriptionConfig(language=language, vad=semantic_vad(), preflight=True, keyterms=terms)

    def opened(self) -> list[Frame]:
        """Return the first message, with the connection's id."""
        return [message(type="connected", request_id=self.id)]

    def send(self, event: Event) -> list[Frame]:
        """Return the frames of an event; most events have none."""
        match event:
            case TranscriptDelta(turn, text):
                begin = self._begin(turn)
                self._texts[turn] += text
                return [*begin, self._turn("turn.update", self._texts[turn])]
            case TranscriptGuessed(turn, text) if text.strip():
                return [*self._begin(turn), self._turn("turn.eager_end", text)]
            case GuessDropped(turn) if turn in self._texts:
                return [message(type="turn.resume", request_id=self.id)]
            case TranscriptDone(turn, text) if text.strip() or turn in self._texts:
                frames = [*self._begin(turn), self._turn("turn.end", text)]
                del self._texts[turn]
                return frames
            case TranscriptFailed(turn) if turn in self._texts:
                return [self._turn("turn.end", self._texts.pop(turn))]
            case SessionEnding():
                return self._ending(event)
            case _:
                return []

    def _begin(self, turn: int) -> list[Frame]:
        if turn in self._texts:
            return []
        self._texts[turn] = ""
        return [message(type="turn.start", request_id=self.id)]

    def _turn(self, kind: str, text: str) -> Frame:
        return message(type=kind, request_id=self.id, transcript=text.strip())


class CartesiaManual(_CartesiaHearing):
    """One connection whose client commits the audio (`finalize`). The texts of its final transcripts are joined."""

    dialect = "cartesia"

    def __init__(self, opening: Opening, context: Context) -> None:
        super().__init__(opening, context)
        self._texts: defaultdict[int, str] = defaultdict(str)
        self._has_text = False

    def configure(self) -> TranscriptionConfig:
        """Read the parameters of the URL. Raises RemoteProtocolError if one is invalid."""
        language, terms = self.read_audio_fields()
        return TranscriptionConfig(language=language, keyterms=terms)

    def send(self, event: Event) -> list[Frame]:
        """Return the frames of an event; most events have none."""
        match event:
            case TranscriptDelta(turn, text):
                self._texts[turn] += text
                return [self._transcript(self._texts[turn], is_final=False)]
            case TranscriptDone(turn, text):
                self._texts.pop(turn, None)
                final = [self._transcript(text, is_final=True, language=event.language)] if text.strip() else []
                self._has_text = self._has_text or bool(final)
                return [*final, message(type="flush_done", request_id=self.id)]
            case CommitRefused():
                return [message(type="flush_done", request_id=self.id)]
            case TranscriptFailed(turn):
                self._texts.pop(turn, None)
                return [message(type="flush_done", request_id=self.id)]
            case SessionEnding():
                return self._ending(event)
            case _:
                return []

    def close(self) -> list[Frame]:
        """Return the message that ends a session that the client has closed."""
        return [message(type="done", request_id=self.id)] if self.was_ended else []

    def _transcript(self, text: str, *, is_final: bool, language: str = "") -> Frame:
        # Clients join the texts without adding spaces.
        text = f" {text.strip()}" if self._has_text else text.strip()
        more = {"language": language} if language else {}
        return message(type="transcript", is_final=is_final, request_id=self.id, text=text, **more)


def _connect(opening: Opening, context: Context) -> CartesiaTurns | CartesiaManual:
    return CartesiaTurns(opening, context) if opening.path == TURNS else CartesiaManual(opening, context)


DIALECT = Dialect(
    name="cartesia",
    matches=lambda opening: opening.path in (TURNS, MANUAL),
    connect=_connect,
    paths=(TURNS, MANUAL),
    parameters=PARAMETERS,
    resume=Resume.NEVER,
)
