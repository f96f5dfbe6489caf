"""The section `full-duplex-bench` of `antiphon bench turns`: conversations in the format that its scorers read.

    antiphon bench turns --data DIR --sections full-duplex-bench --out FOLDER

Full-Duplex-Bench (github.com/DanielLin94144/Full-Duplex-Bench) has four tasks, each a folder of numbered items. An item
has `input.wav`, the user's speech; `output.wav`, the output of the client's loudspeaker on the same clock;
`output.json`, the words of that output with their times; and a file that says where the pause, the end of the turn or
the interruption is. The words and their times are from our transcriber; the benchmark's authors use another model. The
recordings are ours, too. The scorers need other packages, and run outside of the project:

- `pause_handling`: read sentences up to the end of the turn, with an inserted pause of 0.6 to 2 s (tools/evalmix.py of
  the data). `pause_handling_real`: recordings with real hesitations.
- `smooth_turn_taking`: whole turns, and the speech after them.
- `user_interruption`: a recording of each speaker, played over a story. Words count from the end of the user's speech.
- `user_backchannel`: real acknowledgements, played over a story, as in version 1.5.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import soxr
from bench.common import Server, table
from bench.driver import CHUNK_S, STORY, WIRE_HZ, Caller
from bench.hearing.client import transcribe_file, wav
from bench.hearing.clips import PAUSE, Clip, loaded, mixed, read_manifest, spread, whole_turns
from bench.turn_taking.figures import at_level
from bench.turn_taking.interruptions import speakers
from bench.turn_taking.sounds import BACKCHANNEL_DB

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import from_pcm16

# Seconds to wait for an answer: after a turn, and after an interruption.
ANSWER_S = 6.0
BACKCHANNEL_REPEATS = 4


@dataclass(frozen=True, slots=True)
class Item:
    """One conversation of a task."""

    # The benchmark's task, which is a folder.
    task: str
    # The id of the recording.
    source: str
    # The user's speech, which is said at the start or over a story.
    pcm: Pcm
    # Seconds to record after the end of `pcm`.
    after_s: float
    # Whether `pcm` is said over a story.
    over: bool = False
    # Name and content of an extra file, in which the times of `pcm` are `timestamp`.
    facts: tuple[str, list[dict[str, Any]]] = ("", [])
    # Whether only words after the end of `pcm` count.
    words_from_end: bool = False


@dataclass(slots=True)
class Recorded:
    """The client's output from the start of an item (24 kHz), and the second of it at which the recording begins."""

    said_s: float
    heard: Pcm = field(default_factory=lambda: np.zeros(0, np.float32))


def pauses(data: Path) -> list[Item]:
    """Return sentences with an inserted pause, up to the end of the turn, then recordings with real hesitations."""

    def item(task: str, clip: Clip, end_s: float, *pause: dict[str, Any]) -> Item:
        facts = ("pause.json", list(pause)) if pause else ("", [])
        return Item(task, clip.id, clip.pcm[: int(end_s * SAMPLE_RATE_HZ)], 0.0, facts=facts)

    made = mixed(data, PAUSE, 8, "--hold", "0.6,1.2,2.0")
    out = [
        item("pause_handling", clip, row["turn_end"], {"text": "[PAUSE]", "timestamp": row["pause"]})
        for row, clip in made
    ]
    real = loaded(c for c in read_manifest(data) if c.kind == "hesitation")
    return out + [item("pause_handling_real", clip, clip.speech_end) for clip in real]


def turns(data: Path, most: int) -> list[Item]:
    out = []
    for clip in spread(whole_turns(data), most):
        end = [clip.speech_end, clip.speech_end]
        facts = ("turn_taking.json", [{"text": "[TURN-TAKING]", "timestamp": end}])
        out.append(Item("smooth_turn_taking", clip.id, clip.pcm, ANSWER_S, facts=facts))
    return out


def interruptions(data: Path, most: int) -> list[Item]:
    def item(clip: Clip) -> Item:
        about = {"context": STORY, "interrupt": clip.text, "timestamp": [clip.speech_start, clip.speech_end]}
        facts = ("interrupt.json", [about])
        return Item("user_interruption", clip.id, clip.pcm, ANSWER_S, over=True, facts=facts, words_from_end=True)

    return [item(clip) for clip in speakers(data, most)]


