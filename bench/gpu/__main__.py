"""The command line of the suite: `bench/gpu.sh --help`."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
from pathlib import Path

import torch
from bench.common import RESULTS
from bench.gpu.report import Report
from bench.gpu.suite import SECTIONS, run

from antiphon.engine.api import EngineSettings
from antiphon.loading.loader import GPU_STEPS


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description="Measure antiphon on one GPU.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of gpu.json and gpu.txt")
    parser.add_argument("--only", default="", help="sections to measure, comma separated, even if they were measured")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all sections together")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny models on the CPU: the code runs, figures are void"
    )
    parser.add_argument(
        "--engine", type=_fields, default={}, metavar="NAME=VALUE,...", help="fields of EngineSettings for all engines"
    )
    parser.add_argument("--list", action="store_true", help="name the sections")
    args = parser.parse_args()
    if args.list:
        for name, section in SECTIONS.items():
            print(f"{name:<10} {section.help}")
        return 0
    names = args.only.split(",") if args.only else list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"there is no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("there is no CUDA device: measure on a GPU, or give --dry-run")
    try:
        report = Report(args.out, dry=args.dry_run, engine=({} if args.dry_run else GPU_STEPS) | args.engine)
    except ValueError as error:
        parser.error(str(error))
    # Handles SIGTERM, so that the current section and all of its processes end before this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not args.only:
        names = [name for name in names if not report.measured(name)]
    return 0 if run(names, report, minutes=args.minutes, sections=SECTIONS) else 1


def _fields(text: str) -> dict[str, int | str]:
    """Parse fields of EngineSettings: `kv_layout=paged,prefill_rows=512`.

    Raises ArgumentTypeError for unknown fields.
    """
    found: dict[str, int | str] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in {field.name for field in dataclasses.fields(EngineSettings)}:
            raise argparse.ArgumentTypeError(f"{name!r} is not a field of EngineSettings")
        found[name] = int(value) if value.isdigit() else value
    return found


if __name__ == "__main__":
    sys.exit(main())
