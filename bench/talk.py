"""A conversation's delays: from the true end of speech to the first sound of the answer, stage by stage, and
interruptions.

    antiphon bench talk [--data DIR] [--sections latency,interrupt,cancel,pauses,backchannels,echo,heard] [--turns N]
    [--conversations 1,4]

A real server with the default models, real recordings played in real time over the OpenAI Realtime API, server and
clients on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soxr
import websockets

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench.hearing.clips import Clip, loaded, read_manifest
from common import HERE, Server, machine, percentile, save, server, table

from antiphon.audio import Pcm
from antiphon.audio.containers import decode_all
from antiphon.audio.pcm import from_pcm16, to_pcm16
from antiphon.loading.loader import load, store_of
from antiphon.settings import Settings

CHUNK_S, WIRE_HZ = 0.02, 24_000
QUIETEST_DBFS = -45.0
STEP = int(CHUNK_S * WIRE_HZ) * 2
STORY = "Tell me a very long story about a king and his seven sons."
TELLER = "You tell long stories, with every detail, and never stop."
MEDIUM = {"type": "semantic_vad", "eagerness": "medium"}
STAGES = ("stopped", "created", "text", "sound")
INSTRUCTIONS = "You are a voice assistant. Answer in one short sentence."


@dataclass(slots=True)
class Turn:
    """One turn, in seconds from the true end of the user's speech to each stage of its answer."""

    clip: str
    stages: dict[str, float] = field(default_factory=dict)
    responses: int = 0


