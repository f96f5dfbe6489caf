"""Loads a model's weights in a thread of their own, and sets the number of cores that torch uses.

Every model that computes with torch loads through this module, whatever its architecture or checkpoint format.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from antiphon.errors import ModelError

Loaded = TypeVar("Loaded")


def available_cores() -> int:
    """The number of cores in this process's affinity mask, which a container may narrow."""
    return max(1, len(os.sched_getaffinity(0)))


def load_in_own_thread(build: Callable[[], Loaded], *, device: str = "cpu", threads: int = 0) -> Loaded:
    """Call `build` in a temporary thread, block until it returns, and return its result or raise its error.

    On the device `cpu`, sets the number of torch's compute threads to `threads`, for the whole process from now on; 0
    means one thread for each available core. On other devices the setting is left as it is.

    The thread has to end because OpenMP keeps a team of workers for every thread that ever ran a matrix product. If the
    workers outnumber the cores, no team stays awake between products. Measured with the 0.5B default model on two
    cores: if the caller has a second team, a step takes 78 ms instead of 65 for one session, and twice the time for
    eight.
    """

    def load() -> Loaded:
        if device == "cpu":
            torch.set_num_threads(threads or available_cores())
        return build()

    with ThreadPoolExecutor(1, "load") as thread:
        return thread.submit(load).result()


@contextmanager
def load_errors(model_id: str, source: object) -> Iterator[None]:
    """Turn the errors that libraries raise for a broken checkpoint into a ModelError with the model and its folder.

    `source` is the checkpoint's folder. Parts that are built already have no folder, and are named by their type.
    """
    try:
        yield
    # An ImportError is of a package that quantized weights need.
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        origin = source if isinstance(source, Path) else type(source).__name__
        raise ModelError(f"{model_id} does not load from {origin}: {error}") from error
