"""Streaming servers: audio goes to a WebSocket while it is spoken, and words come back.

There are two wires: OpenAI's transcription sessions (also those of another antiphon), and vLLM's `/v1/realtime`.
Each window has a connection of its own, an `Utterance`, which ends with the final. The server's own turn detection is
off.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import WebSocketException

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import Resampler, to_pcm16
from antiphon.contracts import Window
from antiphon.errors import ModelError, Refused, RemoteError
from antiphon.events.languages import language_code
from antiphon.events.words import Word
from antiphon.remote.http import MAX_OBJECTS, decoded, error_text, optional, reason, without_key
from antiphon.remote.pool import Endpoint, Pool
from antiphon.remote.transcriber.heard import HeardText, timed_words, words_of
from antiphon.remote.websocket import open_websocket

log = logging.getLogger(__name__)

# Bounds of one utterance: bytes of a message, bytes of all messages, and characters of its text.
MAX_MESSAGE_BYTES, MAX_BYTES, MAX_CHARS = 1 << 20, 16 << 20, 1 << 16
# Audio is sent in pieces of at least PIECE_SAMPLES, so that a session sends ten messages a second. After
# MESSAGES_A_TURN messages, the event loop can run other tasks.
PIECE_SAMPLES, MESSAGES_A_TURN = SAMPLE_RATE_HZ // 10, 64
# OpenAI's service takes PCM at this rate only.
OPENAI_RATE_HZ = 24_000


# The value of a field that a message does not have.
NULL = msgspec.Raw(b"null")


class _Message(msgspec.Struct):
    """A message of either wire. Servers differ in the fields' types."""

    # Its kind.
    type: str
    # New text.
    delta: msgspec.Raw = NULL
    # The final, in OpenAI's sessions.
    transcript: msgspec.Raw = NULL
    # The final, in vLLM's.
    text: msgspec.Raw = NULL
    # The language of a language event.
    language: msgspec.Raw = NULL
    # The words of a final, with times; only antiphon sends them.
    words: msgspec.Raw = NULL
    # An error: an object, or in vLLM's case a text.
    error: msgspec.Raw = NULL
    # The configuration, in OpenAI's sessions.
    session: msgspec.Raw = NULL
    # The time of the session's beginning, in vLLM's and in antiphon's first message.
    created: msgspec.Raw = NULL


