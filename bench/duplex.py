"""Full duplex: what acknowledgements and pauses do, and whether turns are taken.

    antiphon bench duplex [--data DIR] [--sections backchannels,pauses,turns] [--turns N]

A real server with the default models, real recordings played in real time over /v1/realtime?duplex=1. The client plays
what it gets by its own clock, acknowledges it, falls silent when it is told to duck and drops what was interrupted.
Takeover, after the manner of Full-Duplex-Bench, is the share in which the partner begins to speak, however shortly: bad
in pauses and after acknowledgements, good after turns. How soon a voice falls silent is measured by `antiphon bench
turns --sections barge-in`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common import Server, measured, options, server, show, spread
from bench.driver import Caller, in_loops, shared, telling
from bench.hearing.clips import PAUSE, Clip, loaded, mixed, read_manifest, whole_turns, with_data


async def backchannels(srv: Server, data: Path, repeats: int) -> dict[str, Any]:
    """Real acknowledgements over a long answer."""
    clips = loaded(c for c in read_manifest(data) if c.kind == "backchannel")

    async def play(share: Sequence[Clip]) -> list[tuple[str, bool, bool, bool]]:
        results = []
        for clip in share:
            # A conversation each: a small model tells shorter stories the more it has told.
            async with telling(srv, "duplex") as caller:
                if caller is None:
                    continue
                before, since = len(caller.marks), len(caller.events)
                await caller.say(clip.pcm)
                await asyncio.sleep(clip.seconds + 2.0)
                kinds = {mark.kind for mark in caller.marks[before:]}
                stopped, ducked = "interrupted" in kinds, "ducked" in kinds
                results.append(
                    (clip.id, stopped, ducked and not stopped, bool(caller.times("response.created", since)))
                )
        return results

    results = await shared(clips * repeats, 2, play)
    count = max(1, len(results))
    out = {
        "trials": len(results),
        "hard_stops": sum(s for _, s, _, _ in results) / count,
        "ducked_and_resumed": sum(d for _, _, d, _ in results) / count,
        "takeover": sum(t for *_, t in results) / count,
    }
    show("acknowledgements over an answer", [out])
    print("stopped by:", ", ".join(sorted({i for i, s, _, _ in results if s})) or "none")
    return out


async def pauses(srv: Server, data: Path) -> dict[str, Any]:
    """Hesitations inside a turn (tools/evalmix.py pause): how often the partner begins to speak in them."""

    async def play(share: Sequence[tuple[dict[str, Any], Clip]]) -> list[tuple[str, bool, str]]:
        results = []
        async with Caller(srv.url, None) as caller:
            for row, clip in share:
                since = len(caller.events)
                began = await caller.say(clip.pcm)
                await asyncio.sleep(clip.seconds + 4.0)
                said, over = "", False
                for t, e in caller.events[since:]:
                    if e["type"] == "conversation.item.input_audio_transcription.completed" and not over:
                        said = e["transcript"]
                    if e["type"] == "response.speak" and row["pause"][0] < t - began < row["pause"][1] + 0.1:
                        over = True
                results.append((clip.id, over, said))
                await caller.settle()
        return results

    results = await shared(mixed(data, PAUSE, 12, "--hold", "0.6,1.2,2.0"), 4, play)
    over = [(clip_id, said) for clip_id, is_over, said in results if is_over]
    out = {
        "turns": len(results),
        "takeovers": len(over),
        "takeover": len(over) / max(1, len(results)),
        "inside_a_sentence": sum(not said.rstrip().endswith((".", "?", "!")) for _, said in over),
    }
    show("hesitations of 0.6, 1.2 and 2 s", [out])
    for clip_id, said in over:
        print(f"taken over: {clip_id}: {said}")
    return out


async def turns(srv: Server, clips: list[Clip]) -> dict[str, Any]:
    """Whole turns: whether they are answered, and how soon after the true end of speech the answer sounds."""
    late = []
    async with Caller(srv.url, None) as caller:
        for clip in clips:
            since = len(caller.events)
            end = await caller.say(clip.pcm) + clip.speech_end
            await asyncio.sleep(clip.seconds + 6.0)
            late += [t - end for t in caller.times("response.output_audio.delta", since) if t > end - 0.2][:1]
            await caller.settle()
    out = {"turns": len(clips), "taken": len(late) / max(1, len(clips)), **spread(late, "sound")}
    show("turns: from the true end of speech", [out])
    return out


def main() -> None:
    parser = with_data(options("antiphon bench duplex", __doc__, ("backchannels", "pauses", "turns")))
    parser.add_argument("--turns", type=int, default=30, help="turns")
    args = parser.parse_args()
    with server() as srv:
        sections = {
            "backchannels": lambda: backchannels(srv, args.data, 4),
            "pauses": lambda: pauses(srv, args.data),
            "turns": lambda: turns(srv, whole_turns(args.data)[: args.turns]),
        }
        measured("duplex", args.sections, in_loops(sections), data=args.data.name)


if __name__ == "__main__":
    main()
