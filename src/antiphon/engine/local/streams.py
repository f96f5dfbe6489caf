"""Work of a CUDA device that does not wait for other work of the device, or for the host."""

from __future__ import annotations

from contextlib import AbstractContextManager
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
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def read(self) -> list[Any]:
        """Wait for the copy, and return its numbers."""
        if self._done is not None:
            self._done.synchronize()
        found: list[Any] = self._host.tolist()
        return found


class ThreadStream:
    """A CUDA stream for one thread's work: a DeviceStream of its ModelThread. Work of other threads runs beside it.

    Work outside of model threads goes to the device's default stream, and so does everything that passes from one
    thread to another. So the default stream waits for what a thread gives, and a thread waits for the default stream
    before it takes.
    """

    def __init__(self, device: torch.device) -> None:
        self._own: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._common: Any = torch.cuda.default_stream(device)

    def entered(self) -> AbstractContextManager[Any]:
        """Return a context in which the thread's work goes to this stream."""
        self.take()
        entered: AbstractContextManager[Any] = torch.cuda.stream(self._own)
        return entered

    def take(self) -> None:
        """Let later work of the thread wait for the work of the default stream so far."""
        self._own.wait_stream(self._common)

    def give(self) -> None:
        """Let later work of the default stream wait for the thread's work so far."""
        self._common.wait_stream(self._own)


def used_here(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that another thread may have made. Its memory is kept until this thread's stream has read it.

    Does nothing on a CPU.
    """
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor
