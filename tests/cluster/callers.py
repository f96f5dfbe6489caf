"""Clients that hold conversations with scripted hosts while hosts die, and that check the events they get.

`View` is what a client knows from its events alone; it detects contradictions between them. A `ResumingCaller` resumes
its session. A `StockCaller` knows nothing of resuming; a door resumes for it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import websockets
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from tests.scripted import WORD_SAMPLES, speech, text
from tests.server.clients import b64

RATE_HZ = 24_000
CHUNK_S = 0.1
# Seconds that a scripted word lasts.
WORD_S = WORD_SAMPLES / 16_000
TURN_S = 20.0
SESSION = {
    "type": "realtime",
    "output_modalities": ["audio"],
    "audio": {
        "input": {
            "format": {"type": "audio/pcm", "rate": RATE_HZ},
            "turn_detection": {"type": "server_vad", "silence_duration_ms": 300},
            "transcription": {},
        }
    },
}
# Events about the host. Only a client that resumes gets them.
OF_THE_HOST = {"session.moving", "session.state_degraded", "session.resumed", "session.event_ack"}


class View:
    """A conversation as its events describe it.

    `take` raises AssertionError for an event that contradicts earlier ones.

    `items` has the items by id, in order. `responses` has the status of each response, which is "" while it is open.
    `heard_at_s` has the arrival times of audio. `cancelled_at_s` is when the last cancelled response ended, or None.
    """

    def __init__(self) -> None:
        self.items: dict[str, dict[str, Any]] = {}
        self.responses: dict[str, str] = {}
        self.heard_at_s: deque[float] = deque(maxlen=400)
        self.cancelled_at_s: float | None = None
        self._done: set[str] = set()
        self._transcribed: set[str] = set()

    def take(self, event: dict[str, Any]) -> None:
        """Check the next event, and apply it."""
        match event["type"]:
            case "error":
                raise AssertionError(event)
            case "session.replaced":
                raise AssertionError(event)
            case "conversation.item.added":
                self._add(event["item"], event.get("previous_item_id"))
            case "conversation.item.done":
                item = event["item"]
                assert item["id"] in self.items, event
                assert item["id"] not in self._done, event
                self._done.add(item["id"])
                self.items[item["id"]] = item
            case "conversation.item.deleted":
                assert self.items.pop(event["item_id"], None), event
            case "conversation.item.input_audio_transcription.completed":
                assert event["item_id"] not in self._transcribed, event
                self._transcribed.add(event["item_id"])
                self.items[event["item_id"]]["content"][0]["transcript"] = event["transcript"]
            case "response.created":
                assert event["response"]["id"] not in self.responses, event
                assert "" not in self.responses.values(), event
                self.responses[event["response"]["id"]] = ""
            case "response.done":
                assert self.responses[event["response"]["id"]] == "", event
                self.responses[event["response"]["id"]] = event["response"]["status"]
                if event["response"]["status"] == "cancelled":
                    self.cancelled_at_s = time.monotonic()
            case "response.output_audio.delta" | "response.output_audio_transcript.delta":
                assert self.responses[event["response_id"]] == "", event
                if "audio." in event["type"]:
                    self.heard_at_s.append(time.monotonic())

    def _add(self, item: dict[str, Any], previous: str | None) -> None:
        assert item["id"] not in self.items, item
        order = list(self.items.items())
        at = list(self.items).index(previous) + 1 if previous else 0
        self.items = dict([*order[:at], (item["id"], item), *order[at:]])

    def said(self, role: str) -> list[str]:
        """Return the words of this role in order, without those of items that were broken off."""
        return [
            words(item)
            for item in self.items.values()
            if item.get("role") == role and item.get("status") != "incomplete"
        ]


def words(item: dict[str, Any]) -> str:
    """Return the text of an item, whether spoken or written."""
    return " ".join(part.get("transcript") or part.get("text") or "" for part in item["content"])


class Caller:
    """A client that takes written and spoken turns alternately, and waits for the answer to each.

    `session_id` is set when it is known. `view` is built from the client's events. `said` has the client's own words.
    `num_sent` is the number of its messages, and `num_spoken` that number at the last word of the last spoken turn.
    """

    def __init__(self, number: int, urls: Sequence[str], seed: int, key: str = "") -> None:
        self.number = number
        self.view = View()
        self.said: list[str] = []
        self.session_id = ""
        self.num_sent = 0
        self.num_spoken = 0
        self.events: deque[dict[str, Any]] = deque(maxlen=400)
        self._urls = list(urls)
        self._random = random.Random(seed)
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._next_word = 1
        self._took = asyncio.Event()

    # --- the conversation ---------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """The phase of its turn, according to its events."""
        if "" in self.view.responses.values():
            return "answering"
        last = self.events[-1]["type"] if self.events else ""
        if "speech_started" in last:
            return "speaking"
        if "speech_stopped" in last or "committed" in last or "transcription" in last:
            return "transcribing"
        return "asking" if self.said and self.view.said("assistant")[-1:] != self.said[-1:] else "idle"

    async def turn(self) -> None:
        """Take a written turn, and sometimes a spoken one after it."""
        await self.converse(1 + self._random.randrange(2))

    def connected(self) -> AbstractAsyncContextManager[None]:
        """Keep the session open while the block runs."""
        raise NotImplementedError

    async def converse(self, turns: int, *, spoken: bool = True, num_words: int = 3) -> None:
        """Take `turns` turns, and wait for the answer to each."""
        await self.send("session.update", session=SESSION)
        for turn in range(turns):
            # The audio's level encodes the word's number.
            if self._next_word + num_words > 900:
                self._next_word = 1
            expected = text(self._next_word, num_words)
            if spoken and turn % 2:
                await self._speak(self._next_word, num_words)
            else:
                content = [{"type": "input_text", "text": expected}]
                await self.send(
                    "conversation.item.create", item={"type": "message", "role": "user", "content": content}
                )
                await self.send("response.create")
            self._next_word += num_words
            self.said.append(expected)
            await self._until_answered(expected)
            await asyncio.sleep(self._random.uniform(0, 0.1))

    async def ask(self, question: str) -> None:
        """Write a question and request the answer, without waiting for it."""
        await self.send("session.update", session=SESSION)
        content = [{"type": "input_text", "text": question}]
        await self.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        await self.send("response.create")

    async def _speak(self, first: int, count: int) -> None:
        """Say words at the pace of speech, then stay silent."""
        pcm16 = base64.b64decode(b64(speech(first, count, silence_frames=15), RATE_HZ))
        step = round(CHUNK_S * RATE_HZ) * 2
        for at in range(0, len(pcm16), step):
            await self.send("input_audio_buffer.append", audio=base64.b64encode(pcm16[at : at + step]).decode())
            await asyncio.sleep(CHUNK_S)
            if at < count * WORD_S * RATE_HZ * 2:
                self.num_spoken = self.num_sent

    async def _until_answered(self, expected: str) -> None:
        """Wait until an answer has repeated the words, and nothing else is in progress."""
        try:
            async with asyncio.timeout(TURN_S):
                # An answer that was cancelled with its host comes again, also if its words are complete.
                while not (
                    self.view.said("assistant")[-1:] == [expected]
                    and list(self.view.responses.values())[-1:] == ["completed"]
                ):
                    self._took.clear()
                    await self._took.wait()
        except TimeoutError:
            raise AssertionError(f"caller {self.number}: {expected!r} was not answered; {self.latest()}") from None

    def latest(self) -> str:
        """Return the latest events in short form, without deltas."""
        reported = [self._short(event) for event in self.events if not event["type"].endswith("delta")]
        return "it was reported " + ", ".join(reported[-60:])

    @staticmethod
    def _short(event: dict[str, Any]) -> str:
        about = event.get("item") or event.get("response") or {}
        said = words(about) if "content" in about else about.get("status", "")
        return f"{event['type']} {about.get('id') or event.get('item_id') or ''} {said}".strip()

    def check(self) -> None:
        """Raise AssertionError unless each turn appears once, in order, and with one answer."""
        for role in ("user", "assistant"):
            said = self.view.said(role)
            at = next((n for n, pair in enumerate(zip(said, self.said, strict=False)) if pair[0] != pair[1]), 0)
            assert said == self.said, (
                self.number,
                role,
                at,
                said[at:][:5],
                said[-3:],
                self.said[at:][:5],
                self.latest(),
            )

    # --- the wire -----------------------------------------------------------------------------------------------------

    async def send(self, kind: str, **fields: Any) -> None:
        """Send an event."""
        raise NotImplementedError

    def _take(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self.view.take(event)
        self._took.set()


class StockCaller(Caller):
    """A client of a door that cannot resume. Its connection must never break."""

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Stay connected while the block runs."""
        url = f"{self._random.choice(self._urls)}/v1/realtime"
        async with websockets.connect(url, max_size=None, additional_headers=self._headers) as self._socket:
            reader = asyncio.create_task(self._read())
            try:
                yield
                reader.cancel()
            finally:
                if reader.done() and not reader.cancelled():
                    reader.result()
                reader.cancel()

    async def _read(self) -> None:
        async for frame in self._socket:
            event = json.loads(frame)
            if event["type"] == "session.created":
                self.session_id = event["session"]["id"]
            self._take(event)
        raise AssertionError(f"the door has closed: {self._socket.close_code} {self._socket.close_reason}")

    async def send(self, kind: str, **fields: Any) -> None:
        self.num_sent += 1
        await self._socket.send(json.dumps({"type": kind, **fields}))


