"""The client of the live benchmarks, on top of `antiphon.client`'s connection. It records when each event arrives.

A `Session` is any live session. A `Caller` also talks: its microphone sends without a break (a recording, or silence),
and its loudspeaker plays the received audio, both in real time.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

import numpy as np
import soxr
from bench.common import Server
from bench.turn_taking.figures import Mark
from websockets.asyncio.client import ClientConnection, connect

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import to_pcm16
from antiphon.client.link import ResumingLink, SessionEnded

CONVERSATION, DUPLEX = "/v1/realtime?model=gpt-realtime", "/v1/realtime?duplex=1"
CHUNK_S, WIRE_HZ = 0.02, 24_000
STEP = int(CHUNK_S * WIRE_HZ) * 2
INSTRUCTIONS = "You are a voice assistant. Answer in one short sentence."
TELLER = "You tell long stories, with every detail, and never stop."
STORY = "Tell me a very long story about a king and his seven sons."
# Limits of an answer and of a story, in tokens. A story is always the first answer of a conversation, because a small
# model makes later ones shorter.
ANSWER_TOKENS, STORY_TOKENS = 60, 400
# The modes of turn-taking with their defaults; None is full duplex.
MODES: dict[str, dict[str, Any] | None] = {
    "server_vad": {"type": "server_vad"},
    "semantic_vad": {"type": "semantic_vad"},
    "duplex": None,
}
# Number of steps of CHUNK_S after which a full-duplex client acknowledges playback.
ACK_EVERY = 5
# Seconds of a story that play before somebody speaks over it. By then the server knows whether there is an echo.
LEAD_S = 2.6
# Seconds of an answer that have to remain for a sound over it to count.
LEFT_S = 1.0
Item, Found = TypeVar("Item"), TypeVar("Found")
# Errors that a caller may get for its reactions to events.
EXPECTED = ("response_cancel_not_active", "playback_ack_too_late")


def on_wire(pcm: Pcm) -> bytes:
    """Convert 16 kHz audio to 16-bit PCM at WIRE_HZ."""
    return to_pcm16(np.asarray(soxr.resample(pcm, SAMPLE_RATE_HZ, WIRE_HZ), np.float32))


def server_vad(silence_ms: int) -> dict[str, Any]:
    return {"type": "server_vad", "silence_duration_ms": silence_ms}


async def _connect(url: str, headers: Mapping[str, str]) -> ClientConnection:
    # Without pings, because an overloaded server stops reading, and would not answer them.
    return await connect(
        url, additional_headers=headers, max_size=None, compression=None, ping_interval=None, proxy=None
    )


class Session:
    """One live session at a path of the server, used with `async with`. A broken connection ends it.

    `opening` has the fields of the first session.update; None sends none. `key` is the API key, if the server needs
    one.
    """

    def __init__(self, url: str, path: str, opening: dict[str, Any] | None = None, *, key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # The client does not resume, because a broken connection is a result.
        self.link = ResumingLink(
            url.replace("http", "ws", 1) + path, headers=headers, query={}, give_up_s=-1.0, connect=_connect
        )
        self._opening = opening
        self._ended: SessionEnded | None = None
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.events: list[tuple[float, dict[str, Any]]] = []

    async def __aenter__(self) -> Self:
        """Connect, and wait for the session. Raises SessionEnded if the server refuses it."""
        self.link.start()
        self._tasks.append(asyncio.create_task(self._listen()))
        try:
            if self._opening is not None:
                await self.send("session.update", **self._opening)
            await self.next_event()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.link.close()

    async def send(self, type: str, **fields: Any) -> None:
        """Send an event. Raises SessionEnded if the connection has ended."""
        await self.link.send({"type": type, **fields})

    async def append(self, pcm: bytes) -> None:
        """Send audio in the wire format. Raises SessionEnded if the connection has ended."""
        await self.send("input_audio_buffer.append", audio=base64.b64encode(pcm).decode())

    async def _listen(self) -> None:
        try:
            while True:
                event = await self.link.receive()
                assert isinstance(event, dict)
                at = time.monotonic()
                await self.hear(at, event)
                self.events.append((at, event))
                self._tell()
        except Exception as error:
            # The error is raised later, where events are awaited.
            self._ended = error if isinstance(error, SessionEnded) else SessionEnded("client_error", repr(error))
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def hear(self, at: float, event: dict[str, Any]) -> None:
        """React to an event as the client does, before it is stored."""

    async def next_event(self, since: int = 0) -> None:
        """Wait until there are more than `since` events. Raises SessionEnded if the session ends before."""
        while len(self.events) <= since:
            if self._ended:
                raise self._ended
            await self._changed.wait()

    async def first(
        self, types: str | tuple[str, ...], since: int = 0, most_s: float = 30.0
    ) -> tuple[float, dict[str, Any]]:
        """Wait for the first event of one of the types, from number `since` on. Return it and its time of arrival.

        Raises SessionEnded if the session ends before, or TimeoutError if the event does not arrive in time.
        """
        wanted = (types,) if isinstance(types, str) else types
        async with asyncio.timeout(most_s):
            while True:
                for at, event in self.events[since:]:
                    if event["type"] in wanted:
                        return at, event
                await self.next_event(len(self.events))

    async def until(self, type: str, since: int, most_s: float = 30.0) -> float:
        """Return the time of the first event of a type, from number `since` on. Raises the same errors as `first`."""
        at, _ = await self.first(type, since, most_s)
        return at

    def times(self, type: str, since: int = 0) -> list[float]:
        """Return the arrival times of events of this type, from number `since` on."""
        return [at for at, event in self.events[since:] if event["type"] == type]

    def of_type(self, type: str, since: int = 0) -> list[dict[str, Any]]:
        """Return the events of this type, from number `since` on."""
        return [event for _, event in self.events[since:] if event["type"] == type]


class Caller(Session):
    """A person who talks with the server in one of the MODES, with a client.

    When the server asks for ducking, the client pauses the answer, and later continues at the same sample. It drops an
    interrupted answer, and acknowledges the part that it has played. `marks` has these events. `begun_s` is the time at
    which the microphone was opened. `heard` has the output of the loudspeaker since then, in steps of CHUNK_S, and
    `sounded` is the number of steps that were part of an answer.

    `vad` is the turn detection; None is full duplex. With `tells`, answers are long stories. `session` has fields that
    differ from the defaults. `echo` is the level (in dB, negative) and the delay (in seconds) at which the microphone
    hears the loudspeaker.
    """

    def __init__(
        self,
        url: str,
        vad: dict[str, Any] | None,
        *,
        tells: bool = False,
        session: dict[str, Any] | None = None,
        echo: tuple[float, float] | None = None,
        key: str | None = None,
    ) -> None:
        reported, tokens = (TELLER, STORY_TOKENS) if tells else (INSTRUCTIONS, ANSWER_TOKENS)
        fields: dict[str, Any] = {"instructions": reported}
        if vad is None:
            fields |= {"max_response_output_tokens": tokens, "sample_rate_hz": WIRE_HZ, "turn_detection": None}
        else:
            audio = {"input": {"turn_detection": vad}, "output": {"ducking": True}}
            fields |= {"type": "realtime", "max_output_tokens": tokens, "audio": audio}
        path = DUPLEX if vad is None else CONVERSATION
        super().__init__(url, path, {"session": fields | (session or {})}, key=key)
        self._is_duplex = vad is None
        self._queue: list[bytes] = []
        self._playing: list[tuple[str, bytes]] = []
        self._rest: dict[str, bytes] = {}
        self._played: dict[str, int] = defaultdict(int)
        self._is_ducked = False
        self._echo = echo
        self._air = [bytes(STEP)] * round(echo[1] / CHUNK_S) if echo else []
        self.marks: list[Mark] = []
        self.heard: list[bytes] = []
        self.sounded = 0
        self.begun_s = 0.0

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.begun_s = time.monotonic()
        self._tasks.append(asyncio.create_task(self._run()))
        await asyncio.sleep(0.3)
        return self

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self.begun_s + (len(self.heard) + 1) * CHUNK_S - time.monotonic()))
            await self.step()

    async def step(self) -> None:
        """Process one step of CHUNK_S of the loudspeaker and the microphone."""
        data = self._queue.pop(0) if self._queue else bytes(STEP)
        item, sound = self._playing.pop(0) if self._playing and not self._is_ducked else ("", bytes(STEP))
        self.heard.append(sound)
        if item:
            self.sounded += 1
            self._played[item] += 1
            if self._is_duplex and self._played[item] % ACK_EVERY == 0:
                await self._tell_played(item)
        if self._echo:
            self._air.append(sound)
            back = np.frombuffer(self._air.pop(0), np.int16) * 10 ** (self._echo[0] / 20)
            data = np.clip(np.frombuffer(data, np.int16) + back, -32768, 32767).astype(np.int16).tobytes()
        await self.append(data)

    async def hear(self, at: float, event: dict[str, Any]) -> None:
        if event["type"] == "error" and event["error"]["code"] not in EXPECTED:
            print(event, file=sys.stderr)
        elif event["type"] == "response.output_audio.delta":
            item = event["item_id"]
            data = self._rest.pop(item, b"") + base64.b64decode(event["delta"])
            whole = len(data) // STEP * STEP
            self._playing += [(item, data[at : at + STEP]) for at in range(0, whole, STEP)]
            self._rest[item] = data[whole:]
        elif kind := self._asked(event):
            self.marks.append(Mark(at, kind))
            self._is_ducked = kind == "ducked"
            if kind == "interrupted" and self._playing:
                item = self._playing[0][0]
                self.stop_playing()
                await self._tell_played(item)

    def _asked(self, event: dict[str, Any]) -> Any:
        """Return what an event asks the client to do with the answer that it plays; None for nothing."""
        kind = event["type"]
        if self._is_duplex:
            if kind == "turn.event":
                return {"duck": "ducked", "unduck": "unducked"}.get(event["event"])
            return "interrupted" if kind == "overlap.decision" and event["action"] == "barge_in" else None
        if kind == "input_audio_buffer.speech_started":
            return "interrupted" if self._playing else None
        return {"output_audio_buffer.ducked": "ducked", "output_audio_buffer.unducked": "unducked"}.get(kind)

    async def _tell_played(self, item: str) -> None:
        played_ms = round(self._played[item] * CHUNK_S * 1000)
        if not self._is_duplex:
            await self.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=played_ms)
        elif played_ms:
            await self.send("playback.ack", played_ms=played_ms, item_id=item)

    def stop_playing(self) -> None:
        """Drop the audio that has not been played yet."""
        self._playing.clear()
        self._is_ducked = False

    @property
    def sounding(self) -> bool:
        return bool(self._playing)

    async def say(self, pcm: Pcm) -> float:
        """Play a recording from the next step on. Returns when its first sample reaches the microphone."""
        begins_s = self.begun_s + (len(self.heard) + len(self._queue)) * CHUNK_S
        wire = on_wire(pcm)
        self._queue += [wire[at : at + STEP].ljust(STEP, b"\0") for at in range(0, len(wire), STEP)]
        return begins_s

    async def ask(self, text: str, most_tokens: int = STORY_TOKENS) -> int:
        """Ask for a long answer in writing. Returns the number of the first event after the question."""
        since = len(self.events)
        if self._is_duplex:
            await self.send("push_text", text=text)
            return since
        content = [{"type": "input_text", "text": text}]
        await self.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        await self.send("response.create", response={"max_output_tokens": most_tokens, "instructions": TELLER})
        return since

    async def sounds(self, since: int) -> bool:
        """Wait for the first sound of an answer. Return False if the answer has no sound."""
        _, event = await self.first(("response.output_audio.delta", "response.done"), since)
        return bool(event["type"] == "response.output_audio.delta")

    async def story(self) -> bool:
        """Ask for a story, and wait until LEAD_S of it have been played. Return False if it ends before."""
        if not await self.sounds(await self.ask(STORY)):
            return False
        await asyncio.sleep(LEAD_S)
        return self.goes_on

    @property
    def goes_on(self) -> bool:
        """Return whether an answer is still being generated, or has more than LEFT_S to play."""
        is_made = len(self.times("response.created")) > len(self.times("response.done"))
        return is_made or len(self._playing) * CHUNK_S >= LEFT_S

    async def settle(self) -> None:
        """End what the caller is saying, and wait for silence."""
        for _ in range(40):
            if len(self.times("response.created")) == len(self.times("response.done")):
                break
            await self.send("response.cancel")
            await asyncio.sleep(0.25)
        self.stop_playing()
        await asyncio.sleep(1.5)

    async def quiet(self, for_s: float = 1.0) -> None:
        """Wait until the caller does not speak, and no audio plays."""
        ends = ("rate_limits.updated", "conversation.item.truncated", "session.updated")
        while self.sounding or self.events[-1][1]["type"] not in ends or time.monotonic() - self.events[-1][0] < for_s:
            await asyncio.sleep(0.1)


@asynccontextmanager
async def telling(srv: Server, vad: dict[str, Any] | None, **options: Any) -> AsyncIterator[Caller | None]:
    """Open a caller who hears a story; None if the story ended too early."""
    async with Caller(srv.url, vad, tells=True, **options) as caller:
        yield caller if await caller.story() else None


def in_loops(sections: Mapping[str, Callable[[], Coroutine[Any, Any, Found]]]) -> dict[str, Callable[[], Found]]:
    """Wrap awaitable sections so that each runs in its own event loop."""
    return {name: lambda section=section: asyncio.run(section()) for name, section in sections.items()}


async def shared(
    items: Sequence[Item], at_once: int, play: Callable[[Sequence[Item]], Awaitable[Sequence[Found]]]
) -> list[Found]:
    """Divide the items among this number of concurrent conversations, `play` each share, and return all results."""
    parts = await asyncio.gather(*(play(items[k::at_once]) for k in range(at_once)))
    return [found for part in parts for found in part]
