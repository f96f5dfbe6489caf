"""Loads the parts of a checkpoint on a device, in the type of weights that suits it; shared by adapters on the engine.

What the parts are, and how they are read from a folder, each adapter's `checkpoint.py` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from antiphon.adapters.spec import EngineModelOptions
from antiphon.engine.local.weights import quantize_linear_layers, weights_for
from antiphon.engine.threads import load_errors, load_in_own_thread

Parts = TypeVar("Parts")


def load_parts(
    model_id: str,
    source: Path | Parts,
    options: EngineModelOptions,
    read: Callable[[Path, torch.dtype], Parts],
    rounded: Callable[[Parts], Sequence[nn.Module]],
    *,
    mixture: bool = False,
) -> tuple[Parts, torch.dtype, torch.dtype]:
    """Return a model's parts on `options.device`, the type its decoder computes in, and the type of all else.

    `source`: a checkpoint's folder, which `read` loads in a type, in a thread that ends with it; or the parts
    themselves, of a caller that has built them. `rounded`: the parts that int8 weights are for; between their products
    they compute in float32. `mixture`: as for weights_for. Waits for seconds to minutes. Raises ModelError for a
    checkpoint that does not load, a device that is not there, or weights that are not for it.
    """
    kind, dtype = weights_for(options.device, options.weights, mixture=mixture)

    def build() -> Parts:
        parts = read(source, dtype) if isinstance(source, Path) else source
        if kind == "int8":
            for part in rounded(parts):
                quantize_linear_layers(part)
        return parts

    with load_errors(model_id, source):
        parts = load_in_own_thread(build, device=options.device, threads=options.threads)
    return parts, torch.float32 if kind == "int8" else dtype, dtype
