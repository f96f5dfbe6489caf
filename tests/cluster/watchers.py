"""Clients of video streams, and clients that request responses out of band. They check their events while hosts die.

A `Watcher` and an `Asker` know nothing of resuming; a door resumes for them. An `OwnWatcher` uses our client.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import numpy as np
import websockets
from PIL import Image

from antiphon.client import Client
from tests.cluster.scripted_partners import said

TURN_S = 20.0
NUM_FRAMES = 3
CONFIG = {"modalities": ["text"], "num_frames": NUM_FRAMES, "max_frames": NUM_FRAMES, "enable_frame_filter": False}
# Longer histories are cut for the next host's model, so that it knows fewer questions.
MAX_KNOWN = 25
# Milliseconds of audio in a message.
SOUND_MS = 100


def picture(grey: int) -> bytes:
    """Return a PNG of one colour."""
    file = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), grey, np.uint8)).save(file, "PNG")
    return file.getvalue()


class DoorClient:
    """A client of a door, which opens a WebSocket at `path` and sends `opening` first. It knows nothing of resuming."""

    path: ClassVar[str]
    opening: ClassVar[Mapping[str, Any]]

    def __init__(self, number: int, url: str, seed: int) -> None:
        self.number = number
        self._url = url
        self._random = random.Random(seed)
        self._took = asyncio.Event()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Stay connected while the block runs."""
        async with websockets.connect(f"{self._url}{self.path}", max_size=None) as self._socket:
            await self.send(**self.opening)
            self._reader = asyncio.create_task(self._read())
            self._reader.add_done_callback(lambda _: self._took.set())
            try:
                yield
            finally:
                self._reader.cancel()

    async def send(self, kind: str, **fields: Any) -> None:
        """Send a message."""
        await self._socket.send(json.dumps({"type": kind, **fields}))

    async def until(self, is_done: Callable[[], bool], missing: Callable[[], str]) -> None:
        """Wait until `is_done`. Raises AssertionError with what is `missing` after TURN_S, or for a wrong event."""
        try:
            async with asyncio.timeout(TURN_S):
                while not is_done():
                    if self._reader.done():
                        self._reader.result()
                    self._took.clear()
                    await self._took.wait()
        except TimeoutError:
            raise AssertionError(f"{type(self).__name__} {self.number}: {missing()}") from None

    async def _read(self) -> None:
        async for frame in self._socket:
            self._take(json.loads(frame))
            self._took.set()
        raise AssertionError(f"the door has closed: {self._socket.close_code} {self._socket.close_reason}")

    def _take(self, event: dict[str, Any]) -> None:
        """Check the next event, and apply it."""
        raise NotImplementedError


