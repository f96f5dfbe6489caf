"""RMS norms in one kernel each, instead of the seven that a decoder of `transformers` launches."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import rms_norm

# The number of rows on which the two computations are compared, and the tolerance: the narrowest type's rounding.
ROWS, TOLERANCE = 4, 2e-2


@torch.inference_mode()
def fuse_norms(model: torch.nn.Module) -> int:
    """Make a decoder compute its RMS norms by torch's own kernel. Returns the number of replaced norms.

    A norm stays as it is if the results differ, for example if it adds one to its weights (Gemma).
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
