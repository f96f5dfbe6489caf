"""Cartesia's text to speech: contexts over a WebSocket (`/tts/websocket`), `/tts/bytes` and `/tts/sse`.

See docs/wire/cartesia.md.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from antiphon.audio import SpeechFormat
from antiphon.audio.encode import MEDIA_TYPES, RawCodec, StreamEncoding
from antiphon.audio.pcm import RATES_HZ
from antiphon.errors import RemoteProtocolError
from antiphon.events.speech import (
    AppendText,
    CancelSpeech,
    FlushText,
    SentenceAudio,
    SentenceDone,
    SentenceStarted,
    SpeechConfig,
    SpeechEvent,
    UtteranceDone,
)
from antiphon.events.words import Word
from antiphon.protocols.contexts import CloseWhenSpoken, ContextCommand, EndContext, OpenContext, SpeakInContext
from antiphon.protocols.fields import Text, decode, number
from antiphon.protocols.model_names import loaded_voice
from antiphon.protocols.speech.fields import SpeechCatalog, SpeechFields, read_config
from antiphon.protocols.wire import Frame, Received, ShapedError, message

# The paths at which errors have Cartesia's shape.
CARTESIA_PATHS = ("/tts", "/stt")
# Maximum size of a message, and maximum number of contexts that get text or speak.
MAX_MESSAGE_BYTES, MAX_CONTEXTS = 128 << 10, 10
# Seconds without a message and without speech after which the connection is closed.
IDLE_S = 300.0
MAX_TEXT_CHARS = 10_000
# An id of a voice of the hosted service. Such an id stands for the first loaded voice, unless names are strict.
_HOSTED_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_RAW: Mapping[str, RawCodec] = {
    "pcm_s16le": "pcm_s16le",
    "pcm_f32le": "pcm_f32le",
    "pcm_mulaw": "ulaw",
    "pcm_alaw": "alaw",
}
_FILES: Mapping[str, SpeechFormat] = {"wav": "wav", "mp3": "mp3"}
_SPEEDS = {"slow": 0.8, "normal": 1.0, "fast": 1.2, "slowest": 0.6, "fastest": 1.5}
# Statuses of messages: audio follows, all is sent.
GOES_ON, DONE = 206, 200


class VoiceChoice(msgspec.Struct):
    """The voice. `mode` is `id`; embeddings belong to the hosted models."""

    mode: Text | None = None
    id: Text | None = None


class OutputFormat(msgspec.Struct):
    """The container, the codec and the rate of the audio."""

    # Sample rate in Hz.
    sample_rate: int
    # `raw`; over HTTP also `wav` and `mp3`.
    container: Text = "raw"
    # Codec of raw audio.
    encoding: Text = "pcm_s16le"
    # Bits per second of MP3.
    bit_rate: int | None = None


class SpeechChanges(msgspec.Struct):
    """How to speak. Only `speed` has an effect."""

    # Tempo; 1 is the voice's own.
    speed: float | None = None
    # No effect.
    volume: object = None
    # No effect.
    emotion: object = None


class SpokenRequest(msgspec.Struct, kw_only=True):
    """A text to speak, over HTTP. Null counts as missing, and unknown fields are ignored."""

    # The text.
    transcript: str
    # Name of the model.
    model_id: Text | None = None
    # The voice, or its id; the first loaded voice by default.
    voice: VoiceChoice | Text | None = None
    # The format of the audio.
    output_format: OutputFormat
    # ISO-639-1 code of the language.
    language: Text | None = None
    # How to speak.
    generation_config: SpeechChanges | None = None
    # An older form of the tempo: a word, or a number.
    speed: Text | float | None = None
    # Whether to send the times of words.
    add_timestamps: bool | None = None


class EventsRequest(SpokenRequest, kw_only=True):
    """A text to speak in server-sent events. `context_id`: a name that all events have."""

    context_id: Text | None = None


class GenerationRequest(SpokenRequest, kw_only=True):
    """A text in a context, or the end of the context."""

    # Name of the context.
    context_id: Text
    # Whether more text of the context follows. Otherwise the context ends with this text.
    more: bool | None = msgspec.field(name="continue", default=None)
    # Whether to speak all text so far.
    flush: bool | None = None


class _AnyRequest(msgspec.Struct):
    context_id: Text | None = None
    cancel: bool | None = None


@dataclass(frozen=True, slots=True)
class CartesiaSpeech:
    """A checked request: the text, how to speak it, and the encoding of the audio."""

    text: str
    config: SpeechConfig
    encoding: StreamEncoding
    word_times: bool
    # The context of all events; None if the request has none.
    context_id: str | None = None

    @property
    def media_type(self) -> str:
        """The media type of the audio."""
        codec = self.encoding.codec
        return MEDIA_TYPES[codec] if codec in ("wav", "mp3") else "audio/pcm"


class WordTimestamps(msgspec.Struct):
    """The words of a text, and their times in seconds from the start of the context's audio."""

    # The words, in order.
    words: list[str]
    # Start of each word.
    start: list[float]
    # End of each word.
    end: list[float]


