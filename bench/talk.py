"""Measures conversations: the delay from the true end of speech to each stage of the answer, and interruptions.

    antiphon bench talk [--data DIR] [--sections latency,interrupt,cancel,pauses,backchannels,echo,heard] [--turns N]
    [--conversations 1,4]

It starts a real server with the default models. Clients play real recordings to it in real time, over the OpenAI
Realtime API. The server and the clients share the same cores.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import soxr
from bench.common import Server, measured, numbers, options, percentile, server, show, spread
from bench.driver import CHUNK_S, STORY, WIRE_HZ, Caller, in_loops, server_vad, shared, telling
from bench.hearing.clips import PAUSE, Clip, loaded, mixed, read_manifest, whole_turns, with_data
from bench.turn_taking.replay import is_fitted

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import from_pcm16
from antiphon.events.transcription import Eagerness
from antiphon.loading.loader import load, store_of
from antiphon.settings import Settings

MEDIUM = {"type": "semantic_vad", "eagerness": "medium"}
AUTO = {"type": "semantic_vad", "eagerness": "auto"}
EAGERNESS = get_args(Eagerness)
# Events of an answered turn, with their names in the results.
STAGES = {
    "input_audio_buffer.speech_stopped": "stopped",
    "response.created": "created",
    "response.output_audio_transcript.delta": "text",
    "response.output_audio.delta": "sound",
}
TOPICS = ["a king", "the sea", "a cat", "old trains", "winter", "bread", "a lighthouse", "gardens", "music", "the moon"]


@dataclass(slots=True)
class Turn:
    """One turn. `stages` has the seconds from the true end of the user's speech to each stage of the answer."""

    clip: str
    stages: dict[str, float] = field(default_factory=dict)
    responses: int = 0


async def one_turn(caller: Caller, clip: Clip) -> Turn:
    """Say a recording, and wait for the end of its answer."""
    since = len(caller.events)
    end = await caller.say(clip.pcm) + clip.speech_end
    turn = Turn(clip.id)
    # A pause inside the recording may be taken for its end. Only the answer to the last part of the speech counts.
    await asyncio.sleep(clip.speech_end + 0.9)
    while True:
        events = caller.events[since:]
        if events and events[-1][1]["type"] == "rate_limits.updated" and time.monotonic() > end + 1.5:
            break
        if time.monotonic() > end + 8:
            # The server understood nothing, so it does not answer.
            return turn
        await asyncio.sleep(0.05)
    stopped = [k for k, (_, e) in enumerate(events) if e["type"] == "input_audio_buffer.speech_stopped"]
    if not stopped:
        # Only the end of the answer before has arrived.
        return turn
    for at, event in events[stopped[-1] :]:
        name = STAGES.get(event["type"])
        if name and name not in turn.stages:
            turn.stages[name] = at - end
    turn.responses = sum(e["type"] == "response.created" for _, e in events)
    return turn


async def conversation(srv: Server, clips: list[Clip], endpoint: str, delay_s: float) -> list[Turn]:
    await asyncio.sleep(delay_s)
    out = []
    semantic = {"type": "semantic_vad", "eagerness": endpoint}
    async with Caller(srv.url, semantic if endpoint in EAGERNESS else server_vad(int(endpoint))) as caller:
        for clip in clips:
            out.append(await one_turn(caller, clip))
            await asyncio.sleep(0.4)
    return out


async def latency(
    srv: Server, clips: list[Clip], counts: list[int], endpoints: list[str], turns: int
) -> dict[str, Any]:
    """Measure the stages of answers. Each endpoint is a silence in ms (`server_vad`) or an eagerness (`semantic_vad`).

    No pauses are inserted, so `stopped` is the wait of a user who does not hesitate. With an eagerness, no speaker is
    one that the end-of-turn model is fitted to.
    """
    others = [clip for clip in clips if not is_fitted(clip.speaker)] or clips
    out: dict[str, Any] = {}
    each: dict[str, Any] = {}
    for endpoint in endpoints:
        for count in counts:
            said = others if endpoint in EAGERNESS else clips
            shares = [said[k::count][:turns] for k in range(count)]
            heard = await asyncio.gather(
                *(conversation(srv, share, endpoint, k * 1.3) for k, share in enumerate(shares))
            )
            whole = [t for each in heard for t in each if "sound" in t.stages]
            row: dict[str, Any] = {"turns": sum(map(len, heard)), "answered": len(whole)}
            for stage in STAGES.values():
                row[f"{stage}_p50_s"] = percentile([t.stages[stage] for t in whole if stage in t.stages], 50)
            for stage in ("stopped", "sound"):
                row[f"{stage}_p95_s"] = percentile([t.stages[stage] for t in whole if stage in t.stages], 95)
            row["more_than_one_answer"] = sum(t.responses > 1 for t in whole)
            name = f"{count} at once, {endpoint}" + (" ms" if endpoint.isdecimal() else "")
            out[name] = row
            each[name] = [{"clip": t.clip, "answers": t.responses} | t.stages for t in whole]
    show("from the true end of speech, s", out)
    met = [int(name.split()[0]) for name, row in out.items() if row["sound_p95_s"] <= 1.5]
    print(f"most at once with p95 within 1.5 s: {max(met, default=0)}")
    return out | {"turns": each}


