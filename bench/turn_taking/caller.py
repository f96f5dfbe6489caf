"""A client of a live conversation in any mode of turn-taking, as the live sections of `antiphon bench turns` use it."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import websockets
from bench.common import Server
from bench.talk import CHUNK_S, STEP, STORY, TELLER, WIRE_HZ, Speaker
from bench.turn_taking.figures import Mark

from antiphon.audio import Pcm

DUPLEX = "duplex"
# The modes of turn-taking, each at its defaults.
MODES: dict[str, dict[str, Any] | None] = {
    "server_vad": {"type": "server_vad"},
    "semantic_vad": {"type": "semantic_vad"},
    DUPLEX: None,
}
# A full-duplex client acknowledges playback every so many steps of CHUNK_S.
ACK_EVERY = 5
# An answer has sounded for so long when somebody speaks over it: whether there is an echo is known by then.
LEAD_S = 2.6
# A sound over less of an answer than this is not over it.
LEFT_S = 1.0
# A small model tells shorter stories the more it has told, so a story is the first answer of a conversation.
STORY_TOKENS = 400


class Caller(Speaker):
    """A client that always sends (a recording, or silence) and plays what comes, both in real time.

    It pauses the answer when it is told to duck, goes on from the very sample when it is told so, and drops it when it
    is interrupted; `marks` has these events. `begun_s` is when its microphone was opened and `heard` what came out of
    its loudspeaker since then, in steps of CHUNK_S, `sounded` how many of those were of an answer.

    `echo`: its microphone hears what it plays, so many decibels lower, after so many seconds. `session`: fields of the
    session that are not the defaults.
    """

    def __init__(
        self, url: str, mode: str, *, echo: tuple[float, float] | None = None, session: dict[str, Any] | None = None
    ) -> None:
        super().__init__(url, MODES[mode] or {}, echo)
        self.mode = mode
        if mode == DUPLEX:
            self._url = f"{url}/v1/realtime?duplex=1"
        self._given = session or {}
        self._ducked = False
        self.marks: list[Mark] = []
        self.heard: list[bytes] = []
        self.sounded = 0
        self.begun_s = 0.0
        self._sent = 0

    async def __aenter__(self) -> Caller:
        self._socket = await websockets.connect(self._url, max_size=None, compression=None)
        if self._echo:
            self._air = [bytes(STEP)] * round(self._echo[1] / CHUNK_S)
        await self.send("session.update", session=self._session() | self._given)
        self._tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._listen())]
        await asyncio.sleep(0.3)
        return self

    def _session(self) -> dict[str, Any]:
        if self.mode == DUPLEX:
            return {
                "instructions": TELLER,
                "max_response_output_tokens": STORY_TOKENS,
                "sample_rate_hz": WIRE_HZ,
                "turn_detection": None,
            }
        return {
            "type": "realtime",
            "instructions": TELLER,
            "max_output_tokens": STORY_TOKENS,
            "audio": {"input": {"turn_detection": self._vad}, "output": {"ducking": True}},
        }

    async def _send(self) -> None:
        self.begun_s = time.monotonic()
        while True:
            due = self.begun_s + (self._sent + 1) * CHUNK_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            data = self._queue.pop(0) if self._queue else bytes(STEP)
            item, sound = self._playing.pop(0) if self._playing and not self._ducked else ("", bytes(STEP))
            self.heard.append(sound)
            if item:
                self.sounded += 1
                self._played[item] = self._played.get(item, 0) + 1
                if self.mode == DUPLEX and self._played[item] % ACK_EVERY == 0:
                    await self._acknowledge(item)
            if self._echo:
                self._air.append(sound)
                back = np.frombuffer(self._air.pop(0), np.int16) * 10 ** (self._echo[0] / 20)
                data = np.clip(np.frombuffer(data, np.int16) + back, -32768, 32767).astype(np.int16).tobytes()
            self._sent += 1
            await self.send("input_audio_buffer.append", audio=base64.b64encode(data).decode())

    async def _listen(self) -> None:
        rest: dict[str, bytes] = {}
        async for message in self._socket:
            event = json.loads(message)
            match event["type"]:
                case "error":
                    if event["error"]["code"] not in ("response_cancel_not_active", "playback_ack_too_late"):
                        print(event)
                case "response.output_audio.delta":
                    item = event["item_id"]
                    data = rest.pop(item, b"") + base64.b64decode(event["delta"])
                    whole = len(data) // STEP * STEP
                    self._playing += [(item, data[at : at + STEP]) for at in range(0, whole, STEP)]
                    rest[item] = data[whole:]
                case _ if kind := self._told(event):
                    await self._obey(Mark(time.monotonic(), kind))
            self.events.append((time.monotonic(), event))
            self._changed.set()
            self._changed = asyncio.Event()

    def _told(self, event: dict[str, Any]) -> Any:
        """What an event tells the client to do with the answer that it plays; None for nothing."""
        kind = event["type"]
        if self.mode == DUPLEX:
            if kind == "turn.event":
                return {"duck": "ducked", "unduck": "unducked"}.get(event["event"])
            return "interrupted" if kind == "overlap.decision" and event["action"] == "barge_in" else None
        if kind == "input_audio_buffer.speech_started":
            return "interrupted" if self._playing else None
        return {"output_audio_buffer.ducked": "ducked", "output_audio_buffer.unducked": "unducked"}.get(kind)

    async def _obey(self, mark: Mark) -> None:
        self.marks.append(mark)
        self._ducked = mark.kind == "ducked"
        if mark.kind == "interrupted" and self._playing:
            item, self._playing = self._playing[0][0], []
            if self.mode == DUPLEX:
                await self._acknowledge(item)
            else:
                heard_ms = round(self._played.get(item, 0) * CHUNK_S * 1000)
                await self.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=heard_ms)

    async def _acknowledge(self, item: str) -> None:
        if played := self._played.get(item):
            await self.send("playback.ack", played_ms=round(played * CHUNK_S * 1000), item_id=item)

    async def say(self, pcm: Pcm) -> float:
        """Play a recording from the next step on; returns when its first sample is at the microphone."""
        begins_s = self.begun_s + (self._sent + len(self._queue)) * CHUNK_S
        await super().say(pcm)
        return begins_s

    async def story(self) -> bool:
        """Ask for a long answer, and wait until it has sounded for LEAD_S. False where nothing sounds."""
        since = len(self.events)
        if self.mode == DUPLEX:
            await self.send("push_text", text=STORY)
        else:
            await self.ask(STORY, STORY_TOKENS)
        if not await self.sounds(since):
            return False
        await asyncio.sleep(LEAD_S)
        return self.goes_on

    @property
    def goes_on(self) -> bool:
        """Whether an answer is being made, or has a while to sound."""
        kinds = [event["type"] for _, event in self.events]
        is_made = kinds.count("response.created") > kinds.count("response.done")
        return is_made or len(self._playing) * CHUNK_S >= LEFT_S

    async def transcripts(self, number: int, most_s: float) -> list[dict[str, Any]]:
        """Wait until so many turns have a transcript, for `most_s` at most; all of them."""
        until = time.monotonic() + most_s
        while len(found := self.transcribed) < number and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return found

    @property
    def transcribed(self) -> list[dict[str, Any]]:
        """The events with the transcripts of the turns so far."""
        return [e for _, e in self.events if e["type"] == "conversation.item.input_audio_transcription.completed"]


@asynccontextmanager
async def telling(srv: Server, mode: str, **options: Any) -> AsyncIterator[Caller | None]:
    """A caller who hears a long answer; None where it was over too soon."""
    async with Caller(srv.ws, mode, **options) as caller:
        yield caller if await caller.story() else None
