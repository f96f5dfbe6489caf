"""Begins the recording of a live session, where the server is asked to record."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec

from antiphon.errors import StoreError
from antiphon.protocols.connection import WireConnection
from antiphon.recording.recorder import Recorder
from antiphon.recording.tape import SessionFacts
from antiphon.server.state import ServerState

log = logging.getLogger(__name__)


def open_recorder(state: ServerState, wire: WireConnection) -> Recorder | None:
    """Return what records the session of a wire in the folder of `--record`; None without one, and where that folder
    cannot be written to: a session that cannot be recorded is still served.
    """
    folder = state.settings.server.record
    if not folder:
        return None
    facts = SessionFacts(
        id=wire.id,
        began=int(time.time()),
        opening=msgspec.Raw(msgspec.json.encode(wire.opening)),
        models=tuple(state.loaded().names),
    )
    try:
        return Recorder(Path(folder).expanduser(), facts, max_bytes=state.settings.server.record_mb << 20)
    except StoreError as error:
        log.error("session %s is not recorded: %s", wire.id, error)
        return None
