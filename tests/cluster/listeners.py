"""Clients that get captions from scripted hosts while hosts die, and that check every word, time and item id.

A `Listener` speaks words at the pace of speech. It knows nothing of resuming; a door resumes for it. `Captions` is what
it knows from its events alone.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import websockets

from tests.cluster.callers import CHUNK_S, TURN_S
from tests.scripted import WORD_SAMPLES, speech, text
from tests.server.clients import b64

WORD_S = WORD_SAMPLES / 16_000
# Seconds of silence after a turn.
SILENCE_S = 0.6
AUDIO = {
    "format": {"type": "audio/pcm", "rate": 24_000},
    "turn_detection": {"type": "server_vad", "silence_duration_ms": 300},
}
OPENAI = {"type": "transcription", "audio": {"input": AUDIO}, "include": ["item.input_audio_transcription.words"]}
PREFIX = "conversation.item.input_audio_transcription."


class Captions:
    """The captions as their events describe them, in OpenAI's dialect or vLLM's.

    `take` raises AssertionError for an event that contradicts earlier ones. `completed` has the transcripts in order,
    and `streamed` the joined deltas of each. `words` has all words with times, and `deltas` each delta with its arrival
    time. `is_exact`: the deltas of a turn are its transcript, and its words do not overlap. A real model's transcript
    may have other words than the deltas that were sent before it was known (docs/wire/openai-transcription.md), and the
    times of its words come from several decodes.
    """

    def __init__(self, *, is_exact: bool = True) -> None:
        self._is_exact = is_exact
        self.completed: list[str] = []
        self.streamed: list[str] = []
        self.words: list[dict[str, Any]] = []
        self.deltas: list[tuple[str, float]] = []
        self.joined: dict[str, str] = {}
        self._order: list[str] = []
        self._seen: set[tuple[str, str]] = set()
        self._last_ms = -1

    @property
    def num_open(self) -> int:
        """The number of turns that have begun and have no transcript yet. Only OpenAI's dialect reports beginnings."""
        return len(self._order) - len(self.completed)

    @property
    def is_open(self) -> bool:
        """Whether a turn has words and no transcript yet."""
        return bool(self.joined)

    def take(self, event: dict[str, Any]) -> None:
        """Check the next event, and apply it."""
        kind = event["type"]
        assert kind != "error", event
        assert not kind.startswith("session.") or kind in ("session.created", "session.updated"), event
        item = event.get("item_id") or (event.get("item") or {}).get("id") or ""
        if item and not kind.endswith(".delta"):
            assert (kind, item) not in self._seen, f"{event} came twice"
            self._seen.add((kind, item))
        match kind:
            case "input_audio_buffer.speech_started":
                assert event["audio_start_ms"] > self._last_ms, event
                self._last_ms = event["audio_start_ms"]
                self._order.append(item)
            case "input_audio_buffer.committed":
                previous = self._order[self._order.index(item) - 1] if self._order.index(item) else None
                assert event["previous_item_id"] == previous, event
            case "transcription.delta" | "conversation.item.input_audio_transcription.delta":
                self.deltas.append((event["delta"], time.monotonic()))
                self.joined[item] = self.joined.get(item, "") + event["delta"]
                for word in event.get("words", ()):
                    follows = not self.words or word["start"] >= self.words[-1]["end"] - 0.05
                    assert follows or not self._is_exact, (self.words[-1], word)
                    self.words.append(word)
            case "transcription.done":
                self._complete("", event["text"])
            case "conversation.item.input_audio_transcription.completed":
                self._complete(item, event["transcript"])

    def _complete(self, item: str, transcript: str) -> None:
        streamed = self.joined.pop(item, "")
        assert streamed == transcript or not self._is_exact, (item, streamed, transcript)
        self.streamed.append(streamed)
        self.completed.append(transcript)


