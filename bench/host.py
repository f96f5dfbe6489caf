"""What the host does in a decode step: a decoder of Qwen3-8B's 36 layers, and of next to no width.

    antiphon bench host [--sessions 1,16,64] [--rows 500] [--tokens 40]

On a GPU the kernels of a step run while the host launches the next ones: where the host needs longer than they do, it
bounds the step. Here the products cost almost nothing, so the time of a step is nearly that of the host, by layout of
the KV and by shape of the steps, with one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from bench.common import machine, percentile, save, table
from bench.models import SHAPES, filled
from transformers import Qwen3Config, Qwen3ForCausalLM

from antiphon.engine.api import EngineSettings, Sampling
from antiphon.engine.local.engine import LocalEngine, LocalSession
from antiphon.engine.local.runner import Runner

NARROW = SHAPES["Qwen3-8B"] | {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 256,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "session, exact": {},
    "paged, exact": {"kv_layout": "paged"},
    "paged, bucketed": {"kv_layout": "paged", "decode_shapes": "bucketed"},
}
ROUNDS = 3


async def say(session: LocalSession, count: int) -> list[float]:
    """When each of `count` tokens came."""
    return [time.perf_counter() async for _ in session.generate(Sampling(max_tokens=count))]


async def steps_ms(settings: dict[str, Any], count: int, rows: int, tokens: int) -> list[float]:
    """Milliseconds of each step in which `count` sessions of `rows` rows got a token."""
    model = Qwen3ForCausalLM(Qwen3Config(**NARROW))
    filled(model, torch.device("cpu"), torch.float32)
    engine = LocalEngine(Runner(model, rotate_half=True), EngineSettings(**settings))
    sessions = [await engine.open() for _ in range(count)]
    for number, session in enumerate(sessions):
        session.append([(number + i) % 250 for i in range(rows)])
        await session.settle()
    took = list[float]()
    observed = (engine.runner.stats.steps, engine.runner.stats.step_s)
    for _ in range(ROUNDS):
        await asyncio.gather(*(say(session, tokens) for session in sessions))
        now = (engine.runner.stats.steps, engine.runner.stats.step_s)
        took.append((now[1] - observed[1]) / (now[0] - observed[0]) * 1000)
        observed = now
    engine.close()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(prog="antiphon bench host", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sessions", default="1,16,64")
    parser.add_argument("--rows", type=int, default=500, help="of each session's KV")
    parser.add_argument("--tokens", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts = [int(n) for n in args.sessions.split(",")]
    found: dict[str, dict[str, float]] = {}
    for label, settings in LAYOUTS.items():
        for count in counts:
            took = asyncio.run(steps_ms(settings, count, args.rows, args.tokens))
            found.setdefault(label, {})[str(count)] = percentile(took, 50)
    table(
        f"host time of a decode step, ms, {args.rows} rows a session",
        ["KV and steps", *(f"{n} sessions" for n in counts)],
        [[label, *(found[label][str(n)] for n in counts)] for label in found],
    )
    print(f"\nwritten: {save('host', {'machine': machine(), 'rows': args.rows, 'step_ms': found})}")


if __name__ == "__main__":
    main()
