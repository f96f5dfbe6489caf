"""`antiphon hosts`: lists the hosts of a store, or marks one of them as dead on behalf of a supervisor."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from antiphon.errors import SettingsError, StoreError
from antiphon.settings import Settings
from antiphon.store.sessions import is_store_url, open_store


def show_hosts(settings: Settings, dead: str | None) -> None:
    """Print the hosts that are alive in the store of `--state`, or mark the host `dead` as dead at once.

    `dead`: a host's name with its incarnation, or without it for all its incarnations. Raises SettingsError, and
    StoreError, also if the host is not alive in the store or the store's folder does not exist.
    """
    resume = settings.resume
    if not resume.state:
        raise SettingsError("antiphon hosts needs the store that the hosts share: --state, or ANTIPHON_STATE")
    if not is_store_url(resume.state) and not Path(resume.state).expanduser().is_dir():
        # Opening the store would create the folder, and list no hosts.
        raise StoreError(f"--state {resume.state}: there is no such folder")
    store = open_store(resume.state, resume.state_hours * 3600, resume.host_ttl_s)
    try:
        hosts = store.hosts()
        if dead:
            if not any(host.name == dead or host.name.startswith(f"{dead}/") for host in hosts):
                names = ", ".join(host.name for host in hosts) or "none"
                raise StoreError(f"--dead {dead}: no such host is alive in this store; alive are: {names}")
            store.unregister(dead)
            print(f"{dead} is marked as dead: other hosts may claim its sessions")
            return
    finally:
        store.close()
    if not hosts:
        print("no host is alive in this store")
        return
    if any(host.load is None for host in hosts):
        print("only hosts with a certificate report their load (antiphon certify)\n")
    table = Table("host", "address", "load", "state", box=None, pad_edge=False)
    for host in hosts:
        load = "unknown" if host.load is None else f"{host.load:.2f}"
        table.add_row(host.name, host.address or "-", load, "draining" if host.draining else "serves")
    Console(soft_wrap=True).print(table)
