"""The section `voices` of `antiphon bench turns`: turns of voices other than the user's, with a real server.

A session is planned by speakers.py: one user's turns, with turns of other voices between them. The conversation has its
defaults, `audio.input.primary_speaker` is `auto`, and the server has a speaker encoder. speakers.py measures the same
without a server, with more voices, and also in noise.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from bench.common import server, show
from bench.driver import Caller
from bench.turn_taking.figures import share
from bench.turn_taking.speakers import LENGTHS_S, MODEL, SEED, Session, Turn, plan, read_voices

from antiphon.audio import SAMPLE_RATE_HZ

TRANSCRIBED = "conversation.item.input_audio_transcription.completed"
AT_ONCE = 8
# Largest number of turns of each length and side in a session. Each is answered with a few words of text.
TURNS_A_SIDE = 2
SESSION: dict[str, Any] = {
    "type": "realtime",
    "instructions": "Answer in one word.",
    "max_output_tokens": 4,
    "output_modalities": ["text"],
    "audio": {
        "input": {
            "primary_speaker": "auto",
            "transcription": {"model": "default"},
            "turn_detection": {"type": "server_vad"},
        }
    },
}
# Seconds to wait for the transcript of a turn, and then for the rest of the turn after a pause inside it.
TRANSCRIPT_S, REST_S = 4.0, 0.7


@dataclass(frozen=True, slots=True)
class Said:
    """A turn that was played, and how the server reacted."""

    # The user of the session.
    user: str
    # Whether the turn is the user's own.
    own: bool
    # Its length, in seconds.
    length_s: float
    # Number of turns into which the server split it.
    parts: int
    # Number of those turns that the server marked as another speaker's.
    marked_other: int
    # Number of answers that the server began.
    answers: int
    # The speaker of each transcript; "" if unknown.
    speakers: tuple[str, ...] = ()


def fewer(session: Session) -> Session:
    """Return the session with only TURNS_A_SIDE turns of each length and side, in the same order."""
    kept, counts = list[tuple[bool, Turn]](), dict[tuple[bool, float], int]()
    for own, turn in session.order:
        key = (own, turn.length_s)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= TURNS_A_SIDE:
            kept.append((own, turn))
    return replace(session, order=tuple(kept))


async def said(caller: Caller, user: str, own: bool, turn: Turn) -> Said:
    """Play one turn, and wait for the results."""
    since = len(caller.events)

    def count(type: str) -> int:
        return len(caller.times(type, since))

    await caller.say(turn.pcm)
    await asyncio.sleep(turn.length_s)
    with suppress(TimeoutError):
        await caller.until(TRANSCRIBED, since, TRANSCRIPT_S)
    quiet_from = time.monotonic()
    while time.monotonic() - quiet_from < REST_S:
        is_busy = count("input_audio_buffer.committed") > count(TRANSCRIBED)
        if is_busy or count("response.created") > count("response.done"):
            quiet_from = time.monotonic()
        await asyncio.sleep(0.02)
    found = caller.of_type(TRANSCRIBED, since)
    parts = [e for e in found if e["transcript"].strip()]
    other = sum(e.get("speaker") == "other" for e in parts)
    named = tuple(e.get("speaker", "") for e in found)
    return Said(user, own, turn.length_s, len(parts), other, count("response.created"), named)


def halves(first: Sequence[Turn]) -> list[Turn]:
    """Return the user's first speech as two turns of equal length.

    The server learns from turns with at least a second of detected speech, and a turn of one second has less.
    """
    pcm = np.concatenate([turn.pcm for turn in first])
    middle = len(pcm) // 2
    return [Turn(len(part) / SAMPLE_RATE_HZ, part) for part in (pcm[:middle], pcm[middle:])]


async def session_of(url: str, session: Session) -> list[Said]:
    """Run one session. Its first turns, from which the server learns the user's voice, do not count."""
    async with Caller(url, {"type": "server_vad"}, session=SESSION) as caller:
        first = [await said(caller, session.user, True, turn) for turn in halves(session.first)]
        print(session.user, [one.speakers for one in first])
        return [await said(caller, session.user, own, turn) for own, turn in session.order]


def rows(found: Sequence[Said]) -> list[dict[str, Any]]:
    """Return the user's turns lost, in whole or in part, and others' turns ignored: by length, and for all turns.

    Turns of which the server understood no word are counted separately.
    """
    groups: list[tuple[str, Callable[[Said], bool]]] = [
        (f"{length_s:g} s", lambda s, length_s=length_s: s.length_s == length_s) for length_s in LENGTHS_S
    ]
    groups += [("1 s and more", lambda s: s.length_s >= 1), ("2 s and more", lambda s: s.length_s >= 2)]
    out = []
    for name, is_of in groups:
        of = [s for s in found if is_of(s)]
        own, others = [s for s in of if s.own and s.parts], [s for s in of if not s.own and s.parts]
        out.append(
            {
                "turn": name,
                "own_lost": share(sum(s.marked_other > 0 for s in own), len(own)),
                "others_ignored": share(sum(s.answers == 0 for s in others), len(others)),
                "without_words": sum(not s.parts for s in of),
            }
        )
    return out


async def sessions_of(url: str, sessions: Sequence[Session]) -> list[Said]:
    async def one_after_another(part: Sequence[Session]) -> list[Said]:
        return [one for session in part for one in await session_of(url, session)]

    parts = await asyncio.gather(*(one_after_another(sessions[k::AT_ONCE]) for k in range(AT_ONCE)))
    return [one for part in parts for one in part]


def voices(data: Path, most: int) -> dict[str, Any]:
    """Run at most `most` sessions, taken evenly from the users of the data, on a new server with a speaker encoder."""
    chance = np.random.default_rng(SEED)
    every = [fewer(session) for session in plan(read_voices(data), chance)]
    chosen = [every[k * len(every) // most] for k in range(most)] if len(every) > most else every
    with server("--speaker-model", MODEL) as srv:
        found = asyncio.run(sessions_of(srv.url, chosen))
    made = rows(found)
    for which in ("own_lost", "others_ignored"):
        title = f"turns of another voice, primary_speaker auto: {which.replace('_', ' ')}"
        show(title, {row["turn"]: row[which] for row in made})
    each = [asdict(one) for one in found]
    return {"sessions": len(chosen), "users": len({s.user for s in chosen}), "rows": made, "each": each}
