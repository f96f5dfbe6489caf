"""The Wyoming port of a server: its checks and its listener."""

from __future__ import annotations

from functools import partial

from antiphon.extras import require_extra
from antiphon.server.http.forwarded import Networks
from antiphon.server.listeners import Everyone, Listener, bind_listener, check_listener_exposure, host_of
from antiphon.server.state import ServerState
from antiphon.server.wyoming.announcing import announced
from antiphon.server.wyoming.connection import WyomingJobs
from antiphon.server.wyoming.handling import Histories
from antiphon.settings import Settings


def check_wyoming(settings: Settings) -> None:
    """Raise SettingsError if the Wyoming port is open to others without `--wyoming-allow`, or an extra is missing."""
    own = settings.wyoming
    if own.wyoming:
        anonymous = settings.server.allow_anonymous
        check_listener_exposure("--wyoming", own.wyoming, own.wyoming_allow, allow_anonymous=anonymous)
    if own.wyoming_zeroconf:
        require_extra("wyoming", "--wyoming-zeroconf")


def open_wyoming(state: ServerState) -> None:
    """Bind the Wyoming port, if the settings have one, and add it to the server's listeners.

    Raises SettingsError if the address is not available, or if `--wyoming-allow` is invalid.
    """
    own = state.settings.wyoming
    if own.wyoming:
        allowed = Networks(own.wyoming_allow, "--wyoming-allow") if own.wyoming_allow else Everyone()
        connect = partial(WyomingJobs, state, Histories())
        announce = partial(announced, own.wyoming_zeroconf, host_of(own.wyoming))
        state.listeners.add(Listener("wyoming", bind_listener(own.wyoming), connect, allowed, announce))
