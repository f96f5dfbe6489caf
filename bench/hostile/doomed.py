"""`antiphon` with models that die on a signal: python -m bench.hostile.doomed serve ...

SIGUSR1 dooms the models: the next job of each lane, and the next call or step of each model thread, ends its thread
(or, with ANTIPHON_BENCH_DOOM=hang, never returns). The product has no such hook: the workers' constructors are wrapped
here before anything is loaded. When a thread dies is written to the file ANTIPHON_BENCH_DEATHS, a line each: the
worker's name, and monotonic seconds.
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
from antiphon.engine.lane import Lane
from antiphon.engine.model_thread import ModelThread

DOOM, DEATHS = "ANTIPHON_BENCH_DOOM", "ANTIPHON_BENCH_DEATHS"
doomed = threading.Event()


def mortal(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """`work`, until the signal came: then it ends its thread, or hangs."""

    @functools.wraps(work)
    def wrapped(*args: Any) -> Any:
        if doomed.is_set():
            with Path(os.environ[DEATHS]).open("a") as deaths:
                deaths.write(f"{name} {time.monotonic()}\n")
            if os.environ[DOOM] == "hang":
                threading.Event().wait()
            raise SystemExit("it was told to die")
        return work(*args)

    return wrapped


class MortalLane(Lane[Any, Any]):
    """A lane whose workers die on the signal."""

    def __init__(self, name: str, work: Callable[..., Any], **options: Any) -> None:
        super().__init__(name, mortal(name, work), **options)


class MortalThread(ModelThread):
    """A model thread that dies on the signal."""

    def __init__(self, name: str, *, step: Callable[[], bool] = lambda: False, **options: Any) -> None:
        super().__init__(name, step=mortal(name, step), **options)


def doom_models() -> None:
    """Have every lane and model thread that is made from here on be a mortal one."""
    for module in list(sys.modules.values()):
        for mortal_class, usual in ((MortalLane, Lane), (MortalThread, ModelThread)):
            for name, value in list(vars(module).items()):
                if value is usual and module.__name__ not in (__name__, usual.__module__):
                    setattr(module, name, mortal_class)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: doomed.set())
    doom_models()
    sys.exit(main(sys.argv[1:]))