def p_ms(name: str, seconds: list[float], *percents: int) -> dict[str, float]:
    """Return percentiles in milliseconds, by their names in the results."""
    return spread([1000 * second for second in seconds], name, "ms", percents)


async def cut(caller: Caller, clip: Clip) -> dict[str, Any] | None:
    """Speak over a story. Return the seconds from the onset of speech to each of its effects.

    Returns None if there was no story, and an empty result if the story continues.
    """
    since = await caller.ask(STORY, 600)
    if not await caller.sounds(since):
        return None
    await asyncio.sleep(0.7)
    onset = await caller.say(clip.pcm) + clip.speech_start
    try:
        heard = await caller.until("input_audio_buffer.speech_started", since, clip.seconds + 4)
        ended, done = await caller.first("response.done", since)
    except TimeoutError:
        await caller.send("response.cancel")
        await caller.quiet()
        return {}
    await asyncio.sleep(0.3)
    response = done["response"]
    sounds = [
        at
        for at, e in caller.events[since:]
        if e["type"] == "response.output_audio.delta" and e["response_id"] == response["id"]
    ]
    found: dict[str, Any] = {"reported": heard - onset, "stale": sum(at > ended for at in sounds)}
    if response["status"] == "cancelled":
        found |= {"last": max(0.0, sounds[-1] - onset), "done": ended - onset}
    ducked = [at for at, e in caller.events[since:] if e["type"].endswith(".ducked") and at < heard]
    found["silent"] = (ducked[0] if ducked else heard) - onset
    # Waits until the answer to the speech has ended, and nothing plays.
    await asyncio.sleep(clip.seconds + 1.0)
    await caller.quiet()
    return found


async def interrupt(srv: Server, clips: list[Clip], trials: int) -> dict[str, Any]:
    """Interrupt a long answer by speech.

    Measures the time from the onset of speech to the last sound that is sent, to silence at the client (which pauses
    when it is asked to duck), to the report of speech, and to response.done.
    """
    out: dict[str, Any] = {}
    for name, vad in (("server_vad", server_vad(500)), ("semantic_vad medium", MEDIUM)):
        async with Caller(srv.url, vad) as caller:
            found = [one for clip in clips[:trials] if (one := await cut(caller, clip)) is not None]
        of = {key: [one[key] for one in found if key in one] for key in ("last", "silent", "reported", "done", "stale")}
        out[name] = {
            "trials": len(found),
            "not_taken": len(found) - len(of["reported"]),
            "cut_short": len(of["done"]),
            **p_ms("last_sound", of["last"], 50, 95),
            **p_ms("silent", of["silent"], 50, 95),
            **p_ms("reported", of["reported"], 50, 95),
            **p_ms("done", of["done"], 95),
            "stale_frames": sum(of["stale"]),
        }
    show("interruption: from the onset of speech", out)
    return out


async def cancel(srv: Server, trials: int) -> dict[str, Any]:
    """Send response.cancel during an answer. Measures the time to the last frame of sound and to response.done."""
    last, done, stale = [], [], 0
    async with Caller(srv.url, server_vad(500)) as caller:
        for k in range(trials):
            since = await caller.ask(STORY, 600)
            if not await caller.sounds(since):
                continue
            await asyncio.sleep(0.2 + 0.037 * k % 0.8)
            asked = time.monotonic()
            await caller.send("response.cancel")
            ended = await caller.until("response.done", since)
            await asyncio.sleep(0.4)
            sounds = caller.times("response.output_audio.delta", since)
            stale += sum(at > ended for at in sounds)
            last.append(max(0.0, sounds[-1] - asked))
            done.append(ended - asked)
            caller.stop_playing()
    frames = {"trials": len(done), **p_ms("last_frame", last, 50, 99), **p_ms("done", done, 99), "stale_frames": stale}
    show("response.cancel", [frames])
    return frames


