"""The dialect of a speech stream (/v1/audio/speech/stream): docs/wire/speech-stream.md.

The client sends text in pieces. The server answers each sentence with audio. `fields.py` reads the configuration.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Annotated

import msgspec

from antiphon.errors import RemoteProtocolError
from antiphon.events.speech import (
    AppendText,
    CancelSpeech,
    ConfigureSpeech,
    ContinueSpeech,
    FlushText,
    SentenceAudio,
    SentenceDone,
    SentenceStarted,
    SpeechCommand,
    SpeechConfig,
    SpeechEvent,
    UtteranceDone,
)
from antiphon.protocols.fields import Reader, check_names, decode
from antiphon.protocols.speech.fields import SpeechCatalog, SpeechFields, WordTime, read_config, word_times
from antiphon.protocols.wire import Frame, Received, message

# Maximum sizes of messages, in bytes. A configuration may contain a recording. Other messages only contain text.
MAX_CONFIG_BYTES, MAX_MESSAGE_BYTES = 4 << 20, 128 << 10
# Error messages after a timeout, while waiting for the first message or for any other message.
CONFIG_TIMEOUT = "Timeout waiting for session.config"
IDLE_TIMEOUT = "Idle timeout: no message received"
# Number of bytes in a sample of PCM16, the only format for which word times are reported.
BYTES_PER_SAMPLE = 2


# A number that a client has counted.
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


class _SessionConfig(SpeechFields, tag="session.config"):
    """Configures speech. It takes effect from the next utterance on."""


class _InputText(msgspec.Struct, tag="input.text"):
    text: str = ""


class _InputDone(msgspec.Struct, tag="input.done"):
    """Ends the text of the utterance."""


class _InputCancel(msgspec.Struct, tag="input.cancel"):
    """Drops all text and audio that the user has not heard yet."""


class _SessionContinue(msgspec.Struct, tag="session.continue"):
    """Continues the stream of a host that was lost, see ContinueSpeech. `num_chunks`: those of the divided sentence."""

    utterance_index: _Count = 0
    sentence_index: _Count = 0
    num_bytes: _Count = 0
    num_chunks: _Count = 0


class _SessionClose(msgspec.Struct, tag="session.close"):
    """Ends the session. The remaining text is not spoken."""


# The messages of a client, by their `type`.
SpeechMessage = _SessionConfig | _InputText | _InputDone | _InputCancel | _SessionContinue | _SessionClose
_MESSAGE: Reader[SpeechMessage] = Reader(SpeechMessage)


class SpeechDialect:
    """The dialect of one speech stream, without I/O. `catalog`: the capabilities of the loaded synthesizer."""

    def __init__(self, catalog: SpeechCatalog) -> None:
        self._catalog = catalog
        self._sentence: SentenceStarted | None = None
        self._num_chunks = 0
        self._num_bytes = 0
        self._sentences_started: dict[int, int] = {}
        self._continued = _SessionContinue()
        self._has_text = False
        # Whether a `session.config` was accepted. Until then, any error ends the connection, and the server waits for
        # messages with a different timeout.
        self.configured = False
        # Whether to close the connection after the returned frames.
        self.closing = False
        self.finishing = self.idle_s = None

    # --- from the client

    def feed(self, data: str | bytes) -> Received[SpeechCommand]:
        """Read one message. An invalid message only returns an error for the client; nothing is raised.

        An error before the first configuration ends the connection.
        """
        try:
            commands = self._commands(data)
            return Received(commands, [frame for each in commands if (frame := self._answer(each))])
        except RemoteProtocolError as error:
            return Received(answers=[self.refuse(error.message)])

    def refuse(self, reason: str) -> Frame:
        """Return an error for the client. If no configuration was accepted yet, the error ends the connection."""
        self.closing = self.closing or not self.configured
        return message(type="error", message=reason)

    def _commands(self, data: str | bytes) -> list[SpeechCommand]:
        if len(data) > MAX_CONFIG_BYTES:
            raise RemoteProtocolError("too_large", "WebSocket message too large")
        received = self._read(data)
        if isinstance(received, _SessionConfig):
            return [ConfigureSpeech(self._configure(received))]
        kind = received.__struct_config__.tag
        if not self.configured:
            raise RemoteProtocolError("unexpected", f"Expected session.config, got: {kind}")
        if len(data) > MAX_MESSAGE_BYTES:
            raise RemoteProtocolError("too_large", f"{kind} message too large")
        self._has_text = self._has_text or isinstance(received, _InputText | _InputDone)
        match received:
            case _InputText(text=text):
                return [AppendText(text)]
            case _InputDone():
                return [FlushText()]
            case _SessionContinue(utterance_index=utterance, sentence_index=sentence, num_bytes=num_bytes):
                if self._has_text:
                    raise RemoteProtocolError("unexpected", "session.continue has to come before any text")
                self._continued = received
                self._sentences_started = {utterance: sentence}
                return [ContinueSpeech(utterance, sentence, num_bytes)]
            case _InputCancel():
                return [CancelSpeech()]
            case _SessionClose():
                self.closing = True
                return []

    def _answer(self, command: SpeechCommand) -> Frame | None:
        """Return the answer to a command. Only one has an answer, since its client has to know that it succeeded."""
        if not isinstance(command, ContinueSpeech):
            return None
        return message(type="session.continued", utterance_index=command.utterance, sentence_index=command.sentence)

    def _read(self, data: str | bytes) -> SpeechMessage:
        try:
            received = _MESSAGE.read(data)
        except RemoteProtocolError as error:
            raise self._refusal(data, error) from None
        check_names(data, received)
        return received

    def _refusal(self, data: str | bytes, error: RemoteProtocolError) -> RemoteProtocolError:
        """Return the error for a message that could not be decoded. It depends on the message's `type`."""
        try:
            value = decode(data, object)
        except RemoteProtocolError:
            return RemoteProtocolError("invalid_json", "Invalid JSON message")
        if not isinstance(value, dict):
            return RemoteProtocolError("invalid_json", "WebSocket messages must be JSON objects")
        kind = value.get("type")
        match kind:
            case "session.config":
                return _bad_config(error)
            case _ if not self.configured:
                return RemoteProtocolError("unexpected", f"Expected session.config, got: {_short(kind)}")
            case "input.text":
                return RemoteProtocolError(error.code, "input.text requires a string value")
            case "session.continue":
                return RemoteProtocolError(error.code, f"Invalid value for '{error.param}': expected 0 or more")
            case _:
                return RemoteProtocolError("unknown", f"Unknown message type: {_short(kind)}")

    def _configure(self, fields: SpeechFields) -> SpeechConfig:
        """Convert the fields into a configuration. Raises RemoteProtocolError for an invalid field."""
        try:
            asked = read_config(fields, self._catalog, "wav")
            _check_streaming(asked)
        except RemoteProtocolError as error:
            if error.code in ("model_not_found", "voice_not_found", "voice_not_supported"):
                raise
            raise _bad_config(error) from None
        self.configured = True
        return asked

    # --- to the client

    def send(self, output: SpeechEvent) -> list[Frame]:
        """Return the frames of an event of the session.

        Audio is sent in binary frames. With word times, it is base64 in JSON instead, and the times follow in a last
        chunk without audio.
        """
        match output:
            case SentenceStarted():
                return [self._start_sentence(output)]
            case SentenceAudio():
                return [self._audio(output.data, output.start_s, output.end_s)]
            case SentenceDone():
                return self._end_audio(output)
            case UtteranceDone():
                return self._end_utterance(output)

    def _start_sentence(self, sentence: SentenceStarted) -> Frame:
        self._sentence, self._num_chunks, self._num_bytes = sentence, 0, 0
        before = self._continued
        if (sentence.utterance, sentence.sentence) == (before.utterance_index, before.sentence_index):
            self._num_chunks, self._num_bytes = before.num_chunks, before.num_bytes
        self._sentences_started[sentence.utterance] = sentence.sentence + 1
        config = sentence.config
        return _about(
            sentence,
            "audio.start",
            sentence_text=sentence.text,
            format=config.format,
            **({"sample_rate": sentence.rate_hz} if config.stream else {}),
            **({"word_timestamps": True} if config.word_times else {}),
        )

    def _audio(self, data: bytes, start_s: float, end_s: float, times: list[WordTime] | None = None) -> Frame:
        assert self._sentence
        self._num_bytes += len(data)
        if not self._sentence.config.word_times:
            return Frame(data)
        chunk_id, self._num_chunks = self._num_chunks, self._num_chunks + 1
        return _about(
            self._sentence,
            "audio.chunk",
            chunk_id=chunk_id,
            chunk_start_ms=round(start_s * 1000),
            chunk_end_ms=round(end_s * 1000),
            sample_rate=self._sentence.rate_hz,
            audio_b64=b64encode(data).decode(),
            timestamps=times,
        )

    def _end_audio(self, done: SentenceDone) -> list[Frame]:
        sentence = self._sentence
        assert sentence
        frames = []
        if done.error:
            where = f"utterance {sentence.utterance}, sentence {sentence.sentence}"
            frames.append(message(type="error", message=f"Generation failed for {where}: {done.error}"))
        elif sentence.config.word_times:
            # Word times are known only now, so they are sent in a last chunk without audio.
            end_s = self._num_bytes / BYTES_PER_SAMPLE / sentence.rate_hz
            frames.append(self._audio(b"", end_s, end_s, word_times(done.words)))
        more = {"skipped": done.skipped} if done.skipped else {}
        return [*frames, self._end_sentence(sentence, error=bool(done.error), **more)]

    def _end_utterance(self, done: UtteranceDone) -> list[Frame]:
        frames = []
        if done.cancelled and self._sentence:
            frames.append(self._end_sentence(self._sentence, error=False, cancelled=True))
        num_started = self._sentences_started.pop(done.utterance, 0)
        frames.append(
            message(
                type="session.done",
                utterance_index=done.utterance,
                total_sentences=num_started if done.cancelled else done.num_sentences,
                **({"cancelled": True} if done.cancelled else {}),
            )
        )
        return frames

    def _end_sentence(self, sentence: SentenceStarted, *, error: bool, **more: str | bool) -> Frame:
        self._sentence = None
        return _about(sentence, "audio.done", total_bytes=self._num_bytes, error=error, **more)


def _bad_config(error: RemoteProtocolError) -> RemoteProtocolError:
    return RemoteProtocolError(error.code, f"Invalid session config: {error.message}")


def _check_streaming(config: SpeechConfig) -> None:
    """If audio is to be sent while it is generated, check that its format and speed allow that."""
    if config.stream and config.format != "pcm":
        raise RemoteProtocolError(
            "invalid_value", f"stream_audio=true requires response_format='pcm'. Got {config.format!r}."
        )
    if config.stream and config.speed != 1.0:
        raise RemoteProtocolError("invalid_value", f"stream_audio=true requires speed=1.0. Got {config.speed}.")
    if config.word_times and not config.stream:
        raise RemoteProtocolError(
            "invalid_value", "word_timestamps=true requires stream_audio=true and response_format='pcm'."
        )


def _about(sentence: SentenceStarted, kind: str, **fields: object) -> Frame:
    """Return a message about a sentence. The sentence's indices are its first fields."""
    return message(type=kind, utterance_index=sentence.utterance, sentence_index=sentence.sentence, **fields)


def _short(kind: object) -> str:
    return str(kind)[:80]
