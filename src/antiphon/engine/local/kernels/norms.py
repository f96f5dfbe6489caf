"""RMS norms in one kernel each, in place of the seven that a decoder of `transformers` launches for one."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import rms_norm

# Rows that the two ways are compared on, and by how much they may differ: the rounding of the narrowest type.
ROWS, TOLERANCE = 4, 2e-2


@torch.inference_mode()
def fuse_norms(model: torch.nn.Module) -> int:
    """Have a decoder's RMS norms computed by torch's own kernel, and return how many.

    A norm is left as it is where the results differ, as those do that add one to their weights (Gemma).
    """
    fused = 0
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", None)
        weight: Any = getattr(module, "weight", None)
        if not type(module).__name__.endswith("RMSNorm") or eps is None or weight is None or weight.dim() != 1:
            continue
        kernel = partial(rms_norm, normalized_shape=(len(weight),), weight=weight, eps=float(eps))
        rows = torch.linspace(-3, 3, ROWS * len(weight), device=weight.device).sin().view(ROWS, -1).to(weight.dtype)
        if torch.allclose(module(rows).float(), kernel(rows).float(), rtol=TOLERANCE, atol=TOLERANCE):
            module.forward = kernel
            fused += 1
    return fused