class _Error(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _TimedWord(msgspec.Struct):
    word: str
    start: float
    end: float
    confidence: float = 1.0


_message_decoder, _error_decoder = msgspec.json.Decoder(_Message), msgspec.json.Decoder(_Error)
_text_decoder, _any_decoder = msgspec.json.Decoder(str), msgspec.json.Decoder()
_words_decoder = msgspec.json.Decoder(list[_TimedWord])


class StreamWire(Protocol):
    """How a streaming server is spoken to. `whole_words`: whether each delta ends with a whole word."""

    name: str
    rate_hz: int
    whole_words: bool

    def opening(self, model: str, window: Window) -> Sequence[str]:
        """Return the messages that begin an utterance."""
        ...

    def commit(self) -> str:
        """Return the message that ends the audio."""
        ...

    def read(self, message: _Message, heard: HeardSoFar) -> None:
        """Add what a message says. Raises RemoteError for an error of the server."""
        ...


class HeardSoFar:
    """What a server has said about one utterance. `final`: None until it has sent the last transcript."""

    def __init__(self) -> None:
        self.text, self.language = "", ""
        self.final: HeardText | None = None

    def add(self, delta: msgspec.Raw) -> None:
        """Append the text of a delta. Raises RemoteError if the whole text is too long."""
        self.text += optional(_text_decoder, delta) or ""
        if len(self.text) > MAX_CHARS:
            raise RemoteError(f"the transcriber's server sent more than {MAX_CHARS} characters")

    def finish(self, text: str, words: msgspec.Raw | None = None) -> None:
        """Take the whole transcript and its words. Raises RemoteError if it is too long."""
        if len(text) > MAX_CHARS:
            raise RemoteError(f"the transcriber's server sent more than {MAX_CHARS} characters")
        found = words_of(text)
        timed = optional(_words_decoder, words) if words is not None else None
        if timed:
            found = timed_words(found, [Word(w.word, w.start, w.end, w.confidence) for w in timed])
        self.final = HeardText(found, language_code(self.language) if self.language else "")


class OpenAiWire:
    """OpenAI's transcription sessions. `is_antiphon`: the server is antiphon, which knows more fields and rates."""

    def __init__(self, *, is_antiphon: bool) -> None:
        self._is_antiphon = is_antiphon
        self.name = "another antiphon" if is_antiphon else "OpenAI transcription sessions"
        self.rate_hz = SAMPLE_RATE_HZ if is_antiphon else OPENAI_RATE_HZ
        self.whole_words = is_antiphon

    def opening(self, model: str, window: Window) -> Sequence[str]:
        """Return the session's configuration: the client commits, and antiphon also sends words and the language."""
        transcription: dict[str, str | list[str]] = {"model": model}
        if window.language:
            transcription["language"] = window.language
        if prompt := " ".join(filter(None, (window.context.strip(), window.prompt.strip()))):
            transcription["prompt"] = prompt
        if self._is_antiphon and window.languages and not window.language:
            transcription["languages"] = list(window.languages)
        audio = {
            "format": {"type": "audio/pcm", "rate": self.rate_hz},
            "transcription": transcription,
            "turn_detection": None,
        }
        session = {"type": "transcription", "audio": {"input": audio}}
        if self._is_antiphon:
            session["include"] = [f"item.input_audio_transcription.{what}" for what in ("words", "language")]
        return [json.dumps({"type": "session.update", "session": session})]

    def commit(self) -> str:
        """Return the frame that ends the audio and requests its transcript."""
        return '{"type":"input_audio_buffer.commit"}'

    def read(self, message: _Message, heard: HeardSoFar) -> None:
        """Read deltas, the language, and the completed transcript."""
        match message.type.removeprefix("conversation.item.input_audio_transcription."):
            case "delta":
                heard.add(message.delta)
            case "language":
                heard.language = optional(_text_decoder, message.language) or ""
            case "completed":
                heard.finish(optional(_text_decoder, message.transcript) or "", message.words)
            case "failed":
                raise _failure(message)
            case "error":
                error = optional(_error_decoder, message.error) or _Error()
                if error.code != "input_audio_buffer_commit_empty":
                    raise _failure(message)
                heard.finish("")


class VllmWire:
    """vLLM's `/v1/realtime`, whose deltas are tokens. It reports neither times nor probabilities nor the language."""

    name = "vLLM realtime"
    rate_hz = SAMPLE_RATE_HZ
    whole_words = False

    def opening(self, model: str, window: Window) -> Sequence[str]:
        """Return the model's name, and the commit that begins the transcription."""
        update = {"type": "session.update", "model": model}
        return [json.dumps(update), '{"type":"input_audio_buffer.commit","final":false}']

    def commit(self) -> str:
        """Return the frame that ends the audio and requests the final."""
        return '{"type":"input_audio_buffer.commit","final":true}'

    def read(self, message: _Message, heard: HeardSoFar) -> None:
        """Read deltas and the final text."""
        match message.type:
            case "transcription.delta":
                heard.add(message.delta)
            case "transcription.done":
                heard.finish(optional(_text_decoder, message.text) or heard.text)
            case "error":
                raise _failure(message)


def _failure(message: _Message) -> RemoteError:
    said = error_text(optional(_any_decoder, message.error))
    return RemoteError(f"the transcriber's server failed: {said}")


async def open_socket(pool: Pool[Any], url: str, host: str) -> ClientConnection:
    """Open the connection to a URL of a server. Raises the errors of `open_websocket`."""
    return await open_websocket(host, url, pool.headers(), pool.tls, max_bytes=MAX_MESSAGE_BYTES)


def read_message(data: str | bytes, key: str) -> _Message:
    """Decode one message of a server. Raises RemoteError."""
    found = without_key(data.encode() if isinstance(data, str) else data, key)
    if found.count(b"{") > MAX_OBJECTS:
        raise RemoteError("the transcriber's server sent a message with too many objects")
    return decoded(_message_decoder, found, "message")


class Utterance:
    """The audio of one window at one streaming server, on a connection of its own. Used from one event loop.

    Audio that is fed before the connection is open waits. Errors of the connection are raised by `heard` and `final`.
    """

    def __init__(self, server: StreamingServer, window: Window) -> None:
        self.endpoint, self.start_sample = server.endpoint, window.start_sample
        self._pool, self._url, self._wire = server.pool, server.url, server.wire
        wire = server.wire
        self._resampler = Resampler(SAMPLE_RATE_HZ, wire.rate_hz)
        # Messages that wait to be sent. They have at most the audio of one window.
        self._outgoing: deque[str] = deque(wire.opening(server.model, window))
        self._num_fed, self._is_committed = 0, False
        self._so_far = HeardSoFar()
        self._failure: RemoteError | Refused | None = None
        # Set when a message is to be sent, and when something was heard.
        self._to_send, self._news = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._run())
        self._pool.tasks.add(self._task)
        self._task.add_done_callback(self._ended)
        self.endpoint.running += 1

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._pool.tasks.discard(task)
        self.endpoint.running -= 1

    @property
    def num_fed(self) -> int:
        """The number of the window's samples that were fed."""
        return self._num_fed

    @property
    def failure(self) -> RemoteError | Refused | None:
        """Why the connection failed; None if it did not."""
        return self._failure

    @property
    def is_open(self) -> bool:
        """Whether more audio may be fed."""
        return self._failure is None and not self._is_committed

    def feed(self, window: Window, *, final: bool = False) -> None:
        """Send the window's audio that was not sent yet. Returns at once. `final`: it is all of the audio."""
        if len(window.pcm) - self._num_fed >= (1 if final else PIECE_SAMPLES):
            pcm = self._resampler.feed(window.pcm[self._num_fed :])
            self._num_fed = len(window.pcm)
            self._append(to_pcm16(pcm))
        if final:
            self._append(to_pcm16(self._resampler.flush()))
            self._outgoing.append(self._wire.commit())
            self._is_committed = True
        self._to_send.set()

    def _append(self, data: bytes) -> None:
        if data:
            audio = base64.b64encode(data).decode()
            self._outgoing.append(f'{{"type":"input_audio_buffer.append","audio":"{audio}"}}')

    @property
    def heard(self) -> HeardText:
        """What was heard so far. Raises the error of the connection.

        A last word that may still grow is left out.
        """
        if self._failure:
            raise self._failure
        text = self._so_far.text
        words = words_of(text)
        if words and not self._wire.whole_words and not text[-1:].isspace():
            words = words[:-1]
        return HeardText(words, self._so_far.language)

    async def news(self, timeout_s: float) -> None:
        """Wait until something more was heard, the connection failed, or the time is over."""
        self._news.clear()
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
        except TimeoutError:
            return

    async def final(self) -> HeardText:
        """Wait for the final, without a timeout. Raises RemoteError or Refused."""
        while self._so_far.final is None:
            if self._failure:
                raise self._failure
            self._news.clear()
            await self._news.wait()
        return self._so_far.final

    def close(self) -> None:
        """End the connection. Returns at once."""
        if self._so_far.final is None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            connection = await open_socket(self._pool, self._url, self.endpoint.host)
            async with connection:
                sending = asyncio.create_task(self._send(connection))
                try:
                    await self._receive(connection)
                finally:
                    sending.cancel()
        except (RemoteError, Refused) as error:
            self._failure = error
        except ModelError as error:
            # Another server may accept the key.
            self._failure = RemoteError(str(error))
        except WebSocketException as error:
            self._failure = RemoteError(f"{self.endpoint.host}: {reason(error)}")
        finally:
            self._news.set()

    async def _send(self, connection: ClientConnection) -> None:
        try:
            while True:
                while self._outgoing:
                    await connection.send(self._outgoing.popleft())
                self._to_send.clear()
                await self._to_send.wait()
        except WebSocketException:
            # The receiver reports the end of the connection.
            return

    async def _receive(self, connection: ClientConnection) -> None:
        num_bytes = num_messages = 0
        async for data in connection:
            num_bytes, num_messages = num_bytes + len(data), num_messages + 1
            if num_bytes > MAX_BYTES:
                raise RemoteError(f"the transcriber's server sent more than {MAX_BYTES} bytes for one turn")
            self._wire.read(read_message(data, self._pool.key), self._so_far)
            self._news.set()
            if self._so_far.final is not None:
                return
            if num_messages % MESSAGES_A_TURN == 0:
                await asyncio.sleep(0)
        raise RemoteError(f"{self.endpoint.host} closed the connection before the transcript")


class StreamingServer:
    """A streaming server of a pool. `url`: the WebSocket's. `model`: the name that the server knows."""

    def __init__(self, pool: Pool[Any], endpoint: Endpoint, url: str, model: str, wire: StreamWire) -> None:
        self.pool, self.endpoint, self.url, self.model = pool, endpoint, url, model
        self.wire = wire

    @property
    def name(self) -> str:
        """The kind of server, in words."""
        return self.wire.name

    def open(self, window: Window) -> Utterance:
        """Begin the audio of a window. Returns at once."""
        return Utterance(self, window)
