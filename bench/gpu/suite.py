"""Runs the sections one after another, each in a separate process, and gives each its share of the time.

When a section's process ends, it frees everything that it holds on the GPU. If a section fails or exceeds its time, its
figures so far are kept, and the next section begins.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch
from bench.gpu.report import Figure, Report

from antiphon.adapters.spec import EngineModelOptions
from antiphon.engine.api import EngineSettings
from antiphon.loading.loader import GPU_STEPS

T = TypeVar("T")

# A section with less time than this is not started.
LEAST_S = 2.0


@dataclass(frozen=True, slots=True)
class Section:
    """One section: its function (`run`, "module:function"), its share of the suite's time, and its line of help."""

    run: str
    share: float
    help: str


SECTIONS: dict[str, Section] = {
    "check": Section("bench.gpu.speech:check", 40, "replayed graphs give the same results as without graphs"),
    "tts": Section("bench.gpu.speech:tts", 90, "Qwen3-TTS over the socket: first sound, real-time factor"),
    "minicpmo": Section("bench.gpu.media:native", 75, "MiniCPM-o 4.5: one unit per second, missed units counted"),
    "asr": Section("bench.gpu.speech:asr", 100, "Qwen3-ASR: live streams held"),
    "profile": Section("bench.gpu.step_profile:profile", 60, "kernels, host time and synchronisations of a step"),
    "lm": Section("bench.gpu.language:engine", 80, "a Qwen3-8B on the engine: tokens a second, first token"),
    "omni": Section("bench.gpu.media:omni", 45, "Qwen3-Omni: first text and first sound after speech"),
    "vision": Section("bench.gpu.media:video", 45, "SmolVLM, Qwen2.5-VL: frames a second"),
    "room": Section("bench.gpu.media:room", 80, "128 and 256 texts, 48 and 64 sessions of MiniCPM-o"),
    "agreement": Section("bench.gpu.language:agreement", 30, "the same tokens on the GPU as on the CPU"),
    "vllm": Section("bench.gpu.language:vllm", 50, "the same with vLLM, if it is installed"),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of a section.

    With `dry`, models are tiny and figures are meaningless. The section is killed after `seconds`. `engine` has fields
    of EngineSettings that apply to all engines.
    """

    dry: bool
    seconds: float
    engine: dict[str, Any]

    @property
    def device(self) -> str:
        """The device to measure on."""
        return self.pick("cpu", "cuda")

    def pick(self, dry: T, real: T) -> T:
        """Return the first value for a dry run, the second for a real one."""
        return dry if self.dry else real

    def options(self, kv_gb: int) -> EngineModelOptions:
        """Return a model's options on this device, with `kv_gb` of memory for its KV."""
        if self.dry:
            steps = EngineSettings(**{"kv_bytes": 64 << 20} | self.engine)
            return EngineModelOptions(steps, weights="fp32", threads=1)
        steps = EngineSettings(**{"kv_bytes": kv_gb << 30} | GPU_STEPS | self.engine)
        return EngineModelOptions(steps, device=self.device, weights="bf16")


class Recorder:
    """Sends each figure to the suite as soon as it is measured. `failures` has the errors of failed parts."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self.failures: list[str] = []

    def figure(self, model: str, measure: str, load: str, value: float, unit: str, **details: Any) -> None:
        """Record one figure; see Figure. `details` are written only to gpu.json."""
        self._send(Figure(model, measure, load, float(value), unit, details))

    def note(self, text: str) -> None:
        """Record a remark."""
        self._send(text)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure one part of a section. If it raises, the error is noted, and the section fails after its other parts.

        At its end, the device's memory is freed for the next part.
        """
        try:
            yield
        except Exception as error:
            self.failures.append(f"{name}:\n{traceback.format_exc()}")
            self.note(f"{name} failed: {type(error).__name__}: {error}")
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def counted(count: int, noun: str) -> str:
    """Return a number of things in the form of the table's loads."""
    return f"{count} {noun}{'s' if count > 1 else ''}"


def run(names: list[str], report: Report, *, minutes: float, sections: Mapping[str, Section]) -> bool:
    """Measure these sections, and return whether all were measured completely.

    The remaining time is divided among the remaining sections by their shares, so time that a section does not use goes
    to the later ones. Returns when all sections have ended.
    """
    context = multiprocessing.get_context("forkserver")
    # Modules are imported once, in the process from which the sections' processes are forked. An import error occurs
    # again in the section, which reports it.
    context.set_forkserver_preload(["torch", *{section.run.split(":")[0] for section in sections.values()}])
    until, whole = time.monotonic() + minutes * 60, True
    for number, name in enumerate(names):
        left = until - time.monotonic()
        seconds = left * sections[name].share / sum(sections[n].share for n in names[number:])
        report.begin(name)
        if seconds < LEAST_S:
            report.end(name, "out of time", 0.0, "no time was left for it")
            whole = False
            continue
        whole = _measure(name, sections[name], report, Plan(report.dry, seconds, report.engine), context) and whole
    return whole


def _measure(name: str, section: Section, report: Report, plan: Plan, context: Any) -> bool:
    """Run one section until its end or its time limit. Returns False if it was not measured completely."""
    began = time.monotonic()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(section.run, plan, theirs), name=name)
    process.start()
    theirs.close()
    error: str | None = "it was not finished in its time"
    try:
        while (left := began + plan.seconds - time.monotonic()) > 0:
            if not wait([ours], left):
                break
            try:
                message = ours.recv()
            except EOFError:
                process.join()
                error = f"its process ended with {process.exitcode}"
                break
            if isinstance(message, Figure):
                report.add(name, message)
            elif isinstance(message, str):
                report.note(name, message)
            else:
                (error,) = message
                break
        late = time.monotonic() - began >= plan.seconds
    finally:
        _kill(process)
        ours.close()
    status = "measured" if error is None else "out of time" if late else "failed"
    report.end(name, status, time.monotonic() - began, error or "")
    return error is None


def _kill(process: Any) -> None:
    """Kill a section's process, and all processes that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.join()


def _child(target: str, plan: Plan, connection: Connection) -> None:
    """Run a section in its process.

    Send figures and notes over the connection, and at the end a tuple: the error or None.

    The process leads its own process group, so that a server that it starts is killed with it.
    """
    os.setsid()
    module, function = target.split(":")
    try:
        recorder = Recorder(connection.send)
        getattr(import_module(module), function)(plan, recorder)
    except BaseException:
        connection.send((traceback.format_exc(),))
    else:
        connection.send(("\n".join(recorder.failures) or None,))
