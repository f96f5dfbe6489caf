"""Whether the engine says on the GPU what it says on the CPU, in each of its settings.

The model is tiny and its weights and KV are float32, so that the likeliest token is the same wherever it is computed.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, closing
from typing import Any

import torch
from bench.gpu import language
from bench.gpu.suite import Plan, Recorder
from bench.models.qwen3 import language_model

from antiphon.engine.api import EngineSettings, Sampling, Session
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.runner import Runner

# Sessions of so many rows, told apart by their lengths, and the tokens of each turn.
LENGTHS, TOKENS = (3, 17, 64, 200, 511, 1025), 48
# What the sessions' KV is cut back to before their second turn.
KEPT = 3


def agreement(plan: Plan, recorder: Recorder) -> None:
    """The section `agreement`: tokens that are others than the CPU's, of all of two turns of several sessions.

    Between the turns each session's KV is cut back, and what follows is appended to it.
    """
    expected = asyncio.run(_said("cpu", {}))
    total = sum(len(turn) for turn in expected)
    for label, settings in language.engine_settings(plan).items():
        with recorder.part(label):
            found = asyncio.run(_said(plan.device, settings))
            differ = sum(
                sum(a != b for a, b in zip(ours, theirs, strict=False)) + abs(len(ours) - len(theirs))
                for ours, theirs in zip(found, expected, strict=True)
            )
            recorder.figure("Qwen3-tiny", "tokens that differ from the CPU's", f"{label}", differ, f"of {total}")


async def _said(device: str, settings: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of every session's two turns, with all sessions at once."""
    model = language_model("tiny", "cpu", torch.float32).to(device)
    runner = Runner(model, torch.device(device), torch.float32, torch.float32, rotate_half=True)
    with closing(LocalEngine(runner, EngineSettings(kv_bytes=64 << 20, **settings))) as engine:
        sessions = [await engine.open() for _ in LENGTHS]
        first = await asyncio.gather(
            *(_turn(s, language.tokens(engine, rows, rows)) for s, rows in zip(sessions, LENGTHS, strict=True))
        )
        for session in sessions:
            session.rollback(KEPT)
        second = await asyncio.gather(
            *(
                _turn(s, language.tokens(engine, rows // 2 + 1, rows + 1))
                for s, rows in zip(sessions, LENGTHS, strict=True)
            )
        )
        for session in sessions:
            session.close()
        return [*first, *second]


async def _turn(session: Session, ids: list[int]) -> list[int]:
    session.append(ids)
    async with aclosing(session.generate(Sampling(temperature=0.0, max_tokens=TOKENS))) as made:
        return [token.id async for token in made]
