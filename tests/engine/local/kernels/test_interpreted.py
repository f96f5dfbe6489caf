"""The Triton kernels, interpreted on the CPU and compared with torch's attention. `make kernels` installs the
requirements.

Triton decides at import whether its kernels are interpreted, so each case runs in its own process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
TRITON = ROOT / "build" / "triton"
pytestmark = pytest.mark.skipif(not TRITON.is_dir(), reason="Triton is not installed: make kernels")

# heads, key heads, width, type, scaling, window, softcap, (start, stop) of each session's rows, shares, whole
CASES = [
    (4, 2, 16, "float32", None, 0, None, [(0, 1), (63, 64), (64, 65), (200, 201)], 1),
    (4, 2, 16, "float32", None, 0, None, [(0, 1), (63, 64), (64, 65), (200, 201)], 4),
    (8, 1, 16, "float32", 0.3, 50, None, [(0, 70), (130, 131), (60, 200)], 1),
    (8, 2, 32, "float32", None, 0, 30.0, [(0, 70), (130, 131), (60, 200)], 2),
    (6, 2, 24, "float16", None, 70, None, [(0, 70), (130, 131), (60, 200)], 4),
    (4, 4, 16, "float32", None, 0, None, [(0, 50), (100, 150), (1400, 1450)], 4, True),
]
PROGRAM = """
import json, sys
from types import SimpleNamespace
import torch
from antiphon.engine.local.attention import Scoring, SegmentedAttention
from antiphon.engine.local.kernels.attention import FixedPages, attend_pages, step_tiles, store_rows
from antiphon.engine.local.kv.page_pool import PagePool
from antiphon.engine.local.kv.shape import KvShape

heads, kv_heads, width, kind, scaling, window, softcap, ranges, shares, *whole = json.loads(sys.argv[1])
torch.manual_seed(0)
kind, scoring, cpu = getattr(torch, kind), Scoring(scaling, window, softcap, bool(whole)), torch.device("cpu")
count = sum(stop - start for start, stop in ranges)
drawn = lambda heads: torch.randn(count, heads, width).to(kind)
query, keys, values = drawn(heads), drawn(kv_heads), drawn(kv_heads)
keys[0, 0, 0], values[0, 0, 1] = float("nan"), float("inf")
pools = [PagePool(KvShape(2, kv_heads, width, kind, cpu), 40) for _ in range(2)]
pools[0].rows.copy_(torch.randn(pools[0].rows.shape).to(kind))
pools[1].rows.copy_(pools[0].rows)
places = [
    [SimpleNamespace(handle=p.extend(None, stop, 0, shared=False), start=start, stop=stop, count=stop - start)
     for start, stop in ranges] for p in pools
]
expected = SegmentedAttention(places[0], pools[0].step(places[0])).attend(1, query, keys, values, scoring)
tiles = step_tiles(places[1], heads // kv_heads, cpu)
store_rows(pools[1].rows[1], tiles.slots, keys, values)
assert torch.equal(pools[0].rows, pools[1].rows), "other rows were stored"
found = attend_pages(pools[1].rows[1], tiles, query, scoring, shares)
error = float((found.float() - expected.float()).norm() / expected.float().norm())
assert error < (1e-5 if kind == torch.float32 else 3e-3), error
# A pass of fixed size, filled twice: neither padding nor the step before it changes a row.
fixed = FixedPages(pools[1], count + 50, count + 20, 64 if scoring.whole else 16)
fixed.fill(places[1][::-1])
last = fixed.fill(places[1])
padded = [torch.cat([each, torch.full((50, *each.shape[1:]), float("nan")).to(kind)]) for each in (query, keys, values)]
found = fixed.attend(1, *padded, scoring)[:count]
error = float((found.float() - expected.float()).norm() / expected.float().norm())
assert error < (1e-5 if kind == torch.float32 else 3e-3), error
ends = torch.tensor([stop - start for start, stop in ranges]).cumsum(0) - 1
assert fixed.fixed.last_rows[last].tolist() == ends.tolist()
"""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_store_and_attend_as_torch_does(case: tuple[object, ...]) -> None:
    path = os.pathsep.join([str(TRITON), str(ROOT / "src")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(case)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
