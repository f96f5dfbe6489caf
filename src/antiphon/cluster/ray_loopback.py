"""Keeps the ports of a Ray that serves this machine alone on loopback: `antiphon serve --ray`.

Ray's processes talk to each other by some twenty ports, one of which takes pickled Python. On Linux they listen on all
addresses of the machine. Ray has a switch by which it listens on loopback, made for systems with a firewall that asks;
it is read when `ray` is imported. Two things do not heed it: the internal port of a Serve replica, and the statistics
and metrics of Serve's HAProxy, whose addresses stand in a template. Serve would open the doors' address to its own
proxy and to each replica, too: it is given loopback, and HAProxy the address. Does not import Ray.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
LOOPBACK = "127.0.0.1"
BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
# Stands in for HAProxy, rewrites the `bind` lines of the file that it is given, and becomes HAProxy.
LAUNCHER = r"""#!/bin/sh
ports="${{RAY_SERVE_HAPROXY_STATS_PORT:-8404}}|${{RAY_SERVE_HAPROXY_METRICS_PORT:-9101}}"
for given; do
    [ "$last" = -f ] && sed -i -E \
        -e "s/^([[:space:]]*bind[[:space:]]+)\*?:($ports)([[:space:]]|$)/\1127.0.0.1:\2\3/" \
        -e "s/^([[:space:]]*bind[[:space:]]+)127\.0\.0\.1:{port}([[:space:]]|$)/\1{addresses}\2/" "$given"
    last=$given
done
exec {haproxy} "$@"
"""


def listen_on_loopback() -> None:
    """Have a Ray that this process starts later listen on loopback, and ask for its token. To be called before `ray` is
    imported. What the environment says already stays as it is.
    """
    os.environ.setdefault(SWITCH, "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")


def listens_on_loopback() -> bool:
    """Whether this process belongs to such a Ray, or starts one."""
    return os.environ.get(SWITCH) == "0"


def write_launcher(folder: Path, haproxy: str, host: str, port: int) -> dict[str, str]:
    """Write what Serve starts in the place of HAProxy, and return the variable that tells Serve of it.

    `host`: where clients reach the doors, beside LOOPBACK, where Serve does.
    """
    addresses = [f"{LOOPBACK}:{port}"]
    if host in ("0.0.0.0", "::"):
        addresses = [f"0.0.0.0:{port}", *([f"[::]:{port}"] if host == "::" else [])]
    elif host not in (LOOPBACK, "localhost"):
        addresses.append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    launcher = folder / "haproxy"
    launcher.write_text(LAUNCHER.format(haproxy=shlex.quote(haproxy), port=port, addresses=",".join(addresses)))
    launcher.chmod(0o700)
    return {BINARY: str(launcher)}


def keep_replica_on_loopback(replica: Any) -> None:
    """Have the internal server of this process's replica listen on loopback. `replica`: Serve's module of that name,
    whose function this replaces, as no setting says where the server listens.
    """
    listen = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: listen(server, address.replace("[::]", "127.0.0.1"))
