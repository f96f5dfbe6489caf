"""The client of the live benchmarks, over `antiphon.client`'s connection: what comes is kept with the time it came at.

A `Session` is any live session. A `Caller` is one who talks: their microphone always sends (a recording, or silence)
and their loudspeaker plays what comes, both in real time.
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
# A small model tells shorter stories the more it has told, so a story is the first answer of a conversation.
ANSWER_TOKENS, STORY_TOKENS = 60, 400
# The modes of turn-taking, each at its defaults; None is full duplex.
MODES: dict[str, dict[str, Any] | None] = {
    "server_vad": {"type": "server_vad"},
    "semantic_vad": {"type": "semantic_vad"},
    "duplex": None,
}
# A client of full duplex acknowledges playback after this number of steps of CHUNK_S.
ACK_EVERY = 5
# A story has sounded for this long when somebody speaks over it: whether there is an echo is known by then.
LEAD_S = 2.6
# A sound over less of an answer than this is not over it.
LEFT_S = 1.0
Item, Found = TypeVar("Item"), TypeVar("Found")
# Errors that a caller's own answers to events may come to.
EXPECTED = ("response_cancel_not_active", "playback_ack_too_late")


def on_wire(pcm: Pcm) -> bytes:
    """16 kHz audio as PCM of 16 bits at WIRE_HZ."""
    return to_pcm16(np.asarray(soxr.resample(pcm, SAMPLE_RATE_HZ, WIRE_HZ), np.float32))


def server_vad(silence_ms: int) -> dict[str, Any]:
    return {"type": "server_vad", "silence_duration_ms": silence_ms}


async def _connect(url: str, headers: Mapping[str, str]) -> ClientConnection:
    # A server that is behind reads no more, pings included.
    return await connect(
        url, additional_headers=headers, max_size=None, compression=None, ping_interval=None, proxy=None
    )


class Session:
    """One live session at a path of the server, entered with `async with`. A connection that breaks ends it.

    `opening`: the fields of a session.update that is sent first; None for none. `key`: the API key, if it asks for one.
    """

    def __init__(self, url: str, path: str, opening: dict[str, Any] | None = None, *, key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # No time is given to resuming: what breaks is a result.
        self.link = ResumingLink(
            url.replace("http", "ws", 1) + path, headers=headers, query={}, give_up_s=-1.0, connect=_connect
        )
        self._opening = opening
        self._ended: SessionEnded | None = None
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.events: list[tuple[float, dict[str, Any]]] = []

    async def __aenter__(self) -> Self:
        """Connect, and wait for the session. Raises SessionEnded where the server refuses it."""
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
        """Send an event. Raises SessionEnded."""
        await self.link.send({"type": type, **fields})

    async def append(self, pcm: bytes) -> None:
        """Send audio as it is on the wire. Raises SessionEnded."""
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
            # Whatever it is, it is raised where events are awaited.
            self._ended = error if isinstance(error, SessionEnded) else SessionEnded("client_error", repr(error))
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def hear(self, at: float, event: dict[str, Any]) -> None:
        """Do what the client does about an event, before it is kept."""

    async def next_event(self, since: int = 0) -> None:
        """Wait until there are more events than `since`. Raises SessionEnded."""
        while len(self.events) <= since:
            if self._ended:
                raise self._ended
            await self._changed.wait()

    async def first(
        self, types: str | tuple[str, ...], since: int = 0, most_s: float = 30.0
    ) -> tuple[float, dict[str, Any]]:
        """The first event of one of the types, from number `since` on, and when it came. Raises SessionEnded,
        TimeoutError.
        """
        wanted = (types,) if isinstance(types, str) else types
        async with asyncio.timeout(most_s):
            while True:
                for at, event in self.events[since:]:
                    if event["type"] in wanted:
                        return at, event
                await self.next_event(len(self.events))

    async def until(self, type: str, since: int, most_s: float = 30.0) -> float:
        """When the first event of a type came, from number `since` on. Raises as `first` does."""
        at, _ = await self.first(type, since, most_s)
        return at

    def times(self, type: str, since: int = 0) -> list[float]:
        """When events of this type came, from number `since` on."""
        return [at for at, event in self.events[since:] if event["type"] == type]

    def of_type(self, type: str, since: int = 0) -> list[dict[str, Any]]:
        """The events of this type, from number `since` on."""
        return [event for _, event in self.events[since:] if event["type"] == type]


class Caller(Session):
    """Somebody who talks with the server, in a mode of turn-taking.

    The client pauses the answer when it is told to duck, goes on from the very sample when it is told to, drops it when
    it is interrupted, and tells how much was played; `marks` has these events. `begun_s` is when the microphone was
    opened, `heard` what came out of the loudspeaker since then, in steps of CHUNK_S, and `sounded` the number of those
    that were of an answer.

    `vad`: the turn detection; None is full duplex. `tells`: the answers are long stories. `session`: fields that are
    not the defaults. `echo`: the decibels by which the microphone hears what is played (less than 0), and
    after how many seconds.
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
        told, tokens = (TELLER, STORY_TOKENS) if tells else (INSTRUCTIONS, ANSWER_TOKENS)
        fields: dict[str, Any] = {"instructions": told}
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
        """One CHUNK_S of the loudspeaker and of the microphone."""
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
        """What an event asks the client to do with the answer that it plays; None for nothing."""
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
        """Drop what is still to be played."""
        self._playing.clear()
        self._is_ducked = False

    @property
    def sounding(self) -> bool:
        return bool(self._playing)

    async def say(self, pcm: Pcm) -> float:
        """Play a recording from the next step on; returns when its first sample is at the microphone."""
        begins_s = self.begun_s + (len(self.heard) + len(self._queue)) * CHUNK_S
        wire = on_wire(pcm)
        self._queue += [wire[at : at + STEP].ljust(STEP, b"\0") for at in range(0, len(wire), STEP)]
        return begins_s

    async def ask(self, text: str, most_tokens: int = STORY_TOKENS) -> int:
        """Ask for a long answer in writing; returns the number of the first event after it."""
        since = len(self.events)
        if self._is_duplex:
            await self.send("push_text", text=text)
            return since
        content = [{"type": "input_text", "text": text}]
        await self.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        await self.send("response.create", response={"max_output_tokens": most_tokens, "instructions": TELLER})
        return since

    async def sounds(self, since: int) -> bool:
        """Wait for the first sound of an answer; False for an answer that has none."""
        _, event = await self.first(("response.output_audio.delta", "response.done"), since)
        return bool(event["type"] == "response.output_audio.delta")

    async def story(self) -> bool:
        """Ask for a story, and wait until it has sounded for LEAD_S. False where it is over by then."""
        if not await self.sounds(await self.ask(STORY)):
            return False
        await asyncio.sleep(LEAD_S)
        return self.goes_on

    @property
    def goes_on(self) -> bool:
        """Whether an answer is being made, or has a while to sound."""
        is_made = len(self.times("response.created")) > len(self.times("response.done"))
        return is_made or len(self._playing) * CHUNK_S >= LEFT_S

    async def settle(self) -> None:
        """End what is said, and wait for quiet."""
        for _ in range(40):
            if len(self.times("response.created")) == len(self.times("response.done")):
                break
            await self.send("response.cancel")
            await asyncio.sleep(0.25)
        self.stop_playing()
        await asyncio.sleep(1.5)

    async def quiet(self, for_s: float = 1.0) -> None:
        """Wait until nothing is said, and nothing sounds."""
        ends = ("rate_limits.updated", "conversation.item.truncated", "session.updated")
        while self.sounding or self.events[-1][1]["type"] not in ends or time.monotonic() - self.events[-1][0] < for_s:
            await asyncio.sleep(0.1)


@asynccontextmanager
async def telling(srv: Server, vad: dict[str, Any] | None, **options: Any) -> AsyncIterator[Caller | None]:
    """A caller who hears a story; None where it was over too soon."""
    async with Caller(srv.url, vad, tells=True, **options) as caller:
        yield caller if await caller.story() else None


def in_loops(sections: Mapping[str, Callable[[], Coroutine[Any, Any, Found]]]) -> dict[str, Callable[[], Found]]:
    """Sections that are awaited, each run by an event loop of its own."""
    return {name: lambda section=section: asyncio.run(section()) for name, section in sections.items()}


async def shared(
    items: Sequence[Item], at_once: int, play: Callable[[Sequence[Item]], Awaitable[Sequence[Found]]]
) -> list[Found]:
    """`play(share of the items)` in this number of conversations side by side; all results."""
    parts = await asyncio.gather(*(play(items[k::at_once]) for k in range(at_once)))
    return [found for part in parts for found in part]