def word_timestamps(words: tuple[Word, ...], offset_s: float = 0.0) -> WordTimestamps:
    """Return words in Cartesia's form. `offset_s`: the start of their audio in the context, in seconds."""
    starts = [round(w.start_s + offset_s, 3) for w in words]
    return WordTimestamps([w.text for w in words], starts, [round(w.end_s + offset_s, 3) for w in words])


def cartesia_error(status: int, code: str, text: str, request_id: str) -> ShapedError:
    """Return a refusal in Cartesia's shape."""
    title = code.replace("_", " ")
    body: dict[str, str | int] = {
        "error_code": code,
        "title": title,
        "message": text,
        "status_code": status,
        "request_id": request_id,
    }
    return ShapedError(body, {})


def read_request(found: SpokenRequest, catalog: SpeechCatalog, *, files: bool) -> CartesiaSpeech:
    """Check a request. `files`: containers are allowed. Blocks while it reads an uploaded voice.

    Raises RemoteProtocolError.
    """
    if len(found.transcript) > MAX_TEXT_CHARS:
        raise RemoteProtocolError("invalid_value", f"A text has at most {MAX_TEXT_CHARS} characters.", "transcript")
    encoding = _read_format(found.output_format, files=files)
    voice = VoiceChoice(id=found.voice) if isinstance(found.voice, str) else found.voice or VoiceChoice()
    if voice.mode not in (None, "id"):
        raise RemoteProtocolError("not_supported", "Only voices with an id are supported.", "voice.mode")
    name = voice.id or ""
    if not loaded_voice(name, catalog.voices) and not catalog.models.strict and _HOSTED_ID.fullmatch(name):
        catalog.log_alias(f"voice {name}", catalog.voices[0])
        name = ""
    fields = SpeechFields(model=found.model_id, voice=name or None, language=found.language)
    config = read_config(fields, catalog, "pcm")
    wants_times = bool(found.add_timestamps)
    config = replace(
        config, stream=True, word_times=wants_times, rate_hz=encoding.rate_hz, speed=_speed(found), granularity="none"
    )
    context_id = found.context_id if isinstance(found, EventsRequest | GenerationRequest) else None
    return CartesiaSpeech(found.transcript, config, encoding, wants_times, context_id)


def _read_format(found: OutputFormat, *, files: bool) -> StreamEncoding:
    codec = _FILES.get(found.container) if files else None
    if found.container == "raw":
        raw = _RAW.get(found.encoding)
        if raw is None:
            message = f"The encoding is one of {', '.join(_RAW)}."
            raise RemoteProtocolError("invalid_value", message, "output_format.encoding")
        codec_name: RawCodec | SpeechFormat = raw
    elif codec is None:
        raise RemoteProtocolError("invalid_value", "The container is not supported.", "output_format.container")
    else:
        codec_name = codec
    rate_hz = int(number(found.sample_rate, "output_format.sample_rate", RATES_HZ[0], 48_000))
    bits = None
    if found.bit_rate is not None and codec_name == "mp3":
        bits = int(number(found.bit_rate, "output_format.bit_rate", 8_000, 320_000))
    return StreamEncoding(codec_name, rate_hz, bits)


