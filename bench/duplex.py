"""Full duplex: how soon a voice falls silent, what acknowledgements and pauses do, whether turns are taken, and that
nothing old is sent.

    antiphon bench duplex [--data DIR] [--sections bargein,backchannels,pauses,turns,schedules] [--turns N]

A real server with the default models, real recordings played in real time over /v1/realtime?duplex=1. The client plays
what it gets by its own clock, acknowledges it, falls silent when it is told to duck and drops what an older epoch said.
Takeover, after the manner of Full-Duplex-Bench, is the share in which the partner begins to speak, however shortly: bad
in pauses and after acknowledgements, good after turns.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import websockets

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench.hearing.clips import Clip, loaded, read_manifest
from common import HERE, RESULTS, Server, machine, percentile, save, server, table
from talk import CHUNK_S, INSTRUCTIONS, STEP, STORY, TELLER, WIRE_HZ, Speaker, shared, whole_turns

from antiphon.audio.containers import decode_all

ACK_EVERY = 5
# An answer has sounded for so long when somebody speaks over it: whether there is an echo is known by then.
LEAD_S = 2.6
# What is said over less of an answer than this is no interruption of it.
LEFT_S = 1.5


class DuplexSpeaker(Speaker):
    """A client that ducks, drops what is old and acknowledges what it has played."""

    def __init__(self, url: str, **session: Any) -> None:
        super().__init__(url, {})
        self._url = f"{url}/v1/realtime?duplex=1"
        self._session = session
        self._ducked = False
        # When the voice fell silent or sounded again, by the client's own playback.
        self.silences: list[tuple[float, bool]] = []

    async def __aenter__(self) -> DuplexSpeaker:
        self._socket = await websockets.connect(self._url, max_size=None, compression=None)
        session = {
            "instructions": INSTRUCTIONS,
            "max_response_output_tokens": 60,
            "sample_rate_hz": WIRE_HZ,
            "turn_detection": None,
        }
        await self.send("session.update", session=session | self._session)
        self._tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._listen())]
        return self

    async def _send(self) -> None:
        begun, sent, sounding = time.monotonic(), 0, False
        while True:
            await asyncio.sleep(max(0.0, begun + (sent + 1) * CHUNK_S - time.monotonic()))
            data = self._queue.pop(0) if self._queue else bytes(STEP)
            item, _ = self._playing.pop(0) if self._playing and not self._ducked else ("", b"")
            if item:
                self._played[item] = self._played.get(item, 0) + 1
                if self._played[item] % ACK_EVERY == 0:
                    await self._acknowledge(item)
            if bool(item) != sounding:
                sounding = bool(item)
                self.silences.append((time.monotonic(), not sounding))
            sent += 1
            await self.send("input_audio_buffer.append", audio=base64.b64encode(data).decode())

    async def _acknowledge(self, item: str) -> None:
        played_ms = round(self._played[item] * CHUNK_S * 1000)
        await self.send("playback.ack", played_ms=played_ms, item_id=item)

    async def _listen(self) -> None:
        rest: dict[str, bytes] = {}
        async for message in self._socket:
            event = json.loads(message)
            match event["type"]:
                case "error" if event["error"]["code"] not in ("response_cancel_not_active", "playback_ack_too_late"):
                    print(message, file=sys.stderr)
                case "response.output_audio.delta":
                    item = event["item_id"]
                    data = rest.pop(item, b"") + base64.b64decode(event["delta"])
                    whole = len(data) // STEP * STEP
                    self._playing += [(item, data[at : at + STEP]) for at in range(0, whole, STEP)]
                    rest[item] = data[whole:]
                case "turn.event" if event["event"] in ("duck", "unduck"):
                    self._ducked = event["event"] == "duck"
                case "overlap.decision" if event["action"] == "barge_in":
                    await self.drop()
            self.events.append((time.monotonic(), event))
            self._changed.set()
            self._changed = asyncio.Event()

    async def drop(self) -> None:
        """What waits to be played is old. How much was heard is said."""
        self._ducked = False
        if self._playing:
            item, self._playing = self._playing[0][0], []
            if self._played.get(item):
                await self._acknowledge(item)

    def silent_after(self, at: float) -> float | None:
        """When the voice first fell silent after `at`."""
        return next((t for t, silent in self.silences if silent and t >= at), None)

    async def story(self) -> int | None:
        """A long answer that has begun to sound; the number of the first event after it was asked for."""
        await self.send("session.update", session={"instructions": TELLER, "max_response_output_tokens": 400})
        since = len(self.events)
        await self.send("push_text", text=STORY)
        if not await self.sounds(since):
            return None
        await asyncio.sleep(LEAD_S)
        return since

    def goes_on(self, since: int) -> bool:
        """An answer is still being made, or has a while to sound."""
        done = any(e["type"] == "response.done" for _, e in self.events[since:])
        return not done or len(self._playing) * CHUNK_S >= LEFT_S

    async def settle(self) -> None:
        """End what is said, and wait for quiet."""
        for _ in range(40):
            kinds = [e["type"] for _, e in self.events]
            if kinds.count("response.created") == kinds.count("response.done"):
                break
            await self.send("response.cancel")
            await asyncio.sleep(0.25)
        await self.drop()
        await self.send("session.update", session={"instructions": INSTRUCTIONS, "max_response_output_tokens": 60})
        await asyncio.sleep(1.5)

    def kinds(self, since: int) -> list[str]:
        """Types of events from this number on, with what was decided of overlap."""
        return [f"{e['type']} {e.get('action') or e.get('event') or ''}".strip() for _, e in self.events[since:]]


async def bargein(srv: Server, clips: list[Clip], trials: int) -> dict[str, Any]:
    """Speech over a long answer: from its onset to the client's silence, and whether it took the floor."""
    silent: list[float] = []
    stopped: list[float] = []
    missed: list[tuple[str, list[str]]] = []
    taken = tried = 0
    for clip in clips[:trials]:
        # A conversation each: a small model tells shorter stories the more it has told.
        async with DuplexSpeaker(srv.ws) as speaker:
            await asyncio.sleep(0.3)
            since = await speaker.story()
            if since is None:
                continue
            before = len(speaker.events)
            onset = await speaker.say(clip.pcm) + clip.speech_start
            await asyncio.sleep(max(0.0, onset - time.monotonic()))
            if not speaker.goes_on(since):
                # The answer is over, or nearly, when somebody speaks.
                continue
            tried += 1
            await asyncio.sleep(clip.seconds + 1.5)
            if (quiet := speaker.silent_after(onset)) is not None:
                silent.append(quiet - onset)
            decided = [
                t for t, e in speaker.events[since:] if e["type"] == "overlap.decision" and e["action"] == "barge_in"
            ]
            if decided:
                taken += 1
                stopped.append(decided[0] - onset)
            else:
                missed.append((clip.id, [k for k in speaker.kinds(before) if k.startswith(("turn", "overlap"))]))
    for clip_id, kinds in missed:
        print(f"not taken: {clip_id}: {kinds}")
    out = {
        "trials": tried,
        "taken": taken / max(1, tried),
        "silent_p50_ms": percentile(silent, 50) * 1000,
        "silent_p95_ms": percentile(silent, 95) * 1000,
        "decided_p50_ms": percentile(stopped, 50) * 1000,
        "decided_p95_ms": percentile(stopped, 95) * 1000,
    }
    table("barge-in: from the onset of speech", tuple(out), [tuple(out.values())])
    return out


