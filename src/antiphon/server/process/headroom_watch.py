"""Looks at the signals of live headroom, four times a second: docs/design/admission.md has what each is."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import anyio
import anyio.to_thread

from antiphon.capacity.machine import differs
from antiphon.loading.loaded import LoadedModels
from antiphon.server.process.recent import Evidence
from antiphon.server.state import ServerState

log = logging.getLogger(__name__)

EVERY_S = 0.25
# The event loop's lag is a percentile of the last LOOP_S. The other two are evidence only where several are late: one
# late final beside four others is chance, and refuses nobody.
LOOP_S = 2.0
WINDOWS = {"wait": Evidence(5.0, 5.0), "final": Evidence(30.0, 10.0)}


async def watch_headroom(state: ServerState, models: LoadedModels) -> None:
    """Show the signals to the server's headroom until cancelled, and log each light that changes."""
    if state.admission.headroom.certificate is None:
        log.info(
            "no certificate: sessions are admitted by live headroom alone, %d in a burst (antiphon certify)",
            state.admission.headroom.burst,
        )
    elif others := await anyio.to_thread.run_sync(differs, state.admission.headroom.certificate.machine):
        log.warning("the certificate is of another machine: its %s differ", ", ".join(others))
    before: dict[str, bool] = {}
    while True:
        lights = state.admission.headroom.lights
        lights.see(signals(state, models), time.monotonic(), falls_s(state))
        states = lights.states()
        for name, red in states.items():
            if red != before.get(name, False):
                log.warning("headroom: %s is %s", name, "red: no session is admitted" if red else "green again")
        before = states
        await anyio.sleep(EVERY_S)


def signals(state: ServerState, models: LoadedModels) -> dict[str, float]:
    """Return what each signal is now."""
    recent, memory = state.metrics.recent, state.memory
    return {
        "loop": recent.p95("loop", LOOP_S),
        "lane": max((lane.overdue_s() for lane in models.lanes), default=0.0),
        "wait": recent.sustained("wait", WINDOWS["wait"]),
        "finals": recent.sustained("final", WINDOWS["final"]),
        "memory": memory.num_bytes / memory.limit_bytes,
        "system": used_of_system(),
        "kv": promised_kv(models),
    }


def falls_s(state: ServerState) -> dict[str, float]:
    """Return for each signal over a window when it is low again, in seconds, if nothing is added."""
    recent, green = state.metrics.recent, state.admission.headroom.lights.green_below
    return {
        "loop": LOOP_S,
        "wait": recent.falls_s("wait", WINDOWS["wait"], green("wait")),
        "finals": recent.falls_s("final", WINDOWS["final"], green("finals")),
    }


def promised_kv(models: LoadedModels) -> float:
    """Return what part of the language model's KV was promised, while no session could be parked; else 0."""
    if models.language_model is None:
        return 0.0
    load = models.language_model.load()
    idle = load.conversations - load.parked - load.answering
    return load.promised_bytes / load.kv_total_bytes if load.kv_total_bytes and idle <= 0 else 0.0


def used_of_system(file: Path = Path("/proc/meminfo")) -> float:
    """Return what part of the system's memory is in use; 0 where the system does not tell."""
    try:
        fields = dict(line.split(":", 1) for line in file.read_text().splitlines())
        total, available = (int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return 0.0
    return 1 - available / total if total else 0.0
