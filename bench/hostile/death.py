"""What clients are told of a model whose thread ends or hangs, and how soon: for `antiphon bench attack`."""

from __future__ import annotations

import http.client
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import httpx
from bench.hostile import doomed
from bench.hostile.client import SERVED, named

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
STALL_S = 2.0
ASK_EVERY_S = 0.005
# A client that is told nothing by then is told nothing.
PATIENCE_S = 15.0
# Each model, and the name of its lane or thread.
MODELS = {"transcriber": "transcriber", "language": "engine", "synthesizer": "synthesizer"}
WAYS = ("end", "hang")


def ask(url: str, model: str) -> str:
    """Have one model compute something, and return the answer's name; "no answer" after PATIENCE_S."""
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        try:
            match model:
                case "transcriber":
                    manifest = (DATA / "manifest.jsonl").read_text().splitlines()
                    data = (DATA / json.loads(manifest[0])["path"]).read_bytes()
                    form = {"data": {"model": "default"}, "files": {"file": ("a", data)}}
                    answer = client.post("/v1/audio/transcriptions", **form)
                case "language":
                    messages = [{"role": "user", "content": "Hi."}]
                    body: dict[str, Any] = {"model": "default", "max_tokens": 2, "messages": messages}
                    answer = client.post("/v1/chat/completions", json=body)
                case _:
                    answer = client.post("/v1/audio/speech", json={"input": "Hi there.", "voice": "alloy"})
        except httpx.HTTPError as error:
            return f"no answer ({type(error).__name__})"
    return named(answer)


class Readiness:
    """Asks /ready in a thread, and keeps each change of its status with its time."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self.changes: list[tuple[float, int]] = []

    def __enter__(self) -> Readiness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._ended.wait(ASK_EVERY_S):
            connection = http.client.HTTPConnection(str(self._address.hostname), self._address.port, timeout=5)
            try:
                connection.request("GET", "/ready", headers={"Connection": "close"})
                status = connection.getresponse().status
            except (OSError, http.client.HTTPException):
                status = 0
            finally:
                connection.close()
            if not self.changes or self.changes[-1][1] != status:
                self.changes.append((time.monotonic(), status))

    def first(self, status: int, since_s: float) -> float | None:
        """Seconds from `since_s` until /ready had this status; None where it never had."""
        return next((at - since_s for at, found in self.changes if found == status and at >= since_s), None)


def one_death(model: str, way: str, flags: tuple[str, ...], log: IO[str]) -> dict[str, Any]:
    """Kill one model of a fresh server while it is asked, and note when a client and /ready say so."""
    # Imported here: it is found beside bench/, by the same name as every benchmark finds it.
    from common import server

    with tempfile.TemporaryDirectory() as folder:
        deaths = Path(folder) / "deaths"
        os.environ |= {doomed.DOOM: way, doomed.DOOMED: MODELS[model], doomed.DEATHS: str(deaths)}
        stall_s = STALL_S if way == "hang" else 60.0
        with server(*flags, "--stall-s", str(stall_s), module="bench.hostile.doomed", log=log) as srv:
            ask(srv.url, model)
            with Readiness(srv.url) as readiness:
                srv.process.send_signal(signal.SIGUSR1)
                answer = ask(srv.url, model)
                answered_s = time.monotonic()
                time.sleep(1.5)
                again = ask(srv.url, model)
            lines = deaths.read_text().split() if deaths.exists() else []
            # What hangs does not end with SIGTERM within the time that the benchmark has.
            srv.process.kill()
        died_s = float(lines[1]) if lines else None
        return {
            "died": lines[0] if lines else None,
            "answer": answer,
            "answer_s": answered_s - died_s if died_s else None,
            "ready_503_s": readiness.first(503, died_s) if died_s else None,
            "ready_200_s": readiness.first(200, died_s + 1e-9) if died_s and readiness.first(503, died_s) else None,
            "afterwards": again,
        }


def measure(times: int, flags: tuple[str, ...], log: IO[str]) -> dict[str, Any]:
    """Every model, each way, so many times. Prints a table; medians of the seconds."""
    from common import table

    found: dict[str, Any] = {}
    for way in WAYS:
        for model in MODELS:
            trials = [one_death(model, way, flags, log) for _ in range(times)]
            row: dict[str, Any] = {
                "trials": times,
                "answers": sorted({trial["answer"] for trial in trials}),
                "afterwards": sorted({trial["afterwards"] for trial in trials}),
                "told": sum(not trial["answer"].startswith(("no answer", SERVED)) for trial in trials),
            }
            for key in ("answer_s", "ready_503_s", "ready_200_s"):
                seconds = [trial[key] for trial in trials if trial[key] is not None]
                row[key] = statistics.median(seconds) if seconds else None
            found[f"{model}, {way}"] = row
    table(
        f"models that die; one that hangs is found after {STALL_S:g} s",
        (
            "model, way",
            "trials",
            "told",
            "s to the error",
            "s to /ready 503",
            "s to /ready 200",
            "answer",
            "afterwards",
        ),
        [
            (
                name,
                r["trials"],
                r["told"],
                *("-" if r[k] is None else r[k] for k in ("answer_s", "ready_503_s", "ready_200_s")),
                ", ".join(r["answers"]),
                ", ".join(r["afterwards"]),
            )
            for name, r in found.items()
        ],
    )
    return found
