"""A conversation's delays: from the true end of speech to the first sound of the answer, stage by stage, and interruptions.

    antiphon bench talk [--data DIR] [--sections latency,interrupt] [--turns N] [--conversations 1,4]

A real server with the default models, real recordings played in real time over the OpenAI Realtime API, server and clients on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soxr
import websockets

sys.path.insert(0, str(Path(__file__).resolve().parent))
from asr import Clip, loaded, read_manifest
from common import HERE, Server, machine, percentile, save, server, table

from antiphon.audio import Pcm
from antiphon.audio.pcm import to_pcm16

CHUNK_S, WIRE_HZ = 0.02, 24_000
QUIETEST_DBFS = -45.0
STAGES = ("stopped", "created", "text", "sound")
INSTRUCTIONS = "You are a voice assistant. Answer in one short sentence."


@dataclass(slots=True)
class Turn:
    """One turn, in seconds from the true end of the user's speech to each stage of its answer."""

    clip: str
    stages: dict[str, float] = field(default_factory=dict)
    responses: int = 0


class Speaker:
    """A client that always sends: a recording, or silence, in real time."""

    def __init__(self, url: str, silence_ms: int) -> None:
        self._url = f"{url}/v1/realtime?model=gpt-realtime"
        self._silence_ms = silence_ms
        self._queue: list[bytes] = []
        self.events: list[tuple[float, dict[str, Any]]] = []
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Speaker:
        self._socket = await websockets.connect(self._url, max_size=None, compression=None)
        vad = {"type": "server_vad", "silence_duration_ms": self._silence_ms}
        session = {
            "type": "realtime",
            "instructions": INSTRUCTIONS,
            "max_output_tokens": 60,
            "audio": {"input": {"turn_detection": vad}},
        }
        await self._socket.send(json.dumps({"type": "session.update", "session": session}))
        self._tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._listen())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await self._socket.close()

    async def _send(self) -> None:
        step, begun, sent = int(CHUNK_S * WIRE_HZ) * 2, time.monotonic(), 0
        while True:
            await asyncio.sleep(max(0.0, begun + (sent + 1) * CHUNK_S - time.monotonic()))
            data = self._queue.pop(0) if self._queue else bytes(step)
            sent += 1
            audio = base64.b64encode(data).decode()
            await self._socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))

    async def _listen(self) -> None:
        async for message in self._socket:
            event = json.loads(message)
            if event["type"] == "error":
                print(message, file=sys.stderr)
            self.events.append((time.monotonic(), event))
            self._changed.set()
            self._changed = asyncio.Event()

    async def say(self, pcm: Pcm) -> float:
        """Play a recording from now on; returns when it began."""
        wire = to_pcm16(np.asarray(soxr.resample(pcm, 16_000, WIRE_HZ), np.float32))
        step = int(CHUNK_S * WIRE_HZ) * 2
        self._queue += [wire[at : at + step].ljust(step, b"\0") for at in range(0, len(wire), step)]
        return time.monotonic()

    async def until(self, type: str, since: int, most_s: float = 30.0) -> float:
        """When an event of this type came, among those from number `since` on."""
        async with asyncio.timeout(most_s):
            while True:
                for at, event in self.events[since:]:
                    if event["type"] == type:
                        return at
                await self._changed.wait()


async def one_turn(speaker: Speaker, clip: Clip) -> Turn:
    since = len(speaker.events)
    began = await speaker.say(clip.pcm)
    end = began + clip.speech_end
    turn = Turn(clip.id)
    # A pause inside the recording may be taken for its end: the answer that counts is the one after the last speech.
    await asyncio.sleep(clip.speech_end + 0.9)
    while True:
        events = speaker.events[since:]
        if events and events[-1][1]["type"] == "rate_limits.updated" and time.monotonic() > end + 1.5:
            break
        if time.monotonic() > end + 8:
            # Nothing was understood, so nothing is said.
            return turn
        await asyncio.sleep(0.05)
    stopped = [k for k, (_, e) in enumerate(events) if e["type"] == "input_audio_buffer.speech_stopped"]
    tail = events[stopped[-1] :]
    names = {
        "input_audio_buffer.speech_stopped": "stopped",
        "response.created": "created",
        "response.output_audio_transcript.delta": "text",
        "response.output_audio.delta": "sound",
    }
    for at, event in tail:
        name = names.get(event["type"])
        if name and name not in turn.stages:
            turn.stages[name] = at - end
    turn.responses = sum(e["type"] == "response.created" for _, e in events)
    return turn


async def conversation(srv: Server, clips: list[Clip], silence_ms: int, delay_s: float) -> list[Turn]:
    await asyncio.sleep(delay_s)
    out = []
    async with Speaker(srv.ws, silence_ms) as speaker:
        await asyncio.sleep(0.5)
        for clip in clips:
            out.append(await one_turn(speaker, clip))
            await asyncio.sleep(0.4)
    return out


