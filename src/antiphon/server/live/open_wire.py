"""Makes the wire side of a realtime connection from the server's settings, loaded models and the caller's voices."""

from __future__ import annotations

import time
from functools import partial

import msgspec

from antiphon.contracts import TuningCaps
from antiphon.protocols.connection import Context
from antiphon.protocols.realtime.input_fields import named_voices
from antiphon.server.state import Caller, ServerState


async def prepare_voices(state: ServerState, caller: Caller, data: str | bytes | msgspec.Raw) -> None:
    """Look up the voices that a message enrols, if any, so that the wire finds them when it reads the message.

    Call it before anything that the wire reads. Raises nothing for a voice that cannot be had: the wire does.
    """
    models = state.models
    if models is None:
        return
    for name in named_voices(data):
        await state.enrolled_voices.prepare(caller.key, name, state.uploaded_voices(caller), models)


def context_of(
    state: ServerState, caller: Caller, *, resume_token: str | None = None, autostart: bool = False
) -> Context:
    """What a connection of a caller is made from. `resume_token`, `autostart`: as in Context.

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
        spoken_languages=models.synthesizer.profile.languages if models.synthesizer and not models.partner else (),
        max_append_bytes=audio.max_append_bytes,
        session_s=settings.server.session_s,
        knows_language=profile.languages.__contains__,
        transcriber=profile,
        tells_voices=models.speaker_model is not None,
        enrolled_voices=partial(state.enrolled_voices.find, caller.key),
        tuning_caps=TuningCaps(audio.max_audio_s, audio.max_prefix_tokens, audio.realtime_max_tokens),
        log_alias=state.log_alias,
        resume_token=resume_token,
        autostart=autostart,
    )
