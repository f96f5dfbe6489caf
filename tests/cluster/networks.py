"""Hosts on a separate network, each in a network namespace, whose links fail as real ones do. Needs root and `ip`."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

# No machine has this address, so packets to it are lost silently.
NOBODY = "02:00:00:00:00:99"
_numbers = itertools.count()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def missing() -> str:
    """Return why such a network cannot run here; "" if it can."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        return "network namespaces need root and iproute2"
    name = f"antiphon-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "network namespaces are not allowed here"
    _ip("netns", "del", name)
    return ""


class Network:
    """A network bridge.

    Tests reach its hosts from `here`. `store` is the store's address, which can be cut off by itself.
    """

    def __init__(self) -> None:
        number = (os.getpid() * 7 + next(_numbers)) % 65_000
        self._tag = f"{number:x}"
        self._subnet = f"10.{77 + number // 65_000}.{number % 250}"
        self.here, self.store = f"{self._subnet}.1", f"{self._subnet}.2"
        self._bridge = f"ant-{self._tag}"
        self._names: list[str] = []
        _ip("link", "add", self._bridge, "type", "bridge")
        for address in (self.here, self.store):
            _ip("addr", "add", f"{address}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")

    def add(self) -> tuple[tuple[str, ...], str]:
        """Create a namespace. Return the command prefix that runs a program in it, and its address."""
        number = len(self._names)
        name, address = f"ant-{self._tag}-{number}", f"{self._subnet}.{10 + number}"
        self._names.append(name)
        _ip("netns", "add", name)
        _ip("link", "add", self._link(address), "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", self._link(address), "master", self._bridge, "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", name, "link", "set", device, "up")
        return ("ip", "netns", "exec", name), address

    def _link(self, address: str) -> str:
        return f"av-{self._tag}-{address.rsplit('.', 1)[1]}"

    def _name(self, address: str) -> str:
        return self._names[int(address.rsplit(".", 1)[1]) - 10]

    def cut(self, address: str, other: str) -> None:
        """Drop all packets that the host at `address` sends to another address from now on."""
        _ip("-n", self._name(address), "neigh", "replace", other, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")

    def mend(self, address: str, other: str) -> None:
        """Undo `cut`."""
        _ip("-n", self._name(address), "neigh", "del", other, "dev", "eth0")

    def set_link(self, address: str, state: str) -> None:
        """Disconnect the host (`down`), or connect it again (`up`)."""
        _ip("link", "set", self._link(address), state)

    def close(self) -> None:
        """Delete the network. The links of a namespace are deleted with their namespace."""
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)


@contextmanager
def network() -> Iterator[Network]:
    """Create a network for the block."""
    found = Network()
    try:
        yield found
    finally:
        found.close()
