"""Text to speech over a WebSocket: `stream-input` with one text, and `multi-stream-input` with several contexts.

See docs/wire/elevenlabs.md. Each message of a client may end, flush or extend a text. `voices.py` reads the URL.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec

from antiphon.audio.encode import StreamEncoding
from antiphon.errors import RemoteProtocolError
from antiphon.events.speech import (
    AppendText,
    CancelSpeech,
    FlushText,
    Granularity,
    SentenceAudio,
    SentenceDone,
    SentenceStarted,
    SpeechConfig,
    SpeechEvent,
)
from antiphon.events.words import Word
from antiphon.protocols.contexts import CloseWhenSpoken, ContextCommand, EndContext, OpenContext, SpeakInContext
from antiphon.protocols.elevenlabs.alignment import StreamAlignment, char_times, stream_alignment
from antiphon.protocols.elevenlabs.voices import DEFAULT_FORMAT, VoiceSettings, read_format, read_voice, speed_of
from antiphon.protocols.fields import Text, decode
from antiphon.protocols.opening import TRUE_VALUES
from antiphon.protocols.speech.fields import SpeechCatalog
from antiphon.protocols.wire import Frame, Received, message

# Maximum size of a message, in bytes.
MAX_MESSAGE_BYTES = 128 << 10
# Maximum number of contexts that get text, and of contexts that only speak what they have.
MAX_CONTEXTS = 5
# The context of messages without a name.
DEFAULT_CONTEXT = "default"
# Default and maximum of the idle timeout, in seconds.
IDLE_S, MAX_IDLE_S = 20.0, 180.0
# A schedule that begins with fewer characters asks for speech before a sentence is complete.
SHORT_SCHEDULE = 100
# Number of bytes of a sentence's audio that are kept for the message with its alignment: 10 ms of PCM at 16 kHz.
HELD_BYTES = 320
# Close code of all refusals.
CLOSE_REFUSED = 1008
# Query parameters that are read here, and those of the hosted service that have no effect.
PARAMETERS = frozenset(
    ("model_id", "output_format", "language_code", "inactivity_timeout", "sync_alignment", "auto_mode", "seed")
)


class ChunkSchedule(msgspec.Struct):
    """When to speak. `chunk_length_schedule`: characters to wait for before each generation."""

    chunk_length_schedule: list[float] | None = None


class SpokenText(msgspec.Struct):
    """A message of a client. Null counts as missing, and unknown fields are ignored."""

    # Text to speak. In `stream-input`, an empty one ends the text; in a context, it only keeps the context open.
    text: Text | None = None
    # Whether to speak all text so far.
    flush: bool | None = None
    # How the voice speaks, in the first message of a text.
    voice_settings: VoiceSettings | None = None
    # When to speak, in the first message of a text.
    generation_config: ChunkSchedule | None = None
    # Name of the context.
    context_id: Text | None = None
    # Another spelling of `context_id`.
    contextId: Text | None = None
    # Whether to end the context. Without a flush before it, the context falls silent.
    close_context: bool | None = None
    # Whether to end all contexts, and then the connection.
    close_socket: bool | None = None
    # Accepted, but has no effect: a sentence is spoken as soon as it is complete.
    try_trigger_generation: object = None


@dataclass(slots=True)
class _Context:
    """A context that has not ended."""

    # The client's name of the context.
    name: str
    # When its last message came, in seconds of a monotonic clock.
    used_s: float
    # Whether text came that is not flushed yet.
    has_text: bool = False
    # Whether the client has asked for all text so far to be spoken.
    is_flushed: bool = False
    # Whether it gets no more text.
    is_closed: bool = False
    # The text of the sentence in progress.
    sentence: str = ""
    # The end of its audio so far, in seconds.
    end_s: float = 0.0
    # Audio that waits for the next message.
    held: bytes = b""


class ElevenLabsStreams:
    """One connection, without I/O. `multi`: it has several contexts. `steady_s`: a monotonic clock, in seconds.

    Making it blocks while an uploaded voice is read, and raises RemoteProtocolError for an invalid URL.
    """

    def __init__(
        self,
        voice_id: str,
        query: Mapping[str, str],
        catalog: SpeechCatalog,
        steady_s: Callable[[], float],
        *,
        multi: bool,
    ) -> None:
        self._multi = multi
        self._steady_s = steady_s
        self._encoding: StreamEncoding = read_format(query.get("output_format") or DEFAULT_FORMAT)
        self._config: SpeechConfig = read_voice(
            voice_id,
            catalog,
            self._encoding,
            model_id=query.get("model_id"),
            language_code=query.get("language_code"),
            seed=int(_number(query, "seed", 0, 0, 2**32 - 1)) if query.get("seed") else None,
        )
        self._auto = query.get("auto_mode", "").lower() in TRUE_VALUES
        self.idle_s = _number(query, "inactivity_timeout", IDLE_S, 1.0, MAX_IDLE_S)
        # Contexts that have not ended, by their names in commands; the oldest is the first.
        self._contexts: dict[str, _Context] = {}
        self._num_opened = 0
        self._is_ending = False

    @property
    def name(self) -> str:
        """The dialect's name in metrics, which shows whether it has several contexts."""
        return "elevenlabs_multi" if self._multi else "elevenlabs"

    # --- from the client

    def feed(self, data: str | bytes) -> Received[ContextCommand]:
        """Read one message. An invalid message is answered with an error, and ends the connection."""
        if self._is_ending:
            return Received()
        try:
            if len(data) > MAX_MESSAGE_BYTES:
                raise RemoteProtocolError("invalid_message", f"A message has at most {MAX_MESSAGE_BYTES} bytes.")
            return Received(self._commands(decode(data, SpokenText)))
        except RemoteProtocolError as error:
            return self.refuse(error, "")

    def _commands(self, received: SpokenText) -> list[ContextCommand]:
        if received.close_socket or (not self._multi and received.text == ""):
            self._is_ending = True
            end = self._close_one if received.close_socket else self._end
            return [*(command for key in self._contexts for command in end(key)), CloseWhenSpoken()]
        name = received.context_id or received.contextId or DEFAULT_CONTEXT
        key = next((key for key, c in self._contexts.items() if c.name == name and not c.is_closed), None)
        if received.close_context:
            return self._close(name, key)
        if key is None and not received.text:
            # Keeps the connection open, or flushes what is not there.
            return []
        commands = list[ContextCommand]()
        if key is None:
            key, commands = self._open(name, received)
        self._contexts[key].used_s = self._steady_s()
        return [*commands, *self._speak(key, received.text or "", flush=bool(received.flush))]

    def _open(self, name: str, received: SpokenText) -> tuple[str, list[ContextCommand]]:
        commands = list[ContextCommand]()
        now_s = self._steady_s()
        for key, context in self._contexts.items():
            if not context.is_closed and now_s - context.used_s > self.idle_s:
                commands += self._end(key)
        closed = [key for key, context in self._contexts.items() if context.is_closed]
        if len(self._contexts) - len(closed) >= MAX_CONTEXTS:
            raise RemoteProtocolError(
                "max_active_conversations",
                f"Maximum simultaneous contexts per WebSocket connection exceeded ({MAX_CONTEXTS}). "
                "Please close an existing context before opening a new one.",
            )
        if len(closed) >= MAX_CONTEXTS:
            commands.append(SpeakInContext(closed[0], CancelSpeech()))
        schedule = received.generation_config.chunk_length_schedule if received.generation_config else None
        granularity: Granularity = "clause" if schedule and schedule[0] < SHORT_SCHEDULE else "sentence"
        config = replace(self._config, speed=speed_of(received.voice_settings), granularity=granularity)
        key = str(self._num_opened)
        self._num_opened += 1
        self._contexts[key] = _Context(name, now_s)
        return key, [*commands, OpenContext(key, config, self._encoding)]

    def _speak(self, key: str, text: str, *, flush: bool) -> list[ContextCommand]:
        context, commands = self._contexts[key], list[ContextCommand]()
        if text.strip() or (text and context.has_text):
            commands.append(SpeakInContext(key, AppendText(text)))
            context.has_text, context.is_flushed = True, False
        if context.has_text and (flush or self._auto):
            commands.append(SpeakInContext(key, FlushText()))
            context.has_text = False
        context.is_flushed = context.is_flushed or flush
        return commands

    def _close(self, name: str, key: str | None) -> list[ContextCommand]:
        """Close a context. What was flushed is still spoken, unless the client closes the context a second time."""
        if key is not None:
            return self._close_one(key)
        return [command for key, c in self._contexts.items() if c.name == name for command in self._cut(key)]

    def _close_one(self, key: str) -> list[ContextCommand]:
        return self._end(key) if self._contexts[key].is_flushed else self._cut(key)

    def _end(self, key: str) -> list[ContextCommand]:
        """End a context's text, and have all of it spoken."""
        context = self._contexts[key]
        if context.is_closed:
            return []
        flush = [SpeakInContext(key, FlushText())] if context.has_text else []
        context.is_closed = True
        return [*flush, EndContext(key)]

    def _cut(self, key: str) -> list[ContextCommand]:
        """End a context at once, without the audio that was not sent yet."""
        self._contexts[key].is_closed, self._contexts[key].held = True, b""
        return [SpeakInContext(key, CancelSpeech()), EndContext(key)]

    def refuse(self, error: RemoteProtocolError, context: str) -> Received[ContextCommand]:
        """Return an error for the client, and the command that closes the connection, as the hosted service does."""
        self._is_ending = True
        cuts = [command for key in self._contexts for command in self._cut(key)]
        return Received([*cuts, CloseWhenSpoken(CLOSE_REFUSED, error.code)], [refusal(error)])

    def idled(self) -> Received[ContextCommand]:
        """Return the error that reports the idle timeout."""
        text = f"Have not received a new text input within the timeout of {self.idle_s} seconds."
        return self.refuse(RemoteProtocolError("input_timeout_exceeded", text), "")

    # --- to the client

    def send(self, context: str, event: SpeechEvent, audio: bytes) -> list[Frame]:
        """Return the frames of an event: audio as it comes, and a sentence's alignment with its last audio."""
        speaking = self._contexts[context]
        match event:
            case SentenceStarted():
                speaking.sentence, speaking.end_s = event.text, 0.0
            case SentenceAudio():
                speaking.end_s = event.end_s
                data = speaking.held + audio
                ready, speaking.held = data[:-HELD_BYTES], data[-HELD_BYTES:]
                return [self._audio(speaking, ready)] if ready else []
            case SentenceDone(error=error) if error:
                return [*self._rest(speaking), self._failure(speaking, error)]
            case SentenceDone():
                return [self._aligned(speaking, event.words)]
            case _:
                pass
        return []

    def ended(self, context: str, audio: bytes) -> list[Frame]:
        """Return the last audio of a context, if there is any, and the message that ends it."""
        speaking = self._contexts.pop(context)
        final = {"audio": None, "isFinal": True, "normalizedAlignment": None, "alignment": None}
        return [*self._rest(speaking, audio), message(**final, **self._named(speaking))]

    def _rest(self, context: _Context, audio: bytes = b"") -> list[Frame]:
        """Return the audio that was kept, and `audio`, in a message without an alignment."""
        rest, context.held = context.held + audio, b""
        return [self._audio(context, rest)] if rest else []

    def _aligned(self, context: _Context, words: tuple[Word, ...]) -> Frame:
        # The space after a sentence lasts to the end of its audio, so that clients can join sentences.
        times = char_times(f"{context.sentence} ", words, context.end_s)
        held, context.held = context.held, b""
        return self._audio(context, held, stream_alignment(times))

    def _audio(self, context: _Context, data: bytes, alignment: StreamAlignment | None = None) -> Frame:
        audio = b64encode(data).decode()
        both = {"normalizedAlignment": alignment, "alignment": alignment}
        return message(audio=audio, isFinal=None, **both, **self._named(context))

    def _failure(self, context: _Context, reason: str) -> Frame:
        text = f"A sentence could not be spoken: {reason}."
        return message(message=text, error="generation_failed", code=CLOSE_REFUSED, **self._named(context))

    def _named(self, context: _Context) -> dict[str, str]:
        return {"contextId": context.name} if self._multi else {}


def refusal(error: RemoteProtocolError) -> Frame:
    """Return an error in the form of these WebSockets. `code` is the close code."""
    return message(message=error.message, error=error.code, code=CLOSE_REFUSED)


def _number(query: Mapping[str, str], name: str, default: float, low: float, high: float) -> float:
    """Read a number of the URL. Raises RemoteProtocolError if it is no number, or out of range."""
    text = query.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise RemoteProtocolError("invalid_parameters", f"'{name}' has to be {low:g} to {high:g}.", name)
    return value
