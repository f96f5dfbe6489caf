"""What is watched while a server serves: headroom, the event loop, the threads of its models, and its key as a host.

All of these run until cancelled.
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

# The signals of live headroom are looked at four times a second: docs/design/admission.md has what each is.
HEADROOM_EVERY_S = 0.25
# The event loop's lag is a percentile of the last LOOP_S. The other two are evidence only where several are late: one
# late final beside four others is chance, and refuses nobody.
LOOP_S = 2.0
WINDOWS = {"wait": Evidence(5.0, 5.0), "final": Evidence(30.0, 10.0)}


async def watch_headroom(state: ServerState, models: LoadedModels) -> None:
    """Show the signals to the server's headroom until cancelled, and log each light that changes."""
    headroom, overload = state.admission.headroom, state.admission.headroom.overload
    if headroom.certificate is None:
        log.info(
            "no certificate: sessions are admitted by live headroom alone, %d in a burst (antiphon certify)",
            headroom.burst,
        )
    elif others := await anyio.to_thread.run_sync(differs, headroom.certificate.machine):
        log.warning("the certificate is of another machine: its %s differ", ", ".join(others))
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
    """Return what each signal is now."""
    recent, memory = state.metrics.recent, state.memory
    return {
        "loop": recent.p95("loop", LOOP_S),
        "lane": max((lane.overdue_s() for lane in models.lanes), default=0.0),
        "wait": recent.sustained("wait", WINDOWS["wait"]),
        "finals": recent.sustained("final", WINDOWS["final"]),
        "memory": memory.num_bytes / memory.limit_bytes,
        "system": _used_of_system(),
        "kv": _promised_kv(models),
    }


def _falls_s(state: ServerState) -> dict[str, float]:
    """Return for each signal over a window when it is low again, in seconds, if nothing is added."""
    recent, green = state.metrics.recent, state.admission.headroom.overload.green_below
    return {
        "loop": LOOP_S,
        "wait": recent.falls_s("wait", WINDOWS["wait"], green("wait")),
        "finals": recent.falls_s("final", WINDOWS["final"], green("finals")),
    }


def _promised_kv(models: LoadedModels) -> float:
    """Return what part of the language model's KV was promised, while no session could be parked; else 0."""
    if models.language_model is None:
        return 0.0
    load = models.language_model.load()
    idle = load.conversations - load.parked - load.answering
    return load.promised_bytes / load.kv_total_bytes if load.kv_total_bytes and idle <= 0 else 0.0


def _used_of_system(file: Path = Path("/proc/meminfo")) -> float:
    """Return what part of the system's memory is in use; 0 where the system does not tell."""
    try:
        fields = dict(line.split(":", 1) for line in file.read_text().splitlines())
        total, available = (int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return 0.0
    return 1 - available / total if total else 0.0


# --- the event loop ---------------------------------------------------------------------------------------------------

# All sessions share one event loop, so whatever holds it holds all of them.
# How often the loop is asked, and after what time without an answer the log says what holds it.
INTERVAL_S, LIMIT_S = 0.05, 0.25
# At most one such line in this time, and the innermost calls that it shows.
LOG_EVERY_S, MAX_FRAMES = 10.0, 12


async def watch_loop(observe: Callable[[float], None], limit_s: float = LIMIT_S) -> None:
    """Watch the running event loop until cancelled.

    `observe` is called in another thread, with the seconds from when the loop was asked to call back to when it did. A
    loop that has not done so after `limit_s` is logged as a warning, with the stack of its thread at that moment.
    """
    watch = _Watch(asyncio.get_running_loop(), observe, limit_s)
    threading.Thread(target=watch.run, name="loop-watch", daemon=True).start()
    try:
        await anyio.sleep_forever()
    finally:
        # Not joined: the thread may be waiting for this loop. It ends within `limit_s`.
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
        """Log where the loop's thread is now, unless another line has just been logged."""
        frame, now_s = sys._current_frames().get(self._loop_thread), time.monotonic()
        if frame is None or self.stopped.is_set() or now_s - self._logged_s < LOG_EVERY_S:
            return
        self._logged_s = now_s
        calls = "".join(traceback.format_stack(frame)[-MAX_FRAMES:])
        log.warning("the event loop has been held for %.0f ms by:\n%s", self._limit_s * 1000, calls.rstrip())


# --- models -----------------------------------------------------------------------------------------------------------

# A thread that ends by itself says so at once (`engine/lane.py`, `engine/model_thread.py`); the others are looked at.
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


# --- the key of this host ---------------------------------------------------------------------------------------------


def as_host(state: ServerState) -> Host:
    """Return what other hosts, and doors, are told of this server. One that still loads is as good as one that drains:
    no session is for it while there is another.
    """
    takes_none, load = state.admission.draining or state.models is None, state.admission.load()
    return Host(state.sessions.host_name, state.sessions.address, None if load is None else min(load, 1.0), takes_none)


async def keep_registered(state: ServerState, store: SessionStore) -> None:
    """Renew the key of this host until cancelled, whether or not the store can be had.

    It runs on the event loop that serves: a server whose loop hangs is dead for the others, as its clients find it.
    """
    ttl_s, failing = state.settings.resume.host_ttl_s, False
    while True:
        try:
            # A thread that hangs is left alone: the store bounds its calls.
            await anyio.to_thread.run_sync(partial(store.renew, as_host(state)), abandon_on_cancel=True)
            failing = False
        except StoreError as error:
            if not failing:
                log.error("the key of this host cannot be renewed: %s", error)
            failing = True
        await anyio.sleep(ttl_s * RENEWED_AFTER)
