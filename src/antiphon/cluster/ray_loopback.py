"""Keeps the ports of a single-machine Ray on loopback: `antiphon serve --ray`. Does not import Ray.

Ray's processes talk to each other on about twenty ports, one of which accepts pickled Python. On Linux they listen on
all addresses of the machine. Ray has a switch, read when `ray` is imported, that makes it listen on loopback; it is
intended for systems whose firewall prompts the user. Two parts ignore the switch: the internal port of a Serve replica,
and the statistics and metrics of Serve's HAProxy, whose addresses are in a template. Serve would also bind the doors'
address for its own proxy and for each replica. So Serve gets the loopback address, and only HAProxy gets the doors'
address.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
LOOPBACK = "127.0.0.1"
BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
# Runs in place of HAProxy: rewrites the `bind` lines of its configuration file, then executes HAProxy.
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
    """Make Ray listen on loopback and require its token, if this process starts it later. Call it before importing
    `ray`. Variables that are already set in the environment stay as they are.
    """
    os.environ.setdefault(SWITCH, "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")


def listens_on_loopback() -> bool:
    """Return whether this process belongs to, or starts, a Ray instance that listens on loopback."""
    return os.environ.get(SWITCH) == "0"


def write_launcher(folder: Path, haproxy: str, host: str, port: int) -> dict[str, str]:
    """Write the script that Serve starts instead of HAProxy, and return the environment variable that points to it.

    `host`: the address on which clients reach the doors, in addition to LOOPBACK, on which Serve reaches them.
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
    """Make the internal server of this process's replica listen on loopback.

    `replica`: Serve's module `replica`. Replaces a function in it, since Serve has no setting for the address.
    """
    listen = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: listen(server, address.replace("[::]", "127.0.0.1"))