async def latency(srv: Server, clips: list[Clip], counts: list[int], turns: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    each: dict[str, Any] = {}
    for silence_ms in (200, 500):
        for count in counts:
            shares = [clips[k::count][:turns] for k in range(count)]
            heard = await asyncio.gather(
                *(conversation(srv, share, silence_ms, k * 1.3) for k, share in enumerate(shares))
            )
            whole = [t for each in heard for t in each if "sound" in t.stages]
            row: dict[str, Any] = {"turns": sum(map(len, heard)), "answered": len(whole)}
            for stage in STAGES:
                row[f"{stage}_p50_s"] = percentile([t.stages[stage] for t in whole if stage in t.stages], 50)
            row["sound_p95_s"] = percentile([t.stages["sound"] for t in whole], 95)
            row["more_than_one_answer"] = sum(t.responses > 1 for t in whole)
            name = f"{count} at once, {silence_ms} ms"
            out[name] = row
            each[name] = [{"clip": t.clip, "answers": t.responses} | t.stages for t in whole]
    table(
        "from the true end of speech, s",
        ("conversations, endpoint", *next(iter(out.values())).keys()),
        [(n, *r.values()) for n, r in out.items()],
    )
    return out | {"turns": each}


async def interrupt(srv: Server, clips: list[Clip], trials: int) -> dict[str, Any]:
    """A long answer, cut by speech: from the speech's onset to the last sound and to response.done."""
    last, done = [], []
    async with Speaker(srv.ws, 500) as speaker:
        for clip in clips[:trials]:
            since = len(speaker.events)
            content = [{"type": "input_text", "text": "Tell me a very long story about a king and his seven sons."}]
            item = {"type": "message", "role": "user", "content": content}
            await speaker._socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
            await speaker._socket.send(json.dumps({"type": "response.create", "response": {"max_output_tokens": 600}}))
            await speaker.until("response.output_audio.delta", since)
            began = await speaker.say(clip.pcm)
            onset = began + clip.speech_start
            ended = await speaker.until("response.done", since)
            response = next(e["response"] for _, e in speaker.events[since:] if e["type"] == "response.done")
            if response["status"] != "cancelled":
                continue
            sounds = [
                at
                for at, e in speaker.events[since:]
                if e["type"] == "response.output_audio.delta" and e["response_id"] == response["id"]
            ]
            if sounds:
                last.append(max(0.0, sounds[-1] - onset))
                done.append(ended - onset)
            # Its answer, and quiet.
            await asyncio.sleep(clip.seconds + 1.0)
            while (
                speaker.events[-1][1]["type"] != "rate_limits.updated" or time.monotonic() - speaker.events[-1][0] < 1.0
            ):
                await asyncio.sleep(0.1)
    out = {
        "trials": len(done),
        "last_sound_p50_ms": statistics.median(last) * 1000,
        "last_sound_p95_ms": percentile(last, 95) * 1000,
        "done_p50_ms": statistics.median(done) * 1000,
        "done_p95_ms": percentile(done, 95) * 1000,
    }
    table("interruption: from the onset of speech, ms", tuple(out), [tuple(out.values())])
    return out


async def measure(srv: Server, args: argparse.Namespace, document: dict[str, Any]) -> None:
    wanted = set(args.sections.split(","))
    clips = [
        c
        for c in read_manifest(args.data)
        if c.language == "en"
        and c.text
        and c.kind.startswith("asr_")
        and 2 < c.seconds < 7
        # The bounds of speech are by energy, with a floor at -62 dBFS: of a recording near it they are wrong by half a second.
        and c.active_dbfs > QUIETEST_DBFS
    ]
    clips = loaded(sorted(clips, key=lambda c: c.id)[:: max(1, len(clips) // 40)])
    if "latency" in wanted:
        document["latency"] = await latency(srv, clips, [int(n) for n in args.conversations.split(",")], args.turns)
    if "interrupt" in wanted:
        document["interrupt"] = await interrupt(srv, clips, args.turns)


def main() -> None:
    parser = argparse.ArgumentParser(prog="antiphon bench talk", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--data", type=Path, default=HERE.parent / "tests" / "data", help="folder with a manifest.jsonl"
    )
    parser.add_argument("--sections", default="latency,interrupt")
    parser.add_argument("--conversations", default="1,4")
    parser.add_argument("--turns", type=int, default=12, help="turns of each conversation")
    args = parser.parse_args()
    document: dict[str, Any] = {"machine": machine(), "data": args.data.name}
    with server() as srv:
        asyncio.run(measure(srv, args, document))
    print(f"\nwritten: {save('talk', document)}")


if __name__ == "__main__":
    main()
