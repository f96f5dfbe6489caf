"""`antiphon hosts`: the hosts of a store, and a supervisor's word that one of them is dead."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from antiphon.errors import SettingsError, StoreError
from antiphon.settings import Settings
from antiphon.store.sessions import is_store_url, open_store


def show_hosts(settings: Settings, dead: str | None) -> None:
    """Print the hosts that live in the store of `--state`, or have the host `dead` be dead at once.

    `dead`: a host's name with its incarnation, or without for all of them. Raises SettingsError; StoreError, also for
    a host that does not live in the store, and for a folder that is not there.
    """
    resume = settings.resume
    if not resume.state:
        raise SettingsError("antiphon hosts needs the store that the hosts share: --state, or ANTIPHON_STATE")
    if not is_store_url(resume.state) and not Path(resume.state).expanduser().is_dir():
        # It would be made, and hold nobody.
        raise StoreError(f"--state {resume.state}: there is no such folder")
    store = open_store(resume.state, resume.state_hours * 3600, resume.host_ttl_s)
    try:
        hosts = store.hosts()
        if dead:
            if not any(host.name == dead or host.name.startswith(f"{dead}/") for host in hosts):
                names = ", ".join(host.name for host in hosts) or "none"
                raise StoreError(f"--dead {dead}: no such host lives in this store; there are: {names}")
            store.unregister(dead)
            print(f"{dead} is dead: its sessions may be taken up elsewhere")
            return
    finally:
        store.close()
    if not hosts:
        print("no host lives in this store")
        return
    if any(host.load is None for host in hosts):
        print("load is known of a host with a certificate (antiphon certify)\n")
    table = Table("host", "address", "load", "state", box=None, pad_edge=False)
    for host in hosts:
        load = "unknown" if host.load is None else f"{host.load:.2f}"
        table.add_row(host.name, host.address or "-", load, "draining" if host.draining else "serves")
    Console(soft_wrap=True).print(table)
