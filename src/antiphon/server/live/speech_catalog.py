"""What requests for speech are checked against: the loaded synthesizer's voices and languages, and uploaded voices."""

from __future__ import annotations

from antiphon.events.speech import VoiceSample
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.speech.fields import SpeechCatalog
from antiphon.server.state import Caller, ServerState
from antiphon.store.voices import VoiceStore


def speech_catalog(state: ServerState, caller: Caller) -> SpeechCatalog:
    """Return the catalog of a caller as of now; voices that its key uploads later are found too.

    Raises LookupError where no synthesizer is loaded, Refused while models load and while the server drains.
    """
    store = state.uploaded_voices(caller)
    profile = state.loaded().required_synthesizer.profile
    return SpeechCatalog(
        ModelNames((profile.id,), strict=state.settings.server.strict_models),
        profile.voices,
        profile.languages,
        profile.clones_voices,
        lambda name: _uploaded(store, name, with_audio=profile.clones_voices),
        state.log_alias,
        profile.tasks,
    )


def _uploaded(store: VoiceStore, name: str, *, with_audio: bool) -> VoiceSample | None:
    """Read an uploaded voice from its files, with its audio where the synthesizer needs that to clone it."""
    voice = store.get(name)
    if voice is None:
        return None
    path = store.sample(name) if with_audio else None
    return VoiceSample(path.read_bytes() if path else b"", voice.ref_text, voice.embedding)
