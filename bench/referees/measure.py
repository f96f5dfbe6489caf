"""`antiphon bench turns --referee NAME`: one referee over the servers of `--over`, one after the other.

All servers get the same recordings on the same day. The result has every line that was heard, and for each server that
could not be measured the reason.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.common import HERE, RESULTS, machine, save, show
from bench.house import git
from bench.referees import hotato, voicebench
from bench.referees.calls import Line, calls
from bench.referees.figures import Heard, figures, row
from bench.referees.servers import Target, Unavailable, measured_server

from antiphon.client.link import SessionEnded

REFEREES: dict[str, Callable[[Sequence[Line], Target, Path], list[Heard]]] = {
    "voicebench": voicebench.call,
    "hotato": hotato.call,
}


def referee(name: str, data: Path, over: Sequence[str], count: int, keep: Path | None = None) -> Path:
    """Hold `count` calls with each server, print a table, and write bench/results/referee-NAME.json. Return its path.

    Servers that are not named in `over` keep their last results. `keep`: a folder for the files of each call.
    """
    script = calls(data, count)
    facts = {
        "machine": machine(),
        "data": data.name,
        "commit": git(HERE.parent, "rev-parse", "--short", "HEAD").decode().strip(),
    }
    rows, path = dict[str, dict[str, str]](), HERE
    for server in over:
        # Calls that a server or a referee did not hold to their end are no measurement, but are in the result.
        load_before = os.getloadavg()[0]
        try:
            with measured_server(server) as target:
                found, failed = list[list[Heard]](), list[str]()
                for k, lines in enumerate(script):
                    try:
                        found.append(_held(name, lines, target, keep and keep / f"{server}-{k}"))
                    except (RuntimeError, subprocess.TimeoutExpired, SessionEnded) as error:
                        failed.append(str(error))
                if not found:
                    raise Unavailable(f"no call was held to its end: {failed[0]}")
        except Unavailable as reason:
            print(f"{server} cannot be measured here: {reason}")
            result: dict[str, Any] = {"cannot_run": str(reason)}
        else:
            result = figures([heard for one in found for heard in one])
            rows[server] = row(result) | {"failed calls": str(len(failed))}
            result["calls"] = [[asdict(heard) for heard in one] for one in found]
            result["failed_calls"] = failed
        loads = {"load_before": load_before, "load_after": os.getloadavg()[0], "niceness": os.nice(0)}
        path = save(f"referee-{name}", {server: facts | loads | result}, RESULTS)
    if rows:
        show(f"{name}, {count} calls: seconds; 95 % intervals in parentheses", rows)
    return path


def _held(name: str, lines: Sequence[Line], target: Target, keep: Path | None) -> list[Heard]:
    with tempfile.TemporaryDirectory(prefix="referee-") as folder:
        if keep:
            keep.mkdir(parents=True, exist_ok=True)
        return REFEREES[name](lines, target, keep or Path(folder))
