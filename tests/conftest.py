"""Shared fixtures: the recordings, the loaded light and default models, and real server processes."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from antiphon.audio import Pcm
from antiphon.audio.containers import decode_all
from tests.forking import ForkedProcess, forker

# The same examples on every machine, however slow it is.
hypothesis_settings.register_profile(
    "antiphon", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("antiphon")

# Servers of tests have the same models on every machine.
os.environ.setdefault("ANTIPHON_PROFILE", "default")
# And the same voices.
os.environ.setdefault("ANTIPHON_FALLBACK_VOICE", "off")
# Tests begin sessions as fast as they can, on machines with more to do; those about headroom turn it on.
os.environ.setdefault("ANTIPHON_HEADROOM", "false")

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
    popen: ForkedProcess
    log: Path
    # A second SIGTERM ends a drain, or a process that has given up its handler already.
    is_leaving: bool = False

    @property
    def ws(self) -> str:
        return self.url.replace("http", "ws", 1)

    def terminate(self) -> None:
        self.is_leaving = True
        self.popen.send_signal(signal.SIGTERM)


Serve = Callable[..., Process]


class Servers:
    """Starts server processes and stops them: most when the module is over that started them, since each takes up to
    1.4 GB, those of several modules (`keep`) when all tests are."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._paths = tmp_path_factory
        self._started: list[Process] = []
        self._kept: list[Process] = []

    def start(self, *flags: str, clean: bool = True, keep: bool = False) -> Process:
        """Start a server with these flags and wait until it is ready. `clean`: it is stopped by this, and must have
        logged no error or traceback.
        """
        log = self._paths.mktemp("serve") / "log.txt"
        if "--language-model" not in flags:
            flags = (*flags, "--language-model", "none")
        if "--synthesizer" not in flags:
            flags = (*flags, "--synthesizer", "none")
        with log.open("w") as stderr:
            popen = forker().start(["antiphon", "serve", "--port", "0", *flags], stderr, dict(os.environ))
        for line in popen.stdout:
            if found := re.search(r"ready at (\S+)", line):
                process = Process(found[1], popen, log)
                if clean:
                    (self._kept if keep else self._started).append(process)
                return process
        raise AssertionError(f"the server did not start: {log.read_text()}")

    def stop(self, *, kept: bool) -> None:
        """Stop the servers, all before any is judged: one that failed must not leave the others running."""
        processes = [*self._started, *(self._kept if kept else ())]
        self._started.clear()
        for process in processes:
            if process.popen.poll() is None and not process.is_leaving:
                process.terminate()
        codes = []
        for process in processes:
            with process.popen:
                codes.append(process.popen.wait(60))
        for process in processes:
            text = process.log.read_text()
            assert "Traceback" not in text, text
            assert " ERROR " not in text, text
        assert codes == [0] * len(codes)


@pytest.fixture(scope="session")
def started_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The server processes of all tests."""
    servers = Servers(tmp_path_factory)
    yield servers
    servers.stop(kept=True)


@pytest.fixture(scope="module", autouse=True)
def stop_processes(started_processes: Servers) -> Iterator[None]:
    """Stop the servers that a module's tests have started when the last of them is over."""
    yield
    started_processes.stop(kept=False)


@pytest.fixture(scope="session")
def serve(started_processes: Servers) -> Serve:
    """Start servers with any flags, as `Servers.start` does."""
    return started_processes.start


@pytest.fixture(scope="session")
def talker(serve: Serve) -> Process:
    """A server with the small language model; `make engines` has a vLLM compute it."""
    if url := os.environ.get("ANTIPHON_TEST_VLLM"):
        return serve("--engine", f"vllm:{url}", "--language-model", os.environ["ANTIPHON_TEST_VLLM_FOLDER"], keep=True)
    return serve("--language-model", SMALL, keep=True)


@pytest.fixture(scope="session")
def speaker(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Process:
    """A server with the speech synthesizer. It is patient for a second: pauses are tested."""
    flags = ("--config-timeout-s", "2", "--idle-timeout-s", "2", "--sessions-per-key", "250")
    return serve("--synthesizer", VOICE, *flags, keep=True)


@pytest.fixture(scope="session")
def server(serve: Serve) -> Process:
    """The default server most tests talk to."""
    return serve(keep=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start a server: `make quick` leaves them out.

    Their modules come first, so that at the end both workers have short ones to do.
    """
    for item in items:
        if "serve" in getattr(item, "fixturenames", ()):
            item.add_marker("server")
    long = {item.path for item in items if item.get_closest_marker("server")}
    items.sort(key=lambda item: item.path not in long)
