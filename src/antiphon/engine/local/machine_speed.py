"""How fast this machine multiplies a language model's weights: what decides how large a model can be."""

from __future__ import annotations

import time
from functools import partial

import torch

from antiphon.engine.local import packed
from antiphon.engine.local.weights import Int8Product, weights_for
from antiphon.engine.threads import load_in_own_thread

# Weights that no cache holds, in matrices of the size that models of a few billion parameters have.
WIDTH, NUM_MATRICES = 2048, 24
TRIALS = 7


def seconds_a_billion(threads: int = 0) -> float:
    """Seconds that the CPU takes to multiply a row by a billion weights, of the type that `--weights auto` takes.

    The best of some trials: other work on the machine only makes one slower. `threads`: as in `load_model`. Blocks for
    about a second.
    """
    return load_in_own_thread(_measure, device="cpu", threads=threads)


@torch.inference_mode()
def _measure() -> float:
    kind, dtype = weights_for("cpu", "auto")
    row = torch.randn(1, WIDTH, dtype=torch.float32 if kind == "int8" else dtype)
    if kind == "int8":
        drawn = torch.randint(-128, 128, (WIDTH, WIDTH), dtype=torch.int8)
        scale = torch.ones(WIDTH)
        products = [Int8Product(packed.pack(drawn), [scale], [None]) for _ in range(NUM_MATRICES)]
        steps = [partial(product.times, row) for product in products]
    else:
        matrices = [torch.randn(WIDTH, WIDTH, dtype=dtype) for _ in range(NUM_MATRICES)]
        steps = [partial(torch.nn.functional.linear, row, matrix) for matrix in matrices]
    best = float("inf")
    for _ in range(TRIALS):
        begun = time.perf_counter()
        for step in steps:
            step()
        best = min(best, time.perf_counter() - begun)
    return best / (NUM_MATRICES * WIDTH**2) * 1e9
