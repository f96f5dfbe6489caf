"""Work of a CUDA device that does not wait for other work of the device, or for the host."""

from __future__ import annotations

from typing import Any

import torch


class HostCopy:
    """A copy of a tensor to the host, which begins at once and waits only for the work queued before it.

    On a CPU, there is nothing to copy.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._done = tensor, None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def read(self) -> list[Any]:
        """Wait for the copy, and return its numbers."""
        if self._done is not None:
            self._done.synchronize()
        found: list[Any] = self._host.tolist()
        return found
