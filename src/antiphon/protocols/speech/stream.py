"""The dialect of a speech stream (/v1/audio/speech/stream): docs/wire/speech-stream.md.

Text comes in pieces, and each sentence of it is answered with audio. The fields of the configuration are read by
fields.py.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any

from antiphon.errors import RemoteProtocolError
from antiphon.events.speech import (
    AppendText,
    CancelSpeech,
    ConfigureSpeech,
    FlushText,
    SentenceAudio,
    SentenceDone,
    SentenceStarted,
    SpeechCommand,
    SpeechConfig,
    SpeechEvent,
    UtteranceDone,
)
from antiphon.events.words import Word
from antiphon.protocols.speech import fields as speech_fields
from antiphon.protocols.speech.fields import SpeechCatalog
from antiphon.protocols.wire import Frame, decode_event

# A configuration may bring a recording along; other messages are text.
MAX_CONFIG_BYTES, MAX_MESSAGE_BYTES = 4 << 20, 128 << 10
# What the client is told when the server has waited too long for its first message, or for any other.
CONFIG_TIMEOUT = "Timeout waiting for session.config"
IDLE_TIMEOUT = "Idle timeout: no message received"
# Of PCM16, the one format with word times.
BYTES_PER_SAMPLE = 2


class SpeechDialect:
    """One speech stream's dialect; `catalog` is what the loaded synthesizer offers. Nothing here waits.

    `closing`: the connection is to be closed when the frames that wait have been sent.
    """

    def __init__(self, catalog: SpeechCatalog) -> None:
        self._catalog = catalog
        self._config: SpeechConfig | None = None
        self._commands: list[SpeechCommand] = []
        self._frames: list[Frame] = []
        self._sentence: SentenceStarted | None = None
        self._num_chunks = 0
        self._num_bytes = 0
        self._sentences_started: dict[int, int] = {}
        self.closing = False

    @property
    def configured(self) -> bool:
        """Whether a `session.config` was accepted.

        Before that, any error ends the connection, and the time to wait for a message is another.
        """
        return self._config is not None

    def commands(self) -> list[SpeechCommand]:
        """Remove and return what the messages so far ask of the session, in order; wrong messages ask nothing."""
        taken, self._commands = self._commands, []
        return taken

    def frames(self) -> list[Frame]:
        """Remove and return the frames that wait to be sent, oldest first.

        Text is JSON, bytes are audio in the format asked for.
        """
        taken, self._frames = self._frames, []
        return taken

    def receive(self, data: str | bytes) -> None:
        """Read one message of the client: commands, or an error for the client, are queued. Never raises.

        An error before the first configuration ends the connection.
        """
        try:
            self._receive(data)
        except RemoteProtocolError as error:
            self.refuse(error.message)

    def refuse(self, message: str) -> None:
        """Queue an error with this message. The connection ends with it if no configuration was accepted yet."""
        self._add_frame(type="error", message=message)
        self.closing = self.closing or not self.configured

    def _receive(self, data: str | bytes) -> None:
        size = len(data)
        if size > MAX_CONFIG_BYTES:
            raise RemoteProtocolError("too_large", "WebSocket message too large")
        message = decode_event(
            data, ("invalid_json", "Invalid JSON message"), ("invalid_json", "WebSocket messages must be JSON objects")
        )
        kind = message.get("type")
        if kind == "session.config":
            self._configure(message)
            return
        if not self.configured:
            raise RemoteProtocolError("unexpected", f"Expected session.config, got: {_short(kind)}")
        if size > MAX_MESSAGE_BYTES:
            raise RemoteProtocolError("too_large", f"{_short(kind)} message too large")
        match kind:
            case "input.text":
                text = message.get("text", "")
                if not isinstance(text, str):
                    raise RemoteProtocolError("invalid_type", "input.text requires a string value")
                self._commands.append(AppendText(text))
            case "input.done":
                self._commands.append(FlushText())
            case "input.cancel":
                self._commands.append(CancelSpeech())
            case "session.close":
                self.closing = True
            case _:
                raise RemoteProtocolError("unknown", f"Unknown message type: {_short(kind)}")

    def _configure(self, message: dict[str, Any]) -> None:
        try:
            asked = speech_fields.read_config(message, self._catalog, "wav")
            if asked.stream and (asked.format != "pcm" or asked.speed != 1.0):
                what, got = (
                    ("response_format='pcm'", repr(asked.format))
                    if asked.format != "pcm"
                    else ("speed=1.0", asked.speed)
                )
                raise RemoteProtocolError("invalid_value", f"stream_audio=true requires {what}. Got {got}.")
            if asked.word_times and not asked.stream:
                raise RemoteProtocolError(
                    "invalid_value", "word_timestamps=true requires stream_audio=true and response_format='pcm'."
                )
        except RemoteProtocolError as error:
            if error.code in ("model_not_found", "voice_not_found", "voice_not_supported"):
                raise
            raise RemoteProtocolError(error.code, f"Invalid session config: {error.message}") from None
        self._config = asked
        self._commands.append(ConfigureSpeech(asked))

    # --- to the client

    def send(self, output: SpeechEvent) -> None:
        """Queue the frames of an event of the session.

        With word times, audio is base64 in JSON, and a last chunk without audio has the times; otherwise it is binary.
        """
        match output:
            case SentenceStarted():
                self._start_sentence(output)
            case SentenceAudio():
                self._add_audio(output.data, output.start_s, output.end_s)
            case SentenceDone():
                self._end_audio(output)
            case UtteranceDone(utterance, sentences, cancelled):
                if cancelled and self._sentence:
                    self._end_sentence(self._sentence, error=False, cancelled=True)
                fields: dict[str, Any] = {"cancelled": True} if cancelled else {}
                sent = self._sentences_started.pop(utterance, 0)
                total = sent if cancelled else sentences
                self._add_frame(type="session.done", utterance_index=utterance, total_sentences=total, **fields)

    def _start_sentence(self, sentence: SentenceStarted) -> None:
        self._sentence, self._num_chunks, self._num_bytes = sentence, 0, 0
        self._sentences_started[sentence.utterance] = sentence.sentence + 1
        fields: dict[str, Any] = {}
        if sentence.config.stream:
            fields["sample_rate"] = sentence.rate_hz
        if sentence.config.word_times:
            fields["word_timestamps"] = True
        self._add_frame(
            **self._sentence_fields(sentence, "audio.start"),
            sentence_text=sentence.text,
            format=sentence.config.format,
            **fields,
        )

    def _add_audio(self, data: bytes, start_s: float, end_s: float, words: tuple[Word, ...] | None = None) -> None:
        assert self._sentence
        self._num_bytes += len(data)
        if not self._sentence.config.word_times:
            self._frames.append(Frame(data))
            return
        times = None if words is None else [_word_json(word) for word in words]
        self._add_frame(
            **self._sentence_fields(self._sentence, "audio.chunk"),
            chunk_id=self._num_chunks,
            chunk_start_ms=round(start_s * 1000),
            chunk_end_ms=round(end_s * 1000),
            sample_rate=self._sentence.rate_hz,
            audio_b64=b64encode(data).decode(),
            timestamps=times,
        )
        self._num_chunks += 1

    def _end_audio(self, done: SentenceDone) -> None:
        sentence = self._sentence
        assert sentence
        if done.error:
            where = f"utterance {sentence.utterance}, sentence {sentence.sentence}"
            self._add_frame(type="error", message=f"Generation failed for {where}: {done.error}")
        elif sentence.config.word_times:
            # The times of the words are known only now: a last chunk without audio has them.
            end_s = self._num_bytes / BYTES_PER_SAMPLE / sentence.rate_hz
            self._add_audio(b"", end_s, end_s, done.words)
        self._end_sentence(sentence, error=bool(done.error), skipped=done.skipped)

    def _end_sentence(
        self, sentence: SentenceStarted, *, error: bool, cancelled: bool = False, skipped: str = ""
    ) -> None:
        fields: dict[str, Any] = {"cancelled": True} if cancelled else {}
        if skipped:
            fields["skipped"] = skipped
        self._add_frame(
            **self._sentence_fields(sentence, "audio.done"), total_bytes=self._num_bytes, error=error, **fields
        )
        self._sentence = None

    @staticmethod
    def _sentence_fields(sentence: SentenceStarted, kind: str) -> dict[str, Any]:
        return {"type": kind, "utterance_index": sentence.utterance, "sentence_index": sentence.sentence}

    def _add_frame(self, **fields: Any) -> None:
        self._frames.append(Frame(fields))


def _word_json(word: Word) -> dict[str, Any]:
    return {"word": word.text, "start_ms": round(word.start_s * 1000), "end_ms": round(word.end_s * 1000)}


def _short(kind: Any) -> str:
    return str(kind)[:80]
