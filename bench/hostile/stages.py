"""The setup for classes of attack that need more than a plain server: flags, a door, an extra server.

A class that needs an extra server, such as a hostile model server, is a row of STAGES with a `beside`. That starts the
server, and has the flags that refer to it.
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

# Requests of the bystander: an answer in a conversation, an answer in a chat, a sentence, or a sentence in a cloned
# voice.
Asks = Literal["conversation", "chat", "speech", "clone"]


@dataclass(frozen=True, slots=True)
class Beside:
    """An extra server: its URL, and the flags of antiphon that refer to it."""

    url: str = ""
    flags: tuple[str, ...] = ()


@contextmanager
def nothing(quick: bool) -> Iterator[Beside]:
    yield Beside()


@contextmanager
def site(quick: bool) -> Iterator[Beside]:
    """Run a site of audio files from which the server may fetch."""
    with beside("bench.hostile.site") as (url, _):
        yield Beside(url, ("--fetch-from", urlsplit(url).netloc))


@contextmanager
def bad_model(name: str, quick: bool) -> Iterator[Beside]:
    """Run a language model server that answers as this class of bench.hostile.model_server."""
    with beside("bench.hostile.model_server", name, *(["--quick"] if quick else [])) as (url, _):
        yield Beside(url, ("--language-model", f"{url}#bad"))


@contextmanager
def attacker(
    name: str, url: str, key: str, beside: str = "", *, quick: bool = False, log: IO[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Run one class of attack during the block. Afterwards, the yielded dict has its results."""
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
    """The setup of a class."""

    # Requests of the bystander.
    asks: Asks = "conversation"
    # Flags of the server.
    flags: tuple[str, ...] = ()
    # The module to start instead of `antiphon`.
    module: str = "antiphon"
    # Whether a door is attacked, through which the bystander connects too.
    has_door: bool = False
    # Whether another host of the same store runs.
    has_second_host: bool = False
    # Starts an extra server; takes `quick`.
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
    """A running stage: its attacked address, an extra one, and the product's processes without their children."""

    url: str
    beside: str
    processes: tuple[psutil.Process, ...]

    @property
    def ws(self) -> str:
        return self.url.replace("http", "ws", 1)

    def rss_mb(self) -> float:
        """Return the memory of the product's processes and their children."""
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
    """Set up the stage of a class, with these flags for every host, during the block. `quick` selects small numbers."""
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
            # Killed, since work that remains for the attacker would not end in time.
            found.kill()
