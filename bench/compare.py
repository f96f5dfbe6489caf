"""Runs short benchmarks of two revisions in turn, and prints how their figures compare.

    python -m bench.compare BASE [--head REV] [--only talk,asr,engine,tts,video] [--rounds N] [--data DIR]

The files of both revisions are extracted into temporary folders. Each runs its own `antiphon bench` and its own source
in this Python's environment; uncommitted changes are not measured. A benchmark alternates between base and head for
--rounds rounds, so that a slow drift of the machine affects both sides equally. A figure that is a list counts as its
median.

A row shows the median of each side over the rounds, the ratio head/base, and each side's minimum and maximum. `*` marks
a figure whose two ranges do not overlap. `worse` marks a regression, for which --fail sets the exit status to 3. Chance
alone marks one figure in ten with three rounds, and one in three with two, so a mark is only a reason to measure again
with more rounds. Before each run, the CPU share of other programs is printed, because figures of a busy machine are
meaningless. All results go to bench/results/compare.json.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from bench.common import HERE, RESULTS, machine, options, percentile, table
from bench.house import checkout, git

# The smallest language model of the registry, which `talk` and `engine` use on both sides.
LANGUAGE_MODEL = "smollm2-135m-instruct"
# Options that make each benchmark take between half a minute and a minute on two cores.
QUICK = {
    "talk": "--sections latency --conversations 1 --endpoints 500 --turns 6",
    "asr": "--sections latency --clips 3",
    "engine": f"--sections first,decode --trials 3 --language-model {LANGUAGE_MODEL}",
    "tts": "--sections first,clients --clients 1,32 --seconds 8 --trials 10",
    "video": "--sections intake",
}
TAKES_DATA = ("talk", "asr", "tts", "video")
# The recordings of the tests have no clips that this benchmark could use.
NEEDS_VIDEO = "video"
LONGEST_RUN_S = 600.0
OUTPUT_SHOWN = 2000
BUSY_OVER_S = 1.0


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two revisions and its results: for each figure, its value in each run that had it.

    `busy_percent` has, for each run, the share of all processors that other programs used in the second before it.
    """

    commit: str
    tree: Path
    values: dict[str, list[float]] = field(default_factory=dict)
    busy_percent: list[float] = field(default_factory=list)


def commit_of(revision: str) -> str:
    return git(HERE.parent, "rev-parse", "--short", "--verify", f"{revision}^{{commit}}").decode().strip()


def run(side: Side, name: str, data: Path) -> str | None:
    """Run one benchmark and add its figures to `side`. Returns the end of its output if it failed."""
    result = side.tree / "bench" / "results" / f"{name}.json"
    # Removes old results, since a benchmark keeps the sections that it does not measure.
    result.unlink(missing_ok=True)
    arguments = [*QUICK[name].split(), *(("--data", str(data)) if name in TAKES_DATA else ())]
    status, output = python(side.tree, "-m", "antiphon", "bench", name, *arguments)
    if status:
        return output[-OUTPUT_SHOWN:]
    for figure, value in figures(json.loads(result.read_text()), name):
        side.values.setdefault(figure, []).append(value)
    return None


def python(tree: Path, *arguments: str) -> tuple[int, str]:
    """Run this Python with the tree's source, and wait for all of its processes. Return its exit status and output."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree / "src"), "ANTIPHON_LANGUAGE_MODEL": LANGUAGE_MODEL},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LONGEST_RUN_S)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return 1, f"{output}\nstopped after {LONGEST_RUN_S:g} s"
    return process.returncode, output


def check_source(side: Side) -> None:
    """Exit if Python does not import this revision's source, because another revision would be measured."""
    status, output = python(side.tree, "-c", "import antiphon; print(antiphon.__file__)")
    if status or not Path(output.strip()).is_relative_to(side.tree):
        raise SystemExit(f"compare: {side.commit} does not run from its worktree: {output.strip()}")


