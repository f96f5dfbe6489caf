"""Records traces of the models' threads with PyTorch's profiler, one at a time in each process."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from antiphon.errors import EngineError, StoreError


class Profiler:
    """Records the operations of all threads and writes them into `folder`, as Chrome traces.

    PyTorch's profiler is started and stopped in a thread of its own. The methods block and may be called from any
    thread. A trace keeps growing in memory until it is stopped.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, "profiler")
        self._profile: Any = None

    @property
    def running(self) -> bool:
        """Whether a trace is being recorded."""
        return self._profile is not None

    def start(self) -> None:
        """Begin a trace. Raises EngineError if one is under way, StoreError if the folder cannot be created."""
        self._thread.submit(self._start).result()

    def stop(self) -> Path:
        """End the trace and return its file. Raises EngineError if none is under way, StoreError if writing fails."""
        return self._thread.submit(self._stop).result()

    def _start(self) -> None:
        if self._profile is not None:
            raise EngineError("a profile is being recorded")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self._folder}: {error.strerror}") from None
        # Imported here, so that a server whose models do not use PyTorch loads it only on demand.
        import torch
        from torch._C._profiler import _ExperimentalConfig

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(
            activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True)
        )
        profile.start()
        self._profile = profile

    def _stop(self) -> Path:
        if self._profile is None:
            raise EngineError("no profile is being recorded")
        profile, self._profile = self._profile, None
        profile.stop()
        path = self._folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{time.monotonic_ns()}.pt.trace.json"
        try:
            profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise StoreError(f"{path}: {error}") from None
        return path