class Speaker:
    """A client that always sends (a recording, or silence) and plays what comes, both in real time.

    It falls silent when it is told of speech, and says how much it has played, as clients do. `echo`: its microphone
    hears what it plays, so many decibels lower, after so many seconds. `key`: its API key, if the server asks for one.
    """

    def __init__(
        self, url: str, vad: dict[str, Any], echo: tuple[float, float] | None = None, key: str | None = None
    ) -> None:
        self._url = f"{url}/v1/realtime?model=gpt-realtime"
        self._vad = vad
        self._echo = echo
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._queue: list[bytes] = []
        self._playing: list[tuple[str, bytes]] = []
        self._played: dict[str, int] = {}
        self._air: list[bytes] = []
        self.events: list[tuple[float, dict[str, Any]]] = []
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Speaker:
        self._socket = await websockets.connect(
            self._url, max_size=None, compression=None, additional_headers=self._headers
        )
        if self._echo:
            self._air = [bytes(STEP)] * round(self._echo[1] / CHUNK_S)
        session = {
            "type": "realtime",
            "instructions": INSTRUCTIONS,
            "max_output_tokens": 60,
            "audio": {"input": {"turn_detection": self._vad}, "output": {"ducking": True}},
        }
        await self.send("session.update", session=session)
        self._tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._listen())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await self._socket.close()

    async def send(self, type: str, **fields: Any) -> None:
        await self._socket.send(json.dumps({"type": type} | fields))

    async def _send(self) -> None:
        begun, sent = time.monotonic(), 0
        while True:
            await asyncio.sleep(max(0.0, begun + (sent + 1) * CHUNK_S - time.monotonic()))
            data = self._queue.pop(0) if self._queue else bytes(STEP)
            item, sound = self._playing.pop(0) if self._playing else ("", bytes(STEP))
            if item:
                self._played[item] = self._played.get(item, 0) + 1
            if self._echo:
                self._air.append(sound)
                back = np.frombuffer(self._air.pop(0), np.int16) * 10 ** (self._echo[0] / 20)
                data = np.clip(np.frombuffer(data, np.int16) + back, -32768, 32767).astype(np.int16).tobytes()
            sent += 1
            await self.send("input_audio_buffer.append", audio=base64.b64encode(data).decode())

    async def _listen(self) -> None:
        rest: dict[str, bytes] = {}
        async for message in self._socket:
            event = json.loads(message)
            match event["type"]:
                case "error" if event["error"]["code"] != "response_cancel_not_active":
                    print(message, file=sys.stderr)
                case "response.output_audio.delta":
                    item = event["item_id"]
                    data = rest.pop(item, b"") + base64.b64decode(event["delta"])
                    whole = len(data) // STEP * STEP
                    self._playing += [(item, data[at : at + STEP]) for at in range(0, whole, STEP)]
                    rest[item] = data[whole:]
                case "input_audio_buffer.speech_started" if self._playing:
                    item, self._playing = self._playing[0][0], []
                    heard_ms = round(self._played.get(item, 0) * CHUNK_S * 1000)
                    await self.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=heard_ms)
            self.events.append((time.monotonic(), event))
            self._changed.set()
            self._changed = asyncio.Event()

    @property
    def sounding(self) -> bool:
        return bool(self._playing)

    def stop_playing(self) -> None:
        """Drop what is still to be played."""
        self._playing.clear()

    async def say(self, pcm: Pcm) -> float:
        """Play a recording from now on; returns when it began."""
        wire = to_pcm16(np.asarray(soxr.resample(pcm, 16_000, WIRE_HZ), np.float32))
        self._queue += [wire[at : at + STEP].ljust(STEP, b"\0") for at in range(0, len(wire), STEP)]
        return time.monotonic()

    async def ask(self, text: str, most_tokens: int) -> int:
        """Ask for an answer in writing; returns the number of the first event after it."""
        since = len(self.events)
        content = [{"type": "input_text", "text": text}]
        await self.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        await self.send("response.create", response={"max_output_tokens": most_tokens, "instructions": TELLER})
        return since

    async def sounds(self, since: int) -> bool:
        """Wait for the first sound; False for an answer that has none."""
        sound = asyncio.create_task(self.until("response.output_audio.delta", since))
        done = asyncio.create_task(self.until("response.done", since))
        first, rest = await asyncio.wait((sound, done), return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        return sound in first

    async def until(self, type: str, since: int, most_s: float = 30.0) -> float:
        """When an event of this type came, among those from number `since` on."""
        async with asyncio.timeout(most_s):
            while True:
                for at, event in self.events[since:]:
                    if event["type"] == type:
                        return at
                await self._changed.wait()

    async def quiet(self, for_s: float = 1.0) -> None:
        """Wait until nothing is said, and nothing sounds."""
        while (
            self.sounding
            or self.events[-1][1]["type"]
            not in ("rate_limits.updated", "conversation.item.truncated", "session.updated")
            or time.monotonic() - self.events[-1][0] < for_s
        ):
            await asyncio.sleep(0.1)


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
    async with Speaker(srv.ws, server_vad(silence_ms)) as speaker:
        await asyncio.sleep(0.5)
        for clip in clips:
            out.append(await one_turn(speaker, clip))
            await asyncio.sleep(0.4)
    return out


async def latency(
    srv: Server, clips: list[Clip], counts: list[int], endpoints: list[int], turns: int
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    each: dict[str, Any] = {}
    for silence_ms in endpoints:
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
    print(f"most at once with p95 within 1.5 s: {most_within(out, 1.5)}")
    return out | {"turns": each}


def server_vad(silence_ms: int) -> dict[str, Any]:
    return {"type": "server_vad", "silence_duration_ms": silence_ms}


def most_within(out: dict[str, Any], limit_s: float) -> int:
    """The most conversations at once whose p95 was within the limit."""
    met = [int(n.split()[0]) for n, row in out.items() if n != "turns" and row["sound_p95_s"] <= limit_s]
    return max(met, default=0)


async def shared(items: list[Any], at_once: int, play: Any) -> list[Any]:
    """`play(share of the items)` in so many conversations side by side; all results."""
    parts = await asyncio.gather(*(play(items[k::at_once]) for k in range(at_once)))
    return [r for part in parts for r in part]


async def interrupt(srv: Server, clips: list[Clip], trials: int) -> dict[str, Any]:
    """A long answer, cut by speech:
    from the speech's onset to the last sound sent, to the client's silence (it pauses when it is told to), to the
    report of speech and to response.done.
    """
    out: dict[str, Any] = {}
    for name, vad in (("server_vad", server_vad(500)), ("semantic_vad medium", MEDIUM)):
        last, silent, told, done, missed, stale = [], [], [], [], [], 0
        async with Speaker(srv.ws, vad) as speaker:
            await asyncio.sleep(0.5)
            for clip in clips[:trials]:
                since = await speaker.ask(STORY, 600)
                if not await speaker.sounds(since):
                    continue
                await asyncio.sleep(0.7)
                onset = await speaker.say(clip.pcm) + clip.speech_start
                try:
                    heard = await speaker.until("input_audio_buffer.speech_started", since, clip.seconds + 4)
                    ended = await speaker.until("response.done", since)
                except TimeoutError:
                    missed.append(clip.id)
                    await speaker.send("response.cancel")
                    await speaker.quiet()
                    continue
                await asyncio.sleep(0.3)
                response = next(e["response"] for _, e in speaker.events[since:] if e["type"] == "response.done")
                sounds = [
                    at
                    for at, e in speaker.events[since:]
                    if e["type"] == "response.output_audio.delta" and e["response_id"] == response["id"]
                ]
                stale += sum(at > ended for at in sounds)
                if response["status"] == "cancelled":
                    last.append(max(0.0, sounds[-1] - onset))
                    done.append(ended - onset)
                ducked = [at for at, e in speaker.events[since:] if e["type"].endswith(".ducked") and at < heard]
                silent.append((ducked[0] if ducked else heard) - onset)
                told.append(heard - onset)
                # Its answer, and quiet.
                await asyncio.sleep(clip.seconds + 1.0)
                await speaker.quiet()
        out[name] = {
            "trials": len(told) + len(missed),
            "not_taken": len(missed),
            "cut_short": len(done),
            "last_sound_p50_ms": statistics.median(last) * 1000,
            "last_sound_p95_ms": percentile(last, 95) * 1000,
            "silent_p50_ms": statistics.median(silent) * 1000,
            "silent_p95_ms": percentile(silent, 95) * 1000,
            "told_p50_ms": statistics.median(told) * 1000,
            "told_p95_ms": percentile(told, 95) * 1000,
            "done_p95_ms": percentile(done, 95) * 1000,
            "stale_frames": stale,
        }
    columns = ("turn detection", *out["server_vad"])
    table("interruption: from the onset of speech", columns, [(n, *r.values()) for n, r in out.items()])
    return out


async def cancel(srv: Server, trials: int) -> dict[str, Any]:
    """response.cancel while an answer is made: to the last frame of its sound, and to response.done."""
    last, done, stale = [], [], 0
    async with Speaker(srv.ws, server_vad(500)) as speaker:
        for k in range(trials):
            since = await speaker.ask(STORY, 600)
            if not await speaker.sounds(since):
                continue
            await asyncio.sleep(0.2 + 0.037 * k % 0.8)
            asked = time.monotonic()
            await speaker.send("response.cancel")
            ended = await speaker.until("response.done", since)
            await asyncio.sleep(0.4)
            sounds = [at for at, e in speaker.events[since:] if e["type"] == "response.output_audio.delta"]
            stale += sum(at > ended for at in sounds)
            last.append(max(0.0, sounds[-1] - asked))
            done.append(ended - asked)
            speaker.stop_playing()
    out = {
        "trials": len(done),
        "last_frame_p50_ms": statistics.median(last) * 1000,
        "last_frame_p99_ms": percentile(last, 99) * 1000,
        "done_p99_ms": percentile(done, 99) * 1000,
        "stale_frames": stale,
    }
    table("response.cancel", tuple(out), [tuple(out.values())])
    return out


async def pauses(srv: Server, data: Path) -> dict[str, Any]:
    """Hesitations inside a turn (tools/evalmix.py pause): how often they end it, and how soon its true end does."""
    with tempfile.TemporaryDirectory() as folder:
        tool = [sys.executable, str(data / "tools" / "evalmix.py"), "pause", str(data), folder]
        await asyncio.to_thread(
            subprocess.run, [*tool, "--n", "12", "--hold", "0.6,1.2,2.0"], check=True, stdout=subprocess.DEVNULL
        )
        rows = [json.loads(line) for line in (Path(folder) / "manifest.jsonl").read_text().splitlines()]
        items = [(r, decode_all(str(Path(folder) / r["path"]))) for r in rows]
    out: dict[str, Any] = {}
    modes = (
        ("semantic_vad medium", MEDIUM),
        ("semantic_vad auto", MEDIUM | {"eagerness": "auto"}),
        ("server_vad 500 ms", server_vad(500)),
    )
    for name, vad in modes:

        async def play(share: list[Any], vad: dict[str, Any] = vad) -> list[tuple[bool, float]]:
            results = []
            async with Speaker(srv.ws, vad) as speaker:
                await asyncio.sleep(0.5)
                for row, pcm in share:
                    since = len(speaker.events)
                    began = await speaker.say(pcm)
                    await asyncio.sleep(row["turn_end"] + 0.1)
                    await speaker.until("input_audio_buffer.speech_stopped", since, 20)
                    await asyncio.sleep(5.0)
                    ends = [
                        at - began
                        for at, e in speaker.events[since:]
                        if e["type"] == "input_audio_buffer.speech_stopped"
                    ]
                    # By the source's own pause, which the silence was put into: half a second of each side is its own.
                    early = any(row["pause"][0] < t < row["pause"][1] + 0.1 for t in ends)
                    results.append((early, ends[-1] - row["turn_end"]))
                    await speaker.quiet(0.5)
            return results

        results = await shared(items, 4, play)
        late = [x for _, x in results]
        out[name] = {
            "turns": len(results),
            "false_ends": sum(e for e, _ in results),
            "share": sum(e for e, _ in results) / len(results),
            "end_p50_s": percentile(late, 50),
            "end_p95_s": percentile(late, 95),
        }
    columns = ("turn detection", *next(iter(out.values())))
    table("hesitations of 0.6, 1.2 and 2 s", columns, [(n, *r.values()) for n, r in out.items()])
    return out


async def backchannels(srv: Server, data: Path, repeats: int) -> dict[str, Any]:
    """Real acknowledgements over a long answer: how often it stops."""
    clips = loaded(c for c in read_manifest(data) if c.kind == "backchannel")
    out: dict[str, Any] = {}
    for name, vad in (("semantic_vad medium", MEDIUM), ("server_vad 500 ms", server_vad(500))):

        async def play(share: list[Clip], vad: dict[str, Any] = vad) -> list[tuple[str, bool]]:
            results = []
            async with Speaker(srv.ws, vad) as speaker:
                await asyncio.sleep(0.5)
                for clip in share:
                    since = await speaker.ask(STORY, 200)
                    if not await speaker.sounds(since):
                        continue
                    await asyncio.sleep(0.8)
                    await speaker.say(clip.pcm)
                    await asyncio.sleep(clip.seconds + 2.0)
                    kinds = [e["type"] for _, e in speaker.events[since:]]
                    results.append((clip.id, "input_audio_buffer.speech_started" in kinds))
                    await speaker.send("response.cancel")
                    await asyncio.sleep(0.3)
                    speaker.stop_playing()
                    await asyncio.sleep(2.0)
            return results

        results = await shared(clips * repeats, 2, play)
        stopped = sorted({i for i, s in results if s})
        out[name] = {
            "trials": len(results),
            "stops": sum(s for _, s in results),
            "share": sum(s for _, s in results) / len(results),
        }
        print(f"{name}: stopped by {', '.join(stopped) or 'none'}")
    table(
        "acknowledgements", ("turn detection", "trials", "stops", "share"), [(n, *r.values()) for n, r in out.items()]
    )
    return out


async def loopback(srv: Server, seconds: float) -> dict[str, Any]:
    """A microphone that hears the loudspeaker, 10 dB lower: how often the server interrupts itself."""

    async def play(share: list[float]) -> list[tuple[float, int]]:
        results = []
        for delay_s in share:
            async with Speaker(srv.ws, server_vad(500), (-10.0, delay_s)) as speaker:
                await asyncio.sleep(0.5)
                begun, sounded = time.monotonic(), 0.0
                while sounded < seconds / 4 and time.monotonic() - begun < seconds:
                    since = await speaker.ask(STORY, 150)
                    if not await speaker.sounds(since):
                        continue
                    at = time.monotonic()
                    await speaker.until("response.done", since, 60)
                    while speaker.sounding:
                        await asyncio.sleep(0.05)
                    sounded += time.monotonic() - at
                    await asyncio.sleep(1.5)
                started = sum(e["type"] == "input_audio_buffer.speech_started" for _, e in speaker.events)
                results.append((sounded, started))
        return results

    results = await shared([0.06, 0.15, 0.3, 0.6], 4, play)
    out = {"sound_s": sum(s for s, _ in results), "self_interruptions": sum(n for _, n in results)}
    table("loopback at -10 dB, delays of 60 to 600 ms", tuple(out), [tuple(out.values())])
    return out


async def heard(srv: Server, count: int) -> dict[str, Any]:
    """Answers cut at random:
    what is kept against the words whose sound ended before the cut, by a forced alignment of the sound.
    """
    aligner = load(Settings(), store_of(Settings().models), None, ("transcriber",))
    chance, off = random.Random(7), []
    topics = (
        "a king",
        "the sea",
        "a cat",
        "old trains",
        "winter",
        "bread",
        "a lighthouse",
        "gardens",
        "music",
        "the moon",
    )
    async with Speaker(srv.ws, server_vad(500)) as speaker:
        for k in range(count):
            since = await speaker.ask(f"Say three sentences about {topics[k % len(topics)]}.", 60)
            if not await speaker.sounds(since):
                continue
            await speaker.until("rate_limits.updated", since, 60)
            mine = [e for _, e in speaker.events[since:]]
            item = next(e["item_id"] for e in mine if e["type"] == "response.output_audio.delta")
            text = next(e["transcript"] for e in mine if e["type"] == "response.output_audio_transcript.done")
            data = b"".join(base64.b64decode(e["delta"]) for e in mine if e["type"] == "response.output_audio.delta")
            pcm = np.asarray(soxr.resample(from_pcm16(data), WIRE_HZ, 16_000), np.float32)
            cut_ms = chance.randint(0, len(pcm) // 16)
            await speaker.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=cut_ms)
            await speaker.send("conversation.item.retrieve", item_id=item)
            await speaker.until("conversation.item.retrieved", since)
            kept = next(e["item"] for _, e in speaker.events[since:] if e["type"] == "conversation.item.retrieved")
            speaker.stop_playing()
            said = await aligner.required_transcriber.align(pcm, text.split(), "en")
            if said:
                off.append(len(kept["content"][0]["transcript"].split()) - sum(w.end_s * 1000 <= cut_ms for w in said))
    aligner.close()
    out = {
        "cuts": len(off),
        "exact": sum(x == 0 for x in off),
        "within_one_word": sum(abs(x) <= 1 for x in off),
        "worst": max(map(abs, off)),
    }
    table("heard only", tuple(out), [tuple(out.values())])
    return out


def whole_turns(data: Path) -> list[Clip]:
    """Read and spoken English of 2 to 7 s, whose bounds of speech are known; every so many of them, forty or more."""
    clips = [
        c
        for c in read_manifest(data)
        if c.language == "en"
        and c.text
        and c.kind.startswith("asr_")
        and 2 < c.seconds < 7
        # The bounds of speech are by energy, with a floor at -62 dBFS: of a recording near it they are wrong by half a
        # second.
        and c.active_dbfs > QUIETEST_DBFS
    ]
    return loaded(sorted(clips, key=lambda c: c.id)[:: max(1, len(clips) // 40)])


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


async def measure(srv: Server, args: argparse.Namespace, document: dict[str, Any]) -> None:
    wanted = set(args.sections.split(","))
    clips = whole_turns(args.data)
    sections = {
        "latency": lambda: latency(srv, clips, numbers(args.conversations), numbers(args.endpoints), args.turns),
        "interrupt": lambda: interrupt(srv, clips, args.turns),
        "cancel": lambda: cancel(srv, 40),
        "pauses": lambda: pauses(srv, args.data),
        "backchannels": lambda: backchannels(srv, args.data, 4),
        "echo": lambda: loopback(srv, args.echo_s),
        "heard": lambda: heard(srv, 50),
    }
    for name, section in sections.items():
        if name in wanted:
            document[name] = await section()
            # A section that was measured stays, whatever the next one does.
            save("talk", document)


def main() -> None:
    parser = argparse.ArgumentParser(prog="antiphon bench talk", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--data", type=Path, default=HERE.parent / "tests" / "data", help="folder with a manifest.jsonl"
    )
    parser.add_argument("--sections", default="latency,interrupt,cancel,pauses,backchannels,echo,heard")
    parser.add_argument("--conversations", default="1,4")
    parser.add_argument("--endpoints", default="200,500", help="silence that ends a turn, ms")
    parser.add_argument("--turns", type=int, default=12, help="turns of each conversation")
    parser.add_argument("--echo-s", type=float, default=600, help="seconds of loopback, over four conversations")
    args = parser.parse_args()
    document: dict[str, Any] = {"machine": machine(), "data": args.data.name}
    with server() as srv:
        asyncio.run(measure(srv, args, document))
    print(f"\nwritten: {save('talk', document)}")


if __name__ == "__main__":
    main()
