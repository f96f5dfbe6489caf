"""Computes the vectors of uploaded voices, so that a session recognizes its user (`primary_speaker` `enrolled`).

A wire must not wait while it reads a message. So `prepare` first looks up the voices that the message names; then the
wire reads the message, and gets the outcome from `find`. Each recording is processed only once.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.containers import decode_beginning
from antiphon.contracts import VoiceActivityDetector
from antiphon.contracts.speaker import SpeakerModel
from antiphon.errors import MediaError, ModelError, Refused, RemoteProtocolError
from antiphon.events.transcription import EnrolledVoice
from antiphon.loading.loaded import LoadedModels
from antiphon.protocols.connection import MAX_VOICE_NAME_CHARS, no_voice
from antiphon.shares.fair_cache import FairCache
from antiphon.shares.places import Places
from antiphon.shares.threads import FILE_THREADS, in_thread
from antiphon.store.voices import VoiceStore
from antiphon.turns.voices.enrolment import MIN_SPEECH_S, enrolment_takes, speech_of

# Only this part of a recording, from its start, is searched for speech.
MAX_RECORDING_S = 60.0
# Maximum numbers of cached outcomes that a wire may still ask for, and of cached recordings (4 KiB each).
MAX_OUTCOMES, MAX_HEARD = 1000, 1000


@dataclass(frozen=True, slots=True)
class _Unfit:
    """The reason that a voice cannot be enrolled: an error code, and the part of the message after the voice's name."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Recording:
    """An uploaded file. `mtime_ns` changes when the file is replaced."""

    path: Path
    mtime_ns: int


_Outcome = tuple[EnrolledVoice, ...] | _Unfit


@dataclass(slots=True)
class EnrolledVoices:
    """The enrolled voices of all callers, in one event loop. Only `find` may be called from another thread."""

    # Outcomes for each API key and voice name. None means that the key has no voice of this name.
    _outcomes: FairCache[str, _Outcome | None] = field(default_factory=lambda: FairCache(MAX_OUTCOMES))
    # Outcomes for each API key and recording.
    _heard: FairCache[_Recording, _Outcome] = field(default_factory=lambda: FairCache(MAX_HEARD))
    # One recording is processed at a time.
    listening: Places = field(default_factory=lambda: Places(1))

    async def prepare(self, key: str, name: str, store: VoiceStore, models: LoadedModels) -> None:
        """Look up a voice as it is now in `store`, the store of the caller with this `key`, and compute its vectors.

        Waits for a thread and, if the recording is new, for the VAD and the speaker model. Does not raise for an
        unusable voice. Does nothing without a speaker model.
        """
        if models.speaker_model is None or len(name) > MAX_VOICE_NAME_CHARS:
            return
        outcome = await self._looked_up(key, name, store, models.speaker_model, models.required_vad)
        self._outcomes.put(key, name, outcome)

    def find(self, key: str, name: str, param: str) -> tuple[EnrolledVoice, ...]:
        """Return the vectors of a prepared voice: as it was recorded, and with synthetic noise added.

        Raises RemoteProtocolError for `param`, with one of these codes: `voice_not_found`; `invalid_value` for an
        embedding, or for a recording without enough speech; `resource_exhausted` if the model had no room;
        `server_error` if it failed.
        """
        match self._outcomes.get(key, name):
            case None:
                return no_voice(name, param)
            case _Unfit(code, reason):
                raise RemoteProtocolError(code, f"The voice `{name}` {reason}", param)
            case voices:
                return voices

    async def _looked_up(
        self, key: str, name: str, store: VoiceStore, model: SpeakerModel, detector: VoiceActivityDetector
    ) -> _Outcome | None:
        try:
            found = await in_thread(_recording, name, store)
            if not isinstance(found, _Recording):
                return found
            async with self.listening.held():
                heard = self._heard.get(key, found)
                if heard is None:
                    heard = await _listened(await in_thread(found.path.read_bytes), model, detector)
                    self._heard.put(key, found, heard)
                return heard
        except OSError:
            # The file is being replaced or deleted.
            return None
        except Refused as refusal:
            return _Unfit("resource_exhausted", f"cannot be processed now: {refusal}.")
        except ModelError:
            return _Unfit("server_error", "could not be processed: the model failed.")


def _recording(name: str, store: VoiceStore) -> _Recording | _Unfit | None:
    """Return the recording of a voice; None for an unknown one. Reads files. Raises OSError."""
    voice, path = store.get(name), store.sample(name)
    if voice and path:
        return _Recording(path, path.stat().st_mtime_ns)
    return _Unfit("invalid_value", "was uploaded as an embedding; a recording is needed.") if voice else None


async def _listened(recording: bytes, model: SpeakerModel, detector: VoiceActivityDetector) -> _Outcome:
    """Return the vectors of a recording's voice, or the reason that it has none. Raises Refused, ModelError."""
    try:
        pcm = await in_thread(
            decode_beginning, io.BytesIO(recording), SAMPLE_RATE_HZ, MAX_RECORDING_S, places=FILE_THREADS
        )
    except MediaError as error:
        return _Unfit("invalid_value", f"cannot be decoded: {error}.")
    speech = await _speech(pcm, detector)
    seconds = len(speech) / SAMPLE_RATE_HZ
    if seconds < MIN_SPEECH_S:
        return _Unfit(
            "invalid_value",
            f"has {seconds:.1f} s of speech in its first {MAX_RECORDING_S:.0f} s; {MIN_SPEECH_S:.0f} s are needed.",
        )
    takes = await in_thread(enrolment_takes, speech)
    return tuple([EnrolledVoice(await model.embed(take), seconds) for take in takes])


async def _speech(pcm: Pcm, detector: VoiceActivityDetector) -> Pcm:
    stream, probabilities = detector.open(), list[float]()
    # The last frame is padded with silence.
    padded = np.pad(pcm, (0, -len(pcm) % detector.frame_samples))
    for start in range(0, len(padded), SAMPLE_RATE_HZ):
        probabilities += await stream.feed(padded[start : start + SAMPLE_RATE_HZ])
    return speech_of(padded, probabilities, detector.frame_samples)
