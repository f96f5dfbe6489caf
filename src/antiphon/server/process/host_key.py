"""Keeps this server registered in the session store as a host that lives."""

from __future__ import annotations

import logging
from functools import partial

import anyio
import anyio.to_thread

from antiphon.errors import StoreError
from antiphon.server.state import ServerState
from antiphon.store.sessions import RENEWED_AFTER, Host, SessionStore

log = logging.getLogger(__name__)


def as_host(state: ServerState) -> Host:
    """Return what other hosts, and doors, are told of this server. One that still loads is as good as one that drains:
    no session is for it while there is another.
    """
    takes_none, load = state.admission.draining or state.models is None, state.admission.load()
    return Host(state.sessions.host_name, state.sessions.address, None if load is None else min(load, 1.0), takes_none)


async def keep_registered(state: ServerState, store: SessionStore) -> None:
    """Renew the key of this host until cancelled, whether or not the store can be had.

    It runs on the event loop that serves: a server whose loop hangs is dead for the others, as its clients find it.
    """
    ttl_s, failing = state.settings.resume.host_ttl_s, False
    while True:
        try:
            # A thread that hangs is left alone: the store bounds its calls.
            await anyio.to_thread.run_sync(partial(store.renew, as_host(state)), abandon_on_cancel=True)
            failing = False
        except StoreError as error:
            if not failing:
                log.error("the key of this host cannot be renewed: %s", error)
            failing = True
        await anyio.sleep(ttl_s * RENEWED_AFTER)
