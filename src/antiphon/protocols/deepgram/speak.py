"""Deepgram's speech, `/v1/speak`: a text over HTTP, or pieces of text over a WebSocket. See docs/wire/deepgram.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from antiphon.audio import SpeechFormat
from antiphon.audio.line.g711 import to_alaw, to_ulaw
from antiphon.audio.pcm import from_pcm16
from antiphon.audio.wav import ALAW, PCM, ULAW, wav_header
from antiphon.errors import RemoteProtocolError
from antiphon.events.speech import (
    AppendText,
    CancelSpeech,
    ConfigureSpeech,
    FlushText,
    SentenceAudio,
    SentenceDone,
    SpeechCommand,
    SpeechConfig,
    SpeechEvent,
    UtteranceDone,
)
from antiphon.protocols.deepgram.forms import VERSION, model_uuid
from antiphon.protocols.deepgram.query import MAX_SHOWN_CHARS, DeepgramQuery
from antiphon.protocols.fields import Reader, Text
from antiphon.protocols.wire import Frame, NewId, Received, message

PATH = "/v1/speak"
# The parameters of both forms.
PARAMETERS = frozenset(
    (
        *("model", "encoding", "sample_rate", "container", "bit_rate"),
        *("speed", "callback", "callback_method", "mip_opt_out", "tag"),
    )
)
# The format of each encoding, its sample rate in Hz if none is given, and its format tag in a WAV file.
_ENCODINGS: dict[str, tuple[SpeechFormat, int | None, int]] = {
    "linear16": ("pcm", 24_000, PCM),
    "mulaw": ("pcm", 8_000, ULAW),
    "alaw": ("pcm", 8_000, ALAW),
    "mp3": ("mp3", None, 0),
    "opus": ("opus", 48_000, 0),
    "flac": ("flac", 24_000, 0),
    "aac": ("aac", None, 0),
}
LIVE_ENCODINGS = ("linear16", "mulaw", "alaw")
MEDIA_TYPES = {"linear16": "audio/l16", "mulaw": "audio/mulaw", "alaw": "audio/alaw"}
# Finds the voice and the language that a model's name stands for; None for the default. Raises RemoteProtocolError.
FindVoice = Callable[[str], tuple[str | None, str | None]]
# Punctuation after which the next piece of text begins a word of its own.
_ENDS = (".", "!", "?", ",", ";", ":")


class Speak(msgspec.Struct, tag_field="type", tag="Speak"):
    """Adds text. Complete sentences are spoken at once."""

    text: Text


class Flush(msgspec.Struct, tag_field="type", tag="Flush"):
    """Speaks the text so far to its end."""


class Clear(msgspec.Struct, tag_field="type", tag="Clear"):
    """Drops all text and audio that was not sent yet."""


class CloseSpeech(msgspec.Struct, tag_field="type", tag="Close"):
    """Closes the stream after the text so far is spoken."""


SpeakMessage = Speak | Flush | Clear | CloseSpeech
_MESSAGE: Reader[SpeakMessage] = Reader(SpeakMessage)


class SpeakBody(msgspec.Struct):
    """The body of a request over HTTP."""

    text: Text


class SpeakQuery:
    """The checked query of a request. `voices` and `languages` are the synthesizer's.

    - `config`: how to speak. Audio is streamed.
    - `encoding`: the name of the encoding, `linear16` for a WebSocket if none is given, else `mp3`.
    """

    def __init__(self, query: DeepgramQuery, find_voice: FindVoice, *, live: bool) -> None:
        self.encoding = query.text("encoding", "linear16" if live else "mp3")
        if self.encoding not in (LIVE_ENCODINGS if live else _ENCODINGS):
            raise query.invalid("encoding", f"one of {', '.join(LIVE_ENCODINGS if live else _ENCODINGS)}")
        format_, rate_hz, self._tag = _ENCODINGS[self.encoding]
        if query.text("sample_rate") and rate_hz:
            rate_hz = round(query.number("sample_rate", rate_hz, 8_000, 48_000))
        container = query.text("container", "none" if live or not self._tag else "wav")
        if container not in ("none", "wav", "ogg") or (container == "wav" and not self._tag):
            raise query.invalid("container", f"the container of {self.encoding}")
        self._has_header = container == "wav"
        voice, language = find_voice(query.text("model", "aura-2"))
        speed = query.number("speed", 1.0, 0.7, 1.5)
        if live and speed != 1.0:
            raise RemoteProtocolError("unsupported_parameter", "A live stream has no speed.", "speed")
        self.config = SpeechConfig(voice, format=format_, stream=True, rate_hz=rate_hz, language=language, speed=speed)

    @property
    def media_type(self) -> str:
        """The content type of the response, without that of formats that the encoder names."""
        kind = MEDIA_TYPES.get(self.encoding, "")
        if self._has_header:
            return "audio/wav"
        return f"{kind};rate={self.config.rate_hz}" if kind else ""

    def header(self) -> bytes:
        """Return the bytes before the audio."""
        assert self.config.rate_hz or not self._has_header
        return wav_header(self.config.rate_hz or 0, tag=self._tag) if self._has_header else b""

    def encoded(self, data: bytes) -> bytes:
        """Return audio of the session in the requested encoding."""
        if self.encoding == "mulaw":
            return to_ulaw(from_pcm16(data))
        return to_alaw(from_pcm16(data)) if self.encoding == "alaw" else data


class SpeakConnection:
    """One stream of text. `model` is the name of the synthesizer."""

    dialect = "deepgram_speak"
    configured, closing, idle_s = True, False, 3600.0

    def __init__(self, asked: SpeakQuery, model: str, new_id: NewId) -> None:
        self._asked, self._model = asked, model
        self._request_id = new_id("")
        self.finishing: tuple[int, str] | None = None
        # The last character of the text so far.
        self._last = ""
        # The number of the next Flushed or Cleared.
        self._sequence = 0

    def open(self) -> Received[SpeechCommand]:
        """Return the first command and the first frame."""
        names = {"model_name": self._model, "model_version": VERSION, "model_uuid": model_uuid(self._model)}
        config = replace(self._asked.config, granularity="sentence")
        return Received([ConfigureSpeech(config)], [message(type="Metadata", request_id=self._request_id, **names)])

    def feed(self, data: str | bytes) -> Received[SpeechCommand]:
        """Read one message. An invalid message is answered with a warning."""
        try:
            return self._received(_MESSAGE.read(data))
        except RemoteProtocolError as error:
            return Received([], [self.refuse(error.message)])

    def _received(self, asked: SpeakMessage) -> Received[SpeechCommand]:
        match asked:
            case Speak(text):
                # Some clients send sentences without the space between them.
                joins = self._last in _ENDS and text[:1].isupper()
                self._last = text[-1:]
                return Received([AppendText(f" {text}" if joins else text)] if text else [])
            case Flush():
                self._last = ""
                return Received([FlushText()])
            case Clear():
                self._last = ""
                return Received([CancelSpeech()], [self._numbered("Cleared")])
            case CloseSpeech():
                self.finishing = 1000, ""
                return Received([FlushText()] if self._last else [])

    def send(self, output: SpeechEvent) -> list[Frame]:
        """Return the frames of an event: audio in binary frames, and `Flushed` after the audio of a flushed text."""
        match output:
            case SentenceAudio(data=data):
                return [Frame(self._asked.encoded(data))] if data else []
            case SentenceDone(error=error) if error:
                return [self.refuse(f"The model failed on a sentence: {error}")]
            case UtteranceDone(cancelled=False):
                return [self._numbered("Flushed")]
            case _:
                return []

    def _numbered(self, kind: str) -> Frame:
        number, self._sequence = self._sequence, self._sequence + 1
        return message(type=kind, sequence_id=number)

    def refuse(self, reason: str) -> Frame:
        """Return a warning, because Deepgram's streams go on after an error of one message."""
        return message(type="Warning", description=reason, code="UNPROCESSABLE")


def voice_finder(
    voices: tuple[str, ...],
    languages: tuple[str, ...],
    lenient: Callable[[str], str | None],
    log_alias: Callable[[str, str], None],
) -> FindVoice:
    """Return a function that finds the voice and the language that a model's name stands for.

    The name is a loaded voice, the loaded model or one of Deepgram's, such as `aura-2-thalia-en`. Of the latter, only
    the language counts, and the default voice of it speaks. `lenient` is that of ModelNames.
    """

    def find(name: str) -> tuple[str | None, str | None]:
        own = next((voice for voice in voices if voice.lower() == name.lower()), None)
        if own:
            return own, None
        model = lenient(name)
        if model is None:
            raise RemoteProtocolError("invalid_value", f"There is no model '{name[:MAX_SHOWN_CHARS]}'.", "model")
        log_alias(name, model)
        language = name.rpartition("-")[2]
        return None, language if language in languages else None

    return find
