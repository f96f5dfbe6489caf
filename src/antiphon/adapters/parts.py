"""Loads the parts of a checkpoint on a device, in a suitable dtype. Shared by the adapters that run on an engine.

Each adapter's `checkpoint.py` defines its parts and reads them from a folder.
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
    """Return a model's parts on `options.device`, the dtype its decoder computes in, and the dtype of everything else.

    `source`: a checkpoint's folder, which `read` loads in a given dtype, in a thread of its own; or parts that the
    caller has already built. `rounded`: returns the parts that get int8 weights. These parts compute in float32 between
    their matrix products. `mixture`: see weights_for. Takes seconds to minutes. Raises ModelError if the checkpoint
    does not load, the device is missing, or the device does not support the weights.
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
