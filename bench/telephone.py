"""Telephone calls beside the same conversations over a WebSocket, as the caller's ear has them.

    python -m bench.telephone [--data DIR] [--sections latency,barge_in,cuts] [--turns N] [--cuts N]

The caller is written from Twilio's documents (`carrier.py`): it sends µ-law in frames of 20 ms, plays what it gets, and
returns marks. No carrier was called, so that the path of a carrier is not part of any figure. An application follows
each call (`/v1/realtime?call_id=`), and reports the server's own events. The language model is a process of this
benchmark that answers at once, so that both ways say the same. Server and callers share the same cores.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from typing import Any, Self

import httpx
import numpy as np
import soxr
from bench import carrier
from bench.common import Server, measured, options, percentile, server, show
from bench.driver import INSTRUCTIONS, STORY, TELLER, Caller, Session, in_loops, server_vad
from bench.engines import backend
from bench.hearing.clips import Clip, whole_turns, with_data
from websockets.asyncio.client import connect

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.line.g711 import from_ulaw, to_ulaw

SILENCE = to_ulaw(np.zeros(160, np.float32))
FRAME_BYTES = len(SILENCE)
VAD = server_vad(500)
# A frame is sound if one of its samples is at least this loud. The voice begins with silence.
LOUD = 0.01
# Every answer. It is spoken in about six seconds.
ANSWER = "The weather will be mild tomorrow with some rain late in the evening. The wind comes from the west."
# Length of a word of ordinary speech, in milliseconds.
WORD_MS = 300
LIMIT_S = 40.0


class PhoneCaller:
    """One call, used with `async with`. `application` follows it, and has the events of its session."""

    def __init__(self, srv: Server, instructions: str = INSTRUCTIONS) -> None:
        self._srv = srv
        audio = {"input": {"turn_detection": VAD}}
        self._session = {"type": "realtime", "instructions": instructions, "audio": audio}
        self.buffer = carrier.PlayBuffer(time.monotonic)
        # The times at which the sounds that were received begin at the ear.
        self.sounds_s: list[float] = []
        self.application: Session
        self._queue: list[bytes] = []
        self._begun_s = 0.0
        self._sent = 0

    async def __aenter__(self) -> Self:
        async with httpx.AsyncClient(timeout=LIMIT_S) as http:
            made = await http.post(f"{self._srv.url}/v1/realtime/client_secrets", json={"session": self._session})
            self._socket = await connect(f"{self._srv.ws}/v1/telephone/media/{made.json()['value']}", compression=None)
            await self._socket.send(carrier.connected())
            await self._socket.send(carrier.start())
            self._begun_s = time.monotonic()
            self._tasks = [asyncio.create_task(self._speak()), asyncio.create_task(self._listen())]
        await self.follow()
        return self

    async def follow(self) -> None:
        """Attach the application to the call, with the session of this benchmark."""
        calls: list[Any] = []
        async with httpx.AsyncClient(timeout=LIMIT_S) as http:
            while not calls:
                calls = (await http.get(f"{self._srv.url}/v1/telephone/calls")).json()["data"]
        self.application = Session(self._srv.url, f"/v1/realtime?call_id={calls[-1]['id']}", {"session": self._session})
        await self.application.__aenter__()
        await asyncio.sleep(0.3)

    async def __aexit__(self, *_: object) -> None:
        await self._socket.send(carrier.stop())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._socket.close()
        await self.application.__aexit__()

    async def _speak(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._begun_s + (self._sent + 1) * carrier.FRAME_S - time.monotonic()))
            self._sent += 1
            await self._socket.send(carrier.media(self._queue.pop(0) if self._queue else SILENCE, self._sent))
            for name in self.buffer.due():
                await self._socket.send(carrier.mark(name))

    async def _listen(self) -> None:
        async for data in self._socket:
            message = json.loads(data)
            if message["event"] == "media":
                pcm = np.abs(from_ulaw(base64.b64decode(message["media"]["payload"])))
                if len(loud := np.flatnonzero(pcm >= LOUD)):
                    begins_s = max(time.monotonic(), self.buffer.ends_s)
                    self.sounds_s.append(begins_s + int(loud[0]) / carrier.RATE_HZ)
            for name in self.buffer.take(message):
                await self._socket.send(carrier.mark(name))

    def say(self, pcm: Pcm) -> float:
        """Play a recording from the next frame on. Returns when its first sample is sent."""
        begins_s = self._begun_s + (self._sent + len(self._queue)) * carrier.FRAME_S
        data = to_ulaw(np.asarray(soxr.resample(pcm, SAMPLE_RATE_HZ, carrier.RATE_HZ), np.float32))
        frames = [data[at : at + FRAME_BYTES] for at in range(0, len(data), FRAME_BYTES)]
        self._queue += [frame.ljust(FRAME_BYTES, SILENCE[:1]) for frame in frames]
        return begins_s

    async def heard_after(self, since_s: float, most_s: float = LIMIT_S) -> float | None:
        """Wait for the first sound after a time, and return when it is heard; None if there is none."""
        while time.monotonic() < since_s + most_s:
            if found := [at for at in self.sounds_s if at >= since_s]:
                return found[0]
            await asyncio.sleep(0.01)
        return None

    async def quiet(self, for_s: float = 1.0) -> None:
        """Wait until nothing is generated and nothing plays."""
        events = self.application
        while (
            len(events.times("response.created")) > len(events.times("response.done"))
            or time.monotonic() < self.buffer.ends_s + for_s
        ):
            await asyncio.sleep(0.1)

    async def ask(self, text: str) -> int:
        """Ask for a long answer in writing, through the application. Returns the number of the next event."""
        since = len(self.application.events)
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        await self.application.send("conversation.item.create", item=item)
        await self.application.send("response.create", response={"max_output_tokens": 120, "instructions": TELLER})
        return since


async def _over_socket(caller: Caller, clip: Clip) -> float | None:
    """Say a recording over the WebSocket. Returns the seconds from the end of speech to the first sound at the ear."""
    since, step = len(caller.events), len(caller.heard)
    end_s = await caller.say(clip.pcm) + clip.speech_end
    await asyncio.sleep(max(0.0, end_s - time.monotonic()))
    try:
        await caller.first("response.output_audio.delta", since, 12)
    except TimeoutError:
        return None
    heard_s = None
    while heard_s is None and time.monotonic() < end_s + 15:
        for number in range(step, len(caller.heard)):
            at_s = caller.begun_s + number * 0.02
            samples = np.frombuffer(caller.heard[number], "<i2").astype(int)
            if at_s >= end_s and np.abs(samples).max() >= LOUD * 32768:
                heard_s = at_s
                break
        await asyncio.sleep(0.05)
    await caller.quiet()
    return None if heard_s is None else heard_s - end_s


async def _over_telephone(caller: PhoneCaller, clip: Clip) -> float | None:
    end_s = caller.say(clip.pcm) + clip.speech_end
    await asyncio.sleep(max(0.0, end_s - time.monotonic()))
    heard_s = await caller.heard_after(end_s, 15)
    await caller.quiet()
    return None if heard_s is None else heard_s - end_s


def row(seconds: list[float | None]) -> dict[str, Any]:
    """Return the percentiles of times in milliseconds, and how many there are."""
    found = [s * 1000 for s in seconds if s is not None]
    percents = {f"p{p}_ms": round(percentile(found, p), 1) for p in (50, 95)} if found else {}
    return {"turns": len(seconds), "answered": len(found)} | percents


async def latency(srv: Server, clips: list[Clip], telephone: type[PhoneCaller] = PhoneCaller) -> dict[str, Any]:
    """Say each recording over both, in turns, so that other load affects both."""
    found: dict[str, list[float | None]] = {"WebSocket": [], "telephone": []}
    for clip in clips:
        async with Caller(srv.url, VAD) as caller:
            found["WebSocket"].append(await _over_socket(caller, clip))
        async with telephone(srv) as phone:
            found["telephone"].append(await _over_telephone(phone, clip))
    out = {name: row(times) for name, times in found.items()}
    show("from the true end of speech to the first sound at the ear", out)
    return out


async def barge_in(srv: Server, clips: list[Clip], telephone: type[PhoneCaller] = PhoneCaller) -> dict[str, Any]:
    """Speak over a story. Measures the time from the onset of speech to silence at the ear."""
    found: dict[str, list[float | None]] = {"WebSocket": [], "telephone": []}
    for clip in clips:
        async with Caller(srv.url, VAD, tells=True) as caller:
            if await caller.story():
                onset_s = await caller.say(clip.pcm) + clip.speech_start
                await asyncio.sleep(clip.speech_start + 3.0)
                steps = [caller.begun_s + (n + 1) * 0.02 for n, data in enumerate(caller.heard) if any(data)]
                last = [at for at in steps if onset_s <= at]
                found["WebSocket"].append(last[-1] - onset_s if last and last[-1] < onset_s + 2.9 else None)
        async with telephone(srv, TELLER) as phone:
            since = await phone.ask(STORY)
            begun_s = await phone.heard_after(phone.application.events[since - 1][0])
            if begun_s is not None:
                await asyncio.sleep(2.6)
                onset_s = phone.say(clip.pcm) + clip.speech_start
                await asyncio.sleep(clip.speech_start + 3.0)
                ends_s = phone.buffer.ends_s
                found["telephone"].append(max(0.0, ends_s - onset_s) if ends_s < onset_s + 2.9 else None)
    out = {name: row(times) for name, times in found.items()}
    show("from the onset of speech over a story to silence at the ear", out)
    return out


async def cuts(srv: Server, count: int) -> dict[str, Any]:
    """Cut answers off at random, and compare what the history keeps with what was played."""
    chance, off = random.Random(7), list[float]()
    async with PhoneCaller(srv, TELLER) as phone:
        events = phone.application
        for _ in range(count):
            played_s, asked_s = phone.buffer.played_s, time.monotonic()
            since = await phone.ask("What will the weather be like?")
            if await phone.heard_after(asked_s) is None:
                continue
            await asyncio.sleep(chance.uniform(0.1, 2.5))
            await events.send("response.cancel")
            await events.send("output_audio_buffer.clear")
            await phone.quiet(0.6)
            truncated = events.of_type("conversation.item.truncated", since)
            if truncated:
                off.append(truncated[-1]["audio_end_ms"] - (phone.buffer.played_s - played_s) * 1000)
    out: dict[str, Any] = {"cuts": len(off), "within_a_word": sum(abs(ms) <= WORD_MS for ms in off)}
    if off:
        out |= {
            "worst_ms": round(max(off, key=abs)),
            "p50_ms": round(percentile(off, 50)),
            "more": sum(ms > 0 for ms in off),
        }
    show("what the history keeps, less what was played", [out])
    return out


def main() -> None:
    parser = with_data(options("python -m bench.telephone", __doc__, ("latency", "barge_in", "cuts")))
    parser.add_argument("--turns", type=int, default=12, help="turns of each way")
    parser.add_argument("--cuts", type=int, default=50, help="answers that are cut off")
    args = parser.parse_args()
    clips = whole_turns(args.data)[: args.turns]
    with backend(ANSWER) as url, server("--language-model", url) as srv:
        sections = {
            "latency": lambda: latency(srv, clips),
            "barge_in": lambda: barge_in(srv, clips),
            "cuts": lambda: cuts(srv, args.cuts),
        }
        measured("telephone", args.sections, in_loops(sections), data=args.data.name)


if __name__ == "__main__":
    main()
