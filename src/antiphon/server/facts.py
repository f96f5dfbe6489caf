"""What of the server requests are checked against, and what it says of itself."""

from __future__ import annotations

from typing import Any

from antiphon.events.speech import VoiceSample
from antiphon.protocols.model_names import Models
from antiphon.protocols.speech.fields import SpeechFacts
from antiphon.server.state import ServerState


def speech_facts(state: ServerState) -> SpeechFacts:
    """The facts as of now. Raises LookupError where no synthesizer is loaded, Refused while models load."""
    profile = state.loaded().synthesizer.profile
    return SpeechFacts(
        Models((profile.id,), strict=state.settings.server.strict_models),
        profile.voices,
        profile.languages,
        profile.clones,
        lambda name: _uploaded(state, name, profile.clones),
        state.stand_in,
        profile.tasks,
    )


def _uploaded(state: ServerState, name: str, clones: bool) -> VoiceSample | None:
    voice = state.voices.get(name)
    if voice is None:
        return None
    path = state.voices.sample(name) if clones else None
    return VoiceSample(path.read_bytes() if path else b"", voice.ref_text, voice.embedding)


def worker_health(state: ServerState) -> dict[str, Any]:
    """What the MiniCPM-o demo's front end asks a worker's /health for."""
    steps = [lane.stats for lane in state.models.lanes] if state.models else []
    jobs, busy_s = sum(s.jobs for s in steps), sum(s.busy_s for s in steps)
    return {
        "worker_status": "loading" if state.models is None else "duplex_active" if state.live else "idle",
        # /health is asked without a key.
        "current_session_id": next((live.id for live in state.live if not state.settings.server.api_keys), None),
        "total_requests": state.num_admitted,
        "avg_inference_time_ms": round(busy_s / jobs * 1000, 2) if jobs else 0.0,
    }
