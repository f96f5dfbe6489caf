"""Background tasks of a server: monitor headroom, the event loop and the models' threads, and renew the host's lease.

Each runs until cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from antiphon.admission.certificate import differs
from antiphon.errors import StoreError
from antiphon.loading.loaded import LoadedModels, ModelWorker
from antiphon.server.metrics import Evidence
from antiphon.server.state import ServerState
from antiphon.store.sessions import RENEWED_AFTER, Host, SessionStore

log = logging.getLogger(__name__)

# --- headroom ---------------------------------------------------------------------------------------------------------

# Interval at which the signals of live headroom are read. docs/design/admission.md describes each signal.
HEADROOM_EVERY_S = 0.25
# Window of the percentile of the event loop's lag, in seconds. The three signals below need several late measurements:
# one late final among five may be chance, and must not cause a refusal.
LOOP_S = 2.0
WINDOWS = {"wait": Evidence(5.0, 5.0), "final": Evidence(30.0, 10.0), "units": Evidence(10.0, 5.0)}


async def watch_headroom(state: ServerState, models: LoadedModels) -> None:
    """Feed the signals to the server's headroom until cancelled, and log each signal that turns red or green."""
    headroom, overload = state.admission.headroom, state.admission.headroom.overload
    if headroom.certificate is None:
        log.info(
            "no certificate: sessions are admitted by live headroom alone, %d in a burst (antiphon certify)",
            headroom.burst,
        )
    elif others := await anyio.to_thread.run_sync(differs, headroom.certificate.machine):
        log.warning("the certificate was made on another machine: its %s differ", ", ".join(others))
    before: dict[str, bool] = {}
    while True:
        overload.see(_signals(state, models), time.monotonic(), _falls_s(state))
        states = overload.states()
        for name, red in states.items():
            if red != before.get(name, False):
                log.warning("headroom: %s is %s", name, "red: no session is admitted" if red else "green again")
        before = states
        await anyio.sleep(HEADROOM_EVERY_S)


def _signals(state: ServerState, models: LoadedModels) -> dict[str, float]:
    """Return the current value of each signal."""
    recent, memory = state.metrics.recent, state.memory
    return {
        "loop": recent.p95("loop", LOOP_S),
        "lane": max((lane.overdue_s() for lane in models.lanes), default=0.0),
        "wait": recent.sustained("wait", WINDOWS["wait"]),
        "finals": recent.sustained("final", WINDOWS["final"]),
        "units": recent.sustained("units", WINDOWS["units"]),
        "memory": memory.num_bytes / memory.limit_bytes,
        "system": _used_of_system(),
        "kv": _promised_kv(models),
    }


def _falls_s(state: ServerState) -> dict[str, float]:
    """Return the seconds until each windowed signal is low again, assuming that no further measurements arrive."""
    recent, green = state.metrics.recent, state.admission.headroom.overload.green_below
    return {
        "loop": LOOP_S,
        "wait": recent.falls_s("wait", WINDOWS["wait"], green("wait")),
        "finals": recent.falls_s("final", WINDOWS["final"], green("finals")),
        "units": recent.falls_s("units", WINDOWS["units"], green("units")),
    }


def _promised_kv(models: LoadedModels) -> float:
    """Return the fraction of the language model's KV that is promised, if no session can be parked; else 0."""
    if models.language_model is None:
        return 0.0
    load = models.language_model.load()
    idle = load.conversations - load.parked - load.answering
    return load.promised_bytes / load.kv_total_bytes if load.kv_total_bytes and idle <= 0 else 0.0


