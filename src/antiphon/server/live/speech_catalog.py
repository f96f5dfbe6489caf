"""What of the server requests are checked against, and what it says of itself."""

from __future__ import annotations

from antiphon.events.speech import VoiceSample
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.speech.fields import SpeechCatalog
from antiphon.server.state import ServerState


def speech_facts(state: ServerState) -> SpeechCatalog:
    """The facts as of now. Raises LookupError where no synthesizer is loaded, Refused while models load."""
    profile = state.loaded().required_synthesizer.profile
    return SpeechCatalog(
        ModelNames((profile.id,), strict=state.settings.server.strict_models),
        profile.voices,
        profile.languages,
        profile.clones_voices,
        lambda name: _uploaded(state, name, profile.clones_voices),
        state.log_alias,
        profile.tasks,
    )


def _uploaded(state: ServerState, name: str, clones: bool) -> VoiceSample | None:
    voice = state.voices.get(name)
    if voice is None:
        return None
    path = state.voices.sample(name) if clones else None
    return VoiceSample(path.read_bytes() if path else b"", voice.ref_text, voice.embedding)