def _speed(found: SpokenRequest) -> float:
    given: float | str | None = found.generation_config.speed if found.generation_config else None
    given = found.speed if given is None else given
    if isinstance(given, str):
        given = _SPEEDS.get(given, 1.0)
    return 1.0 if given is None else number(given, "speed", 0.25, 4.0)


def sse_piece(asked: CartesiaSpeech, data: bytes, step_ms: float) -> bytes:
    """Return the server-sent event for a piece of audio. The joined pieces are the audio."""
    return _sse(_chunk(asked.context_id, data, step_ms))


def sse_end(asked: CartesiaSpeech, words: tuple[Word, ...]) -> bytes:
    """Return the events that end a stream: the times of the words, if they were asked for, and the end."""
    times = _sse(_timestamps(asked.context_id, word_timestamps(words))) if asked.word_times and words else b""
    return times + _sse(_done(asked.context_id))


def sse_error(text: str) -> bytes:
    """Return the event for an error that ends a stream. The status 200 was already sent."""
    return _sse(_error(RemoteProtocolError("server_error", text), ""))


def _sse(frame: Frame) -> bytes:
    assert not isinstance(frame.payload, bytes)
    return f"event: {frame.payload['type']}\ndata: {frame.encode()!s}\n\n".encode()


@dataclass(slots=True)
class _Context:
    """A context that has not ended."""

    # The client's name of the context.
    name: str
    # Whether it sends the times of words.
    word_times: bool
    # Whether text came that is not flushed yet.
    has_text: bool = False
    # Whether it gets no more text.
    is_closed: bool = False
    # Number of utterances that were ended.
    num_utterances: int = 0
    # The utterances that the client has flushed.
    flushed: list[int] = field(default_factory=list)
    # The end of the audio of all sentences before this one, in seconds.
    before_s: float = 0.0
    # The end of this sentence's audio so far, in seconds from its start.
    end_s: float = 0.0


