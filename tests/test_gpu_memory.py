"""docs/gpu.md has the tables that bench/gpu_memory.py prints, and the script counts KV as the engine does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bench import gpu_memory

from antiphon.engine.api import EngineSettings
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.runner import Runner
from antiphon.released.memory import ModelMemory
from tests.engine.local import tiny

PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"


@pytest.mark.parametrize("table", [gpu_memory.rows_table, gpu_memory.sessions_table, gpu_memory.steps_table])
def test_the_page_has_the_table_as_it_is_computed(table: Callable[[], str]) -> None:
    assert table() in PAGE.read_text(encoding="utf-8")


def test_a_row_has_the_bytes_that_the_engine_counts() -> None:
    config = tiny.CONFIGS["qwen3"]
    shape = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    page_bytes = 64 * ModelMemory(0, 0, (shape,), "", (64,)).row_bytes[0]

    async def total(budget: int) -> int:
        engine = LocalEngine(Runner(tiny.model("qwen3"), kv_dtype=torch.bfloat16), EngineSettings(kv_bytes=budget))
        try:
            return (await engine.state()).kv_total_bytes
        finally:
            engine.close()

    # The engine rounds its budget to whole pages of 64 rows.
    assert asyncio.run(total(10 * page_bytes)) == 10 * page_bytes
    assert asyncio.run(total(11 * page_bytes - 1)) == 10 * page_bytes
