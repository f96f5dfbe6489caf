"""CUDA graphs: all launches of a function are replayed as one launch, without the host's work."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

log = logging.getLogger(__name__)
T = TypeVar("T")
_captures = threading.Lock()
# Graphs for up to this number of sessions are captured when a model is loaded. Graphs for more sessions are captured
# when they are first needed.
WARMED_SESSIONS = 64


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def warmed_sizes(most: int = WARMED_SESSIONS) -> list[int]:
    """Return the powers of two up to `most`, or up to WARMED_SESSIONS if that is less."""
    return [1 << i for i in range(min(most, WARMED_SESSIONS).bit_length())]


class Graphs:
    """The CUDA graphs of one part of a model. They share memory, because they never run at the same time.

    `part`: the plural name of the part in the log. `enabled`: False if the part runs without graphs.
    """

    def __init__(self, part: str, *, enabled: bool = True) -> None:
        self._part, self._enabled = part, enabled
        self._memory: Any = None

    def capture(self, function: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T] | None:
        """Return the result of `capture` for a function of the part; None if the part runs without graphs.

        If a capture fails, logs that once, and the part runs without graphs from then on.
        """
        if not self._enabled:
            return None
        try:
            self._memory = self._memory or torch.cuda.graph_pool_handle()
            return capture(function, device, self._memory)
        except RuntimeError as error:
            # The part also works without graphs, but is slower.
            log.warning("%s are not captured as CUDA graphs: %s", self._part, error)
            self._enabled = False
            return None


class CapturedPass(ABC, Generic[T]):
    """A part of a model over tensors with fixed addresses, which a CUDA graph replays if it was captured."""

    _captured: tuple[torch.cuda.CUDAGraph, T] | None = None

    @abstractmethod
    def compute(self) -> T:
        """Launch the part, and return its result: tensors, or tuples of them."""

    def capture(self, graphs: Graphs, device: torch.device) -> bool:
        """Capture the part if `graphs` can, which takes the time of a few passes. Returns whether it is captured."""
        self._captured = graphs.capture(self.compute, device)
        return self._captured is not None

    def result(self) -> T:
        """Return the result for the current tensors. It is valid until the next call. Does not wait for the device."""
        if self._captured is None:
            return self.compute()
        graph, out = self._captured
        graph.replay()
        return out


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