def backchannels(data: Path) -> list[Item]:
    clips = loaded(c for c in read_manifest(data) if c.kind == "backchannel")
    return [
        Item("user_backchannel", clip.id, at_level(clip.pcm, BACKCHANNEL_DB), ANSWER_S, over=True)
        for clip in clips * BACKCHANNEL_REPEATS
    ]


async def recorded(srv: Server, item: Item) -> Recorded | None:
    """Hold the conversation of an item. Returns None if the story ended too early."""
    async with Caller(srv.url, None, tells=item.over) as caller:
        if item.over and not await caller.story():
            return None
        begun = await caller.say(item.pcm)
        await asyncio.sleep(len(item.pcm) / SAMPLE_RATE_HZ + item.after_s + CHUNK_S)
        said_s = begun - caller.begun_s
        # Without a story, the item starts where the recording does.
        start = 0 if item.over else round(said_s / CHUNK_S)
        steps = round((said_s + len(item.pcm) / SAMPLE_RATE_HZ + item.after_s) / CHUNK_S)
        heard = from_pcm16(b"".join(caller.heard[start:steps]))
        return Recorded(said_s - start * CHUNK_S, np.asarray(heard, np.float32))


async def written(srv: Server, http: httpx.AsyncClient, item: Item, number: int, folder: Path) -> bool:
    """Hold one conversation and write its files. Returns False if the story ended too early."""
    found = await recorded(srv, item)
    if found is None:
        return False
    place = folder / item.task / str(number)
    place.mkdir(parents=True, exist_ok=True)
    output = np.asarray(soxr.resample(found.heard, WIRE_HZ, SAMPLE_RATE_HZ), np.float32)
    given = np.zeros(len(output), np.float32)
    at = round(found.said_s * SAMPLE_RATE_HZ)
    part = item.pcm[: len(given) - at]
    given[at : at + len(part)] = part
    (place / "input.wav").write_bytes(wav(given))
    (place / "output.wav").write_bytes(wav(output))
    from_s = found.said_s + len(item.pcm) / SAMPLE_RATE_HZ if item.words_from_end else 0.0
    words = await words_of(http, output[round(from_s * SAMPLE_RATE_HZ) :], from_s)
    (place / "output.json").write_text(json.dumps(words, indent=1) + "\n")
    name, facts = item.facts
    if name:
        shifted = [f | {"timestamp": [round(t + found.said_s, 3) for t in f["timestamp"]]} for f in facts]
        (place / name).write_text(json.dumps(shifted, indent=1) + "\n")
    (place / "source.json").write_text(json.dumps({"source": item.source, "said_s": round(found.said_s, 3)}) + "\n")
    return True


async def words_of(http: httpx.AsyncClient, pcm: Pcm, from_s: float) -> dict[str, Any]:
    """Return the words of the output in the scorers' form. Silence has no words, even if some are returned."""
    if not len(pcm) or float(np.abs(pcm).max()) < 0.003:
        return {"text": "", "chunks": []}
    text = await transcribe_file(http, pcm, language="en", word_times=True)
    chunks = [{"text": word, "timestamp": [from_s + start, from_s + end]} for word, start, end in text.words]
    return {"text": text.text, "chunks": chunks}


async def full_duplex_bench(srv: Server, data: Path, folder: Path, most: int) -> dict[str, Any]:
    """Hold all conversations, in full duplex with the defaults, and write FOLDER/TASK/NUMBER."""
    items = [*pauses(data), *turns(data, most), *interruptions(data, most), *backchannels(data)]
    numbers: dict[str, itertools.count[int]] = {item.task: itertools.count(1) for item in items}
    # One conversation after the other. Others could delay an answer, and so hide that a pause was taken for an end.
    async with httpx.AsyncClient(base_url=srv.url, timeout=120) as http:
        done = [(i.task, await written(srv, http, i, next(numbers[i.task]), folder)) for i in items]
    out = {task: sum(ok for name, ok in done if name == task) for task in numbers}
    table("items written", ("task", "items"), list(out.items()))
    return {"items": out}
