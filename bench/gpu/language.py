"""A language model with Qwen3-8B's dimensions: on the engine, with each of the engine's settings, and in vLLM.

A turn adds TURN_ROWS rows to a long conversation that is already in the KV, as at a conversation's 150th turn. `first
token` is the time from the turn's arrival to its first token. `tokens a second` is the rate of all sessions together
from then on. `agreement` tells whether the engine generates the same tokens on the GPU as on the CPU, for each of its
settings.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import tempfile
import time
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import torch
from bench.common import percentile, together
from bench.gpu.suite import Plan, Recorder, counted
from bench.models import SHAPES, language_model

from antiphon.engine.api import EngineSettings, Sampling, Session
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.runner import Runner

TURN_ROWS = 64
# Bytes of device memory reserved for activations and logits.
SPARE_BYTES = 10 << 30
# The sampling that Qwen recommends for the model without thinking (generation_config.json).
SAMPLING = Sampling(temperature=0.7, top_k=20, top_p=0.8, seed=1)
# For `agreement`: the number of rows of each session, which also identifies it; the number of tokens of each turn; and
# the number of rows to which the KV is rolled back before the second turn.
LENGTHS, TOKENS, KEPT = (3, 17, 64, 200, 511, 1025), 48, 3


def name(plan: Plan) -> str:
    """Return the model's name in the figures."""
    return plan.pick("Qwen3-tiny", "Qwen3-8B")


def loads(plan: Plan) -> list[tuple[int, int, int]]:
    """Return (rows, sessions, tokens of each session) for every load to measure, the most important load first."""
    if plan.dry:
        return [(192, 1, 4), (64, 2, 4)]
    return [(45_000, 1, 64), (2000, 64, 64), (2000, 1, 64), (2000, 16, 64), (45_000, 16, 64)]


def engine_settings(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return the engine settings to compare, by name: those of the plan, or else every setting that the engine has."""
    known = {f.name for f in dataclasses.fields(EngineSettings)}
    if "kv_layout" not in known or "kv_layout" in plan.engine:
        shapes = plan.engine.get("decode_shapes", "")
        return {f"{plan.engine.get('kv_layout', 'session')} KV{', ' if shapes else ''}{shapes}": {}}
    found: dict[str, dict[str, Any]] = {
        "session KV": {"kv_layout": "session"},
        "paged KV": {"kv_layout": "paged", "decode_shapes": "exact"},
    }
    if "decode_shapes" in known:
        shapes = "bucketed" if plan.dry else "captured"
        found[f"paged KV, {shapes}"] = {"kv_layout": "paged", "decode_shapes": shapes}
        found[f"paged KV, {shapes}, one step ahead"] = found[f"paged KV, {shapes}"] | {"step_ahead": True}
    return found


def engine(plan: Plan, recorder: Recorder) -> None:
    """The section `lm`: each of the engine settings, under each load."""
    for label, settings in engine_settings(plan).items():
        with recorder.part(label):
            asyncio.run(_measure_engine(plan, recorder, label, settings))


def new_engine(plan: Plan, **settings: Any) -> LocalEngine:
    """Return an engine with the model. Its KV takes the memory that remains."""
    size, dtype, device = *plan.pick(("tiny", torch.float32), ("8B", torch.bfloat16)), torch.device(plan.device)
    model = language_model(size, plan.device, dtype)
    room = 64 << 20 if plan.dry else torch.cuda.mem_get_info()[0] - SPARE_BYTES
    runner = Runner(model, device, dtype, dtype, rotate_half=True)
    return LocalEngine(runner, EngineSettings(**{"kv_bytes": room, "park_after_s": 3600.0} | plan.engine | settings))


async def _measure_engine(plan: Plan, recorder: Recorder, label: str, settings: dict[str, Any]) -> None:
    with closing(new_engine(plan, **settings)) as model:
        row_bytes = model.scheduler.cache.storage.row_bytes
        for rows, sessions, num_tokens in loads(plan):
            # One more session, because the conversation from which the others are forked keeps its rows.
            room = model.settings.kv_bytes // ((rows + 2 * TURN_ROWS + num_tokens + 64) * row_bytes) - 1
            count = min(sessions, room)
            if count < 1 or (count < sessions and (rows, count) in {(r, s) for r, s, _ in loads(plan)}):
                recorder.note(f"{label}: {sessions} sessions of {rows} rows have no room")
                continue
            load = f"{counted(count, 'session')}, {short(rows)} rows, {label}"
            await _measure_load(plan, model, recorder, (rows, count, num_tokens), load)


async def _measure_load(
    plan: Plan, model: LocalEngine, recorder: Recorder, size: tuple[int, int, int], load: str
) -> None:
    rows, count, num_tokens = size
    began = time.perf_counter()
    base = await model.open()
    base.append(tokens(model, rows, 0))
    await base.settle()
    prefill_s = time.perf_counter() - began
    sessions = [await base.fork() for _ in range(count)]
    base.close()
    for number, session in enumerate(sessions):
        # A session gets a KV of its own with the first row that it does not share.
        session.append(tokens(model, TURN_ROWS, 1 + number))
    await asyncio.gather(*(session.settle() for session in sessions))
    began = time.perf_counter()
    times = await together(count, lambda n: turn(sessions[n], tokens(model, TURN_ROWS, 1000 + n), num_tokens))
    for session in sessions:
        session.close()
    firsts, lasts = ([t[i] - began for t in times] for i in (0, 1))
    first_ms = {p: percentile(firsts, p) * 1000 for p in (50, 95)}
    recorder.figure(name(plan), "first token p50", load, first_ms[50], "ms", p95=first_ms[95], prefill_s=prefill_s)
    rate = count * (num_tokens - 1) / (max(lasts) - min(firsts))
    recorder.figure(name(plan), "tokens a second", load, rate, "tokens/s", tokens=count * num_tokens)


async def turn(session: Session, ids: list[int], num_tokens: int) -> tuple[float, float]:
    """Take a turn. Return the times of its first and last token."""
    first = 0.0
    session.append(ids)
    async with aclosing(session.generate(dataclasses.replace(SAMPLING, max_tokens=num_tokens))) as made:
        async for _ in made:
            first = first or time.perf_counter()
    return first, time.perf_counter()


def tokens(model: LocalEngine, count: int, seed: int) -> list[int]:
    """Return tokens that differ from seed to seed, because sessions with equal tokens would share KV."""
    return [i % model.vocabulary_size for i in drawn(count, seed)]


def drawn(count: int, seed: int) -> list[int]:
    """Return random numbers from 0 to 249."""
    return [int(i) for i in torch.randint(0, 250, (count,), generator=torch.Generator().manual_seed(seed))]


def short(rows: int) -> str:
    """Return a number of rows in the short form of the table's loads."""
    return f"{rows // 1000}k" if rows >= 1000 else str(rows)


def vllm(plan: Plan, recorder: Recorder) -> None:
    """The section `vllm`: the same dimensions and loads in vLLM's offline interface, with its dummy weights.

    The first token is measured for a request whose conversation is already in vLLM's prefix cache.
    """
    if importlib.util.find_spec("vllm") is None:
        recorder.note("vLLM is not installed")
        return
    from vllm import LLM, SamplingParams

    config = SHAPES[name(plan)] | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        served = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=max(rows for rows, *_ in loads(plan)) + 1024,
            enable_prefix_caching=True,
        )
        for size in loads(plan):
            _measure_vllm(plan, served, SamplingParams, recorder, size)


