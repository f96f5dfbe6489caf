"""The safetensors files of a checkpoint's folder, mapped into memory, and a report of how much of them is loaded.

A mapped tensor takes no memory of its own: it is a part of the file, and the operating system reads its pages when they
are used. On the CPU, a model whose weights keep their dtype computes with these pages. For another device, each tensor
is copied there from its pages.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from safetensors import safe_open
from transformers.utils import logging as transformers_logging

log = logging.getLogger(__name__)

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Seconds between two reports, and before the first one: a small checkpoint is loaded without any.
REPORT_S = 1.0
# The text by which `transformers` announces that it goes through the tensors of a checkpoint.
LOADING = "Loading weights"


def checkpoint_files(folder: Path) -> list[Path]:
    """Return a folder's safetensors files, as its index names them. Empty: it has none. Raises OSError, ValueError."""
    if (folder / INDEX).is_file():
        names = json.loads((folder / INDEX).read_text())["weight_map"].values()
        return [folder / name for name in dict.fromkeys(names)]
    return [folder / WHOLE] if (folder / WHOLE).is_file() else []


def mapped_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder by name, each mapped. Raises OSError, and the errors of safetensors."""
    found: dict[str, torch.Tensor] = {}
    for path in checkpoint_files(folder):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


class LoadingProgress:
    """Reports how much of a checkpoint is loaded: with a bar on a terminal, else with a line of the log a second.

    `name`: the checkpoint's name. `total`: its bytes. Used as a context manager, by one thread.
    """

    def __init__(self, name: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._total, self._clock = name, total, clock
        self._done = 0.0
        self._reported_s = clock()
        self._bar: Progress | None = None

    @classmethod
    def of(cls, folder: Path) -> LoadingProgress:
        """Return the progress of loading a folder's safetensors files."""
        return cls(folder.name, sum(path.stat().st_size for path in checkpoint_files(folder)))

    def advance(self, size: float) -> None:
        """Note that `size` more bytes are loaded."""
        self._done += size
        if (now := self._clock()) - self._reported_s < REPORT_S:
            return
        self._reported_s = now
        if sys.stderr.isatty():
            if self._bar is None:
                columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
                self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
                self._bar.start()
                self._bar.add_task(self._name, total=self._total)
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        else:
            log.info("loading %s: %.2f of %.2f GB", self._name, self._done / 1e9, self._total / 1e9)

    def __enter__(self) -> LoadingProgress:
        transformers_logging.set_tqdm_hook(self._followed)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        transformers_logging.set_tqdm_hook(None)
        if self._bar is not None:
            self._bar.stop()

    def _followed(self, bar: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, str]) -> Any:
        """Take the place of the bar that `transformers` shows while it goes through the tensors."""
        return self._each(list(args[0])) if options.get("desc") == LOADING else bar(*args, **options)

    def _each(self, items: Sequence[Any]) -> Iterator[Any]:
        for item in items:
            yield item
            # The tensors are counted as if they had one size.
            self.advance(self._total / len(items))
