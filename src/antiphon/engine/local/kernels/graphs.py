"""CUDA graphs: all launches of a function are replayed as one launch, without the host's work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_captures = threading.Lock()


def capture(function: Callable[[], T], device: torch.device, memory: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """Return a graph of the launches of `function`, and its result: tensors that each replay overwrites.

    `memory`: a pool (`torch.cuda.graph_pool_handle`), which graphs that never run at the same time may share.
    `function` is called four times. It must read its inputs from tensors with fixed addresses. Raises RuntimeError if
    it waits for the device, or if a replay gives other numbers than a call.
    """
    # A capture waits for the device, which is forbidden during another capture.
    with _captures, torch.cuda.device(device):
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Libraries allocate and choose kernels in their first calls, which must not be captured.
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other engines of this process may use the device at the same time.
        with torch.cuda.graph(graph, pool=memory, stream=side, capture_error_mode="thread_local"):
            out = function()
        graph.replay()
        if not agree(out, function()):
            raise RuntimeError("a replay of its graph gives other numbers")
    return graph, out


def agree(replayed: Any, called: Any) -> bool:
    """Return whether two results (tensors, or tuples of them) are equal, except for the order of summation.

    Does not compare integers, such as sampled tokens, because equal logits may lead to different ones.
    """
    if isinstance(called, tuple):
        return all(agree(one, other) for one, other in zip(replayed, called, strict=True))
    if called is None or not called.is_floating_point():
        return True
    finite = called[called.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(replayed, called, rtol=0.0, atol=max(0.05 * scale, 1e-6), equal_nan=True)
