"""Where the weights of a model are loaded, and how many cores its products use.

Every model that computes with torch goes through here, whatever its architecture. This module knows nothing of
checkpoints.
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
    """The number of cores that this process may run on: those of its affinity mask, which a container may narrow."""
    return max(1, len(os.sched_getaffinity(0)))


def load_in_own_thread(build: Callable[[], Loaded], *, device: str = "cpu", threads: int = 0) -> Loaded:
    """Call `build` in a thread that ends with it, block until it has, and return its result or raise its error.

    On the device `cpu`, torch is set to compute with `threads` threads from here on, in the whole process; 0 is one
    thread for each core this process may use. On other devices the setting is left as it is.

    The thread has to end because OpenMP keeps a team of workers for every thread that ever ran a product, and where
    there are more workers than cores, no team stays awake between products any more. With a team of the caller's beside
    the engine's, steps of the 0.5B default model on two cores take 78 ms for one session instead of 65, and twice as
    long for eight.
    """

    def load() -> Loaded:
        if device == "cpu":
            torch.set_num_threads(threads or available_cores())
        return build()

    with ThreadPoolExecutor(1, "load") as thread:
        return thread.submit(load).result()


@contextmanager
def load_errors(model_id: str, source: object) -> Iterator[None]:
    """Turn what libraries raise over a checkpoint that does not load into a ModelError with the model and its folder.

    `source` is the checkpoint's folder. Parts that were built already have no folder, and are named by their type.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        origin = source if isinstance(source, Path) else type(source).__name__
        raise ModelError(f"{model_id} does not load from {origin}: {error}") from error
