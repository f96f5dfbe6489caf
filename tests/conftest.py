"""Shared fixtures: the recordings, the loaded light and default models, and real server processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from antiphon.audio import Pcm
from antiphon.audio.containers import decode_all

# The same examples on every machine, however slow it is.
hypothesis_settings.register_profile(
    "antiphon", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("antiphon")

SMALL, VOICE = "smollm2-135m-instruct", "hibari-heart"
DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class Recording:
    id: str
    path: Path
    text: str
    seconds: float
    kind: str
    language: str

    @property
    def pcm(self) -> Pcm:
        return decode_all(str(self.path))


@pytest.fixture(scope="session")
def recordings() -> dict[str, Recording]:
    rows = map(json.loads, (DATA / "manifest.jsonl").read_text(encoding="utf-8").splitlines())
    return {
        r["id"]: Recording(
            r["id"], DATA / r["path"], r.get("text") or "", r["seconds"], r["kind"], r.get("language") or ""
        )
        for r in rows
    }


@dataclass(slots=True)
class Process:
    """A real `antiphon serve`."""

    url: str
    popen: subprocess.Popen[str]
    log: Path

    @property
    def ws(self) -> str:
        return self.url.replace("http", "ws", 1)

    def terminate(self) -> None:
        self.popen.send_signal(signal.SIGTERM)


Serve = Callable[..., Process]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Start servers with any flags; each is stopped at the end, and must have logged no error or traceback."""
    started: list[Process] = []

    def start(*flags: str, clean: bool = True) -> Process:
        log = tmp_path_factory.mktemp("serve") / "log.txt"
        if "--language-model" not in flags:
            flags = (*flags, "--language-model", "none")
        if "--synthesizer" not in flags:
            flags = (*flags, "--synthesizer", "none")
        with log.open("w") as stderr:
            popen = subprocess.Popen(
                [sys.executable, "-m", "antiphon", "serve", "--port", "0", *flags],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
            )
        assert popen.stdout is not None
        for line in popen.stdout:
            if found := re.search(r"ready at (\S+)", line):
                process = Process(found[1], popen, log)
                if clean:
                    started.append(process)
                return process
        raise AssertionError(f"the server did not start: {log.read_text()}")

    yield start
    # All are stopped before any is judged: one that failed must not leave the others running.
    codes = []
    for process in started:
        if process.popen.poll() is None:
            process.terminate()
    for process in started:
        with process.popen:
            codes.append(process.popen.wait(60))
    for process in started:
        text = process.log.read_text()
        assert "Traceback" not in text, text
        assert " ERROR " not in text, text
    assert codes == [0] * len(codes)


@pytest.fixture(scope="session")
def talker(serve: Serve) -> Process:
    """A server with the small language model."""
    return serve("--language-model", SMALL)


@pytest.fixture(scope="session")
def speaker(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Process:
    """A server with the speech synthesizer. It is patient for a second: pauses are tested."""
    return serve(
        "--synthesizer", VOICE, "--config-timeout-s", "2", "--idle-timeout-s", "2", "--sessions-per-key", "250"
    )


@pytest.fixture(scope="session")
def server(serve: Serve) -> Process:
    """The default server most tests talk to."""
    return serve()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start a server: `make quick` leaves them out."""
    for item in items:
        if "serve" in getattr(item, "fixturenames", ()):
            item.add_marker("server")
