"""`antiphon` with models that die on a signal: python -m bench.hostile.doomed serve ...

SIGUSR1 dooms the worker ANTIPHON_BENCH_DOOMED: the next job of the lane, or the next step of the model thread, of that
name ends its thread (or, with ANTIPHON_BENCH_DOOM=hang, never returns). The product has no such hook: the workers'
constructors are wrapped here before anything is loaded. When a thread dies is written to the file
ANTIPHON_BENCH_DEATHS, a line each: the worker's name, and monotonic seconds.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from antiphon.cli.main import main
from antiphon.engine import lane, model_thread

DOOM, DOOMED, DEATHS = "ANTIPHON_BENCH_DOOM", "ANTIPHON_BENCH_DOOMED", "ANTIPHON_BENCH_DEATHS"
# How often the signal came: each worker dies once each time, so that one that is restarted lives.
dooms = 0


def mortal(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """`work`, until the signal came: then it ends its thread once, or hangs."""
    died = dooms

    @functools.wraps(work)
    def wrapped(*args: Any) -> Any:
        nonlocal died
        if died < dooms and name == os.environ[DOOMED]:
            died = dooms
            with Path(os.environ[DEATHS]).open("a") as deaths:
                deaths.write(f"{name} {time.monotonic()}\n")
            if os.environ[DOOM] == "hang":
                threading.Event().wait()
            raise SystemExit("it was told to die")
        return work(*args)

    return wrapped


class MortalLane(lane.Lane[lane.Job, lane.Result]):
    """A lane whose workers die on the signal."""

    def __init__(self, name: str, work: Callable[..., Any], **options: Any) -> None:
        super().__init__(name, mortal(name, work), **options)


class MortalThread(model_thread.ModelThread):
    """A model thread that dies on the signal."""

    def __init__(self, name: str, *, step: Callable[[], bool] = lambda: False, **options: Any) -> None:
        super().__init__(name, step=mortal(name, step), **options)


def doom(*_: object) -> None:
    """The next job or step of each worker is its last."""
    global dooms
    dooms += 1


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, doom)
    # Adapters and the engine are imported when their models are loaded, and find these.
    lane.Lane, model_thread.ModelThread = MortalLane, MortalThread  # type: ignore[misc]
    sys.exit(main(sys.argv[1:]))