async def backchannels(srv: Server, data: Path, repeats: int) -> dict[str, Any]:
    """Real acknowledgements over a long answer."""
    clips = loaded(c for c in read_manifest(data) if c.kind == "backchannel")

    async def play(share: list[Clip]) -> list[tuple[str, bool, bool, bool]]:
        results = []
        for clip in share:
            async with DuplexSpeaker(srv.ws) as speaker:
                await asyncio.sleep(0.3)
                since = await speaker.story()
                before = len(speaker.events)
                if since is None or not speaker.goes_on(since):
                    continue
                await speaker.say(clip.pcm)
                await asyncio.sleep(clip.seconds + 2.0)
                kinds = speaker.kinds(before)
                stopped = "overlap.decision barge_in" in kinds
                ducked = "turn.event duck" in kinds
                results.append((clip.id, stopped, ducked and not stopped, "response.created" in kinds))
        return results

    results = await shared(clips * repeats, 2, play)
    count = max(1, len(results))
    out = {
        "trials": len(results),
        "hard_stops": sum(s for _, s, _, _ in results) / count,
        "ducked_and_resumed": sum(d for _, _, d, _ in results) / count,
        "takeover": sum(t for *_, t in results) / count,
    }
    table("acknowledgements over an answer", tuple(out), [tuple(out.values())])
    print("stopped by:", ", ".join(sorted({i for i, s, _, _ in results if s})) or "none")
    return out


