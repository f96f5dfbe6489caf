"""The figures of every release, by machine: `bench/history/MACHINE.json`.

    python bench/history.py add [VERSION]   # what bench/results holds now, under a version (default: the package's)
    python bench/history.py show            # what fell since the newest version of this machine

A machine is its CPU and its number of cores. Of a result only numbers are kept whose name says which way is better. One
has fallen where it is worse by more than NOISE; a figure of one run is no proof, so `make compare` measures what is
listed again, in turn. Exits with 3 where something fell.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import HERE, RESULTS, table
from compare import better_if, figures

HISTORY = HERE / "history"
# Two runs of a benchmark on a shared machine differ by so much.
NOISE = 0.2


def measured(folder: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """The figures of each result whose machine is known, by machine and then by name."""
    for file in sorted(folder.glob("*.json")):
        document: dict[str, Any] = json.loads(file.read_text())
        machine = document.get("machine")
        if isinstance(machine, dict) and machine.get("cpu"):
            named = {n: v for n, v in figures(document, file.stem) if better_if(n)}
            if named:
                yield slug(machine), named


def slug(machine: dict[str, Any]) -> str:
    """A file's name for a machine."""
    return re.sub(r"[^a-z0-9]+", "-", f"{machine['cpu']} {machine.get('cores', '')} cores".lower()).strip("-")


def add(folder: Path, history: Path, name: str) -> list[Path]:
    """Put the results of a folder into the history under a version, and return the files that were written."""
    history.mkdir(exist_ok=True)
    written = {}
    for machine, named in measured(folder):
        file = history / f"{machine}.json"
        known = written.get(file) or (json.loads(file.read_text()) if file.exists() else {})
        known.setdefault(name, {}).update(named)
        written[file] = known
    for file, known in written.items():
        file.write_text(json.dumps(known, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    return list(written)


def fallen(folder: Path, history: Path) -> list[tuple[str, str, float, float]]:
    """What is worse than in the newest version of its machine: (figure, version, then, now)."""
    out = []
    for machine, named in measured(folder):
        file = history / f"{machine}.json"
        known: dict[str, dict[str, float]] = json.loads(file.read_text()) if file.exists() else {}
        for figure, now in named.items():
            versions = [v for v in sorted(known, key=ordered) if figure in known[v]]
            if not versions:
                continue
            then = known[versions[-1]][figure]
            worse = now - then if better_if(figure) == "less" else then - now
            if worse > NOISE * abs(then):
                out.append((figure, versions[-1], then, now))
    return out


def ordered(name: str) -> tuple[int, ...]:
    """Versions in their order; what is no number counts as 0."""
    return tuple(int(part) if part.isdigit() else 0 for part in re.split(r"[.+-]", name))


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of every release, by machine.")
    parser.add_argument("command", choices=("add", "show"))
    parser.add_argument("version", nargs="?", default=version("antiphon"))
    args = parser.parse_args()
    if args.command == "add":
        print("\n".join(f"written: {path}" for path in add(RESULTS, HISTORY, args.version)))
        return 0
    found = fallen(RESULTS, HISTORY)
    rows = [(figure, before, f"{then:.4g}", f"{now:.4g}", f"{now / then:.2f}") for figure, before, then, now in found]
    table("worse than before, by more than noise", ("figure", "in", "then", "now", "ratio"), rows)
    return 3 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
