"""The sampled tokens of tiny decoders are fixed, so they must be equal with every `transformers` and torch."""

from __future__ import annotations

import asyncio

import pytest
import torch

from antiphon.engine.api import EngineSettings, Sampling
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.runner import Runner
from tests.engine.local import tiny
from tests.engine.local.tiny import FAMILIES

torch.set_num_threads(1)
PROMPT = list(range(24))
# Recorded with transformers 5.17 and 5.23, and with torch 2.11 and 2.13.
TOKENS = {
    "llama": [67, 15, 41, 28, 28, 78, 48, 71, 77, 39, 30, 38],
    "qwen2": [51, 31, 25, 21, 9, 82, 62, 67, 74, 58, 39, 27],
    "qwen3": [62, 25, 26, 20, 28, 74, 48, 68, 73, 41, 28, 26],
    "gemma": [64, 31, 52, 32, 32, 88, 56, 56, 78, 57, 36, 36],
    "gemma2": [60, 18, 23, 25, 20, 86, 52, 70, 87, 38, 29, 28],
    "gemma3": [60, 20, 31, 24, 24, 79, 58, 64, 69, 64, 50, 37],
}


async def sampled(family: str) -> list[int]:
    engine = LocalEngine(Runner(tiny.model(family)), EngineSettings(kv_bytes=4 << 20))
    session = await engine.open()
    session.append(PROMPT)
    tokens = [t.id async for t in session.generate(Sampling(max_tokens=12, temperature=1.0, seed=5))]
    session.close()
    engine.close()
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_gives_the_same_tokens_with_every_version(family: str) -> None:
    assert asyncio.run(sampled(family)) == TOKENS[family]
