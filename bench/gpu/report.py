"""The results of the sections: gpu.json, from which a later run resumes, and the table gpu.txt."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from bench.common import machine

Status = Literal["running", "measured", "failed", "out of time"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a model."""

    # The model's name.
    model: str
    # What was measured.
    measure: str
    # The load under which it was measured.
    load: str
    # The figure.
    value: float
    # Its unit.
    unit: str
    # Further counts, only in gpu.json.
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Published:
    """A published figure and our goal.

    It applies to figures with this measure and load whose model starts with `model`.
    """

    model: str
    measure: str
    load: str
    text: str


PUBLISHED = (
    Published("Qwen3-TTS", "first sound p50", "1 text", "97 ms claimed by its makers"),
    Published("Qwen3-TTS", "first sound p50", "64 texts", "vLLM-Omni 724 ms, 1.7B, one H200; goal < 100"),
    Published("Qwen3-TTS", "first sound p95", "10 texts a second", "nari-qwen3-tts < 50 ms, 1.7B, one H100"),
    Published("Qwen3-TTS", "first sound p95", "20 texts a second", "nari-qwen3-tts < 80 ms, 1.7B, one H100"),
    Published("Qwen3-TTS", "real-time factor p50", "64 texts", "vLLM-Omni 0.66 (97 s of audio a second); goal < 0.4"),
    Published("MiniCPM-o", "unit p50", "1 session", "goal < 200 ms"),
    Published("MiniCPM-o", "missed units", "32 sessions", "goal 0"),
    Published("Qwen3-ASR", "streams held", "p95 <= 1.5 s", "goal >= 600"),
    Published("Qwen3-8B", "first token p50", "1 session, 45k rows", "SGLang 184 ms at turn 150; goal <= 100"),
)


def beside(figure: Figure) -> str:
    """Return the published figure for this figure; "" if there is none.

    The load of this figure may have details after a comma.
    """
    for known in PUBLISHED:
        same = figure.model.startswith(known.model) and figure.measure == known.measure
        if same and (figure.load == known.load or figure.load.startswith(known.load + ",")):
            return known.text
    return ""


def row(figure: Figure) -> str:
    """Return a figure as a line of the table."""
    value = f"{figure.value:.0f}" if abs(figure.value) >= 100 else f"{figure.value:.3g}"
    line = f"{figure.model:<24} {figure.measure:<32} {figure.load:<42} {value:>9} {figure.unit:<12}"
    return f"{line} {beside(figure)}".rstrip()


class Report:
    """The results, in a folder that is created. Every figure is written to both files as soon as it is added.

    `dry` marks a dry run. `engine` has the fields of EngineSettings that apply to all figures. Raises ValueError if the
    folder has figures of another machine or of other settings, because both would be mixed.
    """

    def __init__(self, folder: Path, *, dry: bool, engine: dict[str, Any]) -> None:
        self.dry, self.engine = dry, engine
        self._headed = False
        self._json, self._text = folder / "gpu.json", folder / "gpu.txt"
        folder.mkdir(parents=True, exist_ok=True)
        self._document: dict[str, Any] = {"dry_run": dry, "engine": engine, "machine": machine() | accelerator()}
        self._document["sections"] = {}
        if self._json.is_file():
            before = json.loads(self._json.read_text(encoding="utf-8"))
            for name in ("dry_run", "engine", "gpu"):
                was, now = (d.get(name, d["machine"].get(name)) for d in (before, self._document))
                if was != now:
                    raise ValueError(f"{self._json} has other figures ({name}: {was}, not {now}): give another --out")
            self._document["sections"] = before["sections"]

    def measured(self, section: str) -> bool:
        """Return whether a section was measured completely, in this run or an earlier one."""
        found: bool = self._document["sections"].get(section, {}).get("status") == "measured"
        return found

    def begin(self, section: str) -> None:
        """Start a section, and drop its figures from an earlier run."""
        self._document["sections"][section] = {"status": "running", "date": time.strftime("%Y-%m-%d %H:%M:%S")}
        self._document["sections"][section]["figures"] = []
        if not self._headed:
            self._headed = True
            self.say(self._head())
        self.say(f"\n## {section}")
        self._write()

    def _head(self) -> str:
        machine = self._document["machine"]
        where = f"{machine['gpu'] or machine['cpu']}, " + ", ".join(f"{k} {v}" for k, v in machine["packages"].items())
        return f"# {where}{'; a dry run: its figures say nothing' if self.dry else ''}"

    def add(self, section: str, figure: Figure) -> None:
        """Add a figure to the section. A value that is not finite is written as null."""
        kept = asdict(figure) | {"value": figure.value if math.isfinite(figure.value) else None}
        if published := beside(figure):
            kept["beside"] = published
        self._document["sections"][section]["figures"].append(kept)
        self.say(row(figure))
        self._write()

    def note(self, section: str, text: str) -> None:
        """Add a remark of a section, such as the reason why it has no figures."""
        self._document["sections"][section].setdefault("notes", []).append(text)
        self.say(text)
        self._write()

    def end(self, section: str, status: Status, took_s: float, error: str = "") -> None:
        """End a section. `error` is the reason if it was not measured completely."""
        self._document["sections"][section] |= {"status": status, "took_s": round(took_s, 1)}
        if error:
            self._document["sections"][section]["error"] = error
        last = error.strip().splitlines()[-1] if error.strip() else ""
        self.say(f"-- {section}: {status} in {took_s:.1f} s{': ' if last else ''}{last}")
        self._write()

    def say(self, line: str) -> None:
        """Print a line, and append it to the table."""
        print(line, flush=True)
        with self._text.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _write(self) -> None:
        """Replace gpu.json atomically, so that it is readable even if the machine disappears."""
        new = self._json.with_suffix(".json.new")
        new.write_text(
            json.dumps(self._document, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
        )
        os.replace(new, self._json)


def accelerator() -> dict[str, Any]:
    """Return the GPU's name, memory and driver, without using the GPU. `gpu` is None if there is no GPU."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {"gpu": None, "cuda": torch.version.cuda}
    name, memory, driver = (part.strip() for part in found.splitlines()[0].split(","))
    return {"gpu": name, "gpu_memory": memory, "driver": driver, "cuda": torch.version.cuda}
