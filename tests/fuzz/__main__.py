"""A long fuzzing campaign: python -m tests.fuzz [--inputs 1000000] [--minutes 60] [--seed 0] [--only NAME,NAME]

Prints the number of inputs, the number of inputs that passed, and the inputs per second. Inputs that fail are written
to tests/fuzz/corpus, and the exit status is then 1. tests/fuzz/test_fuzz.py runs all inputs of the corpus again.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.fuzz.campaign import run, written
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=60.0, help="it ends earlier, with fewer inputs, after these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(TARGETS), help="targets, by name; all of them otherwise")
    args = parser.parse_args()
    only = args.only.split(",")
    if unknown := set(only) - TARGETS.keys():
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    begun = time.monotonic()
    report = run(args.inputs, args.seed, until=lambda: time.monotonic() > begun + args.minutes * 60, only=only)
    took_s = time.monotonic() - begun
    for name, tried in report.tried.items():
        print(f"{name:34} {tried:8} tried, {tried - len(report.of(name)):8} held")
    total = sum(report.tried.values())
    print(f"{total} inputs in {took_s:.0f} s, {total / took_s:.0f} a second; {len(report.finds)} did not hold")
    for find in report.finds:
        print(f"{written(find)}: {find.target}: {find.failure}")
    return 1 if report.finds else 0


if __name__ == "__main__":
    sys.exit(main())
