"""One step of each model under torch.profiler, and what it has to move against the memory's bandwidth.

A step is what the model is counted in: a token, a frame of codes, a partial transcript, a unit of audio, a picture. Its
host time is what the wall clock says without the profiler. What it has to move is computed: the weights that it reads,
once for all sessions of the step, and the KV of its sessions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch
from bench.gpu import language
from bench.gpu.suite import Plan, Recorder
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

# Calls of the CUDA runtime that wait for the device.
SYNCHRONISATIONS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
# Of one direction of a copy: more than any cache holds.
COPY_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Profiled:
    """What is profiled of one model.

    `run`: takes so many steps. `load`: with how many sessions and rows. `step`: the name of a step. `weights`: the
    parts that a step runs, with how often it reads each. `kv_bytes`: the KV that a step reads.
    """

    model: str
    load: str
    step: str
    run: Callable[[int], Awaitable[None]]
    weights: tuple[tuple[Any, int], ...]
    kv_bytes: int

    @property
    def moved_bytes(self) -> int:
        """The bytes that a step has to read."""
        return self.kv_bytes + sum(times * weight_bytes(part) for part, times in self.weights)


def weight_bytes(module: Any) -> int:
    """Return the bytes of a module's weights, but for its tables of embeddings, of which a step reads a few rows."""
    tables = {id(m.weight) for m in module.modules() if isinstance(m, torch.nn.Embedding)}
    return sum(p.numel() * p.element_size() for p in module.parameters() if id(p) not in tables)


def profile(plan: Plan, recorder: Recorder) -> None:
    """The section `profile`: each model by itself, one after another."""
    bandwidth = measured_bandwidth(plan)
    recorder.figure("memory", "copy, read and written", f"{plan.device}", bandwidth / 1e9, "GB/s")
    for name, opened in MODELS.items():
        with recorder.part(name):
            asyncio.run(_profile(plan, recorder, opened, bandwidth))


def measured_bandwidth(plan: Plan) -> float:
    """Return bytes a second of a copy within the device's memory, read and written: the median of five."""
    size = 16 << 20 if plan.dry else COPY_BYTES
    source = torch.zeros(size, dtype=torch.uint8, device=plan.device)
    target, took = torch.empty_like(source), []
    for _ in range(6):
        _wait(plan)
        began = time.perf_counter()
        target.copy_(source)
        _wait(plan)
        took.append(time.perf_counter() - began)
    return 2 * size / sorted(took[1:])[2]


def _wait(plan: Plan) -> None:
    if not plan.dry:
        torch.cuda.synchronize()


async def _profile(plan: Plan, recorder: Recorder, opened: Any, bandwidth: float) -> None:
    steps = 2 if plan.dry else 16
    async with opened(plan) as found:
        await found.run(2)
        began = time.perf_counter()
        await found.run(steps)
        host_ms = (time.perf_counter() - began) / steps * 1000
        counts = await counted(plan, found, steps)
    load = f"{found.step}, {found.load}"
    floor_ms = found.moved_bytes / bandwidth * 1000
    recorder.figure(found.model, "host time", load, host_ms, "ms")
    recorder.figure(found.model, "computed floor of memory traffic", load, floor_ms, "ms", bytes=found.moved_bytes)
    recorder.figure(found.model, "of the memory's bandwidth", load, 100 * floor_ms / host_ms, "%")
    for measure, (count, unit) in counts.items():
        recorder.figure(found.model, measure, load, count / steps, unit)


async def counted(plan: Plan, profiled: Profiled, steps: int) -> dict[str, tuple[float, str]]:
    """Return what the profiler counts in so many steps, by measure, with its unit."""
    activities = [ProfilerActivity.CPU] + ([] if plan.dry else [ProfilerActivity.CUDA])
    # The engines' threads are others than this one.
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=activities, experimental_config=all_threads, acc_events=True) as found:
        await profiled.run(steps)
        _wait(plan)
    events = found.key_averages()
    host = [e for e in events if e.device_type == DeviceType.CPU]
    counts = {
        "operators": (float(sum(e.count for e in host if e.key.startswith("aten::"))), ""),
        "numbers read on the host": (float(sum(e.count for e in host if e.key == "aten::_local_scalar_dense")), ""),
    }
    if plan.dry:
        return counts
    device = [e for e in events if e.device_type != DeviceType.CPU]
    kernels = [e for e in device if not e.key.startswith(("Memcpy", "Memset"))]
    copies = [e for e in device if "DtoH" in e.key]
    return counts | {
        "kernels": (float(sum(e.count for e in kernels)), ""),
        "kernel time": (sum(e.self_device_time_total for e in kernels) / 1000, "ms"),
        "synchronisations": (float(sum(e.count for e in host if e.key in SYNCHRONISATIONS)), ""),
        "copies to the host": (float(sum(e.count for e in copies)), ""),
        "launched graphs": (float(sum(e.count for e in host if e.key == "cudaGraphLaunch")), ""),
    }


@asynccontextmanager
async def _language(plan: Plan) -> AsyncIterator[Profiled]:
    rows, sessions = (64, 2) if plan.dry else (2000, 16)
    model = language.new_engine(plan)
    try:
        opened = [await model.open() for _ in range(sessions)]
        for number, session in enumerate(opened):
            session.append(language.tokens(model, rows, number))
            await session.settle()

        async def run(steps: int) -> None:
            await asyncio.gather(*(language.turn(session, [number], steps) for number, session in enumerate(opened)))

        kv_bytes = sessions * rows * model.runner.storage().row_bytes
        load = f"{sessions} sessions, {language.short(rows)} rows"
        yield Profiled(language.name(plan), load, "token", run, ((model.runner.model, 1),), kv_bytes)
    finally:
        model.close()


# By a name for notes: what opens a model and yields what is profiled of it.
MODELS: dict[str, Callable[[Plan], Any]] = {"lm": _language}
