"""A model that takes turns by itself: a session of hours, and what a unit costs with MiniCPM-o 4.5's real dimensions.

    antiphon bench native [--sections hours,answers,worker,released] [--units N] [--sessions 1,2,4,8]

`hours`: one session of the tiny random model of the tests, fed as fast as it goes, its window cutting the oldest units:
does a step late in it cost what one early did, and does memory stay. `released`: the released dimensions with random
weights on a GPU, every unit spoken to its last token (the most a unit can cost), by several sessions at once: a unit's
step against the second it may take. Without a GPU it says so. `answers` and `worker`: the tiny model behind a real
server (native_wire.py): a hundred push-to-talk clients, and ten minutes of the MiniCPM-o demo's player.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench.models.minicpmo import Silent, native_model
from common import RESULTS, machine, percentile, save, table
from native_wire import answers, worker
from tests.adapters import tiny_minicpmo as tiny

from antiphon.adapters.minicpmo.model import MiniCpmO
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import NativeOptions, Unit
from antiphon.engine.api import EngineSettings
from antiphon.events.duplex import NativeSampling


async def hours(count: int) -> dict[str, Any]:
    """`count` units of one session, the default window's rows scaled to the tiny model's 4,096."""
    with tempfile.TemporaryDirectory() as folder:
        options = EngineModelOptions(weights="fp32", threads=1)
        model = MiniCpmO(tiny.write(Path(folder)), "tiny", options, window=(1600, 1200), vocoder=Silent())
        talk = await model.open(NativeOptions(tiny.PROMPT, sampling=NativeSampling(temperature=0.7, seed=1)))
        sounds = [tiny.sound(i) for i in range(64)]
        took, rss, rows = [], [], []
        process = psutil.Process()
        for number in range(count):
            started = time.perf_counter()
            await talk.append(Unit(sounds[number % 64]))
            await talk.step()
            took.append((time.perf_counter() - started) * 1000)
            rows.append(talk.context_rows)
            if number % 100 == 99:
                rss.append(process.memory_info().rss / 1e6)
        talk.close()
        held = (await model.engine.state()).kv_bytes
        model.close()
    tenth = count // 10
    early, late = took[tenth : 2 * tenth], took[-tenth:]
    found = {
        "units": count,
        "hours": round(count / 3600, 2),
        "step_ms_early": round(percentile(early, 50), 2),
        "step_ms_late": round(percentile(late, 50), 2),
        "rss_mb_early": round(rss[len(rss) // 10], 1),
        "rss_mb_late": round(rss[-1], 1),
        "rows_most": max(rows),
        "kv_bytes_after_close": held,
    }
    table(
        "One session (tiny random model)",
        ["units", "step early / late", "RSS early / late", "rows at most"],
        [
            [
                count,
                f"{found['step_ms_early']} / {found['step_ms_late']} ms",
                f"{found['rss_mb_early']} / {found['rss_mb_late']} MB",
                found["rows_most"],
            ]
        ],
    )
    return found


async def released(sessions: list[int], units: int = 30) -> dict[str, Any] | None:
    """Unit steps of the real dimensions on a GPU."""
    if not torch.cuda.is_available():
        print("\nreleased dimensions: no GPU here, not measured")
        return None
    options = EngineModelOptions(EngineSettings(kv_bytes=16 << 30), device="cuda", weights="bf16")
    model = native_model("4.5", options)
    rows = []
    for count in sessions:
        talks = [
            await model.open(NativeOptions(tiny.PROMPT, listen_only_units=0, sampling=NativeSampling(seed=i)))
            for i in range(count)
        ]
        took: list[float] = []

        async def hold(talk: Any, took: list[float] = took) -> None:
            for number in range(units):
                started = time.perf_counter()
                await talk.append(Unit(tiny.sound(number)))
                await talk.step()
                if number >= 5:
                    took.append(time.perf_counter() - started)

        await asyncio.gather(*(hold(t) for t in talks))
        for talk in talks:
            talk.close()
        rows.append({"sessions": count, "p50_s": percentile(took, 50), "p95_s": percentile(took, 95)})
    model.close()
    gc.collect()
    table(
        f"Unit of 1 s, released dimensions, {torch.cuda.get_device_name()}",
        ["sessions", "p50 s", "p95 s"],
        [[r["sessions"], round(r["p50_s"], 3), round(r["p95_s"], 3)] for r in rows],
    )
    return {"device": torch.cuda.get_device_name(), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(prog="antiphon bench native", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sections", default="hours,answers,worker,released")
    parser.add_argument("--units", type=int, default=7200)
    parser.add_argument("--sessions", default="1,2,4,8")
    parser.add_argument("--clients", type=int, default=100, help="of push-to-talk")
    parser.add_argument("--seconds", type=int, default=600, help="of the worker's player")
    args = parser.parse_args()
    document: dict[str, Any] = {"machine": machine()}
    if (before := RESULTS / "native.json").is_file():
        document = json.loads(before.read_text()) | document
    wanted = set(args.sections.split(","))
    if "hours" in wanted:
        document["hours"] = asyncio.run(hours(args.units))
    if "answers" in wanted:
        document["answers"] = answers(args.clients)
    if "worker" in wanted:
        document["worker"] = worker(args.seconds)
    if "released" in wanted and (found := asyncio.run(released([int(n) for n in args.sessions.split(",")]))):
        document["released"] = found
    print(f"\nwritten: {save('native', document)}")


if __name__ == "__main__":
    main()
