"""Reads recorded sessions back, and gathers their turns."""

from __future__ import annotations

import json
import os
import wave
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from antiphon.audio import Pcm
from antiphon.audio.pcm import Resampler, from_pcm16
from antiphon.errors import StoreError

# The version of the format of recordings. Other versions are refused.
VERSION = 1
# Bytes at the end of a file that contain the last lines of nearly every recording.
LAST_LINES_BYTES = 1 << 16


class SessionFacts(msgspec.Struct, kw_only=True):
    """The content of a recording's session.json."""

    # The version of the recording's format.
    version: int = VERSION
    # The session's id.
    id: str = ""
    # When the session began, in Unix seconds.
    began: int = 0
    # The connection's request, in the form in which the recording server wrote it.
    opening: msgspec.Raw = msgspec.Raw(b"{}")
    # The ids of the loaded models.
    models: tuple[str, ...] = ()
    # How the texts were redacted (redaction.py). If the value is not "off", the audio is silence.
    redaction: str = "off"


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """A message of the client as JSON text, received `at_s` seconds after the session began."""

    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class RecordedAudio:
    """Audio of the client: its first sample in the tape's `input_pcm`, and its number of samples."""

    at_s: float
    start: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """A message of the server as JSON text, or audio of a response. The `type` of audio is "sound"."""

    at_s: float
    text: str

    @property
    def type(self) -> str:
        """The message's `type`; empty if it has none."""
        return _type_decoder.decode(self.text).type


TapeEntry = RecordedMessage | RecordedAudio | RecordedEvent


@dataclass(frozen=True, slots=True)
class Mark:
    """An event that is drawn as a line across the session: a response that was cut off, or an error."""

    at_s: float
    label: str


@dataclass(slots=True)
class RecordedTurn:
    """One turn of the user and its response. Times are seconds since the session began; None if it did not happen."""

    # The item of the turn.
    item_id: str
    # When the user's speech began.
    started: float | None = None
    # When the user's speech ended, or a written message was sent.
    ended: float | None = None
    # When the transcript was complete.
    transcribed: float | None = None
    # The transcript, or the text of a written message.
    transcript: str = ""
    # The response to the turn; "" without one.
    response_id: str = ""
    # When the response was created.
    asked: float | None = None
    # When the response's first text was sent.
    first_text: float | None = None
    # When the response's first audio was sent.
    first_sound: float | None = None
    # When the response was done.
    done: float | None = None
    # The response's status.
    status: str = ""
    # The response's text.
    answer: str = ""


@dataclass(slots=True)
class Tape:
    """A recorded session, read back from its folder."""

    # The content of session.json.
    facts: SessionFacts
    # The messages and audio of both sides, in order.
    entries: list[TapeEntry]
    # The client's audio, float32 [num_samples], 16 kHz.
    input_pcm: Pcm
    # The audio of the responses; empty if there is none.
    output_pcm: Pcm = field(default_factory=lambda: np.zeros(0, np.float32))
    # The sample rate of `output_pcm`.
    output_hz: int = 24_000
    # The number of recordings from which it was joined.
    num_parts: int = 1

    @classmethod
    def read(cls, folder: Path) -> Tape:
        """Read a session's folder. An incomplete line of a killed process is dropped.

        Raises StoreError if the folder is not a recorded session, or has another version.
        """
        try:
            facts = msgspec.json.decode((folder / "session.json").read_bytes(), type=SessionFacts)
            lines = (folder / "events.jsonl").read_bytes().split(b"\n")
            input_pcm, _ = _read_wav(folder / "in.wav")
            output_pcm, output_hz = input_pcm[:0], 24_000
            if (folder / "out.wav").exists():
                output_pcm, output_hz = _read_wav(folder / "out.wav")
        except FileNotFoundError as error:
            missing = f"it has no {Path(error.filename).name}" if folder.is_dir() else "there is no such folder"
            raise StoreError(f"{folder} is not a recorded session: {missing}") from error
        except (OSError, EOFError, wave.Error, msgspec.DecodeError) as error:
            raise StoreError(f"{folder} is not a recorded session: {error}") from error
        if facts.version != VERSION:
            raise StoreError(f"{folder} was recorded in version {facts.version}; this reads {VERSION}")
        return cls(facts, list(_entries(lines)), input_pcm, output_pcm, output_hz)

    @classmethod
    def read_whole(cls, folder: Path) -> Tape:
        """Read a session's folder, and join it with the other recordings of the same id next to it, ordered by time.

        A session that moved has a recording on each host. Raises the errors of `read`.
        """
        tape = cls.read(folder)
        found = sessions_in(folder.resolve().parent) if tape.facts.id else []
        parts = [session.folder for session in found if session.facts.id == tape.facts.id]
        return joined([cls.read(part) for part in parts]) if len(parts) > 1 else tape

    @property
    def duration_s(self) -> float:
        """The time of the last entry in seconds; 0 without entries."""
        return self.entries[-1].at_s if self.entries else 0.0

    def outputs(self) -> list[RecordedEvent]:
        """Return the entries of the server's messages and audio, in order."""
        return [e for e in self.entries if isinstance(e, RecordedEvent)]


