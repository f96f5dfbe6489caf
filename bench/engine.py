"""The benefit of a session's KV: time to first token, tokens per second, and costs of rollback, parking and memory.

    antiphon bench engine [--language-model NAME] [--sections first,decode,mixed,state,peers] [--trials N]
        [--kv-layout session|paged] [--decode-shapes exact|bucketed|captured]

The engine runs in this process, configured as in the server. Sampling is greedy, without stop tokens. The same run
measures peers: plain `transformers.generate` with the same checkpoint in bfloat16, and llama.cpp (`make peers`) with
the same GGUF file.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

# Has to come before the import of torch; see antiphon/cli/main.py.
os.environ.setdefault("GOMP_SPINCOUNT", "30000")

import torch
from bench.common import HERE, machine, options, peer, percentile, save, show, together

from antiphon.adapters.causal_lm.checkpoint import prepare
from antiphon.adapters.causal_lm.model import CausalLm
from antiphon.adapters.spec import EngineModelOptions
from antiphon.engine.api import EngineSettings, Sampling
from antiphon.engine.local.engine import LocalEngine, LocalSession
from antiphon.loading.loader import prepare as prepared
from antiphon.loading.loader import store_of
from antiphon.loading.selection import LANGUAGE_ROLES, LocalModel, selected_models
from antiphon.settings import load as load_settings

TURNS, TURN_TOKENS, ANSWER_TOKENS, COLD_TOKENS = 20, 20, 12, 200


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def prose(tokenizer: Any, count: int) -> list[int]:
    """Return `count` tokens of English: the text of the licence, repeated. They are the same in every revision."""
    text = (HERE.parent / "LICENSE").read_text()
    ids = tokenizer.encode(text * (1 + count * 8 // len(text)), add_special_tokens=False)
    return list(ids[:count])


async def reported(engine: LocalEngine, ids: list[int], *, number: int = 0) -> LocalSession:
    """Open a session with these ids. `number` changes the first one, so that sessions share no rows."""
    session = await engine.open()
    session.append([ids[0] + number, *ids[1:]])
    return session


async def first_token(session: LocalSession) -> float:
    """Return the seconds until the next token is generated."""
    began = time.perf_counter()
    async with aclosing(session.generate(Sampling(max_tokens=1))) as tokens:
        await anext(tokens)
    return time.perf_counter() - began


async def answer(session: LocalSession, count: int) -> list[float]:
    """Generate `count` tokens, and return the time of each."""
    return [time.perf_counter() async for _ in session.generate(Sampling(max_tokens=count))]


async def first(engine: LocalEngine, ids: list[int], trials: int) -> dict[str, Any]:
    async def from_scratch(prompt: list[int]) -> float:
        took = []
        for k in range(trials):
            session = await reported(engine, prompt, number=1 + k)
            took.append(await first_token(session))
            session.close()
        return median(took)

    cold_s, kept, rebuilt, given = await from_scratch(ids[:COLD_TOKENS]), list[float](), list[float](), list[int]()
    session = await engine.open()
    for turn in range(TURNS):
        session.append(ids[turn * TURN_TOKENS : (turn + 1) * TURN_TOKENS])
        kept.append(await first_token(session))
        await answer(session, ANSWER_TOKENS - 1)
        rows = await engine.thread.call(lambda: list(session.scheduled.rows.ids))
        given = [i for i in rows if i is not None]
        if turn in (1, TURNS - 1):
            rebuilt.append(await from_scratch(given[: len(given) - ANSWER_TOKENS]))
    session.close()
    early, late = median(kept[1:4]), median(kept[-3:])
    out = {
        "cold_s": cold_s,
        "turn_2_s": early,
        "turn_20_s": late,
        "ratio": late / early,
        "rebuilt_turn_2_s": rebuilt[0],
        "rebuilt_turn_20_s": rebuilt[1],
        "rows_at_turn_20": len(given),
    }
    show(f"time to first token (median), {TURN_TOKENS} new tokens a turn, {COLD_TOKENS} cold", [out])
    return out


async def decode(engine: LocalEngine, ids: list[int]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for count in (1, 2, 4, 8, 16, 32):
        sessions = [await reported(engine, ids[:16], number=50 + k) for k in range(count)]
        for session in sessions:
            await session.settle()
        stamps = await together(count, lambda n, opened=sessions: answer(opened[n], 40))
        gaps = [b - a for each in stamps for a, b in pairwise(each[1:])]
        gap = median(gaps)
        out[str(count)] = {"tokens_per_s": count / gap, "gap_p95_s": percentile(gaps, 95), "step_s": gap}
        for session in sessions:
            session.close()
    show("decode, all sessions together", out)
    return out


async def mixed(engine: LocalEngine, ids: list[int]) -> dict[str, Any]:
    """Measure eight sessions that answer while a ninth prefills 1,500 tokens, and others begin with 20 tokens each."""
    talking = [await reported(engine, ids[:40], number=90 + k) for k in range(8)]
    for session in talking:
        await session.settle()
    tasks = [asyncio.create_task(answer(s, 80)) for s in talking]
    await asyncio.sleep(1.0)
    loading = await reported(engine, ids[:1500], number=99)
    asked = []
    for k in range(4):
        short = await reported(engine, ids[:20], number=120 + k)
        asked.append(await first_token(short))
        short.close()
    await loading.settle()
    gaps = [b - a for each in await asyncio.gather(*tasks) for a, b in pairwise(each)]
    for session in (*talking, loading):
        session.close()
    out = {f"gap_p{q}_s": percentile(gaps, q) for q in (50, 95)} | {"gap_max_s": max(gaps), "asked_s": asked}
    show("eight answer, a ninth prefills 1,500 tokens, four ask with 20", [out | {"asked_s": median(asked)}])
    return out


async def state(engine: LocalEngine, ids: list[int], trials: int) -> dict[str, Any]:
    cache = engine.scheduler.cache
    session = await reported(engine, ids[:2000])
    await session.settle()
    scheduled, took = session.scheduled, dict[str, list[float]]()

    async def timed(name: str, call: Callable[[], Any]) -> None:
        def work() -> float:
            began = time.perf_counter()
            call()
            return (time.perf_counter() - began) * 1000

        took.setdefault(name, []).append(await engine.thread.call(work))

    for _ in range(trials):
        await timed("rollback_ms", lambda: engine.scheduler.rollback(scheduled, 1990))
        await timed("park_ms", lambda: cache.park(scheduled.lease, scheduled.rows.computed))
        await timed("restore_ms", lambda: cache.wake(scheduled.lease, scheduled.rows.computed))
        await engine.thread.call(lambda: scheduled.rows.append(ids[1990:2000]))
        await session.settle()
    session.close()
    thousand = await reported(engine, ids[:1000])
    await thousand.settle()
    held = (await engine.state()).kv_bytes
    thousand.close()
    out = {name: median(values) for name, values in took.items()}
    out |= {"kv_mb_per_1000": held / 1e6, "sessions_in_2_gb": int((2 << 30) // (held or 1))}
    show("state: 2,000 tokens rolled back and parked, and sessions of 1,000", [out])
    return out


def transformers_generate(folder: Path, ids: list[int], trials: int) -> dict[str, Any]:
    """Run the same prompts with `generate`, in one call per turn: with its cache kept between turns, and without."""
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
        cold = [run([ids[0] + 1 + k, *ids[1:COLD_TOKENS]], 1)[0] for k in range(trials)]
        cache, rows, times = None, list[int](), []
        for turn in range(TURNS):
            rows = rows + ids[turn * TURN_TOKENS : (turn + 1) * TURN_TOKENS]
            took, rows, cache = run(rows, 1, cache)
            times.append(took)
            _, rows, cache = run(rows, ANSWER_TOKENS - 1, cache)
        alone = run(ids[:16], 40)[0] - run(ids[:16], 1)[0]
    return {"ttft_cold_s": median(cold), "decode": {"1": 39 / alone}} | _turns(times)


def llama(gguf: Path, ids: list[int], trials: int) -> dict[str, Any] | None:
    plan = {
        "cold": ids[:COLD_TOKENS],
        "turns": [ids[t * TURN_TOKENS : (t + 1) * TURN_TOKENS] for t in range(TURNS)],
        "answer": ANSWER_TOKENS,
        "decode": {"1": 40, "8": 40, "16": 40},
        "trials": trials,
    }
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] | None = peer("xllamacpp", Path(folder), "--model", str(gguf), plan=plan)
    return found and found | _turns(found.pop("ttft_turns_s"))


def _turns(times: list[float]) -> dict[str, float]:
    return {"turn_2_s": median(times[1:4]), "turn_20_s": median(times[-3:])}


async def measure(model: CausalLm, sections: set[str], trials: int) -> dict[str, Any]:
    engine = model.engine
    ids = prose(model.tokenizer, 2100)
    # Warms up, because the first step of each shape is slower.
    warm = await reported(engine, ids[:100])
    await answer(warm, 8)
    warm.close()
    work = {
        "first": lambda: first(engine, ids, trials),
        "decode": lambda: decode(engine, ids),
        "mixed": lambda: mixed(engine, ids),
        "state": lambda: state(engine, ids, trials),
    }
    return {name: await run() for name, run in work.items() if name in sections}


def versus(document: dict[str, Any]) -> None:
    """Print the peers' figures next to the engine's."""
    own = document["first"] | {"ttft_cold_s": document["first"]["cold_s"]}
    own["decode"] = {k: v["tokens_per_s"] for k, v in document["decode"].items()}
    sides = {"antiphon": own} | {name: peer for name, peer in document["peers"].items() if peer}
    rows = {
        name: {key: side[key] for key in ("ttft_cold_s", "turn_2_s", "turn_20_s")}
        | {f"tokens/s, {n} sessions": side["decode"].get(n, "-") for n in ("1", "8", "16")}
        for name, side in sides.items()
    }
    show("side by side: first token, s, and tokens a second", rows)


def main() -> None:
    parser = options("antiphon bench engine", __doc__, ("first", "decode", "mixed", "state", "peers"))
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
    found = asyncio.run(measure(model, sections, args.trials))
    ids = prose(model.tokenizer, 2100)
    model.close()
    if kv != EngineSettings():
        # These figures are added to those of the defaults, and do not replace them.
        print(f"\nwritten: {save('engine', {f'{kv.kv_layout}, {kv.decode_shapes}': found})}")
        return
    document |= found
    del model
    if "peers" in sections:
        gguf = source.path if isinstance(source, LocalModel) else store.require(source) / "model.gguf"
        plain = prepare(gguf, store.home, source.id, "bf16")
        document["peers"] = {
            "transformers": transformers_generate(plain, ids, args.trials),
            "llama.cpp": llama(gguf, ids, args.trials),
        }
        versus(document)
    print(f"\nwritten: {save('engine', document)}")


if __name__ == "__main__":
    main()
