"""Shared fixtures: the recordings, the loaded light and default models, and real server processes."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from antiphon.audio import Pcm
from antiphon.audio.containers import decode_all
from tests.forking import ForkedProcess, forker

# Hypothesis runs the same examples on every machine, without deadlines.
hypothesis_settings.register_profile(
    "antiphon", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("antiphon")

# With this, the tests' servers load the same models on every machine.
os.environ.setdefault("ANTIPHON_PROFILE", "default")
# With this, the tests' servers have the same voices on every machine.
os.environ.setdefault("ANTIPHON_FALLBACK_VOICE", "off")
# No limit by headroom, because tests open sessions in quick succession on busy machines. Tests of headroom turn it on.
os.environ.setdefault("ANTIPHON_HEADROOM", "false")
# Each worker's servers compute with one thread, because two workers with a thread for each core slow each other down.
os.environ.setdefault("ANTIPHON_ENGINE_THREADS", "1")

SMALL, VOICE = "smollm2-135m-instruct", "hibari-heart"
DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class Recording:
    # Its name in the manifest.
    id: str
    # The audio file.
    path: Path
    # The spoken text.
    text: str
    # Its length in seconds.
    seconds: float
    # The manifest's kind of recording.
    kind: str
    # ISO 639-1.
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
    """A running process of `antiphon serve`."""

    url: str
    popen: ForkedProcess
    log: Path
    # True after the first SIGTERM. A second one would end the drain, or a process that has removed its handler.
    is_leaving: bool = False

    @property
    def ws(self) -> str:
        return self.url.replace("http", "ws", 1)

    def terminate(self) -> None:
        self.is_leaving = True
        self.popen.send_signal(signal.SIGTERM)


Serve = Callable[..., Process]


class Servers:
    """Starts and stops server processes.

    Each server takes up to 1.4 GB, so most servers stop at the end of the module that started them. Servers that
    several modules share (`keep`) stop at the end of all tests.
    """

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._paths = tmp_path_factory
        self._started: list[Process] = []
        self._kept: list[Process] = []

    def start(self, *flags: str, clean: bool = True, keep: bool = False) -> Process:
        """Start a server with these flags and wait until it is ready.

        With `clean`, `stop` fails if the server has logged an error or a traceback.
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
        """Stop all servers, then check each, so that a failed check leaves no server running."""
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
    """Return the starter of server processes, which all tests share."""
    servers = Servers(tmp_path_factory)
    yield servers
    servers.stop(kept=True)


@pytest.fixture(scope="module", autouse=True)
def stop_processes(started_processes: Servers) -> Iterator[None]:
    """Stop the servers that a module's tests started, after the module's last test."""
    yield
    started_processes.stop(kept=False)


@pytest.fixture(scope="session")
def serve(started_processes: Servers) -> Serve:
    """Return a function that starts a server with any flags; see `Servers.start`."""
    return started_processes.start


@pytest.fixture(scope="session")
def talker(serve: Serve) -> Process:
    """Return a server with the small language model. In `make engines`, vLLM computes that model."""
    if url := os.environ.get("ANTIPHON_TEST_VLLM"):
        return serve("--engine", f"vllm:{url}", "--language-model", os.environ["ANTIPHON_TEST_VLLM_FOLDER"], keep=True)
    return serve("--language-model", SMALL, keep=True)


@pytest.fixture(scope="session")
def partner(serve: Serve) -> Process:
    """Return a server with the small language model and the speech synthesizer."""
    return serve("--language-model", SMALL, "--synthesizer", VOICE, keep=True)


@pytest.fixture(scope="session")
def speaker(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Process:
    """Return a server with the speech synthesizer. Its timeouts are short, because tests wait for them."""
    flags = ("--config-timeout-s", "2", "--idle-timeout-s", "2", "--sessions-per-key", "250")
    return serve("--synthesizer", VOICE, *flags, keep=True)


@pytest.fixture(scope="session")
def server(serve: Serve) -> Process:
    """Return the default server, which most tests use."""
    return serve(keep=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start a server, which `make quick` excludes.

    Modules with such tests run first, then modules with slow tests. Short modules come last, so that both workers
    finish at about the same time.
    """
    for item in items:
        if "serve" in getattr(item, "fixturenames", ()):
            item.add_marker("server")
    kinds = ("server", "slow")
    long = {kind: {item.path for item in items if item.get_closest_marker(kind)} for kind in kinds}
    items.sort(key=lambda item: [item.path not in long[kind] for kind in kinds])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the test modules without garbage collection, and exclude them from it, because they stay to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
