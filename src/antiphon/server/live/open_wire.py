"""Opens the protocol of a connection that is about to begin."""

from __future__ import annotations

import time

from antiphon.protocols.duplex.connection import DuplexConnection
from antiphon.protocols.negotiation import RealtimeConnection
from antiphon.protocols.opening import Opening
from antiphon.protocols.wire import random_id
from antiphon.server.state import ServerState


def duplex_for(
    state: ServerState, opening: Opening, *, resume_token: str | None = None, autostart: bool = False
) -> DuplexConnection:
    """The protocol of a duplex connection that is about to begin. Raises Refused while models load."""
    settings, models = state.settings, state.loaded()
    partner = models.conversation_model
    return DuplexConnection(
        opening,
        state.names,
        state.conversation_models,
        partner.profile.voices if partner else (),
        new_id=random_id,
        expires_at=int(time.time() + (settings.server.session_s or 365 * 86400)),
        max_append_bytes=settings.audio.max_append_bytes,
        language_check=models.required_transcriber.profile.languages.__contains__,
        log_alias=state.log_alias,
        resume_token=resume_token,
        autostart=autostart,
    )


def connection_for(state: ServerState, opening: Opening, *, resume_token: str | None = None) -> RealtimeConnection:
    """The protocol of a connection that is about to begin. Raises Refused while models load."""
    settings, models = state.settings, state.loaded()
    partner = models.conversation_model
    return RealtimeConnection(
        opening,
        state.names,
        time.time,
        session_s=settings.server.session_s,
        max_append_bytes=settings.audio.max_append_bytes,
        language_check=models.required_transcriber.profile.languages.__contains__,
        log_alias=state.log_alias,
        conversation_models=state.conversation_models,
        voices=partner.profile.voices if partner else (),
        resume_token=resume_token,
    )
