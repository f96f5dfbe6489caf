"""Several real servers as one service: hosts with scripted models that share a store, doors, and their failures."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.forking import ForkedProcess, forker
from tests.store.servers import free_port

INTERNAL_KEY = "of-the-supervisor"
START_S = 30.0
SCRIPTED = ("tests.cluster.scripted_host",)


@dataclass(slots=True)
class Host:
    """One server, which keeps its name and port when it restarts. `prefix` is the beginning of its command line."""

    name: str
    module: tuple[str, ...]
    flags: tuple[str, ...]
    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    address: str = "127.0.0.1"
    port: int = field(default_factory=free_port)
    popen: subprocess.Popen[str] | ForkedProcess | None = None

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

    @property
    def ws(self) -> str:
        return self.url.replace("http", "ws", 1)

    @property
    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text()

    def start(self) -> None:
        """Start the server without waiting until it is ready; see `wait`."""
        arguments = [*self.module, "--host", self.address, "--port", str(self.port), *self.flags]
        env = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"} | self.env
        with (self.folder / f"{self.name}.log").open("a") as log:
            if self.prefix:
                command = [*self.prefix, sys.executable, "-m", *arguments]
                self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env)
            else:
                self.popen = forker().start(arguments, log, env)

    def wait(self) -> None:
        """Wait until the server is ready."""
        assert self.popen
        assert self.popen.stdout
        for line in self.popen.stdout:
            if re.search(r"ready at \S+", line):
                return
        raise AssertionError(f"{self.name} did not start: {self.log}")

    def send(self, number: signal.Signals) -> None:
        assert self.popen
        self.popen.send_signal(number)

    def kill(self) -> None:
        """Kill the server at once, and wait for its end."""
        self.send(signal.SIGKILL)
        self.end()

    def end(self) -> int:
        """Wait until the server has ended, and return its exit status."""
        assert self.popen
        with self.popen:
            code = self.popen.wait(START_S)
        self.popen = None
        return code

    def is_ready(self) -> bool:
        """Return whether the server accepts sessions now."""
        try:
            return httpx.get(f"{self.url}/ready", trust_env=False, timeout=1).status_code == 200
        except httpx.HTTPError:
            return False

    def num_sessions(self) -> int:
        """Return the number of the server's sessions; 0 if it does not answer."""
        return round(self.metric("antiphon_sessions{"))

    def metric(self, beginning: str) -> float:
        """Return the sum of the server's metrics with this prefix; 0 if it does not answer."""
        try:
            lines = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=2).text.splitlines()
        except httpx.HTTPError:
            return 0.0
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(beginning))


class Cluster:
    """Hosts with scripted models that share a store. `hosts` has the started ones, which are all stopped together."""

    def __init__(
        self,
        state: str,
        folder: Path,
        *flags: str,
        pace_s: float = 0.0,
        api_key: str = "",
        voices: str = "",
        native: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.state = state
        self.folder = folder
        self.hosts: list[Host] = []
        self.doors: list[Host] = []
        self._flags = flags
        self._env = {"ANTIPHON_INTERNAL_KEY": INTERNAL_KEY, "ANTIPHON_TEST_PACE_S": str(pace_s)} | dict(env or {})
        if api_key:
            self._env["ANTIPHON_API_KEYS"] = api_key
        if voices:
            self._env["ANTIPHON_TEST_VOICES"] = voices
        if native:
            self._env["ANTIPHON_TEST_NATIVE"] = "1"

    def add_host(
        self,
        *flags: str,
        module: tuple[str, ...] = SCRIPTED,
        prefix: tuple[str, ...] = (),
        address: str = "127.0.0.1",
        skew_s: float = 0.0,
        env: Mapping[str, str] | None = None,
    ) -> Host:
        """Start another host at `address`. With `wait`, return when it is ready.

        `prefix` is the beginning of its command line. `skew_s` is the time by which its clock is ahead. `env` adds
        environment variables.
        """
        name = f"host-{len(self.hosts) + 1}"
        given = self._env | {"ANTIPHON_TEST_SKEW_S": str(skew_s)} | dict(env or {})
        host = Host(name, module, ("--state", self.state, "--host-name", name, *self._flags, *flags), self.folder,
                    given, prefix, address)  # fmt: skip
        self.hosts.append(host)
        host.start()
        return host

    def add_door(self, *flags: str, env: Mapping[str, str] | None = None) -> Host:
        """Start a door, which finds the hosts in their store unless `flags` name them. `env` adds variables.

        With `wait`, return when it is ready.
        """
        name = f"door-{len(self.doors) + 1}"
        given = ("--role", "door", *(flags or ("--state", self.state)))
        door = Host(name, ("antiphon", "serve"), given, self.folder, dict(env or {}))
        self.doors.append(door)
        door.start()
        return door

    def unregister(self, dead: Host) -> None:
        """Mark a host as dead, as its supervisor would do, by a request to any other host that is alive."""
        for host in self.hosts:
            if host is dead or host.popen is None:
                continue
            with httpx.Client(
                trust_env=False, verify=False, headers={"authorization": f"Bearer {INTERNAL_KEY}"}
            ) as client:
                try:
                    client.delete(f"{host.url}/internal/hosts/{dead.name}").raise_for_status()
                except httpx.TransportError:
                    continue
                return
        raise AssertionError("no host is alive")

    def close(self) -> None:
        """Stop all servers that run, all hosts at once."""
        for process in [*self.doors, *self.hosts]:
            if process.popen:
                process.send(signal.SIGCONT)
                process.kill()


@contextmanager
def cluster(
    state: str,
    *flags: str,
    num_hosts: int = 3,
    pace_s: float = 0.0,
    api_key: str = "",
    voices: str = "",
    native: bool = False,
    env: Mapping[str, str] | None = None,
) -> Iterator[Cluster]:
    """Run hosts that share the store `state` during the block, which begins when they are ready.

    `voices`: those of a scripted synthesizer, separated by commas. `native`: the conversation model is a native one.
    `env`: variables for all hosts.
    """
    with tempfile.TemporaryDirectory(prefix="antiphon-hosts-") as folder:
        given = {"pace_s": pace_s, "api_key": api_key, "voices": voices, "native": native, "env": env}
        found = Cluster(state or f"{folder}/state", Path(folder), *flags, **given)  # type: ignore[arg-type]
        try:
            for _ in range(num_hosts):
                found.add_host()
            for host in found.hosts:
                host.wait()
            yield found
        finally:
            found.close()


def until(true: object, limit_s: float = START_S) -> None:
    """Wait until a function returns a true value. Raises AssertionError if that takes longer than `limit_s`."""
    assert callable(true)
    end_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end_s, true
        time.sleep(0.02)
