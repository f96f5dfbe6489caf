"""What a session's KV is worth: time to first token, tokens a second, and what rollback, parking and memory cost.

    antiphon bench engine [--language-model NAME] [--sections first,decode,mixed,state,peers] [--trials N]
        [--kv-layout session|paged] [--decode-shapes exact|bucketed|captured]

The engine runs in this process, as the server runs it; greedy, no stop tokens. Peers, in the same run: plain
`transformers.generate` on the same checkpoint in bfloat16, and llama.cpp (`make peers`) on the same GGUF file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

# Before torch is loaded; see antiphon/cli/main.py.
os.environ.setdefault("GOMP_SPINCOUNT", "30000")

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import HERE, machine, percentile, save, table

from antiphon.adapters.causal_lm.checkpoint import prepare
from antiphon.adapters.causal_lm.model import CausalLm
from antiphon.adapters.spec import EngineModelOptions
from antiphon.engine.api import EngineSettings, Sampling
from antiphon.engine.local.engine import LocalEngine, LocalSession
from antiphon.engine.local.runner import Runner
from antiphon.engine.local.weights import Int8Linear
from antiphon.loading.loader import prepare as prepared
from antiphon.loading.loader import store_of
from antiphon.loading.selection import LANGUAGE_ROLES, LocalModel, selected_models
from antiphon.settings import load as load_settings

TURNS, TURN_TOKENS, ANSWER_TOKENS, COLD_TOKENS = 20, 20, 12, 200


def prose(tokenizer: Any, count: int, skip: int = 0) -> list[int]:
    """`count` tokens of English, the same in every revision: the licence's text, over and over."""
    text = (HERE.parent / "LICENSE").read_text()
    ids = tokenizer.encode(text * (1 + (count + skip) * 8 // len(text)), add_special_tokens=False)
    return list(ids[skip : skip + count])


async def first_token(session: LocalSession) -> float:
    """Seconds to the next token."""
    began = time.perf_counter()
    async with aclosing(session.generate(Sampling(max_tokens=1))) as tokens:
        await anext(tokens)
    return time.perf_counter() - began


async def answer(session: LocalSession, count: int) -> list[float]:
    """When each of `count` tokens came."""
    return [time.perf_counter() async for _ in session.generate(Sampling(max_tokens=count))]


async def first(engine: LocalEngine, ids: list[int], trials: int) -> dict[str, Any]:
    cold = []
    for k in range(trials):
        session = await engine.open()
        # Another first token each time: nothing is shared with a session before.
        session.append([ids[0] + 1 + k, *ids[1:COLD_TOKENS]])
        cold.append(await first_token(session))
        session.close()
    kept, rebuilt = [], []
    session = await engine.open()
    given: list[int] = []
    for turn in range(TURNS):
        new = ids[turn * TURN_TOKENS : (turn + 1) * TURN_TOKENS]
        session.append(new)
        kept.append(await first_token(session))
        await answer(session, ANSWER_TOKENS - 1)
        rows = await engine.thread.call(lambda: list(session.scheduled.rows.ids))
        given = [i for i in rows if i is not None]
        if turn in (1, TURNS - 1):
            again = []
            for k in range(trials):
                other = await engine.open()
                other.append([given[0] + 1 + k, *given[1 : len(given) - ANSWER_TOKENS]])
                again.append(await first_token(other))
                other.close()
            rebuilt.append(statistics.median(again))
    session.close()
    early, late = statistics.median(kept[1:4]), statistics.median(kept[-3:])
    out = {
        "cold_s": statistics.median(cold),
        "turn_2_s": early,
        "turn_20_s": late,
        "ratio": late / early,
        "rebuilt_turn_2_s": rebuilt[0],
        "rebuilt_turn_20_s": rebuilt[1],
        "rows_at_turn_20": len(given),
    }
    table(
        "time to first token, s (median)",
        ("prompt", "kept KV", "rebuilt"),
        [
            (f"{COLD_TOKENS} tokens, cold", out["cold_s"], out["cold_s"]),
            (f"turn 2, {TURN_TOKENS} new", early, rebuilt[0]),
            (f"turn 20, {TURN_TOKENS} new of {len(given)}", late, rebuilt[1]),
        ],
    )
    return out


def floor_s(runner: Runner, rows: int, trials: int) -> float:
    """Seconds of a step's matrix products alone."""
    linear = [m for m in runner.model.modules() if isinstance(m, Int8Linear | torch.nn.Linear)]
    head = runner.model.get_output_embeddings()
    inputs: dict[int, torch.Tensor] = {}
    kind = runner.dtype
    times = []
    with torch.inference_mode():
        for _ in range(trials + 1):
            began = time.perf_counter()
            for layer in linear:
                if isinstance(layer, Int8Linear):
                    if layer.index:
                        continue
                    width = layer.product.width
                    x = inputs.setdefault(width, torch.randn(rows, width, dtype=kind))
                    layer.product.times(x)
                else:
                    width = layer.in_features
                    x = inputs.setdefault(width, torch.randn(rows, width, dtype=kind))
                    layer(x)
            times.append(time.perf_counter() - began)
    assert head is not None
    return statistics.median(times[1:])


async def decode(engine: LocalEngine, runner: Runner, ids: list[int], trials: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    rows = []
    for count in (1, 2, 4, 8, 16, 32):
        sessions = [await engine.open() for _ in range(count)]
        for k, session in enumerate(sessions):
            session.append([ids[0] + 50 + k, *ids[1:16]])
            await session.settle()
        before = (runner.stats.steps, runner.stats.step_s, runner.stats.forward_s)
        stamps = await asyncio.gather(*(answer(s, 40) for s in sessions))
        gaps = [b - a for each in stamps for a, b in pairwise(each[1:])]
        steps, step_s, forward_s = (
            now - then
            for now, then in zip((runner.stats.steps, runner.stats.step_s, runner.stats.forward_s), before, strict=True)
        )
        gap = statistics.median(gaps)
        # In the engine's thread: a second team of OpenMP threads would slow both down (engine/threads.py).
        least = await engine.thread.call(lambda count=count: floor_s(runner, count, trials))
        out[str(count)] = {
            "tokens_per_s": count / gap,
            "gap_p95_s": percentile(gaps, 95),
            "step_s": gap,
            "floor_s": least,
            # What is neither the decoder nor the choice of tokens, of the time between tokens.
            "outside_model": 1 - forward_s / steps / gap,
            "outside_step": 1 - step_s / steps / gap,
        }
        rows.append((count, count / gap, gap * 1000, least * 1000, gap / least, 100 * (1 - forward_s / steps / gap)))
        for session in sessions:
            session.close()
    table(
        "decode, all sessions together",
        ("sessions", "tokens/s", "step ms", "products alone ms", "ratio", "outside the model %"),
        rows,
    )
    return out


async def mixed(engine: LocalEngine, ids: list[int]) -> dict[str, Any]:
    """Eight sessions answer while a ninth loads 1,500 tokens and others come with 20."""
    talking = [await engine.open() for _ in range(8)]
    for k, session in enumerate(talking):
        session.append([ids[0] + 90 + k, *ids[1:40]])
        await session.settle()
    loading = await engine.open()
    tasks = [asyncio.create_task(answer(s, 80)) for s in talking]
    await asyncio.sleep(1.0)
    loading.append([ids[0] + 99, *ids[1:1500]])
    asked = []
    for k in range(4):
        short = await engine.open()
        short.append([ids[0] + 120 + k, *ids[1:20]])
        asked.append(await first_token(short))
        short.close()
    await loading.settle()
    stamps = await asyncio.gather(*tasks)
    gaps = [b - a for each in stamps for a, b in pairwise(each)]
    for session in (*talking, loading):
        session.close()
    out = {
        "gap_p50_s": percentile(gaps, 50),
        "gap_p95_s": percentile(gaps, 95),
        "gap_max_s": max(gaps),
        "asked_s": asked,
    }
    table(
        "eight answer, a ninth loads 1,500 tokens, four ask with 20",
        ("gap p50 ms", "gap p95 ms", "longest ms", "the four wait ms (median)"),
        [(out["gap_p50_s"] * 1e3, out["gap_p95_s"] * 1e3, out["gap_max_s"] * 1e3, statistics.median(asked) * 1e3)],
    )
    return out


async def state(engine: LocalEngine, ids: list[int], trials: int) -> dict[str, Any]:
    cache = engine.scheduler.cache
    session = await engine.open()
    session.append(ids[:2000])
    await session.settle()
    back, park, restore = [], [], []
    scheduled = session.scheduled
    for _ in range(trials):

        def timed(call: Any, into: list[float]) -> None:
            began = time.perf_counter()
            call()
            into.append(time.perf_counter() - began)

        await engine.thread.call(lambda: timed(lambda: engine.scheduler.rollback(scheduled, 1990), back))
        await engine.thread.call(lambda: timed(lambda: cache.park(scheduled.lease, scheduled.rows.computed), park))
        await engine.thread.call(lambda: timed(lambda: cache.wake(scheduled.lease, scheduled.rows.computed), restore))
        await engine.thread.call(lambda: scheduled.rows.append(ids[1990:2000]))
        await session.settle()
    disk = LocalEngine(engine.runner, EngineSettings(host_bytes=0))
    on_disk = await disk.open()
    on_disk.append(ids[:2000])
    await on_disk.settle()
    there, again = [], []
    for _ in range(trials):
        await disk.thread.call(lambda: timed(lambda: disk.scheduler.cache.park(on_disk.scheduled.lease, 1999), there))
        await disk.thread.call(lambda: timed(lambda: disk.scheduler.cache.wake(on_disk.scheduled.lease, 1999), again))
    disk.close()
    session.close()
    thousand = await engine.open()
    thousand.append(ids[:1000])
    await thousand.settle()
    held = (await engine.state()).kv_bytes
    before = psutil.Process().memory_info().rss
    sessions: list[LocalSession] = []
    # Forks share their KV: each is made to write, so that it holds its own.
    for _ in range(50):
        other = await thousand.fork()
        other.append(ids[1000:1003])
        await other.settle()
        sessions.append(other)
    grown = psutil.Process().memory_info().rss - before
    out = {
        "rollback_ms": statistics.median(back) * 1e3,
        "park_ms": statistics.median(park) * 1e3,
        "restore_ms": statistics.median(restore) * 1e3,
        "park_disk_ms": statistics.median(there) * 1e3,
        "restore_disk_ms": statistics.median(again) * 1e3,
        "kv_mb_per_1000": held / 1e6,
        "rss_mb_per_1000": grown / len(sessions) / 1e6,
        "sessions_in_2_gb": int((2 << 30) // (held or 1)),
    }
    for other in (*sessions, thousand):
        other.close()
    table(
        "state",
        (
            "rollback ms",
            "park/restore 2,000 ms",
            "the same, disk ms",
            "MB per 1,000 tokens",
            "RSS MB",
            "sessions of 1,000 in 2 GB",
        ),
        [
            (
                out["rollback_ms"],
                f"{out['park_ms']:.1f} / {out['restore_ms']:.1f}",
                f"{out['park_disk_ms']:.1f} / {out['restore_disk_ms']:.1f}",
                out["kv_mb_per_1000"],
                out["rss_mb_per_1000"],
                out["sessions_in_2_gb"],
            )
        ],
    )
    return out


def transformers_generate(folder: Path, ids: list[int], trials: int) -> dict[str, Any]:
    """The same prompts by `generate`: one conversation a call, its cache handed from turn to turn or not at all."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def run(prompt: list[int], count: int, cache: Any = None) -> tuple[float, list[int], Any]:
        began = time.perf_counter()
        given = torch.tensor([prompt])
        out = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            past_key_values=cache if cache is not None else DynamicCache(config=model.config),
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        return time.perf_counter() - began, out.sequences[0].tolist(), out.past_key_values

    with torch.inference_mode():
        run(ids[:8], 2)
        cold = statistics.median(run([ids[0] + 1 + k, *ids[1:COLD_TOKENS]], 1)[0] for k in range(trials))
        cache, rows, times = None, list[int](), []
        for turn in range(TURNS):
            rows = rows + ids[turn * TURN_TOKENS : (turn + 1) * TURN_TOKENS]
            took, rows, cache = run(rows, 1, cache)
            times.append(took)
            _, rows, cache = run(rows, ANSWER_TOKENS - 1, cache)
        alone = run(ids[:16], 40)[0] - run(ids[:16], 1)[0]
    return {
        "ttft_cold_s": cold,
        "turn_2_s": statistics.median(times[1:4]),
        "turn_20_s": statistics.median(times[-3:]),
        "decode": {"1": 39 / alone},
    }


def llama(gguf: Path, ids: list[int], trials: int) -> dict[str, Any] | None:
    python = HERE / "peers" / ".venv-xllamacpp" / "bin" / "python"
    if not python.exists():
        print("llama.cpp is not here: make peers")
        return None
    plan = {
        "cold": ids[:COLD_TOKENS],
        "turns": [ids[t * TURN_TOKENS : (t + 1) * TURN_TOKENS] for t in range(TURNS)],
        "answer": ANSWER_TOKENS,
        "decode": {"1": 40, "8": 40, "16": 40},
        "trials": trials,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "plan.json").write_text(json.dumps(plan))
        out = Path(folder) / "out.json"
        command = [
            python,
            HERE / "peers/xllamacpp/drive.py",
            "--model",
            gguf,
            "--plan",
            Path(folder) / "plan.json",
            "--out",
            out,
        ]
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"llama.cpp: {done.stderr[-2000:]}")
        found = json.loads(out.read_text())
    turns = found.pop("ttft_turns_s")
    return found | {"turn_2_s": statistics.median(turns[1:4]), "turn_20_s": statistics.median(turns[-3:])}


async def measure(model: CausalLm, sections: set[str], trials: int) -> dict[str, Any]:
    engine = model.engine
    runner = engine.runner
    assert isinstance(runner, Runner)
    ids = prose(model.tokenizer, 2100)
    # Warm: the first step of each shape is slower.
    warm = await engine.open()
    warm.append(ids[:100])
    await answer(warm, 8)
    warm.close()
    out: dict[str, Any] = {}
    if "first" in sections:
        out["first"] = await first(engine, ids, trials)
    if "decode" in sections:
        out["decode"] = await decode(engine, runner, ids, trials)
    if "mixed" in sections:
        out["mixed"] = await mixed(engine, ids)
    if "state" in sections:
        out["state"] = await state(engine, ids, trials)
    return out


def versus(document: dict[str, Any]) -> None:
    """Print the peers beside the engine."""
    peers = document["peers"]
    names = [n for n in ("transformers", "llama.cpp") if peers.get(n)]
    mine = {
        "ttft_cold_s": document["first"]["cold_s"],
        "turn_2_s": document["first"]["turn_2_s"],
        "turn_20_s": document["first"]["turn_20_s"],
        "decode": {k: v["tokens_per_s"] for k, v in document["decode"].items()},
    }
    sides = [mine, *(peers[n] for n in names)]
    rows: list[tuple[Any, ...]] = [
        ("first token, 200 cold, s", *(s["ttft_cold_s"] for s in sides)),
        ("first token, turn 2, s", *(s["turn_2_s"] for s in sides)),
        ("first token, turn 20, s", *(s["turn_20_s"] for s in sides)),
        *((f"{n} sessions, tokens/s", *(s["decode"].get(n, "-") for s in sides)) for n in ("1", "8", "16")),
    ]
    table("side by side", ("", "antiphon", *names), rows)


def plot(document: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = list(document["decode"])
    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    axes.plot([int(c) for c in counts], [document["decode"][c]["tokens_per_s"] for c in counts], "o-", label="antiphon")
    for name, peer in document.get("peers", {}).items():
        if peer:
            axes.plot([int(c) for c in peer["decode"]], list(peer["decode"].values()), "s--", label=name)
    axes.set_xlabel("sessions at once")
    axes.set_ylabel("tokens a second, all together")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default="first,decode,mixed,state,peers")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--language-model", default="")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--kv-layout", default="session", choices=("session", "paged"))
    parser.add_argument("--decode-shapes", default="exact", choices=("exact", "bucketed", "captured"))
    args = parser.parse_args()
    sections = set(args.sections.split(","))
    settings = load_settings({"language_model": args.language_model, "weights": args.weights}, os.environ)
    store = store_of(settings.models)
    (source,) = selected_models(settings, LANGUAGE_ROLES)
    folder = prepared(settings, store, source)
    document: dict[str, Any] = {"machine": machine(), "model": source.id, "weights": args.weights}
    began = time.perf_counter()
    kv = EngineSettings(kv_layout=args.kv_layout, decode_shapes=args.decode_shapes)
    model = CausalLm(folder, source.id, EngineModelOptions(kv))
    document["load_s"] = time.perf_counter() - began
    print(f"{source.id} loaded in {document['load_s']:.1f} s (imports not counted)")
    measured = asyncio.run(measure(model, sections, args.trials))
    if kv != EngineSettings():
        # Beside the figures of the defaults, and not in their place.
        model.close()
        print(f"\nwritten: {save('engine', {f'{kv.kv_layout}, {kv.decode_shapes}': measured})}")
        return
    document |= measured
    ids = prose(model.tokenizer, 2100)
    model.close()
    del model
    if "peers" in sections:
        gguf = source.path if isinstance(source, LocalModel) else store.require(source) / "model.gguf"
        plain = prepare(gguf, store.home, source.id, "bf16")
        document["peers"] = {
            "transformers": transformers_generate(plain, ids, args.trials),
            "llama.cpp": llama(gguf, ids, args.trials),
        }
        versus(document)
    path = save("engine", document)
    plot(json.loads(path.read_text()), path.with_suffix(".png"))
    print(f"\nwritten: {path}")


if __name__ == "__main__":
    main()
