"""Makes the protocol side of a realtime connection from the server's settings and loaded models."""

from __future__ import annotations

import time

from antiphon.protocols.duplex.connection import DuplexConnection
from antiphon.protocols.negotiation import RealtimeConnection
from antiphon.protocols.opening import Opening
from antiphon.protocols.wire import random_id
from antiphon.server.state import ServerState

# What a full-duplex client is told where sessions do not expire.
YEAR_S = 365 * 86400


def duplex_for(
    state: ServerState, opening: Opening, *, resume_token: str | None = None, autostart: bool = False
) -> DuplexConnection:
    """Make the wire of a full-duplex connection; its caller opens it (`open`).

    `resume_token` is announced to the client; None: the session cannot be resumed. `autostart`: the session begins
    without a first event of the client. Raises Refused while models load and while the server drains.
    """
    settings, models = state.settings, state.loaded()
    model = models.conversation_model
    return DuplexConnection(
        opening,
        state.transcriber_names,
        state.conversation_names,
        model.profile.voices if model else (),
        new_id=random_id,
        expires_at=int(time.time() + (settings.server.session_s or YEAR_S)),
        max_append_bytes=settings.audio.max_append_bytes,
        language_check=models.required_transcriber.profile.languages.__contains__,
        log_alias=state.log_alias,
        resume_token=resume_token,
        autostart=autostart,
    )


def connection_for(state: ServerState, opening: Opening, *, resume_token: str | None = None) -> RealtimeConnection:
    """Make the wire of a `/v1/realtime` connection, whose dialect is not known yet; its caller opens it (`open`).

    `resume_token` is announced to the client; None: the session cannot be resumed. Raises Refused while models load
    and while the server drains.
    """
    settings, models = state.settings, state.loaded()
    model = models.conversation_model
    return RealtimeConnection(
        opening,
        state.transcriber_names,
        time.time,
        session_s=settings.server.session_s,
        max_append_bytes=settings.audio.max_append_bytes,
        language_check=models.required_transcriber.profile.languages.__contains__,
        log_alias=state.log_alias,
        conversation_models=state.conversation_names,
        voices=model.profile.voices if model else (),
        resume_token=resume_token,
    )
