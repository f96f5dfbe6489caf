"""The vectors of uploaded voices by which a session tells its user from others (`primary_speaker` `enrolled`).

A wire reads a message without waiting, so what a message names is looked up before it is read (`prepare`), and the
wire finds the outcome (`find`). A recording is listened to once.
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

# Of a recording, so many seconds are searched for speech.
MAX_RECORDING_S = 60.0
# Bounds: outcomes that a wire may still ask for, and recordings that need not be heard again, of 4 KiB each.
MAX_OUTCOMES, MAX_HEARD = 1000, 1000


@dataclass(frozen=True, slots=True)
class _Unfit:
    """Why nobody is enrolled by a voice: the code of an error, and the rest of a sentence that the name begins."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Recording:
    """An uploaded file; `mtime_ns` tells a replaced one."""

    path: Path
    mtime_ns: int


_Outcome = tuple[EnrolledVoice, ...] | _Unfit


@dataclass(slots=True)
class EnrolledVoices:
    """Those of all callers, in one event loop. Only `find` may be called from another thread."""

    # Of each key, by the voice's name. None: there is no such voice.
    _outcomes: FairCache[str, _Outcome | None] = field(default_factory=lambda: FairCache(MAX_OUTCOMES))
    # Of each key, by the recording.
    _heard: FairCache[_Recording, _Outcome] = field(default_factory=lambda: FairCache(MAX_HEARD))
    # One recording is listened to at a time.
    listening: Places = field(default_factory=lambda: Places(1))

    async def prepare(self, key: str, name: str, store: VoiceStore, models: LoadedModels) -> None:
        """Look a voice up as it is now, in the `store` of the caller with this `key`, and listen to it.

        Waits for a thread, and for the VAD and the speaker model where the recording is new. Raises nothing for a voice
        that cannot be had; without a speaker model it does nothing.
        """
        if models.speaker_model is None or len(name) > MAX_VOICE_NAME_CHARS:
            return
        outcome = await self._looked_up(key, name, store, models.speaker_model, models.required_vad)
        self._outcomes.put(key, name, outcome)

    def find(self, key: str, name: str, param: str) -> tuple[EnrolledVoice, ...]:
        """Return the vectors of a voice that was prepared: as it was recorded, and with made-up noises.

        Raises RemoteProtocolError that names `param`: `voice_not_found`; `invalid_value` for an embedding, and for a
        recording without enough speech; `resource_exhausted` and `server_error` where the model had no room or failed.
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
            # It is being replaced or deleted.
            return None
        except Refused as refusal:
            return _Unfit("resource_exhausted", f"cannot be listened to now: {refusal}.")
        except ModelError:
            return _Unfit("server_error", "could not be listened to: the model failed.")


def _recording(name: str, store: VoiceStore) -> _Recording | _Unfit | None:
    """The recording of a voice. Reads files. Raises OSError."""
    voice, path = store.get(name), store.sample(name)
    if voice and path:
        return _Recording(path, path.stat().st_mtime_ns)
    return _Unfit("invalid_value", "was uploaded as an embedding; a recording is needed.") if voice else None


async def _listened(recording: bytes, model: SpeakerModel, detector: VoiceActivityDetector) -> _Outcome:
    """The vectors of a recording's voice. Raises Refused, ModelError."""
    try:
        pcm = await in_thread(
            decode_beginning, io.BytesIO(recording), SAMPLE_RATE_HZ, MAX_RECORDING_S, places=FILE_THREADS
        )
    except MediaError as error:
        return _Unfit("invalid_value", f"cannot be heard: {error}.")
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
    # The last frame is filled up with silence.
    padded = np.pad(pcm, (0, -len(pcm) % detector.frame_samples))
    for start in range(0, len(padded), SAMPLE_RATE_HZ):
        probabilities += await stream.feed(padded[start : start + SAMPLE_RATE_HZ])
    return speech_of(padded, probabilities, detector.frame_samples)
