"""Conversations whose models are all on a second antiphon, beside the same models in one process.

    antiphon bench remote_talk [--data DIR] [--sections beside,heard] [--turns 24] [--cuts 50]

One server has all models. A front has only the detectors of speech and turns: its transcriber, its language model and
its voice are on that server, on the same machine.

- beside: the same recorded turns are said to the server and to two fronts, in turns. Measures the time from the true
  end of speech to each stage of the answer. One of the fronts may begin answers to turns that may still continue
  (`--remote-preemptive`), as the server itself does.
- heard: answers of the front are cut at random, as in `bench talk`.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import Any

from bench.common import Server, measured, options, percentile, server, show
from bench.driver import Caller, in_loops, server_vad
from bench.hearing.clips import Clip, whole_turns, with_data
from bench.remote import ROOT
from bench.talk import STAGES, Turn, heard, one_turn

from antiphon.store.registry import profile

# The silence that ends a turn, in milliseconds, and the first turns, which warm the models up and do not count.
SILENCE_MS, WARM = 200, 2
# Answers that a front may begin in a minute before their turn has ended.
PREEMPTIVE = 120
WHOLE, FRONT, EARLY = "one process", "a front", "a front, preemptive"


def elsewhere(back: Server) -> tuple[str, ...]:
    """Return the flags of a front whose models are on another server."""
    names = {model.role: model.id for model in profile("default")}
    roles = {"transcriber": "transcriber", "language-model": "language", "synthesizer": "synthesizer"}
    return tuple(word for flag, role in roles.items() for word in (f"--{flag}", f"{back.url}/v1#{names[role]}"))


async def beside(servers: dict[str, Server], clips: Sequence[Clip], turns: int) -> dict[str, Any]:
    """Say recorded turns to all servers, in a new order for each turn."""
    chance, said = random.Random(7), dict[str, list[Turn]]()
    async with AsyncExitStack() as stack:
        callers = {
            name: await stack.enter_async_context(Caller(one.url, server_vad(SILENCE_MS)))
            for name, one in servers.items()
        }
        for number in range(WARM + turns):
            for name in chance.sample(list(callers), len(callers)):
                turn = await one_turn(callers[name], clips[number % len(clips)])
                while callers[name].sounding:
                    await asyncio.sleep(0.1)
                if number >= WARM:
                    said.setdefault(name, []).append(turn)
    rows = dict[str, dict[str, Any]]()
    for name, found in said.items():
        # Turns that all have answered, so that all have answered the same.
        whole = [t for k, t in enumerate(found) if all("sound" in other[k].stages for other in said.values())]
        rows[name] = {"turns": len(found), "answered": len(whole)}
        for stage in STAGES.values():
            rows[name][f"{stage}_p50_s"] = percentile([t.stages[stage] for t in whole if stage in t.stages], 50)
        rows[name]["sound_p95_s"] = percentile([t.stages["sound"] for t in whole], 95)
    for row in rows.values():
        row |= {f"ratio_p{q}": row[f"sound_p{q}_s"] / rows[WHOLE][f"sound_p{q}_s"] for q in (50, 95)}
    show("from the true end of speech, s", rows)
    return rows


def main() -> None:
    parser = with_data(options("antiphon bench remote_talk", __doc__, ("beside", "heard")))
    parser.add_argument("--turns", type=int, default=24, help="turns that are said to each server [%(default)s]")
    parser.add_argument("--cuts", type=int, default=50, help="answers that are cut [%(default)s]")
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    with ExitStack() as stack:
        back = stack.enter_context(server())
        front = stack.enter_context(server(*elsewhere(back)))
        early = stack.enter_context(server(*elsewhere(back), "--remote-preemptive", str(PREEMPTIVE)))
        servers = {WHOLE: back, FRONT: front, EARLY: early}
        sections = {
            "beside": lambda: beside(servers, whole_turns(args.data), args.turns),
            "heard": lambda: heard(front, args.cuts),
        }
        measured("remote-talk", args.sections, in_loops(sections), commit=commit)


if __name__ == "__main__":
    main()
