"""Shared parts of the benchmarks: the machine's description, a real server process, tables, results."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import psutil

T = TypeVar("T")

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PACKAGES = (
    "antiphon", "ctranslate2", "hibari-tts", "onnxruntime", "torch", "transformers", "numpy", "uvicorn", "websockets",
)  # fmt: skip


def machine() -> dict[str, Any]:
    """Return a description of the machine, for the results."""
    name = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "date": time.strftime("%Y-%m-%d"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def percentile(values: Sequence[float], q: float) -> float:
    """Return the linearly interpolated percentile; nan if there are no values."""
    return float(np.percentile(values, q)) if len(values) else float("nan")


def spread(
    values: Sequence[float], name: str = "", unit: str = "s", qs: Sequence[float] = (50, 95)
) -> dict[str, float]:
    """Return the percentiles `qs` of the values, with keys such as NAME_p50_UNIT."""
    return {f"{name}_p{q:g}_{unit}".lstrip("_"): percentile(values, q) for q in qs}


def changed(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """Return the differences between consecutive values of each counter."""
    return [b - a for a, b in zip(before, after, strict=True)]


async def together(count: int, work: Callable[[int], Awaitable[T]]) -> list[T]:
    """Run `work(0)` to `work(count - 1)` concurrently."""
    return list(await asyncio.gather(*map(work, range(count))))


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table with aligned columns."""
    cells = [[f"{c:.2f}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    widths = [max(len(str(h)), *(len(r[i]) for r in cells)) if cells else len(h) for i, h in enumerate(head)]
    print(f"\n## {title}")
    print("  ".join(h.ljust(w) for h, w in zip(head, widths, strict=True)))
    for row in cells:
        print("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)), flush=True)


def show(title: str, rows: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]]) -> None:
    """Print rows of a result as a table, with their keys as its head. A mapping's own keys become the first column."""
    if isinstance(rows, Mapping):
        rows = [{"": name} | dict(row) for name, row in rows.items()]
    head = list(dict.fromkeys(key for row in rows for key in row))
    table(title, [key.replace("_", " ") for key in head], [[row.get(key, "") for key in head] for row in rows])


def save(name: str, document: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write NAME.json into bench/results or another folder. Keeps the results of sections that did not run."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | document, indent=1, ensure_ascii=False) + "\n")
    return path


def options(name: str, doc: str | None, sections: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Return an option parser, described by the docstring's first line. It has --sections if there are any."""
    parser = argparse.ArgumentParser(prog=name, description=(doc or "").split("\n")[0])
    if sections:
        parser.add_argument("--sections", default=",".join(sections), help="which to measure [%(default)s]")
    return parser


def numbers(text: str) -> list[int]:
    """Parse a list of numbers in an option: 1,8,32."""
    return [int(number) for number in text.split(",")]


def measured(name: str, wanted: str, sections: Mapping[str, Callable[[], Any]], **facts: Any) -> Path:
    """Measure the wanted sections. After each, write its result into NAME.json, along with `facts`.

    The result is stored under the section's name. A result of None is not stored.
    """
    if unknown := set(wanted.split(",")) - set(sections):
        raise SystemExit(f"--sections: no {', '.join(sorted(unknown))}; there are {', '.join(sections)}")
    path = save(name, {"machine": machine()} | facts)
    for section, measure in sections.items():
        if section in wanted.split(",") and (found := measure()) is not None:
            save(name, {section: found})
    print(f"\nwritten: {path}")
    return path


@dataclass(frozen=True, slots=True)
class Server:
    """A running server process."""

    url: str
    process: psutil.Process

    @property
    def ws(self) -> str:
        return self.url.replace("http", "ws", 1)

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def rss_mb(self) -> float:
        return float(self.process.memory_info().rss) / 1e6

    def metric(self, line: str) -> float:
        """Return the value of the line of /metrics with exactly this name and labels; 0 if the line is missing."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=10).read().decode()
        found = re.search(rf"^{re.escape(line)} (\S+)$", text, re.M)
        return float(found[1]) if found else 0.0


def peer(name: str, folder: Path, *arguments: str, **inputs: Any) -> Any:
    """Run a peer's driver in the peer's environment, and return its result; None if `make peers` has not created that.

    The driver gets `inputs` as JSON files, and writes into `folder`.
    """
    python = HERE / "peers" / f".venv-{name}" / "bin" / "python"
    if not python.is_file():
        print(f"{name} is not installed: make peers")
        return None
    out = folder / f"{name}.json"
    command = [str(python), str(HERE / "peers" / name / "drive.py"), "--out", str(out), *arguments]
    for key, value in inputs.items():
        given = folder / f"{name}-{key}.json"
        given.write_text(json.dumps(value))
        command += [f"--{key}", str(given)]
    subprocess.run(command, check=True)
    return json.loads(out.read_text())


@contextmanager
def beside(module: str, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a module of the benchmarks in a separate process. Yields its first line of output, and the process."""
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parent) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


@contextmanager
def server(*flags: str, module: str = "antiphon", log: IO[str] | None = None) -> Iterator[Server]:
    """Run `antiphon serve` on a free port, yield the server when it is ready, and stop it with SIGTERM.

    `module` replaces `antiphon` on the command line. The server logs to `log`, or to standard error if that is None.
    """
    command = [sys.executable, "-m", module, "serve", "--port", "0", "--log-level", "warning", *flags]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        cwd=HERE.parent,
        # Headroom is off, so that no measurement is refused.
        env={"ANTIPHON_PROFILE": "default", "ANTIPHON_HEADROOM": "false"} | os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"ready at (\S+)", line):
                yield Server(found[1], psutil.Process(process.pid))
                break
        else:
            raise RuntimeError("the server did not start")
    finally:
        with process:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
