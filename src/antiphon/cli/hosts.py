"""`antiphon hosts`: the hosts of a store, and a supervisor's word that one of them is dead."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from antiphon.errors import SettingsError
from antiphon.settings import Settings
from antiphon.store.sessions import open_store


def show_hosts(settings: Settings, dead: str | None) -> None:
    """Print the hosts that live in the store of `--state`, or have the host `dead` be dead at once.

    `dead`: a host's name with its incarnation, or without for all of them. Raises SettingsError, StoreError.
    """
    resume = settings.resume
    if not resume.state:
        raise SettingsError("antiphon hosts needs the store that the hosts share: --state, or ANTIPHON_STATE")
    store = open_store(resume.state, resume.state_hours * 3600, resume.host_ttl_s)
    try:
        if dead:
            store.unregister(dead)
            print(f"{dead} is dead: its sessions may be taken up elsewhere")
            return
        hosts = store.hosts()
    finally:
        store.close()
    if not hosts:
        print("no host lives in this store")
        return
    table = Table("host", "address", "load", "state", box=None, pad_edge=False)
    for host in hosts:
        table.add_row(host.name, host.address or "-", f"{host.load:.2f}", "draining" if host.draining else "serves")
    Console(soft_wrap=True).print(table)
