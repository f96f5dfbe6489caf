"""Looks up the voices of remembered speakers, for the labels of sessions and files.

A wire must not wait while it reads a message. So `prepare` first looks up the speakers that the message names; then the
wire reads the message, and gets the outcome from `find`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from antiphon.contracts.speaker import SpeakerModel
from antiphon.errors import RemoteProtocolError
from antiphon.events.transcription import KnownVoice
from antiphon.protocols.connection import MAX_VOICE_NAME_CHARS, no_speaker
from antiphon.shares.fair_cache import FairCache
from antiphon.shares.threads import in_thread
from antiphon.store.voices import SpeakerStore

# Maximum number of outcomes that a wire may still ask for (1 KiB each).
MAX_OUTCOMES = 1000


async def remembered(name: str, param: str, store: SpeakerStore, model: SpeakerModel) -> KnownVoice:
    """Return the voice of a remembered speaker. Reads a file in a thread.

    Raises RemoteProtocolError for `param`: `speaker_not_found`, or `invalid_value` if another speaker encoder made the
    speaker's vector.
    """
    kept = await in_thread(store.get, name) if len(name) <= MAX_VOICE_NAME_CHARS else None
    if kept is None:
        return no_speaker(name, param)
    if (kept.encoder, len(kept.vector)) != (model.profile.id, model.profile.size):
        message = f"The speaker `{kept.name}` was remembered with the speaker encoder `{kept.encoder}`: post it again."
        raise RemoteProtocolError("invalid_value", message, param)
    return KnownVoice(kept.name, np.array(kept.vector, np.float32), kept.speech_s)


@dataclass(slots=True)
class KnownSpeakers:
    """The known speakers of all callers, in one event loop. Only `find` may be called from another thread."""

    # Outcomes for each API key and name.
    _outcomes: FairCache[str, KnownVoice | RemoteProtocolError] = field(default_factory=lambda: FairCache(MAX_OUTCOMES))

    async def prepare(self, key: str, name: str, store: SpeakerStore, model: SpeakerModel | None) -> None:
        """Look up a speaker as it is now in `store`, the store of the caller with this `key`.

        Does not raise for a speaker who cannot be used. Does nothing without a speaker model.
        """
        if model is None or len(name) > MAX_VOICE_NAME_CHARS:
            return
        try:
            self._outcomes.put(key, name, await remembered(name, "", store, model))
        except RemoteProtocolError as error:
            self._outcomes.put(key, name, error)

    def find(self, key: str, name: str, param: str) -> KnownVoice:
        """Return the voice of a prepared speaker. Raises RemoteProtocolError for `param`, as `remembered` does."""
        match self._outcomes.get(key, name):
            case KnownVoice() as voice:
                return voice
            case RemoteProtocolError() as error:
                raise RemoteProtocolError(error.code, error.message, param)
            case _:
                return no_speaker(name, param)
