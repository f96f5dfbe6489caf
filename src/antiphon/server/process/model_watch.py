"""Watches the threads that models run in: one that hangs in a step is declared lost, so that its callers get an error.

A thread that ends by itself says so at once (`engine/lane.py`, `engine/model_thread.py`); this finds those that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import anyio

from antiphon.loading.loaded import ModelWorker

# How often the workers are looked at: a loss is known to /ready and to all callers within this time of the limit.
CHECK_S = 1.0


async def watch_models(workers: Mapping[str, ModelWorker], stall_s: float, on_lost: Callable[[], None]) -> None:
    """Look at the workers every CHECK_S seconds until one is lost, call `on_lost` then, and go on looking.

    `stall_s`: seconds that one step may run before its worker is declared lost; 0: any time. Runs until cancelled.
    """
    told = False
    while True:
        if declare_stalled(workers, stall_s) and not told:
            told = True
            on_lost()
        await anyio.sleep(CHECK_S)


def declare_stalled(workers: Mapping[str, ModelWorker], stall_s: float) -> dict[str, str]:
    """Declare the workers lost whose step has run for longer than `stall_s`, and return why each lost one is lost."""
    for worker in workers.values():
        if stall_s and worker.busy_s() > stall_s:
            worker.fail(f"a step has run for more than {stall_s:g} s")
    return {name: worker.lost for name, worker in workers.items() if worker.lost}
