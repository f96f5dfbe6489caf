"""Scribe over a WebSocket (`/v1/speech-to-text/realtime`): audio in, transcripts out. See docs/wire/elevenlabs.md."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from antiphon.audio.incoming import Encoding
from antiphon.errors import RemoteProtocolError
from antiphon.events.data_uri import decode_base64
from antiphon.events.languages import language_code
from antiphon.events.transcription import (
    CommitAudio,
    CommitRefused,
    ServerVad,
    SessionEnding,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptionConfig,
)
from antiphon.events.words import Word
from antiphon.protocols.connection import Command, Context, Dialect, Event, Resume
from antiphon.protocols.fields import Reader, Text
from antiphon.protocols.hearing import HearingConnection
from antiphon.protocols.opening import TRUE_VALUES, Opening
from antiphon.protocols.realtime.input_fields import MAX_KEYTERM_CHARS, MAX_KEYTERMS
from antiphon.protocols.wire import Frame, Received, message

PATH = "/v1/speech-to-text/realtime"
# The formats of a client's audio: each has an encoding, and its rate in the name.
FORMATS: Mapping[str, tuple[Encoding, int]] = {
    **{f"pcm_{rate_hz}": ("s16", rate_hz) for rate_hz in (8000, 16000, 22050, 24000, 44100, 48000)},
    "ulaw_8000": ("ulaw", 8000),
}
# The default pause that ends a segment, in seconds, and its range.
SILENCE_S, MIN_SILENCE_S, MAX_SILENCE_S = 1.5, 0.1, 5.0
# The probability from which a frame counts as speech, by default.
VAD_THRESHOLD = 0.4
# The message type of an error, by its code here. All other errors are `error`.
_ERRORS = {
    "invalid_value": "input_error",
    "invalid_type": "input_error",
    "invalid_json": "input_error",
    "missing_required_parameter": "input_error",
    "model_not_found": "input_error",
    "too_large": "chunk_size_exceeded",
    "session_expired": "session_time_limit_exceeded",
    "resource_exhausted": "resource_exhausted",
    "memory_limit_exceeded": "resource_exhausted",
    "rate_limit_exceeded": "rate_limited",
    "input_audio_buffer_overflow": "queue_overflow",
}
# Query parameters that are read here.
PARAMETERS = frozenset(
    (
        *("model_id", "audio_format", "commit_strategy", "vad_silence_threshold_secs", "vad_threshold"),
        *("language_code", "include_timestamps", "include_language_detection", "keyterms"),
    )
)


class InputAudioChunk(msgspec.Struct, tag_field="message_type", tag="input_audio_chunk"):
    """Appends audio in base64, in the format of the URL. `commit`: whether it ends the segment."""

    audio_base_64: str
    commit: bool | None = None
    # Accepted, but has no effect: the URL has the rate.
    sample_rate: object = None
    # Text before the audio, as a hint for the model.
    previous_text: Text | None = None


class CommitSegment(msgspec.Struct, tag_field="message_type", tag="commit"):
    """Ends the segment with the audio that was sent so far."""


_MESSAGE: Reader[InputAudioChunk | CommitSegment] = Reader(InputAudioChunk | CommitSegment)


class ScribeWord(msgspec.Struct):
    """A word, or the space between two words. Times are seconds of the audio."""

    # The word with its punctuation, or the space.
    text: str
    # When it begins.
    start: float
    # When it ends.
    end: float
    # `word` or `spacing`.
    type: str
    # The speaker, if speakers are distinguished.
    speaker_id: str | None
    # Logarithm of the model's probability of the word.
    logprob: float


def scribe_words(words: Sequence[Word], speaker: str | None = None) -> Iterator[ScribeWord]:
    """Yield words and the spaces between them."""
    end_s: float | None = None
    for word in words:
        if end_s is not None:
            yield ScribeWord(" ", round(end_s, 3), round(word.start_s, 3), "spacing", speaker, 0.0)
        logprob = round(math.log(max(word.probability, 1e-6)), 4)
        yield ScribeWord(word.text, round(word.start_s, 3), round(word.end_s, 3), "word", speaker, logprob)
        end_s = word.end_s


class ScribeConnection(HearingConnection):
    """One connection. A segment ends with the client's commit, or at a pause (`commit_strategy=vad`)."""

    dialect = "scribe"

    def __init__(self, opening: Opening, context: Context) -> None:
        super().__init__(opening, context)
        self._texts: defaultdict[int, str] = defaultdict(str)

    def configure(self) -> TranscriptionConfig:
        """Read the parameters of the URL. Raises RemoteProtocolError if one is invalid."""
        query = self.query
        self.check_model(query.get("model_id", ""))
        found = FORMATS.get(query.get("audio_format", "pcm_16000"))
        if found is None:
            raise _invalid("audio_format", ", ".join(FORMATS))
        self.decode_as(*found)
        strategy = query.get("commit_strategy", "manual")
        if strategy not in ("manual", "vad"):
            raise _invalid("commit_strategy", "manual or vad")
        silence_s = self.number("vad_silence_threshold_secs", SILENCE_S, MIN_SILENCE_S, MAX_SILENCE_S)
        threshold = self.number("vad_threshold", VAD_THRESHOLD, 0.0, 1.0)
        code = query.get("language_code", "")
        language = language_code(code) if code else None
        self.context.check_language(language, "language_code")
        terms = tuple(value.strip() for name, value in self.opening.query if name == "keyterms" and value.strip())
        if len(terms) > MAX_KEYTERMS or any(len(term) > MAX_KEYTERM_CHARS for term in terms):
            raise _invalid("keyterms", f"at most {MAX_KEYTERMS} terms of {MAX_KEYTERM_CHARS} characters")
        return TranscriptionConfig(
            language=language,
            vad=ServerVad(threshold, silence_duration_ms=round(silence_s * 1000)) if strategy == "vad" else None,
            word_times=self._flag("include_timestamps"),
            keyterms=terms,
        )

    def opened(self) -> list[Frame]:
        """Return the first message, with the configuration."""
        name, vad = self.query.get("audio_format", "pcm_16000"), self.config.vad
        config = {
            "sample_rate": FORMATS[name][1],
            "audio_format": name,
            "language_code": self.config.language,
            "model_id": self.query.get("model_id") or self.context.models.loaded[0],
            "commit_strategy": "vad" if vad else "manual",
            "vad_silence_threshold_secs": vad.silence_duration_ms / 1000 if vad else SILENCE_S,
            "vad_threshold": vad.threshold if vad else VAD_THRESHOLD,
            "include_timestamps": self.config.word_times,
            "include_language_detection": self._flag("include_language_detection"),
        }
        return [message(message_type="session_started", session_id=self.id, config=config)]

    def read(self, data: str) -> Received[Command]:
        """Read a message. Raises RemoteProtocolError."""
        match _MESSAGE.read(data):
            case InputAudioChunk(audio, commit):
                try:
                    pcm = decode_base64(audio)
                except ValueError:
                    raise _invalid("audio_base_64", "base64") from None
                received = self.hear(pcm)
                return Received([*received.commands, CommitAudio()]) if commit else received
            case CommitSegment():
                return Received([CommitAudio()])

    def refuse(self, error: RemoteProtocolError, event_id: str | None) -> list[Frame]:
        """Return an error, which ends the session."""
        kind = _ERRORS.get(error.code, "error")
        self.finishing = 1008, kind
        return [message(message_type=kind, error=error.message)]

    def send(self, event: Event) -> list[Frame]:
        """Return the frames of an event; most events have none."""
        match event:
            case TranscriptDelta(turn, text):
                self._texts[turn] += text
                return [message(message_type="partial_transcript", text=self._texts[turn].strip())]
            case TranscriptDone():
                return self._committed(event)
            case CommitRefused():
                return [message(message_type="commit_throttled", error="There is no new audio to commit.")]
            case TranscriptFailed(turn, text):
                self._texts.pop(turn, None)
                return [message(message_type="transcriber_error", error=text)]
            case SessionEnding(code, text):
                return self.refuse(RemoteProtocolError(code, text), None)
            case _:
                return []

    def _committed(self, done: TranscriptDone) -> list[Frame]:
        self._texts.pop(done.turn, None)
        text = done.text.strip()
        if not text and self.config.vad:
            return []
        frames = [message(message_type="committed_transcript", text=text)]
        if self.config.word_times or self._flag("include_language_detection"):
            kind, words = "committed_transcript_with_timestamps", list(scribe_words(done.words))
            frames.append(message(message_type=kind, text=text, language_code=done.language or None, words=words))
        return frames

    def _flag(self, name: str) -> bool:
        return self.query.get(name, "").lower() in TRUE_VALUES


def _invalid(name: str, expected: str) -> RemoteProtocolError:
    return RemoteProtocolError("invalid_value", f"Invalid value for '{name}': expected {expected}.", name)


DIALECT = Dialect(
    name="scribe",
    matches=lambda opening: opening.path == PATH,
    connect=ScribeConnection,
    paths=(PATH,),
    parameters=PARAMETERS,
    resume=Resume.NEVER,
)
