"""Debian's HAProxy in front of hosts. It knows nothing of sessions, and may send any connection to any host."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil

from tests.store.servers import free_port

DEPLOYED = Path(__file__).parents[2] / "deploy" / "haproxy.cfg"
CONFIGURATION = """
global
    # After a reload the old process lets go of its connections by then.
    hard-stop-after {hard_stop_s}s
    stats socket {folder}/socket mode 600 expose-fd listeners level admin
defaults
    mode http
    timeout connect 2s
    timeout client 60s
    timeout server 60s
    timeout tunnel 1h
frontend door
    bind 127.0.0.1:{port}
    default_backend hosts
backend hosts
    balance leastconn
    option httpchk GET /ready
    default-server check inter 200ms fall 1 rise 1 on-marked-down shutdown-sessions
{servers}
"""


def missing() -> str:
    """Return why HAProxy cannot run here; "" if it can."""
    return "" if shutil.which("haproxy") else "haproxy is not installed: apt-get install haproxy"


def deployed(doors: Sequence[str], port: int) -> str:
    """Return `deploy/haproxy.cfg` with this port, in front of these two doors (HOST:PORT)."""
    text = DEPLOYED.read_text().replace("bind :8000", f"bind 127.0.0.1:{port}")
    for number, address in enumerate(doors, 1):
        text, found = re.subn(rf" server door-{number} \S+", f" server door-{number} {address}", text)
        assert found == 1
    return text


class Balancer:
    """One HAProxy.

    `addresses` has HOST:PORT of each server behind it. With `as_deployed`, it uses the deployment's file, with two
    doors and the `hard_stop_s` of that file.
    """

    def __init__(self, addresses: Sequence[str], hard_stop_s: int = 1, *, as_deployed: bool = False) -> None:
        self.port = free_port()
        self.url, self.ws = f"http://127.0.0.1:{self.port}", f"ws://127.0.0.1:{self.port}"
        self._folder = Path(tempfile.mkdtemp(prefix="antiphon-haproxy-"))
        servers = "\n".join(f"    server host{n} {address}" for n, address in enumerate(addresses))
        text = CONFIGURATION.format(folder=self._folder, port=self.port, servers=servers, hard_stop_s=hard_stop_s)
        if as_deployed:
            text = deployed(addresses, self.port)
        (self._folder / "haproxy.cfg").write_text(text)
        command = ["haproxy", "-W", "-q", "-f", str(self._folder / "haproxy.cfg")]
        with (self._folder / "log").open("w") as log:
            self._popen = subprocess.Popen(command, stderr=log)
        until_s = time.monotonic() + 20
        while not self._serves():
            assert self._popen.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < until_s, (self._folder / "log").read_text()
            time.sleep(0.05)

    def _serves(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/ready", trust_env=False, timeout=1).status_code == 200
        except httpx.HTTPError:
            return False

    def workers(self) -> set[int]:
        """Return the processes that carry connections. After a reload, old ones may still have some."""
        return {p.pid for p in psutil.Process(self._popen.pid).children()}

    def reload(self) -> None:
        """Start a new process that takes over. The old one cuts its connections after `hard_stop_s`."""
        self._popen.send_signal(signal.SIGUSR2)

    def close(self) -> None:
        """Stop HAProxy and delete its folder."""
        self._popen.terminate()
        self._popen.wait(20)
        shutil.rmtree(self._folder, ignore_errors=True)
