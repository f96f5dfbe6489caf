"""Full duplex: effects of acknowledgements and pauses, and whether turns are taken.

    antiphon bench duplex [--data DIR] [--sections backchannels,pauses,turns] [--turns N]

It uses a real server with the default models, and real recordings in real time over /v1/realtime?duplex=1. The client
plays the audio by its own clock, acknowledges it, falls silent when asked to duck, and drops interrupted audio.
Takeover, defined as in Full-Duplex-Bench, is the share of trials in which the server begins to speak, however briefly.
It is bad in pauses and after acknowledgements, and good after turns. The time until a voice falls silent is measured by
`antiphon bench turns --sections barge-in`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from bench.common import Server, measured, options, server, show, spread
from bench.driver import Caller, in_loops
from bench.hearing.clips import Clip, whole_turns, with_data
from bench.talk import acknowledged, hesitations


async def backchannels(srv: Server, data: Path) -> dict[str, Any]:
    """Play real acknowledgements over a long answer."""
    results = await acknowledged(srv, None, data)
    count = max(1, len(results))
    out = {
        "trials": len(results),
        "hard_stops": sum("interrupted" in reported for _, reported, _ in results) / count,
        "ducked_and_resumed": sum("ducked" in reported and "interrupted" not in reported for _, reported, _ in results)
        / count,
        "takeover": sum(is_answered for *_, is_answered in results) / count,
    }
    show("acknowledgements over an answer", [out])
    return out


async def pauses(srv: Server, data: Path) -> dict[str, Any] | None:
    """Measure how often the server speaks in pauses inside a turn. None if no recordings with pauses can be made."""
    if not (results := await hesitations(srv, None, data)):
        return None
    over = list[str]()
    for one in results:
        spoken = [at for at, event in one.events if event["type"] == "response.speak" and one.is_early(at)]
        if spoken:
            done = "conversation.item.input_audio_transcription.completed"
            texts = [event["transcript"] for at, event in one.events if event["type"] == done and at < spoken[0]]
            over.append(texts[-1] if texts else "")
            print(f"taken over: {one.row['id']}: {over[-1]}")
    out = {
        "turns": len(results),
        "takeovers": len(over),
        "takeover": len(over) / len(results),
        "inside_a_sentence": sum(not said.rstrip().endswith((".", "?", "!")) for said in over),
    }
    show("hesitations of 0.6, 1.2 and 2 s", [out])
    return out


async def turns(srv: Server, clips: list[Clip]) -> dict[str, Any]:
    """Measure whether whole turns are answered, and the delay from the true end of speech to the answer's audio."""
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
            "backchannels": lambda: backchannels(srv, args.data),
            "pauses": lambda: pauses(srv, args.data),
            "turns": lambda: turns(srv, whole_turns(args.data)[: args.turns]),
        }
        measured("duplex", args.sections, in_loops(sections), data=args.data.name)


if __name__ == "__main__":
    main()
