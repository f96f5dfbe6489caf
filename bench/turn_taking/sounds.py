"""The section `sounds` of `antiphon bench turns`: sounds over an answer that should not end the answer.

Real recordings, at the levels of the data's tools/evalmix.py, play over an answer: several of one class, with a second
of silence between them. The data has no coughs; sneezes are the most similar sounds. The echo is the answer itself,
which the client's microphone hears 10 dB lower.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench.common import Server, show
from bench.driver import CHUNK_S, MODES, Caller, telling
from bench.hearing.clips import Clip, loaded, read_manifest
from bench.turn_taking.figures import at_level, ducks_without_interruption, rate_interval, share

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

# Number of concurrent conversations. With a single one, the machine would be idle most of the time.
AT_ONCE = 3
ACKNOWLEDGEMENT_REPEATS = 4
# Longer recordings are played in pieces of this length, in seconds.
PIECE_S = 5.0
# Seconds after a sound that still count as its effect, because a decision by words waits for a transcript.
AFTER_S = 1.5
ECHO_DB, ECHO_DELAYS_S = -10.0, (0.06, 0.15, 0.3)
# Seconds of answers with echo, for each delay of the echo.
ECHO_S = 45.0
# Levels as in tools/evalmix.py duplex, where speech is at -26 dB of full scale.
BACKCHANNEL_DB, NOISE_DB, SPEECH_DB = -30.0, -34.0, -26.0
GOAL_CLASSES = ("acknowledgements", "sneezes", "echo")


@dataclass(frozen=True, slots=True)
class Sound:
    kind: str
    recording: str
    pcm: Pcm


@dataclass(frozen=True, slots=True)
class Outcome:
    """The effect of one sound on an answer.

    `seconds` is the duration that was observed, with the time after the sound.
    """

    kind: str
    recording: str
    interrupted: bool
    ducks: int
    seconds: float


def pieces(pcm: Pcm) -> list[Pcm]:
    """Return the recording in pieces of PIECE_S. A remainder that is shorter than half a piece is dropped."""
    size = round(PIECE_S * SAMPLE_RATE_HZ)
    return [pcm[at : at + size] for at in range(0, len(pcm), size) if at == 0 or len(pcm) - at >= size / 2]


def class_of(clip: Clip) -> str | None:
    if "sneeze" in clip.label.lower():
        return "sneezes"
    return {"backchannel": "acknowledgements", "noise": "noise", "music": "music", "babble": "babble"}.get(clip.kind)


def sounds(data: Path) -> list[Sound]:
    """Return all sounds, in an order that mixes their classes."""
    out = []
    for clip in loaded(c for c in read_manifest(data) if class_of(c)):
        kind = class_of(clip)
        assert kind is not None
        level = {"acknowledgements": BACKCHANNEL_DB, "sneezes": SPEECH_DB}.get(kind, NOISE_DB)
        pcm = at_level(clip.pcm, level)
        repeats = ACKNOWLEDGEMENT_REPEATS if kind in ("acknowledgements", "sneezes") else 1
        out += [Sound(kind, clip.id, piece) for piece in pieces(pcm) for _ in range(repeats)]
    order = np.random.default_rng(7).permutation(len(out))
    return [out[k] for k in order]


async def one(caller: Caller, sound: Sound) -> Outcome | None:
    """Play a sound over the answer. Return None if the answer ended by itself before the effect was known."""
    marks_before = len(caller.marks)
    seconds = len(sound.pcm) / SAMPLE_RATE_HZ + AFTER_S
    await caller.say(sound.pcm)
    await asyncio.sleep(seconds)
    marks = caller.marks[marks_before:]
    interrupted = any(mark.kind == "interrupted" for mark in marks)
    if not interrupted and not caller.goes_on and not (marks and marks[-1].kind == "ducked"):
        return None
    return Outcome(sound.kind, sound.recording, interrupted, ducks_without_interruption(marks), seconds)


async def over_answers(srv: Server, mode: str, share_of: Sequence[Sound]) -> list[Outcome]:
    """Play the sounds over as many answers as needed."""
    out, left, failures = [], list(share_of), 0
    while left and failures < 10:
        async with telling(srv, MODES[mode]) as caller:
            played = 0
            while caller and left and caller.goes_on:
                outcome = await one(caller, left[0])
                if outcome is None:
                    break
                out.append(outcome)
                left.pop(0)
                played += 1
                if outcome.interrupted:
                    break
            failures = 0 if played else failures + 1
    return out


async def echoed(srv: Server, mode: str, delay_s: float) -> list[Outcome]:
    """Play answers for ECHO_S that the microphone hears. Return one outcome for each answer."""
    out, heard_s = [], 0.0
    for _ in range(10):
        async with Caller(srv.url, MODES[mode], tells=True, echo=(ECHO_DB, delay_s)) as caller:
            await caller.story()
            while caller.goes_on and heard_s + caller.sounded * CHUNK_S < ECHO_S:
                await asyncio.sleep(0.1)
            interrupted = any(mark.kind == "interrupted" for mark in caller.marks)
            seconds = caller.sounded * CHUNK_S
            ducks = ducks_without_interruption(caller.marks)
            out.append(Outcome("echo", f"delay {delay_s:g} s", interrupted, ducks, seconds))
            heard_s += seconds
        if heard_s >= ECHO_S:
            break
    return out


def rows(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the share that ends the answer and the ducks per minute, for each class and for the goal's classes."""
    kinds = sorted({o.kind for o in outcomes})
    groups: dict[str, Callable[[Outcome], bool]] = {kind: (lambda o, kind=kind: o.kind == kind) for kind in kinds}
    groups["acknowledgements, sneezes and echo"] = lambda o: o.kind in GOAL_CLASSES
    groups["all but babble"] = lambda o: o.kind != "babble"
    out = {}
    for name, is_of in groups.items():
        found = [o for o in outcomes if is_of(o)]
        minutes, ducks = sum(o.seconds for o in found) / 60, sum(o.ducks for o in found)
        out[name] = {
            "recordings": len({o.recording for o in found}),
            "ends_an_answer": share(sum(o.interrupted for o in found), len(found)),
            "minutes": round(minutes, 2),
            "ducks_without_interruption": ducks,
            "ducks_a_minute": round(ducks / minutes, 2) if minutes else None,
            "ducks_interval": [round(v, 2) for v in rate_interval(ducks, minutes)],
            "ended_by": sorted({o.recording for o in found if o.interrupted}),
        }
    return out


async def over_an_answer(srv: Server, data: Path, modes: Sequence[str] = tuple(MODES)) -> dict[str, Any]:
    """Measure every class of sound, in every mode with its defaults."""
    every, out = sounds(data), dict[str, Any]()
    for mode in modes:
        parts = await asyncio.gather(*(over_answers(srv, mode, every[k::AT_ONCE]) for k in range(AT_ONCE)))
        echoes = await asyncio.gather(*(echoed(srv, mode, delay_s) for delay_s in ECHO_DELAYS_S))
        out[mode] = rows([o for part in (*parts, *echoes) for o in part])
        shown = {kind: row | row["ends_an_answer"] for kind, row in out[mode].items()}
        for row in shown.values():
            del row["ends_an_answer"], row["ended_by"]
        show(f"sounds over an answer, {mode}", shown)
    return out
