"""What a request for speech may name: the loaded synthesizer, its voices, and those that were uploaded."""

from __future__ import annotations

from antiphon.protocols.speech_fields import SpeechFacts
from antiphon.protocols.wire import Models
from antiphon.server.state import ServerState


def speech_facts(state: ServerState) -> SpeechFacts:
    """The facts as of now. Raises LookupError where no synthesizer is loaded, Refused while models load."""
    profile = state.loaded().synthesizer.profile
    return SpeechFacts(
        Models((profile.id,), strict=state.settings.server.strict_models),
        profile.voices,
        profile.languages,
        profile.clones,
        lambda name: state.voices.get(name) is not None,
        state.stand_in,
    )
