"""What the host does in a decode step: a decoder of Qwen3-8B's 36 layers, and of next to no width.

    antiphon bench host [--sessions 1,16,64] [--rows 500] [--tokens 40]

On a GPU the kernels of a step run while the host launches the next ones: where the host needs longer than they do, it
bounds the step. Here the products cost almost nothing, so the time of a step is nearly that of the host, by layout of
the KV and by shape of the steps, with one thread.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from bench.common import machine, numbers, options, percentile, save, table, together
from bench.models import SHAPES, filled
from transformers import Qwen3Config, Qwen3ForCausalLM

from antiphon.engine.api import EngineSettings, Sampling
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.runner import Runner

NARROW = SHAPES["Qwen3-8B"] | {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "vocab_size": 256}
NARROW |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "session, exact": {},
    "paged, exact": {"kv_layout": "paged"},
    "paged, bucketed": {"kv_layout": "paged", "decode_shapes": "bucketed"},
}
ROUNDS = 3


async def steps_ms(settings: dict[str, Any], count: int, rows: int, tokens: int) -> list[float]:
    """Milliseconds of each step in which `count` sessions of `rows` rows got a token."""
    model = Qwen3ForCausalLM(Qwen3Config(**NARROW))
    filled(model, torch.device("cpu"), torch.float32)
    engine = LocalEngine(Runner(model, rotate_half=True), EngineSettings(**settings))
    sessions = [await engine.open() for _ in range(count)]
    for number, session in enumerate(sessions):
        session.append([(number + i) % 250 for i in range(rows)])
        await session.settle()
    took, stats = list[float](), engine.runner.stats
    observed = (stats.steps, stats.step_s)

    async def say(number: int) -> None:
        async for _ in sessions[number].generate(Sampling(max_tokens=tokens)):
            pass

    for _ in range(ROUNDS):
        await together(count, say)
        now = (stats.steps, stats.step_s)
        took.append((now[1] - observed[1]) / (now[0] - observed[0]) * 1000)
        observed = now
    engine.close()
    return took


def main() -> None:
    parser = options("antiphon bench host", __doc__)
    parser.add_argument("--sessions", default="1,16,64")
    parser.add_argument("--rows", type=int, default=500, help="of each session's KV")
    parser.add_argument("--tokens", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts = numbers(args.sessions)
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