class ResumingCaller(Caller):
    """A client that resumes its session at any of its hosts, and sends unreceived messages again.

    `first` is the host to begin at; by default, any host. `how` counts the ways in which the session was resumed.
    `resumed_s` has the seconds of each resume, from the end of a connection to the reply on the next one.
    """

    def __init__(self, number: int, urls: Sequence[str], seed: int, key: str = "", first: str = "") -> None:
        super().__init__(number, urls, seed, key)
        self._first = first
        self.how: list[str] = []
        self.resumed_s: list[float] = []
        self._token = ""
        self._last_seq = self._acked_seq = 0
        # Messages that the host may not have received, by number; and the number of the next message on this
        # connection.
        self._kept: dict[int, str] = {}
        self._next = 1
        self._socket: ClientConnection | None = None
        self._writing = asyncio.Lock()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Reconnect whenever the connection breaks, while the block runs."""
        await self._open()
        reader = asyncio.create_task(self._read())
        try:
            yield
            reader.cancel()
            if self._socket:
                await self._socket.close()
        finally:
            if reader.done() and not reader.cancelled():
                reader.result()
            reader.cancel()

    async def _open(self) -> None:
        for url in [self._first] if self._first else self._random.sample(self._urls, len(self._urls)):
            try:
                self._socket = await self._connect(url, "resume=1")
                break
            except OSError:
                continue
        assert self._socket, "no host takes a session"
        created = json.loads(await self._socket.recv())
        self.session_id, self._token = created["session"]["id"], created["resume_token"]

    async def _connect(self, url: str, query: str) -> ClientConnection:
        return await websockets.connect(
            f"{url}/v1/realtime?{query}",
            max_size=None,
            additional_headers=self._headers,
            open_timeout=5,
            ping_interval=0.5,
            ping_timeout=1.5,
            close_timeout=0.5,
        )

    def cut(self) -> None:
        """Abort the connection, as a network failure does."""
        if self._socket:
            self._socket.transport.abort()

    async def send(self, kind: str, **fields: Any) -> None:
        self.num_sent += 1
        self._kept[self.num_sent] = json.dumps({"type": kind, **fields})
        await self._write()

    async def _write(self) -> None:
        """Send the messages that this connection lacks, in order.

        If it breaks, the next connection sends them again.
        """
        async with self._writing:
            while self._socket and self._next in self._kept:
                try:
                    await self._socket.send(self._kept[self._next])
                except ConnectionClosed:
                    return
                self._next += 1

    async def _read(self) -> None:
        while True:
            assert self._socket
            try:
                async for frame in self._socket:
                    await self._receive(json.loads(frame))
            except ConnectionClosed:
                pass
            # A connection that hangs is not waited for.
            self._socket.transport.abort()
            broke_s = time.monotonic()
            self._socket = None
            self._socket = await self._resume()
            self.resumed_s.append(time.monotonic() - broke_s)
            await self._write()

    async def _receive(self, event: dict[str, Any]) -> None:
        seq = event.get("server_event_seq")
        if seq is not None:
            assert seq == self._last_seq + 1, (seq, self._last_seq, event)
            self._last_seq = seq
        if event["type"] not in OF_THE_HOST:
            self._take(event)
        elif event["type"] != "session.resumed":
            self.events.append(event)
        if self._last_seq - self._acked_seq >= 32 and self._socket:
            self._acked_seq = self._last_seq
            try:
                await self._socket.send(json.dumps({"type": "session.event_ack", "server_event_seq": self._last_seq}))
            except ConnectionClosed:
                return

    async def _resume(self) -> ClientConnection:
        refusals: list[Any] = []
        async with asyncio.timeout(TURN_S):
            while True:
                for url in self._random.sample(self._urls, len(self._urls)):
                    try:
                        if (socket := await self._resume_at(url, refusals)) is not None:
                            return socket
                    except (OSError, TimeoutError, InvalidHandshake, ConnectionClosed) as error:
                        refusals.append(type(error).__name__)
                await asyncio.sleep(self._random.uniform(0.01, 0.06))

    async def _resume_at(self, url: str, refusals: list[Any]) -> ClientConnection | None:
        socket = await self._connect(url, f"resume={self.session_id}")
        request = {"session_id": self.session_id, "resume_token": self._token}
        request |= {"last_received_server_event_seq": self._last_seq}
        try:
            await socket.send(json.dumps({"type": "session.resume", **request}))
            async with asyncio.timeout(TURN_S):
                resumed = json.loads(await socket.recv())
        except BaseException:
            socket.transport.abort()
            raise
        if resumed["type"] == "error":
            assert resumed["error"].get("retryable"), resumed
            refusals.append(resumed["error"]["code"])
            await socket.close()
            return None
        assert resumed["type"] == "session.resumed", resumed
        self.how.append(resumed["how"])
        self.events.append(resumed | {"item": {"id": f"{resumed['how']} {resumed['received_events']} at {url[-5:]}"}})
        self._token = resumed["resume_token"]
        received = resumed["received_events"]
        assert received + 1 >= min(self._kept, default=1), (received, "the host has forgotten what it had stored")
        # Messages that a host has received but not stored may have to be sent to another host.
        self._kept = {n: frame for n, frame in self._kept.items() if n > resumed["stored_events"]}
        async with self._writing:
            self._next = received + 1
        return socket
