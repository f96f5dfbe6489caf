"""Makes the wire side of a realtime connection from the server's settings and loaded models."""

from __future__ import annotations

import time

from antiphon.contracts import TuningCaps
from antiphon.protocols.connection import Context
from antiphon.server.state import ServerState


def context_of(state: ServerState, *, resume_token: str | None = None, autostart: bool = False) -> Context:
    """What a connection is made from. `resume_token`, `autostart`: as in Context.

    Raises Refused while models load and while the server drains.
    """
    settings, models = state.settings, state.loaded()
    model, profile = models.conversation_model, models.required_transcriber.profile
    audio = settings.audio
    return Context(
        models=state.transcriber_names,
        now_s=time.time,
        steady_s=time.monotonic,
        conversation_models=state.conversation_names,
        voices=model.profile.voices if model else (),
        max_append_bytes=audio.max_append_bytes,
        session_s=settings.server.session_s,
        knows_language=profile.languages.__contains__,
        transcriber=profile,
        tells_voices=state.loaded().speaker_model is not None,
        tuning_caps=TuningCaps(audio.max_audio_s, audio.max_prefix_tokens, audio.realtime_max_tokens),
        log_alias=state.log_alias,
        resume_token=resume_token,
        autostart=autostart,
    )
