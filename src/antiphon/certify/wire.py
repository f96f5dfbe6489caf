"""What the clients of a certificate share: a connection, the server's events, a microphone, a loudspeaker."""

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
# A server has so long to say that it takes a session.
BEGIN_S = 3.0
# A turn whose answer has not come by then has failed.
PATIENCE_S = 15.0
# 16-bit samples above this are heard: 45 dB below the loudest that there can be.
AUDIBLE = 184


class Failed(Exception):
    """A turn went wrong; the text says how."""


@asynccontextmanager
async def connected(url: str, key: str) -> AsyncIterator[Any]:
    """Yield a connection to a server, with its API key unless that is ""."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with websockets.connect(
        url, additional_headers=headers, max_size=None, compression=None, open_timeout=PATIENCE_S
    ) as socket:
        yield socket


class _Problem(msgspec.Struct):
    """An error of a server."""

    message: str | None = None


class _Part(msgspec.Struct):
    """A part of an item: its text, or the transcript of its sound."""

    text: str | None = None
    transcript: str | None = None


class _Item(msgspec.Struct):
    """An item of a server's history."""

    id: str = ""
    content: list[_Part] | None = None


class _Ended(msgspec.Struct):
    """How a response has ended; a server of full duplex says in `metadata` why there is none."""

    status: str | None = None
    metadata: dict[str, str] | None = None


class Event(msgspec.Struct):
    """What clients read of an event of a server, and nothing but its type of one that has other fields than it should.

    `message`: of an error of the speech and the video stream.
    """

    type: str = ""
    item_id: str = ""
    delta: str = ""
    transcript: str = ""
    message: str = "error"
    error: msgspec.Raw = msgspec.Raw(b"null")
    response: _Ended | None = None
    item: _Item | None = None

    @property
    def problem(self) -> str:
        """What went wrong, in the server's words."""
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
    """Read an event. Raises ValueError for what has no type."""
    try:
        return msgspec.json.decode(message, type=Event)
    except msgspec.ValidationError:
        return Event(msgspec.json.decode(message, type=_Typed).type)


async def begin(socket: Any, *sessions: str) -> None:
    """Ask for a session (JSON), or for the next one where the server refuses it. Raises Failed where it refuses all.

    A server that says nothing for BEGIN_S is taken to have agreed.
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
    """Return float32 at 16 kHz as 16-bit PCM at 24 kHz."""
    return to_pcm16(np.asarray(soxr.resample(pcm, SAMPLE_RATE_HZ, WIRE_HZ), np.float32))


class Microphone:
    """Sends sound in real time without a gap: what it is given, and silence. `clock`: when the last chunk was due."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._waiting = socket, b""
        self._due_s = time.monotonic()

    def say(self, recording: Recording) -> float:
        """Say a recording from the next chunk on, and return when its speech will have been sent, monotonic."""
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
    """The server's events, as they come. A reader sees each once."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._queue: asyncio.Queue[tuple[float, Event]] = asyncio.Queue()

    async def run(self) -> None:
        async for message in self._socket:
            if isinstance(message, str):
                self._queue.put_nowait((time.monotonic(), read_event(message)))
        raise Failed("the server closed the connection")

    async def next(self, until_s: float) -> tuple[float, Event]:
        """Return the next event and when it came. Raises Failed where none comes by `until_s`, monotonic."""
        try:
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                return await self._queue.get()
        except TimeoutError:
            raise Failed("no answer came in time") from None

    def forget(self) -> None:
        """Drop what has come and was not read."""
        while not self._queue.empty():
            self._queue.get_nowait()


async def while_running(turns: Callable[[], Any], *tasks: Callable[[], Any]) -> None:
    """Take turns until they, or one of the tasks, end; raise what one failed with."""
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
    """Plays what comes by the clock, and knows how late sound was, and when it will have been heard.

    `begun_s`: when sound first came. `audible_s`: when the first of it that is no silence was heard. Monotonic.
    """

    def __init__(self) -> None:
        self.begun_s: float | None = None
        self.audible_s: float | None = None
        self.late_s = 0.0
        self._until_s = 0.0
        self.items: dict[str, float] = {}

    def take(self, event: Event, at_s: float) -> None:
        """Take in a delta of sound."""
        self.take_sound(base64.b64decode(event.delta), at_s, event.item_id)

    def take_sound(self, pcm: bytes, at_s: float, item_id: str = "") -> None:
        """Take in 16-bit PCM."""
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
        """When all that has come will have been heard, monotonic."""
        return self._until_s