@dataclass(frozen=True, slots=True)
class Hesitation:
    """A turn with a pause inside. `row`: its row of the manifest. `events`: its events, with seconds from its start.

    `sounded`: the seconds, from its start, of each step of the loudspeaker in which an answer was heard.
    """

    row: dict[str, Any]
    events: list[tuple[float, dict[str, Any]]]
    sounded: list[float]

    @property
    def was_spoken_into(self) -> bool:
        """Whether an answer was heard before the turn's true end."""
        return any(self.row["pause"][0] < at < self.row["turn_end"] for at in self.sounded)

    @property
    def talked_over_s(self) -> float:
        """Seconds in which an answer was heard while the user went on after the pause."""
        return CHUNK_S * sum(self.row["pause"][1] < at < self.row["turn_end"] for at in self.sounded)

    @property
    def is_whole(self) -> bool:
        """Whether the last answer is to the whole turn: it is one item, or each item continues the one before."""
        items = [e["item"] for _, e in self.events if e["type"] == "conversation.item.added"]
        said = [item for item in items if item["role"] == "user"]
        return all(later.get("continues") == item["id"] for item, later in itertools.pairwise(said))

    def is_early(self, at: float) -> bool:
        """Return whether an event at second `at` is in the pause. An answer must not begin there."""
        # The bounds are those of the pause that the source had already; silence was inserted into it.
        return bool(self.row["pause"][0] < at < self.row["pause"][1] + 0.1)


async def hesitations(srv: Server, vad: dict[str, Any] | None, data: Path) -> list[Hesitation]:
    """Say turns with a pause of 0.6, 1.2 or 2 s (tools/evalmix.py pause) in four conversations at once."""

    async def play(share: Sequence[tuple[dict[str, Any], Clip]]) -> list[Hesitation]:
        results = []
        async with Caller(srv.url, vad) as caller:
            for row, clip in share:
                since = len(caller.events)
                began = await caller.say(clip.pcm)
                await asyncio.sleep(clip.seconds + 5.0)
                sounded = [caller.begun_s + i * CHUNK_S - began for i, step in enumerate(caller.heard) if any(step)]
                events = [(at - began, event) for at, event in caller.events[since:]]
                results.append(Hesitation(row, events, sounded))
                await caller.settle()
        return results

    return await shared(mixed(data, PAUSE, 12, "--hold", "0.6,1.2,2.0"), 4, play)


async def pauses(srv: Server, data: Path) -> dict[str, Any] | None:
    """Measure how often a pause inside a turn ends it, and the delay of the answer after the turn's true end.

    Returns None if no recordings with pauses can be made.
    """
    out: dict[str, Any] = {}
    modes = {"semantic_vad medium": MEDIUM, "semantic_vad auto": AUTO, "server_vad 500 ms": server_vad(500)}
    for name, vad in modes.items():
        if not (said := await hesitations(srv, vad, data)):
            return None
        stopped = "input_audio_buffer.speech_stopped"
        ends = [[at for at, event in one.events if event["type"] == stopped] for one in said]
        false_ends = sum(any(map(one.is_early, times)) for one, times in zip(said, ends, strict=True))
        late = [times[-1] - one.row["turn_end"] for one, times in zip(said, ends, strict=True) if times]
        out[name] = {"turns": len(said), "false_ends": false_ends, "share": false_ends / len(said)}
        out[name] |= {
            "spoken_into": sum(one.was_spoken_into for one in said),
            "talked_over_0.4_s": sum(one.talked_over_s > 0.4 for one in said),
            "talked_over_max_s": max(one.talked_over_s for one in said),
            "whole": sum(one.is_whole for one in said),
        }
        out[name] |= spread(late, "end")
    show("hesitations of 0.6, 1.2 and 2 s", out)
    return out


async def acknowledged(srv: Server, vad: dict[str, Any] | None, data: Path) -> list[tuple[str, set[str], bool]]:
    """Play real acknowledgements, four times each, over a story that is the first answer of a conversation.

    Return for each acknowledgement its recording, what the client was asked to do, and whether another answer began.
    """
    clips = loaded(c for c in read_manifest(data) if c.kind == "backchannel")

    async def play(share: Sequence[Clip]) -> list[tuple[str, set[str], bool]]:
        results = []
        for clip in share:
            async with telling(srv, vad) as caller:
                if caller is None:
                    continue
                before, since = len(caller.marks), len(caller.events)
                await caller.say(clip.pcm)
                await asyncio.sleep(clip.seconds + 2.0)
                reported = {mark.kind for mark in caller.marks[before:]}
                results.append((clip.id, reported, bool(caller.times("response.created", since))))
        return results

    results = await shared(clips * 4, 2, play)
    print(
        "stopped by:",
        ", ".join(sorted({clip_id for clip_id, reported, _ in results if "interrupted" in reported})) or "none",
    )
    return results