class CartesiaStreams:
    """One connection, without I/O. `catalog` must not block: voices are named in messages."""

    name = "cartesia_speech"
    idle_s = IDLE_S

    def __init__(self, catalog: SpeechCatalog) -> None:
        self._catalog = catalog
        # Contexts that have not ended, by their names in commands.
        self._contexts: dict[str, _Context] = {}
        self._num_opened = 0

    # --- from the client

    def feed(self, data: str | bytes) -> Received[ContextCommand]:
        """Read one message. An invalid message is answered with an error."""
        name = ""
        try:
            if len(data) > MAX_MESSAGE_BYTES:
                raise RemoteProtocolError("invalid_value", f"A message has at most {MAX_MESSAGE_BYTES} bytes.")
            about = decode(data, _AnyRequest)
            name = about.context_id or ""
            if about.cancel:
                return Received(self._cancel(name))
            return Received(self._speak(decode(data, GenerationRequest)))
        except RemoteProtocolError as error:
            return Received(answers=[_error(error, name)])

    def _speak(self, found: GenerationRequest) -> list[ContextCommand]:
        commands = list[ContextCommand]()
        key = next((k for k, c in self._contexts.items() if c.name == found.context_id and not c.is_closed), None)
        if key is None:
            asked = read_request(found, self._catalog, files=False)
            if len(self._contexts) >= MAX_CONTEXTS:
                message = f"At most {MAX_CONTEXTS} contexts speak at a time."
                raise RemoteProtocolError("rate_limit_exceeded", message, "context_id")
            key = str(self._num_opened)
            self._num_opened += 1
            self._contexts[key] = _Context(found.context_id, asked.word_times)
            commands.append(OpenContext(key, replace(asked.config, granularity="sentence"), asked.encoding))
        context = self._contexts[key]
        if found.transcript.strip() or (found.transcript and context.has_text):
            commands.append(SpeakInContext(key, AppendText(found.transcript)))
            context.has_text = True
        if found.flush:
            context.flushed.append(context.num_utterances)
        if found.flush or not found.more:
            commands.append(SpeakInContext(key, FlushText()))
            context.has_text = False
            context.num_utterances += 1
        if not found.more:
            context.is_closed = True
            commands.append(EndContext(key))
        return commands

    def _cancel(self, name: str) -> list[ContextCommand]:
        commands = list[ContextCommand]()
        for key, context in self._contexts.items():
            if context.name == name:
                context.is_closed = True
                commands += [SpeakInContext(key, CancelSpeech()), EndContext(key)]
        return commands

    def refuse(self, error: RemoteProtocolError, context: str) -> Received[ContextCommand]:
        """Return an error about a context. The connection goes on."""
        about = self._contexts.get(context)
        return Received(answers=[_error(error, about.name if about else "")])

    def idled(self) -> Received[ContextCommand]:
        """Return the command that closes the connection after the idle timeout."""
        return Received([CloseWhenSpoken(1000, "idle timeout")])

    # --- to the client

    def send(self, context: str, event: SpeechEvent, audio: bytes) -> list[Frame]:
        """Return the frames of an event: audio, the times of a sentence's words, and the ends of flushes."""
        speaking = self._contexts[context]
        match event:
            case SentenceStarted():
                speaking.before_s, speaking.end_s = speaking.before_s + speaking.end_s, 0.0
            case SentenceAudio(start_s=start_s, end_s=end_s):
                speaking.end_s = end_s
                return [_chunk(speaking.name, audio, (end_s - start_s) * 1000)] if audio else []
            case SentenceDone(error=error) if error:
                return [_error(RemoteProtocolError("generation_failed", error), speaking.name)]
            case SentenceDone(words=words) if speaking.word_times and words:
                return [_timestamps(speaking.name, word_timestamps(words, speaking.before_s))]
            case UtteranceDone(utterance, cancelled=False) if utterance in speaking.flushed:
                return [_flush_done(speaking, speaking.flushed.index(utterance) + 1)]
            case _:
                pass
        return []

    def ended(self, context: str, audio: bytes) -> list[Frame]:
        """Return the message that ends a context."""
        speaking = self._contexts.pop(context)
        rest = [_chunk(speaking.name, audio, 0.0)] if audio else []
        return [*rest, _done(speaking.name)]


def _chunk(context: str | None, data: bytes, step_ms: float) -> Frame:
    audio, step = b64encode(data).decode(), round(step_ms, 1)
    return message(type="chunk", data=audio, done=False, status_code=GOES_ON, step_time=step, context_id=context)


def _timestamps(context: str | None, times: WordTimestamps) -> Frame:
    return message(type="timestamps", done=False, status_code=GOES_ON, context_id=context, word_timestamps=times)


def _done(context: str | None) -> Frame:
    return message(type="done", done=True, status_code=DONE, context_id=context)


def _flush_done(context: _Context, number: int) -> Frame:
    return message(
        type="flush_done",
        done=False,
        flush_done=True,
        flush_id=number,
        status_code=GOES_ON,
        context_id=context.name,
    )


def _error(error: RemoteProtocolError, name: str) -> Frame:
    status = {"model_not_found": 404, "voice_not_found": 404, "rate_limit_exceeded": 429}.get(error.code, 400)
    return message(
        type="error",
        error=error.message,
        error_code=error.code,
        title=error.code.replace("_", " "),
        message=error.message,
        done=True,
        status_code=status,
        context_id=name or None,
    )