def _measure_vllm(plan: Plan, served: Any, params: Any, recorder: Recorder, size: tuple[int, int, int]) -> None:
    rows, count, num_tokens = size

    def generate(prompts: list[list[int]], max_tokens: int) -> float:
        began = time.perf_counter()
        how = params(temperature=0.7, top_k=20, top_p=0.8, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        served.generate([{"prompt_token_ids": p} for p in prompts], how, use_tqdm=False)
        return time.perf_counter() - began

    base = drawn(rows, 0)
    generate([base], 1)
    load = f"{counted(count, 'session')}, {short(rows)} rows, vLLM"
    first_s = generate([base + drawn(TURN_ROWS, 1000 + n) for n in range(count)], 1)
    recorder.figure(name(plan), "first token p50", load, first_s * 1000, "ms")
    whole_s = generate([base + drawn(TURN_ROWS, 2000 + n) for n in range(count)], num_tokens)
    recorder.figure(
        name(plan), "tokens a second", load, count * (num_tokens - 1) / max(1e-9, whole_s - first_s), "tokens/s"
    )


def agreement(plan: Plan, recorder: Recorder) -> None:
    """The section `agreement`: tokens that differ from the CPU's, in two turns of several sessions.

    Between the turns, each session's KV is rolled back and new rows are appended. The model is tiny, and its weights
    and KV are float32, so that the most likely token is the same on every device.
    """
    expected = asyncio.run(_said("cpu", {}))
    total = sum(len(said) for said in expected)
    for label, settings in engine_settings(plan).items():
        with recorder.part(label):
            found = asyncio.run(_said(plan.device, settings))
            differ = sum(
                sum(a != b for a, b in zip(ours, theirs, strict=False)) + abs(len(ours) - len(theirs))
                for ours, theirs in zip(found, expected, strict=True)
            )
            recorder.figure("Qwen3-tiny", "tokens that differ from the CPU's", label, differ, f"of {total}")


async def _said(device: str, settings: dict[str, Any]) -> list[list[int]]:
    """Run two turns of all sessions at once. Return the tokens of each session."""
    model = language_model("tiny", "cpu", torch.float32).to(device)
    runner = Runner(model, torch.device(device), torch.float32, torch.float32, rotate_half=True)
    with closing(LocalEngine(runner, EngineSettings(kv_bytes=64 << 20, **settings))) as engine:
        sessions = [await engine.open() for _ in LENGTHS]

        async def say(number: int, rows: int, seed: int) -> list[int]:
            sessions[number].append(tokens(engine, rows, seed))
            async with aclosing(sessions[number].generate(Sampling(temperature=0.0, max_tokens=TOKENS))) as made:
                return [token.id async for token in made]

        first = await together(len(LENGTHS), lambda n: say(n, LENGTHS[n], LENGTHS[n]))
        for session in sessions:
            session.rollback(KEPT)
        second = await together(len(LENGTHS), lambda n: say(n, LENGTHS[n] // 2 + 1, LENGTHS[n] + 1))
        for session in sessions:
            session.close()
        return [*first, *second]