async def backchannels(srv: Server, data: Path) -> dict[str, Any]:
    """Measure how often a real acknowledgement stops a long answer."""
    out: dict[str, Any] = {}
    for name, vad in (("semantic_vad medium", MEDIUM), ("server_vad 500 ms", server_vad(500))):
        results = await acknowledged(srv, vad, data)
        stops = sum("interrupted" in reported for _, reported, _ in results)
        out[name] = {"trials": len(results), "stops": stops, "share": stops / max(1, len(results))}
    show("acknowledgements", out)
    return out


async def loopback(srv: Server, seconds: float) -> dict[str, Any]:
    """Measure how often the server interrupts itself. The microphone hears the loudspeaker 10 dB lower."""

    async def play(share: Sequence[float]) -> list[tuple[float, int]]:
        results = []
        for delay_s in share:
            async with Caller(srv.url, server_vad(500), echo=(-10.0, delay_s)) as caller:
                begun, sounded = time.monotonic(), 0.0
                while sounded < seconds / 4 and time.monotonic() - begun < seconds:
                    since = await caller.ask(STORY, 150)
                    if not await caller.sounds(since):
                        continue
                    at = time.monotonic()
                    await caller.until("response.done", since, 60)
                    while caller.sounding:
                        await asyncio.sleep(0.05)
                    sounded += time.monotonic() - at
                    await asyncio.sleep(1.5)
                results.append((sounded, len(caller.times("input_audio_buffer.speech_started"))))
        return results

    results = await shared([0.06, 0.15, 0.3, 0.6], 4, play)
    out = {"sound_s": sum(s for s, _ in results), "self_interruptions": sum(n for _, n in results)}
    show("loopback at -10 dB, delays of 60 to 600 ms", [out])
    return out


async def heard(srv: Server, count: int) -> dict[str, Any]:
    """Interrupt answers at random.

    Compares the text that the history keeps with the words whose sound ended before the interruption. A forced
    alignment of the sound gives the times of words.
    """
    aligner = load(Settings(), store_of(Settings().models), None, ("transcriber",))
    chance, off = random.Random(7), []
    async with Caller(srv.url, server_vad(500)) as caller:
        for k in range(count):
            since = await caller.ask(f"Say three sentences about {TOPICS[k % len(TOPICS)]}.", 60)
            if not await caller.sounds(since):
                continue
            await caller.until("rate_limits.updated", since, 60)
            sounds = caller.of_type("response.output_audio.delta", since)
            text = caller.of_type("response.output_audio_transcript.done", since)[0]["transcript"]
            data = b"".join(base64.b64decode(e["delta"]) for e in sounds)
            pcm = np.asarray(soxr.resample(from_pcm16(data), WIRE_HZ, SAMPLE_RATE_HZ), np.float32)
            cut_ms = chance.randint(0, len(pcm) // 16)
            item = sounds[0]["item_id"]
            await caller.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=cut_ms)
            await caller.send("conversation.item.retrieve", item_id=item)
            _, kept = await caller.first("conversation.item.retrieved", since)
            caller.stop_playing()
            said = await aligner.required_transcriber.align(pcm, text.split(), "en")
            if said:
                words = kept["item"]["content"][0]["transcript"].split()
                off.append(len(words) - sum(w.end_s * 1000 <= cut_ms for w in said))
    aligner.close()
    out = {"cuts": len(off), "exact": off.count(0), "within_one_word": sum(abs(x) <= 1 for x in off)}
    out["worst"] = max(map(abs, off))
    show("heard only", [out])
    return out


def main() -> None:
    names = ("latency", "interrupt", "cancel", "pauses", "backchannels", "echo", "heard")
    parser = with_data(options("antiphon bench talk", __doc__, names))
    parser.add_argument("--conversations", default="1,4")
    parser.add_argument("--endpoints", default="200,500,auto", help="silences that end a turn, ms, or eagernesses")
    parser.add_argument("--turns", type=int, default=12, help="turns of each conversation")
    parser.add_argument("--echo-s", type=float, default=600, help="seconds of loopback, over four conversations")
    args = parser.parse_args()
    clips = whole_turns(args.data)
    counts, endpoints = numbers(args.conversations), args.endpoints.split(",")
    if unknown := {e for e in endpoints if not (e.isdecimal() or e in EAGERNESS)}:
        parser.error(f"--endpoints: {', '.join(sorted(unknown))} is neither milliseconds nor an eagerness")
    with server() as srv:
        sections = {
            "latency": lambda: latency(srv, clips, counts, endpoints, args.turns),
            "interrupt": lambda: interrupt(srv, clips, args.turns),
            "cancel": lambda: cancel(srv, 40),
            "pauses": lambda: pauses(srv, args.data),
            "backchannels": lambda: backchannels(srv, args.data),
            "echo": lambda: loopback(srv, args.echo_s),
            "heard": lambda: heard(srv, 50),
        }
        measured("talk", args.sections, in_loops(sections), data=args.data.name)


if __name__ == "__main__":
    main()