class Watcher(DoorClient):
    """A client that shows frames, asks about them, and waits for each answer.

    `num_asked` counts its questions. `is_answering` and `is_showing` are true while an answer arrives, and while frames
    are sent.
    """

    path = "/v1/video/chat/stream"
    opening: ClassVar[Mapping[str, Any]] = {"kind": "session.config", **CONFIG}

    def __init__(self, number: int, url: str, seed: int) -> None:
        super().__init__(number, url, seed)
        self.num_asked = 0
        self.is_answering = self.is_showing = False
        self.answers: list[str] = []
        self._num_shown = 0
        self._acknowledged: list[str] = []
        self._text = ""

    @property
    def phase(self) -> str:
        return "answering" if self.is_answering else "showing" if self.is_showing else "asking"

    async def turn(self) -> None:
        """Show some frames, with audio, and ask about them. Raises AssertionError for a wrong answer."""
        self.is_showing = True
        for _ in range(self._random.randint(1, 4)):
            await self.show()
            await asyncio.sleep(0.1)
        self.is_showing = False
        num_sounds = self._random.randint(0, 3)
        for _ in range(num_sounds):
            await self.sound(bytes(32 * SOUND_MS))
        answer = await self.ask(f"q{self.num_asked}")
        first = max(1, self._num_shown - NUM_FRAMES + 1)
        greys = [number % 250 for number in range(first, self._num_shown + 1)]
        expected = said(f"q{self.num_asked}", greys, num_sounds * SOUND_MS / 1000, self.num_asked)
        parts = answer if self.num_asked < MAX_KNOWN else answer.rpartition(" | ")[0]
        assert parts == (expected if self.num_asked < MAX_KNOWN else expected.rpartition(" | ")[0]), self.number
        self.num_asked += 1

    async def show(self) -> None:
        """Send the next frame. Its grey value is its number."""
        self._num_shown += 1
        data = base64.b64encode(picture(self._num_shown % 250)).decode()
        await self.send("video.frame", frame_id=str(self._num_shown), data=data)

    async def sound(self, pcm16: bytes) -> None:
        await self.send("audio.chunk", data=base64.b64encode(pcm16).decode())

    async def ask(self, question: str) -> str:
        """Ask, and return the whole answer."""
        await self.send("video.query", text=question)
        await self.until(
            lambda: len(self.answers) > self.num_asked, lambda: f"{question} was not answered: {self._text!r}"
        )
        return self.answers[self.num_asked]

    def check(self) -> None:
        """Raise AssertionError unless each frame was acknowledged once, in order, and each question answered once."""
        assert self._acknowledged == [str(n + 1) for n in range(self._num_shown)], (self.number, self._acknowledged)
        assert len(self.answers) == self.num_asked, (self.number, self.answers[-3:])

    def _take(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "error":
                raise AssertionError(event)
            case "video.frame.ack":
                assert event["accepted"], event
                self._acknowledged.append(event["frame_id"])
            case "response.start":
                # A second one begins the same answer again.
                assert len(self.answers) == self.num_asked, event
                self._text, self.is_answering = "", True
            case "response.text.delta":
                assert self.is_answering, event
                self._text += event["delta"]
            case "response.text.done":
                assert event["text"] == self._text, (event, self._text)
                self.answers.append(self._text)
                self.is_answering = False


class OwnWatcher(Watcher):
    """A Watcher that uses our client, which resumes its session by itself."""

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        async with (
            Client(self._url.replace("ws", "http", 1)) as client,
            client.video(config={**CONFIG, "modalities": ["text"]}) as self._video,
        ):
            yield

    async def show(self) -> None:
        self._num_shown += 1
        await self._video.show(picture(self._num_shown % 250))

    async def sound(self, pcm16: bytes) -> None:
        await self._video.send_audio(pcm16)

    async def ask(self, question: str) -> str:
        async with asyncio.timeout(TURN_S):
            words: list[str] = []
            async for word in self._video.stream(question):
                self.is_answering = True
                words.append(word)
        self.is_answering = False
        return "".join(words)

    def check(self) -> None:
        return


class Asker(DoorClient):
    """A client of a door that requests several responses out of band at once, and takes a written turn with them.

    `completed` counts the completed responses by their metadata.
    """

    path = "/v1/realtime"
    opening: ClassVar[Mapping[str, Any]] = {
        "kind": "session.update",
        "session": {"type": "realtime", "output_modalities": ["text"]},
    }

    def __init__(self, number: int, url: str, seed: int) -> None:
        super().__init__(number, url, seed)
        self.completed: Counter[str] = Counter()
        self._open: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        self._num_asked = 0

    @property
    def phase(self) -> str:
        return "out of band" if self._open else "asking out of band"

    async def turn(self) -> None:
        """Request responses out of band, and sometimes one of the conversation, and wait for all of them."""
        names = []
        for _ in range(self._random.randint(1, 3)):
            self._num_asked += 1
            names.append(str(self._num_asked))
            content = [{"type": "input_text", "text": f"beside {self._num_asked} one two three"}]
            given = {"type": "message", "role": "user", "content": content}
            response = {"conversation": "none", "metadata": {"name": names[-1]}, "input": [given]}
            await self.send("response.create", response=response)
        await self.until(
            lambda: all(self.completed[name] for name in names) and not self._open,
            lambda: f"{[name for name in names if not self.completed[name]]} did not come; open: {self._open}",
        )

    def check(self) -> None:
        """Raise AssertionError unless each response was completed once, and each that began has ended."""
        assert self.completed == {str(n + 1): 1 for n in range(self._num_asked)}, (self.number, self.completed)
        assert not self._open, self._open

    def _take(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "error":
                raise AssertionError(event)
            case "response.created":
                response = event["response"]
                assert response["id"] not in self._texts, event
                self._open[response["id"]] = response["metadata"]["name"]
                self._texts[response["id"]] = ""
            case "response.output_text.delta":
                assert event["response_id"] in self._open, event
                self._texts[event["response_id"]] += event["delta"]
            case "response.done":
                response = event["response"]
                name = self._open.pop(response["id"])
                assert response["metadata"] == {"name": name}, event
                assert "conversation_id" not in response, event
                if response["status"] == "completed":
                    self.completed[name] += 1
                    assert self._texts[response["id"]] == f"beside {name} one two three", event
                else:
                    assert response["status"] == "cancelled", event
