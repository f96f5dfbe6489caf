"""Shared parts of the clients of a certificate: a connection, the server's events, a microphone, a loudspeaker."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import soxr
import websockets

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import to_pcm16
from antiphon.certify.recordings import Recording

WIRE_HZ, CHUNK_S = 24_000, 0.04
CHUNK_BYTES = 2 * int(WIRE_HZ * CHUNK_S)
# Time limit for the server's reply to a request for a session.
BEGIN_S = 3.0
# A turn fails if its answer does not arrive within PATIENCE_S.
PATIENCE_S = 15.0
# 16-bit samples above this are audible: 45 dB below full scale.
AUDIBLE = 184


class Failed(Exception):
    """A turn failed. The message has the reason."""


@asynccontextmanager
async def connected(url: str, key: str) -> AsyncIterator[Any]:
    """Yield a connection to a server. An empty `key` sends no API key."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with websockets.connect(
        url, additional_headers=headers, max_size=None, compression=None, open_timeout=PATIENCE_S
    ) as socket:
        yield socket


class _Problem(msgspec.Struct):
    """The `error` of an event."""

    message: str | None = None


class _Part(msgspec.Struct):
    """A content part of an item: its text, or the transcript of its audio."""

    text: str | None = None
    transcript: str | None = None


class _Item(msgspec.Struct):
    """An item of a server's history."""

    id: str = ""
    content: list[_Part] | None = None


class _Usage(msgspec.Struct):
    """The usage of a response. A native model counts its units as output tokens."""

    output_tokens: int = 0


class _Ended(msgspec.Struct):
    """How a response ended. In full duplex, `metadata` has the reason if there was no response."""

    status: str | None = None
    metadata: dict[str, str] | None = None
    usage: _Usage | None = None


class Event(msgspec.Struct):
    """The fields of a server's event that clients read. If a field has an unexpected type, only `type` is set."""

    # The name of the event.
    type: str = ""
    # The item that the event belongs to.
    item_id: str = ""
    # New text, or audio in base64.
    delta: str = ""
    # The transcript of a turn.
    transcript: str = ""
    # The error message, in speech and video streams.
    message: str = "error"
    # The `error`, in the Realtime API: an object, or any other JSON that a server sends.
    error: msgspec.Raw = msgspec.Raw(b"null")
    # The response of `response.done` or `response.listen`.
    response: _Ended | None = None
    # The item of `conversation.item.retrieved`.
    item: _Item | None = None

    @property
    def reason(self) -> str:
        """Why there was no response, in full duplex."""
        return ((self.response and self.response.metadata) or {}).get("reason", "")

    @property
    def output_tokens(self) -> int:
        """The output tokens of a response that has ended; 0 if the server does not report them."""
        return self.response.usage.output_tokens if self.response and self.response.usage else 0

    @property
    def problem(self) -> str:
        """The server's error message, or else its `error` as JSON."""
        with suppress(msgspec.ValidationError):
            found = msgspec.json.decode(self.error, type=_Problem | None)
            if found is None:
                return "error"
            if found.message:
                return found.message
        return bytes(self.error).decode()


class _Typed(msgspec.Struct):
    type: str


def read_event(message: str | bytes) -> Event:
    """Decode an event. Raises ValueError if it has no type."""
    try:
        return msgspec.json.decode(message, type=Event)
    except msgspec.ValidationError:
        return Event(msgspec.json.decode(message, type=_Typed).type)


async def begin(socket: Any, *sessions: str) -> None:
    """Request a session (JSON), and the next one if the server refuses it. Raises Failed if it refuses all.

    No reply within BEGIN_S counts as acceptance.
    """
    for session in sessions:
        await socket.send(f'{{"type":"session.update","session":{session}}}')
        refusal = ""
        with suppress(TimeoutError):
            async with asyncio.timeout(BEGIN_S):
                while not refusal:
                    event = read_event(await socket.recv())
                    if event.type == "session.updated":
                        return
                    if event.type == "error":
                        refusal = event.problem
        if not refusal:
            return
    raise Failed(f"the session is refused: {refusal}"[:200])