def _used_of_system(file: Path = Path("/proc/meminfo")) -> float:
    """Return the fraction of the system's memory in use; 0 if the system does not report it."""
    try:
        fields = dict(line.split(":", 1) for line in file.read_text().splitlines())
        total, available = (int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return 0.0
    return 1 - available / total if total else 0.0


# --- the event loop ---------------------------------------------------------------------------------------------------

# All sessions share one event loop, so code that blocks the loop blocks all of them. Interval at which the loop's lag
# is measured, and the lag above which the log shows the code that blocks the loop. In seconds.
INTERVAL_S, LIMIT_S = 0.05, 0.25
# Minimum seconds between two such log lines, and the number of innermost calls that each line shows.
LOG_EVERY_S, MAX_FRAMES = 10.0, 12


async def watch_loop(observe: Callable[[float], None], limit_s: float = LIMIT_S) -> None:
    """Measure the lag of the running event loop until cancelled.

    Calls `observe` in another thread with the seconds that each callback waited for the loop. If the loop has not run a
    callback after `limit_s`, logs a warning with the current stack of the loop's thread.
    """
    watch = _Watch(asyncio.get_running_loop(), observe, limit_s)
    threading.Thread(target=watch.run, name="loop-watch", daemon=True).start()
    try:
        await anyio.sleep_forever()
    finally:
        # Does not join the thread, which may be waiting for this loop. The thread ends within `limit_s`.
        watch.stopped.set()


class _Watch:
    def __init__(self, loop: asyncio.AbstractEventLoop, observe: Callable[[float], None], limit_s: float) -> None:
        self._loop, self._observe, self._limit_s = loop, observe, limit_s
        self._loop_thread = threading.get_ident()
        self._logged_s = -LOG_EVERY_S
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(INTERVAL_S):
            asked_s, answered = time.monotonic(), threading.Event()
            try:
                self._loop.call_soon_threadsafe(answered.set)
            except RuntimeError:
                # The loop is closed.
                return
            if not answered.wait(self._limit_s):
                self._tell()
            while not answered.wait(self._limit_s):
                if self.stopped.is_set():
                    return
            self._observe(time.monotonic() - asked_s)

    def _tell(self) -> None:
        """Log the stack of the loop's thread, at most once in LOG_EVERY_S."""
        frame, now_s = sys._current_frames().get(self._loop_thread), time.monotonic()
        if frame is None or self.stopped.is_set() or now_s - self._logged_s < LOG_EVERY_S:
            return
        self._logged_s = now_s
        calls = "".join(traceback.format_stack(frame)[-MAX_FRAMES:])
        log.warning("the event loop has been blocked for %.0f ms by:\n%s", self._limit_s * 1000, calls.rstrip())


# --- models -----------------------------------------------------------------------------------------------------------

# Interval, in seconds, of the check for threads that hang. /ready and all callers learn of a loss at most this time
# after the limit. A thread that ends reports it at once (`engine/lane.py`, `engine/model_thread.py`).
CHECK_S = 1.0


async def watch_models(workers: Mapping[str, ModelWorker], stall_s: float, on_lost: Callable[[], None]) -> None:
    """Check the workers every CHECK_S until cancelled. Calls `on_lost` once, when the first worker is lost.

    A worker is declared lost when one step has run for more than `stall_s` seconds; 0 sets no limit.
    """
    warned = False
    while True:
        if declare_stalled(workers, stall_s) and not warned:
            warned = True
            on_lost()
        await anyio.sleep(CHECK_S)


def declare_stalled(workers: Mapping[str, ModelWorker], stall_s: float) -> dict[str, str]:
    """Declare workers lost whose step has run for more than `stall_s`; return the reason for each lost worker."""
    for worker in workers.values():
        if stall_s and worker.busy_s() > stall_s:
            worker.fail(f"a step has run for more than {stall_s:g} s")
    return {name: worker.lost for name, worker in workers.items() if worker.lost}


# --- the key of this host ---------------------------------------------------------------------------------------------


def as_host(state: ServerState) -> Host:
    """Return this server's entry in the store, which other hosts and doors read.

    A server that is loading is marked as draining, so it gets no session while another host is available.
    """
    takes_none, load = state.admission.draining or state.models is None, state.admission.load()
    return Host(state.sessions.host_name, state.sessions.address, None if load is None else min(load, 1.0), takes_none)


async def keep_registered(state: ServerState, store: SessionStore) -> None:
    """Renew the lease of this host until cancelled, even while the store fails.

    Runs on the event loop that serves clients. If this loop hangs, the server is dead for clients and for other hosts.
    """
    ttl_s, failing = state.settings.resume.host_ttl_s, False
    while True:
        try:
            # Does not wait for a thread that hangs: the store has timeouts of its own.
            await anyio.to_thread.run_sync(partial(store.renew, as_host(state)), abandon_on_cancel=True)
            failing = False
        except StoreError as error:
            if not failing:
                log.error("the key of this host cannot be renewed: %s", error)
            failing = True
        await anyio.sleep(ttl_s * RENEWED_AFTER)