def joined(parts: list[Tape]) -> Tape:
    """Join the recordings of one session. The facts are those of the first one, and times count from its beginning.

    A recording's start time is in whole seconds, so the joint is accurate to a second. No recording begins before
    the end of the previous one.
    """
    first = parts[0]
    entries, inputs, outputs, end_s, num_samples = list[TapeEntry](), list[Pcm](), list[Pcm](), 0.0, 0
    for part in parts:
        shift_s = max(part.facts.began - first.facts.began, end_s)
        for entry in part.entries:
            moved = replace(entry, at_s=entry.at_s + shift_s)
            entries.append(
                replace(moved, start=moved.start + num_samples) if isinstance(moved, RecordedAudio) else moved
            )
        end_s, num_samples = shift_s + part.duration_s, num_samples + len(part.input_pcm)
        inputs.append(part.input_pcm)
        if len(part.output_pcm):
            resampler = Resampler(part.output_hz, first.output_hz)
            outputs += [resampler.feed(part.output_pcm), resampler.flush()]
    redaction = next((part.facts.redaction for part in parts if part.facts.redaction != "off"), "off")
    facts = msgspec.structs.replace(first.facts, redaction=redaction)
    output_pcm = np.concatenate(outputs) if outputs else first.output_pcm
    return Tape(facts, entries, np.concatenate(inputs), output_pcm, first.output_hz, len(parts))


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """One of the recordings in a folder: its own folder, its facts, and its length in seconds."""

    folder: Path
    facts: SessionFacts
    seconds: float


def sessions_in(folder: Path) -> list[RecordedSession]:
    """Return the sessions that are recorded in `folder`, each in its own folder, ordered by the time when they began.

    Returns an empty list if `folder` is not a folder, or is itself a session's folder. Reads only the end of each
    recording, and skips unreadable recordings.
    """
    found = []
    for path in sorted(folder.glob("*/session.json")):
        try:
            facts = msgspec.json.decode(path.read_bytes(), type=SessionFacts)
            found.append(RecordedSession(path.parent, facts, _last_s(path.parent / "events.jsonl")))
        except (OSError, msgspec.DecodeError):
            continue
    return sorted(found, key=lambda session: session.facts.began)


def _last_s(events: Path) -> float:
    """Return the time of the last entry, in seconds; 0 without entries."""
    with events.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        # A line with an image may be longer than LAST_LINES_BYTES; then the whole file is read.
        for length in (min(size, LAST_LINES_BYTES), size):
            file.seek(size - length)
            times = [entry.at_s for entry in _entries(file.read(length).split(b"\n"))]
            if times:
                return times[-1]
    return 0.0


def _entries(lines: list[bytes]) -> Iterator[TapeEntry]:
    for line in lines:
        try:
            # The standard library's json, because a client's text may contain half of a surrogate pair, which msgspec
            # rejects.
            row = json.loads(line)
        except ValueError:
            continue
        match row:
            case {"t": int() | float() as at_s, "in": message}:
                yield RecordedMessage(at_s, json.dumps(message))
            case {"t": int() | float() as at_s, "sound": [int() as start, int() as num_samples]}:
                yield RecordedAudio(at_s, start, num_samples)
            case {"t": int() | float() as at_s, "out": event}:
                yield RecordedEvent(at_s, json.dumps(event))


def _read_wav(path: Path) -> tuple[Pcm, int]:
    with wave.open(str(path), "rb") as file:
        return from_pcm16(file.readframes(file.getnframes())), file.getframerate()


# --- the server's events that make up turns and marks


class _Type(msgspec.Struct):
    type: str = ""


class _SpeechStarted(msgspec.Struct, tag="input_audio_buffer.speech_started"):
    item_id: str


class _Committed(msgspec.Struct, tag="input_audio_buffer.committed"):
    item_id: str


class _Transcribed(msgspec.Struct, tag="conversation.item.input_audio_transcription.completed"):
    item_id: str
    transcript: str


class _Content(msgspec.Struct):
    text: str | None = None


class _Item(msgspec.Struct):
    id: str
    role: str | None = None
    content: list[_Content] | None = None


class _ItemAdded(msgspec.Struct, tag="conversation.item.added"):
    item: _Item


class _BetaItemAdded(_ItemAdded, tag="conversation.item.created"):
    """The same event in the beta protocol."""


class _Response(msgspec.Struct):
    id: str
    status: str = ""


class _ResponseCreated(msgspec.Struct, tag="response.created"):
    response: _Response


class _TextDelta(msgspec.Struct, tag="response.output_text.delta"):
    response_id: str
    delta: str


