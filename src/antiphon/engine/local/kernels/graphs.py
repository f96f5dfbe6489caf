"""CUDA graphs: what a function has launched once is launched again as a whole, without the host's work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_captures = threading.Lock()


def capture(function: Callable[[], T], device: torch.device, memory: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """Return a graph of what `function` launches, and what it returned: tensors that each replay writes anew.

    `memory`: a pool (`torch.cuda.graph_pool_handle`), which graphs that never run at once may share. The function is
    called three times, and has to read its inputs from tensors that stay where they are. Raises RuntimeError where it
    waits for the device.
    """
    # Captures wait for the device, which another capture forbids.
    with _captures, torch.cuda.device(device):
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Libraries allocate and choose kernels in their first calls, which must not be captured.
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other engines of this process may use the device meanwhile.
        with torch.cuda.graph(graph, pool=memory, stream=side, capture_error_mode="thread_local"):
            out = function()
    return graph, out