async def pauses(srv: Server, data: Path) -> dict[str, Any]:
    """Hesitations inside a turn (tools/evalmix.py pause): how often the partner begins to speak in them."""
    with tempfile.TemporaryDirectory() as folder:
        tool = [sys.executable, str(data / "tools" / "evalmix.py"), "pause", str(data), folder]
        await asyncio.to_thread(
            subprocess.run, [*tool, "--n", "12", "--hold", "0.6,1.2,2.0"], check=True, stdout=subprocess.DEVNULL
        )
        rows = [json.loads(line) for line in (Path(folder) / "manifest.jsonl").read_text().splitlines()]
        items = [(r, decode_all(str(Path(folder) / r["path"]))) for r in rows]

    async def play(share: list[Any]) -> list[tuple[str, bool, str]]:
        results = []
        async with DuplexSpeaker(srv.ws) as speaker:
            await asyncio.sleep(0.5)
            for row, pcm in share:
                since = len(speaker.events)
                began = await speaker.say(pcm)
                await asyncio.sleep(len(pcm) / 16_000 + 4.0)
                said, over = "", False
                for t, e in speaker.events[since:]:
                    if e["type"] == "conversation.item.input_audio_transcription.completed" and not over:
                        said = e["transcript"]
                    if e["type"] == "response.speak" and row["pause"][0] < t - began < row["pause"][1] + 0.1:
                        over = True
                results.append((row["id"], over, said))
                await speaker.settle()
        return results

    results = await shared(items, 4, play)
    over = [(i, said) for i, t, said in results if t]
    inside = [i for i, said in over if not said.rstrip().endswith((".", "?", "!"))]
    out = {
        "turns": len(results),
        "takeovers": len(over),
        "takeover": len(over) / len(results),
        "inside_a_sentence": len(inside),
    }
    table("hesitations of 0.6, 1.2 and 2 s", tuple(out), [tuple(out.values())])
    for clip_id, said in over:
        print(f"taken over: {clip_id}: {said}")
    return out


async def turns(srv: Server, clips: list[Clip], count: int) -> dict[str, Any]:
    """Whole turns: whether they are answered, and how soon after the true end of speech the answer sounds."""
    late, answered = [], 0
    async with DuplexSpeaker(srv.ws) as speaker:
        await asyncio.sleep(0.5)
        for clip in clips[:count]:
            since = len(speaker.events)
            end = await speaker.say(clip.pcm) + clip.speech_end
            await asyncio.sleep(clip.seconds + 6.0)
            sounds = [t for t, e in speaker.events[since:] if e["type"] == "response.output_audio.delta"]
            after = [t for t in sounds if t > end - 0.2]
            if after:
                answered += 1
                late.append(after[0] - end)
            await speaker.settle()
    out = {
        "turns": min(count, len(clips)),
        "taken": answered / max(1, min(count, len(clips))),
        "sound_p50_s": percentile(late, 50),
        "sound_p95_s": percentile(late, 95),
    }
    table("turns: from the true end of speech", tuple(out), [tuple(out.values())])
    return out


async def schedules(count: int) -> dict[str, Any]:
    """Random speech, answers, cuts and acknowledgements on a virtual clock:
    frames of an old epoch among what a client gets.
    """
    from tests.sessions.duplex.test_session import schedule

    frames, broken = 0, 0
    for seed in range(count):
        try:
            frames += await schedule(random.Random(seed), 40)
        except AssertionError as error:
            broken += 1
            print(f"seed {seed}: {error}", file=sys.stderr)
    out = {"schedules": count, "frames": frames, "of_an_old_epoch": broken}
    table("random schedules", tuple(out), [tuple(out.values())])
    return out


async def measure(srv: Server, args: argparse.Namespace, document: dict[str, Any]) -> None:
    wanted = set(args.sections.split(","))
    clips = whole_turns(args.data)
    sections = {
        "bargein": lambda: bargein(srv, clips, args.turns),
        "backchannels": lambda: backchannels(srv, args.data, 4),
        "pauses": lambda: pauses(srv, args.data),
        "turns": lambda: turns(srv, clips, args.turns),
        "schedules": lambda: schedules(args.schedules),
    }
    for name, section in sections.items():
        if name in wanted:
            document[name] = await section()
            save("duplex", document)


def main() -> None:
    parser = argparse.ArgumentParser(prog="antiphon bench duplex", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--data", type=Path, default=HERE.parent / "tests" / "data", help="folder with a manifest.jsonl"
    )
    parser.add_argument("--sections", default="bargein,backchannels,pauses,turns,schedules")
    parser.add_argument("--turns", type=int, default=30, help="turns, and answers that are cut")
    parser.add_argument("--schedules", type=int, default=10_000)
    args = parser.parse_args()
    document: dict[str, Any] = {"machine": machine(), "data": args.data.name}
    if (before := RESULTS / "duplex.json").is_file():
        # Sections that are not measured now stay as they were.
        document = json.loads(before.read_text()) | document
    with server() as srv:
        asyncio.run(measure(srv, args, document))
    print(f"\nwritten: {save('duplex', document)}")


if __name__ == "__main__":
    main()