def wire_pcm(pcm: Pcm) -> bytes:
    """Convert float32 audio at 16 kHz to 16-bit PCM at 24 kHz."""
    return to_pcm16(np.asarray(soxr.resample(pcm, SAMPLE_RATE_HZ, WIRE_HZ), np.float32))


class Microphone:
    """Sends audio in real time without gaps: recordings, and silence between them."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._waiting = socket, b""
        self._due_s = time.monotonic()

    def say(self, recording: Recording) -> float:
        """Play a recording, beginning with the next chunk. Returns the monotonic time at which its speech will end."""
        begins_s = self._due_s + CHUNK_S
        self._waiting = wire_pcm(recording.pcm)
        return begins_s + recording.speech_end_s

    async def run(self) -> None:
        silence = bytes(CHUNK_BYTES)
        while True:
            self._due_s += CHUNK_S
            await asyncio.sleep(max(0.0, self._due_s - time.monotonic()))
            data, self._waiting = self._waiting[:CHUNK_BYTES], self._waiting[CHUNK_BYTES:]
            sound = data + silence[len(data) :]
            event = {"type": "input_audio_buffer.append", "audio": base64.b64encode(sound).decode()}
            await self._socket.send(json.dumps(event))


class Events:
    """A queue of the server's events. Each event is read once."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._queue: asyncio.Queue[tuple[float, Event]] = asyncio.Queue()

    async def run(self) -> None:
        async for message in self._socket:
            if isinstance(message, str):
                self._queue.put_nowait((time.monotonic(), read_event(message)))
        raise Failed("the server closed the connection")

    async def next(self, until_s: float) -> tuple[float, Event]:
        """Return the next event with its monotonic time of arrival. Raises Failed if none arrives by `until_s`."""
        try:
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                return await self._queue.get()
        except TimeoutError:
            raise Failed("no answer arrived in time") from None

    def forget(self) -> None:
        """Drop all events that were not read yet."""
        while not self._queue.empty():
            self._queue.get_nowait()


async def while_running(turns: Callable[[], Any], *tasks: Callable[[], Any]) -> None:
    """Run `turns` along with the tasks. When one of them ends, cancel the others, and raise its error if it failed."""
    running = [asyncio.ensure_future(work()) for work in (*tasks, turns)]
    try:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class Loudspeaker:
    """Simulates the playback of received audio, and records how late it arrived. Times are monotonic.

    `begun_s` is when the first audio arrived, and `audible_s` when its first sound that is not silence was played.
    `late_s` is the longest gap in playback. `items` has the seconds of audio of each item.
    """

    def __init__(self) -> None:
        self.begun_s: float | None = None
        self.audible_s: float | None = None
        self.late_s = 0.0
        self._until_s = 0.0
        self.items: dict[str, float] = {}

    def take(self, event: Event, at_s: float) -> None:
        """Play the audio of a delta that arrived at `at_s`."""
        self.take_sound(base64.b64decode(event.delta), at_s, event.item_id)

    def take_sound(self, pcm: bytes, at_s: float, item_id: str = "") -> None:
        """Play 16-bit PCM at WIRE_HZ that arrived at `at_s`."""
        if self.begun_s is None:
            self.begun_s = self._until_s = at_s
        self.late_s = max(self.late_s, at_s - self._until_s)
        if self.audible_s is None:
            samples = np.frombuffer(pcm[: len(pcm) // 2 * 2], "<i2").astype(np.int32)
            if len(loud := np.flatnonzero(np.abs(samples) > AUDIBLE)):
                self.audible_s = max(self._until_s, at_s) + float(loud[0]) / WIRE_HZ
        seconds = len(pcm) / 2 / WIRE_HZ
        self._until_s = max(self._until_s, at_s) + seconds
        self.items[item_id] = self.items.get(item_id, 0.0) + seconds

    @property
    def heard_by_s(self) -> float:
        """The monotonic time at which all received audio has been played."""
        return self._until_s
