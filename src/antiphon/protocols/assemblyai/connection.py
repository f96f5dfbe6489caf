"""One connection of AssemblyAI's streaming API, version 3: audio in, turns out. See docs/wire/assemblyai.md.

A turn grows with its final words, and ends once. Transcripts are always formatted, so the end of a turn is both
`end_of_turn` and `turn_is_formatted`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from antiphon.errors import RemoteProtocolError
from antiphon.events.transcription import (
    CommitAudio,
    SessionEnding,
    SpeechStarted,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptGuessed,
    TranscriptionConfig,
)
from antiphon.events.words import Word
from antiphon.protocols.assemblyai.messages import (
    ENCODINGS,
    AssemblyKeepAlive,
    AssemblyMessage,
    AssemblyWord,
    ForceEndpoint,
    Terminate,
    UpdateConfiguration,
    apply,
    invalid,
    settings_of,
    shown_words,
    wants_labels,
)
from antiphon.protocols.connection import Command, Context, Dialect, Event, Resume
from antiphon.protocols.fields import Reader
from antiphon.protocols.hearing import HearingConnection
from antiphon.protocols.opening import Opening
from antiphon.protocols.wire import Frame, Received, message

# Close codes: an error of the server, an invalid setting or message, the end of the longest session.
SERVER_ERROR, INVALID_INPUT, EXPIRED = 3005, 3006, 3008
# Range of the idle timeout that a client may set, in seconds.
MIN_IDLE_S, MAX_IDLE_S = 5.0, 3600.0
# The fields of a `Turn` message.
TurnFields = dict[str, str | int | float | list[AssemblyWord] | None]
_MESSAGE: Reader[AssemblyMessage] = Reader(AssemblyMessage)
# Query parameters that are read here, and in messages.py.
PARAMETERS = frozenset(
    (
        *("sample_rate", "encoding", "speech_model", "format_turns", "end_of_turn_confidence_threshold"),
        *("max_turn_silence", "vad_threshold", "keyterms_prompt", "prompt", "language_code", "language_codes"),
        *("speaker_labels", "inactivity_timeout"),
    )
)


@dataclass(slots=True)
class _Turn:
    """A turn that has words. `order`: its number on the wire, which counts only such turns."""

    order: int
    text: str = ""
    words: list[Word] = field(default_factory=list)
    # The text that was sent as an utterance.
    sent_text: str = ""

    def shown(self) -> TurnFields:
        """Return the fields of a `Turn` message."""
        return {
            "type": "Turn",
            "turn_order": self.order,
            "turn_is_formatted": False,
            "end_of_turn": False,
            "transcript": self.text.strip(),
            "end_of_turn_confidence": 0.0,
            "words": shown_words(self.words),
            "utterance": "",
        }

    def utterance(self, text: str) -> str:
        """Return the part of the turn's text that was not sent as an utterance yet."""
        text = text.strip()
        new = text.removeprefix(self.sent_text) if text.startswith(self.sent_text) else ""
        self.sent_text = text if new else self.sent_text
        return new.strip()


class AssemblyConnection(HearingConnection):
    """One connection. Its settings are in the URL, and may be changed by messages."""

    dialect = "assemblyai"

    def __init__(self, opening: Opening, context: Context) -> None:
        super().__init__(opening, context)
        self._opened_s = context.steady_s()
        # The turns that have words, and have not ended, by their numbers in the session.
        self._turns: dict[int, _Turn] = {}
        self._num_turns = 0

    def configure(self) -> TranscriptionConfig:
        """Read the settings in the URL. Raises RemoteProtocolError if one is invalid."""
        query = self.query
        self.check_model(query.get("speech_model", ""))
        encoding = ENCODINGS.get(query.get("encoding", ""))
        if encoding is None:
            raise invalid("encoding", ", ".join(filter(None, ENCODINGS)))
        self.decode_as(encoding, int(self.number("sample_rate", 16_000, 1, 1_000_000)))
        if query.get("inactivity_timeout"):
            self.idle_s = self.number("inactivity_timeout", 0, MIN_IDLE_S, MAX_IDLE_S)
        labels = wants_labels(query, self.context)
        # A guess ends a turn sooner, and clients may answer it.
        config = TranscriptionConfig(word_times=True, preflight=True, speaker_labels=labels)
        return apply(settings_of(query), config, self.context)

    def opened(self) -> list[Frame]:
        """Return the first message, with the session's id."""
        return [message(type="Begin", id=self.id, expires_at=self.context.expires_at)]

    # --- from the client

    def read(self, data: str) -> Received[Command]:
        """Read a text message. Raises RemoteProtocolError."""
        match _MESSAGE.read(data):
            case UpdateConfiguration() as update:
                return Received(self.reconfigure(apply(update, self.config, self.context)))
            case ForceEndpoint():
                return Received([CommitAudio()])
            case AssemblyKeepAlive():
                return Received()
            case Terminate():
                return self.end()

    def refuse(self, error: RemoteProtocolError, event_id: str | None) -> list[Frame]:
        """Return an error, which ends the session."""
        return self._failed(INVALID_INPUT, error.message)

    def _failed(self, code: int, text: str) -> list[Frame]:
        self.finishing = code, "See Error message for details"
        return [message(type="Error", error_code=code, error=text)]

    # --- to the client

    def send(self, event: Event) -> list[Frame]:
        """Return the frames of an event; most events have none."""
        match event:
            case SpeechStarted(at_ms=at_ms):
                return [message(type="SpeechStarted", timestamp=at_ms)]
            case TranscriptDelta(number, text, words):
                turn = self._turn(number)
                turn.text += text
                turn.words += words
                return [message(**turn.shown())]
            case TranscriptGuessed(number, text) if text.strip():
                turn = self._turn(number)
                return [message(**turn.shown() | {"utterance": turn.utterance(text)})]
            case TranscriptDone():
                return self._ended(event)
            case TranscriptFailed(number, text):
                self._turns.pop(number, None)
                return [message(type="Warning", warning_code=SERVER_ERROR, warning=text)]
            case SessionEnding(code, text):
                return self._failed(EXPIRED if code == "session_expired" else SERVER_ERROR, text)
            case _:
                return []

    def close(self) -> list[Frame]:
        """Return the message that ends a session that the client has terminated."""
        if not self.was_ended:
            return []
        seconds = self.context.steady_s() - self._opened_s
        return [
            message(
                type="Termination",
                audio_duration_seconds=round(self.received_s),
                session_duration_seconds=round(seconds),
            )
        ]

    def _turn(self, number: int) -> _Turn:
        if number not in self._turns:
            self._turns[number] = _Turn(self._num_turns)
            self._num_turns += 1
        return self._turns[number]

    def _ended(self, done: TranscriptDone) -> list[Frame]:
        if not done.text.strip() and done.turn not in self._turns:
            return []
        turn, label = self._turn(done.turn), done.speaker_label or None
        del self._turns[done.turn]
        text = done.text.strip()
        ended = {
            "turn_is_formatted": True,
            "end_of_turn": True,
            "transcript": text,
            "end_of_turn_confidence": 1.0,
            "words": shown_words(done.words, label),
            "utterance": turn.utterance(text),
            "speaker_label": label,
        }
        if done.language:
            ended["language_code"] = done.language
        return [message(**turn.shown() | ended)]


DIALECT = Dialect(
    name="assemblyai",
    matches=lambda opening: opening.path == "/v3/ws",
    connect=AssemblyConnection,
    paths=("/v3/ws",),
    parameters=PARAMETERS,
    resume=Resume.NEVER,
)
