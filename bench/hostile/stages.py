"""The setup of the attacks that need more than a plain server: flags, a door or an extra server.

An attack that needs an extra server, such as a hostile model server, has a row in STAGES with a `beside`. This starts
the extra server, and has antiphon's flags that refer to it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, Literal
from urllib.parse import urlsplit

import psutil
from bench.common import HERE, beside, server
from bench.hostile import model_server
from bench.hostile.doors import INTERNAL_KEY

# What the bystander requests: an answer in a conversation, an answer in a chat, a spoken sentence, or a sentence in a
# cloned voice.
Asks = Literal["conversation", "chat", "speech", "clone"]


@dataclass(frozen=True, slots=True)
class Beside:
    """An extra server: its URL, and antiphon's flags that refer to it."""

    url: str = ""
    flags: tuple[str, ...] = ()


@contextmanager
def nothing(quick: bool) -> Iterator[Beside]:
    yield Beside()


@contextmanager
def site(quick: bool) -> Iterator[Beside]:
    """Run a site of audio files from which antiphon may fetch."""
    with beside("bench.hostile.site") as (url, _):
        yield Beside(url, ("--fetch-from", urlsplit(url).netloc))


@contextmanager
def bad_model(name: str, quick: bool) -> Iterator[Beside]:
    """Run a model server with the answers of one class of bench.hostile.model_server."""
    with beside("bench.hostile.model_server", name, *(["--quick"] if quick else [])) as (url, _):
        yield Beside(url, ("--language-model", f"{url}#bad"))


@contextmanager
def attacker(
    name: str, url: str, key: str, beside: str = "", *, quick: bool = False, log: IO[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Run an attack during the block. Afterwards, the dict that was yielded has its results."""
    command = [sys.executable, "-m", "bench.hostile", name, url, key, "--beside", beside]
    command += ["--quick"] if quick else []
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=HERE.parent
    )
    found: dict[str, Any] = {}
    assert process.stdout
    process.stdout.readline()
    try:
        yield found
    finally:
        out, _ = process.communicate()
        found |= json.loads(out) if out.strip() else {"tried": 0, "outcomes": {"the attacker failed": 1}}


@dataclass(frozen=True, slots=True)
class Stage:
    """The setup of one class of attack."""

    # What the bystander requests.
    asks: Asks = "conversation"
    # Extra flags of antiphon.
    flags: tuple[str, ...] = ()
    # The module that is started instead of `antiphon`.
    module: str = "antiphon"
    # True if the attack is on a door. The bystander connects through the door, too.
    has_door: bool = False
    # True if a second host with the same store runs.
    has_second_host: bool = False
    # Starts the extra server. Its argument is `quick`.
    beside: Callable[[bool], AbstractContextManager[Beside]] = nothing


PLAIN = Stage()
STAGES = {
    "idle": Stage(flags=("--sessions-per-key", "1000", "--max-sessions", "1001")),
    "schemas": Stage("chat"),
    "storms": Stage(has_second_host=True),
    "door-paths": Stage(has_door=True),
    "door-bodies": Stage(has_door=True),
    **{f"model-{name}": Stage("speech", beside=partial(bad_model, name)) for name in model_server.CLASSES},
    "fetches": Stage("clone", module="bench.hostile.cloning", beside=site),
}


@dataclass(frozen=True, slots=True)
class Staged:
    """A running stage: the address to attack, an extra address, and antiphon's processes without their children."""

    url: str
    beside: str
    processes: tuple[psutil.Process, ...]

    @property
    def ws(self) -> str:
        return self.url.replace("http", "ws", 1)

    def rss_mb(self) -> float:
        """Return the memory of antiphon's processes and their children, in MB."""
        return sum(process.memory_info().rss for process in self._all()) / 1e6

    def num_fds(self) -> int:
        return sum(process.num_fds() for process in self._all())

    def _all(self) -> list[psutil.Process]:
        living = [process for process in self.processes if process.is_running()]
        return [each for process in living for each in (process, *process.children(recursive=True))]

    def kill(self) -> None:
        """End all processes at once."""
        for process in self._all():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    @property
    def lives(self) -> bool:
        return all(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in self.processes)


@contextmanager
def staged(name: str, flags: tuple[str, ...], log: IO[str], *, quick: bool = False) -> Iterator[Staged]:
    """Set up the stage of a class during the block. Every host gets these flags. `quick` selects smaller numbers."""
    stage = STAGES.get(name, PLAIN)
    with ExitStack() as stack:
        other = stack.enter_context(stage.beside(quick))
        of_host = [*flags, *stage.flags, *other.flags]
        if stage.has_door or stage.has_second_host:
            of_host += ["--state", stack.enter_context(tempfile.TemporaryDirectory())]
        if stage.has_door:
            os.environ["ANTIPHON_INTERNAL_KEY"] = INTERNAL_KEY
            stack.callback(os.environ.pop, "ANTIPHON_INTERNAL_KEY")
        started = [
            stack.enter_context(server(*of_host, module=stage.module, log=log))
            for _ in range(1 + stage.has_second_host)
        ]
        attacked, url = started[0].url, other.url or started[-1].url
        if stage.has_door:
            started.append(stack.enter_context(server("--role", "door", "--behind", attacked, log=log)))
            attacked = started[-1].url
        found = Staged(attacked, url, tuple(each.process for each in started))
        try:
            yield found
        finally:
            # Kills the processes, because the attacker's unfinished work would take too long.
            found.kill()