def figures(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Return the numbers in a benchmark's JSON by their path. The machine's description is left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key != "machine":
                yield from figures(inner, f"{name} / {key}")
    elif isinstance(value, list):
        if value and all(is_number(one) for one in value):
            yield f"{name} (median)", percentile(value, 50)
    elif is_number(value):
        yield name, float(value)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# Endings of figure names that say whether more or less is better.
MORE = ("tokens_per_s", "streams", "answered", "sessions", "frames_per_s", "percent_ignored")
LESS = ("_s", "_ms", "_p50", "_p95", "_p99", "wer", "lost", "missed", "rss_mb", "failed")


def better_if(figure: str) -> str:
    """Return "more" or "less", whichever makes this figure better; "" if its name does not say."""
    name = figure.removesuffix(" (median)").rsplit(" / ", 1)[-1]
    return "more" if name.endswith(MORE) else "less" if name.endswith(LESS) else ""


def fell(figure: str, row: dict[str, Any]) -> bool:
    """Return whether every run of head is worse than every run of base."""
    better = better_if(figure)
    after, before = row["head"]["median"], row["base"]["median"]
    return bool(row["apart"] and ((better == "less" and after > before) or (better == "more" and after < before)))


def compared(base: Side, head: Side) -> dict[str, dict[str, Any]]:
    """Return a comparison of each figure that both sides have."""

    def summary(values: list[float]) -> dict[str, Any]:
        return {"median": percentile(values, 50), "min": min(values), "max": max(values), "values": values}

    rows: dict[str, dict[str, Any]] = {}
    for figure, values in base.values.items():
        if figure in head.values:
            before, after = summary(values), summary(head.values[figure])
            rows[figure] = {
                "base": before,
                "head": after,
                "ratio": after["median"] / before["median"] if before["median"] else None,
                "apart": min(len(before["values"]), len(after["values"])) > 1
                and (before["max"] < after["min"] or after["max"] < before["min"]),
            }
    return rows


def show(base: Side, head: Side, rows: dict[str, dict[str, Any]]) -> None:
    varied = {n: r for n, r in rows.items() if len({*r["base"]["values"], *r["head"]["values"]}) > 1}
    table(
        f"{base.commit} (base) and {head.commit} (head)",
        ("figure", "base", "head", "head/base", "base min-max", "head min-max", "apart"),
        [
            (
                name,
                f"{row['base']['median']:.4g}",
                f"{row['head']['median']:.4g}",
                "-" if row["ratio"] is None else f"{row['ratio']:.3f}",
                *(f"{row[side]['min']:.4g} - {row[side]['max']:.4g}" for side in ("base", "head")),
                "worse" if fell(name, row) else "*" if row["apart"] else "",
            )
            for name, row in varied.items()
        ],
    )
    print(f"\n{len(rows) - len(varied)} more figures had the same value in every run.")
    for side, other in ((base, head), (head, base)):
        if only := sorted(side.values.keys() - other.values.keys()):
            print(f"Only {side.commit} has: {', '.join(only)}")


def measure(sides: Sequence[Side], names: Sequence[str], rounds: int, data: Path) -> list[str]:
    """Run the benchmarks in turn. A failed one is not run again. Return the failed ones."""
    failed = []
    for name in names:
        turns = [side for _ in range(rounds) for side in sides]
        for number, side in enumerate(turns, 1):
            busy = psutil.cpu_percent(interval=BUSY_OVER_S)
            began = time.perf_counter()
            error = run(side, name, data)
            took = time.perf_counter() - began
            print(
                f"{name} {number}/{len(turns)}: {side.commit}, {took:.0f} s, processors {busy:.0f} % busy before it",
                flush=True,
            )
            side.busy_percent.append(busy)
            if error is not None:
                print(f"{name} failed at {side.commit}:\n{error}", file=sys.stderr)
                failed.append(name)
                break
    return failed


def has_video(data: Path) -> bool:
    rows = map(json.loads, (data / "manifest.jsonl").read_text(encoding="utf-8").splitlines())
    return any(row["kind"] == "video" for row in rows)


def main() -> int:
    parser = options("python -m bench.compare", __doc__)
    parser.add_argument("base", help="the revision to compare with")
    parser.add_argument("--head", default="HEAD", help="the revision to judge [%(default)s]")
    parser.add_argument("--only", default=",".join(QUICK), help="benchmarks to run [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each benchmark at each revision [%(default)s]")
    recordings = HERE.parent / "tests" / "data"
    parser.add_argument("--data", type=Path, default=recordings, help="a folder with manifest.jsonl")
    parser.add_argument("--fail", action="store_true", help="exit with 3 if a figure regressed by more than noise")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := set(names) - QUICK.keys():
        parser.error(f"--only: no benchmark {', '.join(sorted(unknown))}; there are {', '.join(QUICK)}")
    if args.rounds < 1:
        parser.error("--rounds: 1 or more")
    data = args.data.resolve()
    if NEEDS_VIDEO in names and not has_video(data):
        print(f"{NEEDS_VIDEO} skipped: {data} has no clips; pass a folder with clips as --data", file=sys.stderr)
        names.remove(NEEDS_VIDEO)
    # Handles SIGTERM, so that the folders are removed and running processes are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    commits = [commit_of(revision) for revision in (args.base, args.head)]
    with checkout(HERE.parent, commits[0]) as before, checkout(HERE.parent, commits[1]) as after:
        base, head = Side(commits[0], before), Side(commits[1], after)
        for side in (base, head):
            check_source(side)
        failed = measure((base, head), names, args.rounds, data)
    rows = compared(base, head)
    show(base, head, rows)
    document = {
        "machine": machine(),
        "rounds": args.rounds,
        "base": {"commit": base.commit, "busy_percent": base.busy_percent},
        "head": {"commit": head.commit, "busy_percent": head.busy_percent},
        "figures": rows,
    }
    path = RESULTS / "compare.json"
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(f"\nwritten: {path}")
    worse = [figure for figure, row in rows.items() if fell(figure, row)]
    if worse:
        print("\nworse: " + ", ".join(worse))
    return 1 if failed else 3 if worse and args.fail else 0


if __name__ == "__main__":
    raise SystemExit(main())
