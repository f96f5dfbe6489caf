"""docs/gpu.md has the tables that bench/gpu_memory.py prints, and the script counts KV as the engine does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from accelerate import init_empty_weights
from bench import gpu_memory
from bench.gpu.report import Figure, Report
from bench.models import SHAPES

from antiphon.adapters.minicpmo.token2wav.files import FlowConfig
from antiphon.adapters.minicpmo.token2wav.flow import Flow, FlowSlots
from antiphon.adapters.minicpmo.token2wav.hift import CausalHift, load_hift
from antiphon.adapters.minicpmo.token2wav.hift_layers import HiftConfig
from antiphon.adapters.minicpmo.token2wav.vocoder import HiftSlots
from antiphon.engine.api import EngineSettings
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.runner import Runner
from antiphon.released.manifest import SessionLoad
from antiphon.released.memory import ModelMemory
from tests.engine.local import tiny

PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"


@pytest.mark.parametrize(
    "table",
    [
        gpu_memory.rows_table,
        gpu_memory.sessions_table,
        gpu_memory.steps_table,
        gpu_memory.cards_table,
        gpu_memory.units_table,
        gpu_memory.units_picture,
    ],
)
def test_the_page_has_the_table_as_it_is_computed(table: Callable[[], str]) -> None:
    assert table() in PAGE.read_text(encoding="utf-8")


def test_the_picture_is_redrawn_from_what_was_measured(tmp_path: Path) -> None:
    report = Report(tmp_path, dry=True, engine={})
    for section, counts in (("minicpmo", (32, 8)), ("room", (48,))):
        report.begin(section)
        for count in counts:
            for percent in (50, 95):
                figure = Figure("MiniCPM-o 4.5", f"unit p{percent}", f"{count} sessions", count * percent / 10, "ms")
                report.add(section, figure)
            report.add(section, Figure("MiniCPM-o 4.5", "missed units", f"{count} sessions", 0, "of 10"))
    found = gpu_memory.measured_units(tmp_path / "gpu.json")
    assert found == {"p50": {8: 40, 32: 160, 48: 240}, "p95": {8: 76, 32: 304, 48: 456}}
    drawn = gpu_memory.units_picture(found).splitlines()
    assert drawn[2:4] == [
        '    title "a unit of MiniCPM-o, measured: p95 above, p50 below"',
        '    x-axis "sessions that speak" [8, 32, 48]',
    ]
    assert drawn[5:7] == ["    line [76, 304, 456]", "    line [40, 160, 240]"]


def test_a_row_has_the_bytes_that_the_engine_counts() -> None:
    config = tiny.CONFIGS["qwen3"]
    shape = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    page_bytes = 64 * ModelMemory(0, 0, (shape,), SessionLoad("", (64,))).row_bytes[0]

    async def total(budget: int) -> int:
        engine = LocalEngine(Runner(tiny.model("qwen3"), kv_dtype=torch.bfloat16), EngineSettings(kv_bytes=budget))
        try:
            return (await engine.state()).kv_total_bytes
        finally:
            engine.close()

    # The engine rounds its budget to whole pages of 64 rows.
    assert asyncio.run(total(10 * page_bytes)) == 10 * page_bytes
    assert asyncio.run(total(11 * page_bytes - 1)) == 10 * page_bytes


def test_token2wav_has_the_bytes_of_its_released_sizes() -> None:
    with init_empty_weights():
        flow = Flow(msgspec.convert(SHAPES["MiniCPM-o-4.5-flow"], FlowConfig)).requires_grad_(False)
    hift = load_hift(CausalHift(HiftConfig()).state_dict(), {}, torch.device("cpu"), causal=True)
    slots, vocoder = FlowSlots(flow, 1, kv_dtype=torch.float16), HiftSlots(hift, 1)
    model = next(m.memory for m in gpu_memory.MODELS if m.name == "MiniCPM-o 4.5")
    assert model.session.slot_bytes == slots.slot_bytes + vocoder.table[0].nbytes + vocoder.exact[0].nbytes
    assert model.float32_parameters == sum(p.numel() for part in (flow, hift) for p in part.parameters())