class _SpokenTextDelta(_TextDelta, tag="response.output_audio_transcript.delta"):
    """The text of a spoken response."""


class _BetaTextDelta(_TextDelta, tag="response.text.delta"):
    """The same event in the beta protocol."""


class _BetaSpokenTextDelta(_TextDelta, tag="response.audio_transcript.delta"):
    """The text of a spoken response, in the beta protocol."""


class _Sound(msgspec.Struct, tag="sound"):
    """Audio of a response. The recording does not name the response."""


class _ResponseDone(msgspec.Struct, tag="response.done"):
    response: _Response


class _Truncated(msgspec.Struct, tag="conversation.item.truncated"):
    audio_end_ms: int


class _ErrorBody(msgspec.Struct):
    message: str = ""


class _Error(msgspec.Struct, tag="error"):
    """An error, which is text in the vLLM dialect."""

    error: _ErrorBody | str | None = None


_ServerEvent = (
    _SpeechStarted
    | _Committed
    | _Transcribed
    | _ItemAdded
    | _BetaItemAdded
    | _ResponseCreated
    | _TextDelta
    | _SpokenTextDelta
    | _BetaTextDelta
    | _BetaSpokenTextDelta
    | _Sound
    | _ResponseDone
    | _Truncated
    | _Error
)
_type_decoder = msgspec.json.Decoder(_Type)
_event_decoder: msgspec.json.Decoder[_ServerEvent] = msgspec.json.Decoder(_ServerEvent)


def _event_of(entry: RecordedEvent) -> _ServerEvent | None:
    """Decode an event; return None for other types, and for content that msgspec rejects."""
    try:
        return _event_decoder.decode(entry.text)
    except msgspec.DecodeError:
        return None


def marks(outputs: list[RecordedEvent]) -> list[Mark]:
    """Return the cuts of responses with their positions, and the errors with their messages, in order of time."""
    found = []
    for entry in outputs:
        match _event_of(entry):
            case _Truncated(audio_end_ms=end_ms):
                found.append(Mark(entry.at_s, f"cut at {end_ms} ms"))
            case _Error(error=_ErrorBody(message=label)) | _Error(error=str(label)):
                found.append(Mark(entry.at_s, label))
            case _Error():
                found.append(Mark(entry.at_s, ""))
            case _:
                pass
    return found


def turns(outputs: list[RecordedEvent]) -> list[RecordedTurn]:
    """Return the turns of a session from its server's events, in order.

    A response belongs to the last earlier turn without a response. If there is no such turn, it is a turn by itself.
    """
    reader = _TurnReader()
    for entry in outputs:
        if event := _event_of(entry):
            reader.read(event, entry.at_s)
    return list(reader.turns.values())


@dataclass(slots=True)
class _TurnReader:
    """Gathers turns from a session's events, which must be read in order."""

    turns: dict[str, RecordedTurn] = field(default_factory=dict)
    _by_response: dict[str, RecordedTurn] = field(default_factory=dict)

    def read(self, event: _ServerEvent, at_s: float) -> None:
        """Read one event of the server, at its time in seconds."""
        match event:
            case _SpeechStarted(item_id=item_id):
                self._turn(item_id).started = at_s
            case _Committed(item_id=item_id):
                self._turn(item_id).ended = at_s
            case _Transcribed(item_id=item_id, transcript=transcript):
                turn = self._turn(item_id)
                turn.transcribed, turn.transcript = at_s, transcript
            case _ItemAdded(item=_Item(id=item_id, role="user", content=content)):
                text = " ".join(part.text or "" for part in content or ())
                if text.strip():
                    turn = self._turn(item_id)
                    turn.ended, turn.transcript = at_s, text
            case _:
                self._read_response(event, at_s)

    def _read_response(self, event: _ServerEvent, at_s: float) -> None:
        match event:
            case _ResponseCreated(response=response):
                unanswered = next((t for t in reversed(self.turns.values()) if not t.response_id), None)
                turn = unanswered or self._turn(response.id)
                turn.response_id, turn.asked = response.id, at_s
                self._by_response[response.id] = turn
            case _TextDelta(response_id=response_id, delta=delta):
                turn = self._by_response.get(response_id, RecordedTurn(""))
                turn.first_text = at_s if turn.first_text is None else turn.first_text
                turn.answer += delta
            case _Sound():
                # The audio belongs to the newest response that is not done.
                under_way = [t for t in self._by_response.values() if t.done is None]
                for turn in under_way[-1:]:
                    turn.first_sound = at_s if turn.first_sound is None else turn.first_sound
            case _ResponseDone(response=response):
                turn = self._by_response.get(response.id, RecordedTurn(""))
                turn.done, turn.status = at_s, response.status
            case _:
                return

    def _turn(self, item_id: str) -> RecordedTurn:
        return self.turns.setdefault(item_id, RecordedTurn(item_id))