class Listener:
    """A client that speaks, and waits for the words of each turn. `vllm`: it uses vLLM's dialect, and commits turns.

    `said` has its own words by turn. `lengths` are the numbers of words of its turns, from which `turn` chooses. The
    other fields are those of `Captions` and of `callers.Caller`.
    """

    def __init__(
        self,
        number: int,
        urls: Sequence[str],
        seed: int,
        *,
        vllm: bool = False,
        is_exact: bool = True,
        lengths: Sequence[int] = (1, 3, 8),
    ) -> None:
        self.number = number
        self.captions = Captions(is_exact=is_exact)
        self.said: list[str] = []
        self.is_speaking = False
        self._vllm, self._lengths = vllm, lengths
        self._urls = list(urls)
        self._random = random.Random(seed)
        self._next_word = 1
        self._took = asyncio.Event()
        self._audio_s = 0.0

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Stay connected while the block runs."""
        query = "dialect=vllm" if self._vllm else "intent=transcription"
        url = f"{self._random.choice(self._urls)}/v1/realtime?{query}"
        async with websockets.connect(url, max_size=None) as self._socket:
            if self._vllm:
                await self.send("session.update", model="default", word_timestamps=True)
            else:
                await self.send("session.update", session=OPENAI)
            self._reader = asyncio.create_task(self._read())
            self._reader.add_done_callback(lambda _: self._took.set())
            try:
                yield
            finally:
                self._reader.cancel()

    @property
    def phase(self) -> str:
        """The phase of its turn, according to its events."""
        if len(self.captions.completed) == len(self.said):
            return "silent"
        words = "with words" if self.captions.is_open else "without words"
        return f"{'said' if self.is_speaking else 'waiting'} {words}"

    async def turn(self) -> None:
        """Say some words, and wait for them."""
        await self.speak(num_words=self._random.choice(self._lengths))

    async def speak(self, turns: int = 1, num_words: int = 3) -> None:
        """Say `turns` turns, and wait for the words of each."""
        for _ in range(turns):
            if self._next_word + num_words > 900:
                self._next_word = 1
            first, self._next_word = self._next_word, self._next_word + num_words
            self.said.append(text(first, num_words))
            self.is_speaking = True
            await self._sound(base64.b64decode(b64(speech(first, num_words), self.rate_hz)))
            self.is_speaking = False
            if self._vllm:
                await self.send("input_audio_buffer.commit", final=True)
            await self._sound(bytes(round(SILENCE_S * self.rate_hz) * 2))
            await self._until_read()

    def check(self) -> None:
        """Raise AssertionError unless each word was heard once, in order, at the time at which it was said."""
        at = next((n for n, pair in enumerate(zip(self.captions.completed, self.said, strict=False))
                   if pair[0] != pair[1]), 0)  # fmt: skip
        assert self.captions.completed == self.said, (self.number, at, self.captions.completed[at:], self.said[at:])

    @property
    def rate_hz(self) -> int:
        """The sample rate of the audio that is sent."""
        return 16_000 if self._vllm else 24_000

    async def _sound(self, pcm16: bytes) -> None:
        step = round(CHUNK_S * self.rate_hz) * 2
        for at in range(0, len(pcm16), step):
            await self.send("input_audio_buffer.append", audio=base64.b64encode(pcm16[at : at + step]).decode())
            await asyncio.sleep(CHUNK_S)

    async def _until_read(self) -> None:
        try:
            async with asyncio.timeout(TURN_S):
                while len(self.captions.completed) < len(self.said):
                    self.raise_failure()
                    self._took.clear()
                    await self._took.wait()
        except TimeoutError:
            read = self.captions.completed[-3:], self.captions.joined
            raise AssertionError(f"listener {self.number}: {self.said[-1]!r} was not transcribed; {read}") from None

    def raise_failure(self) -> None:
        """Raise the error with which reading has ended, if it has."""
        if self._reader.done():
            self._reader.result()

    async def send(self, kind: str, **fields: Any) -> None:
        """Send an event."""
        await self._socket.send(json.dumps({"type": kind, **fields}))

    async def _read(self) -> None:
        async for frame in self._socket:
            self.captions.take(json.loads(frame))
            self._took.set()
        raise AssertionError(f"the door has closed: {self._socket.close_code} {self._socket.close_reason}")
