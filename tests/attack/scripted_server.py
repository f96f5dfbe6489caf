"""A process of `antiphon serve` with scripted models: python -m tests.attack.scripted_server LOADS [FLAG ...].

The `prompt` of a file decides what happens. "wait": the file is transcribed after the process gets SIGUSR1. "hang": it
occupies a lane's worker forever. "die": it ends the worker. With LOADS "slowly", the models never finish loading.
ANTIPHON_TEST_DESCRIPTORS is the maximum number of open files of the process.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from antiphon.audio import Pcm
from antiphon.cli.main import main
from antiphon.contracts import FileInfo, FileOptions, TranscriptSegment
from antiphon.engine.lane import Lane
from antiphon.loading.loaded import LoadedModels
from antiphon.server import run
from tests.forking import ForkedProcess, forker, leave
from tests.scripted import ScriptedDetector, ScriptedTranscriber
from tests.server.scripted import Echo
from tests.store.servers import free_port

LIMIT_S = 30


def segment(text: str) -> TranscriptSegment:
    return TranscriptSegment(0, 0, 0.0, 1.0, text, (1,), 0.0, 0.0, 1.0, 0.0)


class PromptedTranscriber(ScriptedTranscriber):
    def __init__(self) -> None:
        super().__init__()
        self.lane: Lane[str, str] = Lane("files", self._work)

    async def transcribe(
        self, slabs: AsyncIterable[Pcm], options: FileOptions
    ) -> AsyncIterator[FileInfo | TranscriptSegment]:
        yield FileInfo("en", 1.0)
        yield segment(" Begun.")
        if options.prompt == "wait":
            released, loop = asyncio.Event(), asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGUSR1, released.set)
            await released.wait()
        else:
            await self.lane.run(options.prompt)
        yield segment(" Done.")

    def _work(self, prompts: Sequence[str]) -> Sequence[str]:
        if "hang" in prompts:
            time.sleep(3600)
        if "die" in prompts:
            raise SystemExit("out of luck")
        return prompts


def load(*_: Any) -> LoadedModels:
    if sys.argv[1] == "slowly":
        threading.Event().wait()
    ears = PromptedTranscriber()
    return LoadedModels(ears, ScriptedDetector(), None, None, None, None, Echo(), None, ("scripted",), (ears.lane,))


@dataclass(slots=True)
class ScriptedServer:
    """A process of this module. `log` has its standard error."""

    url: str
    popen: ForkedProcess
    log: Path

    def ready(self) -> dict[str, Any]:
        """Return the body of /ready."""
        body: dict[str, Any] = httpx.get(f"{self.url}/ready", timeout=LIMIT_S).json()
        return body

    def until(self, line: str) -> None:
        """Wait until /metrics has this line."""
        end_s = time.monotonic() + LIMIT_S
        while line not in httpx.get(f"{self.url}/metrics", timeout=LIMIT_S).text.splitlines():
            assert self.popen.poll() is None
            assert time.monotonic() < end_s, f"no line {line!r}"

    def until_ready(self, name: str, value: Any) -> None:
        """Wait until the body of /ready has this value."""
        end_s = time.monotonic() + LIMIT_S
        while (body := self.ready())[name] != value:
            assert time.monotonic() < end_s, f"{name} is {body[name]!r}, not {value!r}"

    def exit_code(self) -> int:
        """Wait for the end of the process, and check that its log has no traceback."""
        code = self.popen.wait(LIMIT_S)
        assert "Traceback" not in self.log.read_text(), self.log.read_text()
        assert " ERROR " not in self.log.read_text(), self.log.read_text()
        return code


@contextmanager
def scripted_server(folder: Path, *flags: str, loads: str = "at once", **env: str) -> Iterator[ScriptedServer]:
    """Start a server with these additional environment variables.

    Wait until it is ready or, with "slowly", until its socket is open.
    """
    port, log_path = free_port(), folder / "log.txt"
    command = ["tests.attack.scripted_server", loads, "serve", "--no-pull", "--port", str(port), *flags]
    with log_path.open("w") as log:
        process = forker().start(command, log, os.environ | env)
    server = ScriptedServer(f"http://127.0.0.1:{port}", process, log_path)
    status = "loading" if loads == "slowly" else "ready"
    try:
        while True:
            assert process.poll() is None, server.log.read_text()
            try:
                if server.ready()["status"] == status:
                    break
            except httpx.TransportError:
                time.sleep(0.01)
        yield server
    finally:
        with process:
            process.kill()


if __name__ == "__main__":
    if number := int(os.environ.get("ANTIPHON_TEST_DESCRIPTORS", 0)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))
    run.load = load
    # The signal would have no effect if no file waited for it yet.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    leave(main(sys.argv[2:]))
