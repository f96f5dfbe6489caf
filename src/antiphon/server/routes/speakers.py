"""/v1/speakers: remembers, lists and forgets the speakers whom transcripts of the caller call by name."""

from __future__ import annotations

import io
import time
from typing import Literal
from urllib.parse import quote

import msgspec
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.containers import decode_beginning
from antiphon.errors import MediaError, RemoteProtocolError
from antiphon.protocols.rest.transcription_form import MAX_NAME_CHARS, speaker_name
from antiphon.protocols.speech.rest import MAX_FIELD_CHARS
from antiphon.server.http.auth import identify
from antiphon.server.http.body import FORM_BYTES, json_response, limited_form
from antiphon.server.http.errors import BodyTooLarge
from antiphon.server.state import ServerState
from antiphon.sessions.transcription.file_speakers import UnfitReference, known_voice
from antiphon.shares.threads import FILE_THREADS, in_thread
from antiphon.store.voices import StoredSpeaker
from antiphon.transports.paths import flaw
from antiphon.turns.voices.enrolment import MIN_SPEECH_S

MAX_FILE_BYTES = 10 << 20
# Least and most seconds of a recording. It has to have MIN_SPEECH_S of speech.
MIN_S, MAX_S = 5.0, 30.0
NOT_KEPT = "This server remembers no speakers: start it with `--speakers-per-key`."
NO_MODEL = "No speaker model is loaded: start the server with `antiphon serve --speaker-model resemblyzer`."


class RememberedSpeaker(msgspec.Struct):
    """A remembered speaker, without the vector."""

    # Distinguishes the object from others of the API.
    object: Literal["speaker"]
    # The name that requests use.
    name: str
    # The consent that was given, in the client's words.
    consent: str
    # When the speaker was remembered, in Unix seconds.
    created_at: int
    # When the speaker will be deleted, in Unix seconds; None: never.
    expires_at: int | None
    # The seconds of speech from which the vector was made.
    speech_seconds: float
    # The id of the speaker encoder that made the vector.
    encoder: str


class SpeakerList(msgspec.Struct):
    """All speakers that the caller's key has remembered."""

    object: Literal["list"]
    data: list[RememberedSpeaker]


class SpeakerDeleted(msgspec.Struct):
    """The response to the deletion of a speaker. `name` is spelled as in the request."""

    object: Literal["speaker"]
    name: str
    deleted: Literal[True]


async def speakers(request: Request) -> Response:
    """GET: list the caller's speakers. POST: remember a speaker by a recording of 5 to 30 s."""
    state: ServerState = request.app.state.antiphon
    if not state.settings.speech.speakers_per_key:
        raise RemoteProtocolError("not_supported", NOT_KEPT)
    if request.method == "POST":
        with state.admission.admit(identify(request), kind="captions"):
            return await _remember(request, state)
    kept = await in_thread(state.remembered_speakers(identify(request)).list)
    return json_response(SpeakerList("list", [_shown(speaker, state) for speaker in kept]))


async def speaker(request: Request) -> Response:
    """DELETE: forget a speaker. 404 (`speaker_not_found`) for other names."""
    state: ServerState = request.app.state.antiphon
    name = request.path_params["name"]
    if not await in_thread(state.remembered_speakers(identify(request)).delete, name):
        raise RemoteProtocolError("speaker_not_found", f"No speaker `{name[:MAX_NAME_CHARS]}` is remembered.", "name")
    return json_response(SpeakerDeleted("speaker", name, True))


async def _remember(request: Request, state: ServerState) -> Response:
    models = state.loaded()
    model, clustering = models.speaker_model, models.speaker_model.profile.clustering if models.speaker_model else None
    if model is None or clustering is None:
        raise RemoteProtocolError("model_not_found", NO_MODEL)
    too_large = BodyTooLarge(f"A recording may have {MAX_FILE_BYTES} bytes.", "file_too_large", "file")
    async with limited_form(request, MAX_FILE_BYTES + FORM_BYTES, max_fields=20, error=too_large) as form:
        fields = {key: value for key, value in form.items() if isinstance(value, str)}
        file = form.get("file")
        if isinstance(file, UploadFile) and (file.size or 0) > MAX_FILE_BYTES:
            raise too_large
        recording = await file.read() if isinstance(file, UploadFile) else None
    missing = next((key for key in ("name", "consent") if not fields.get(key, "").strip()), None)
    if recording is None or missing:
        param = missing or "file"
        raise RemoteProtocolError("missing_required_parameter", f"Missing required parameter: '{param}'.", param)
    name, consent = speaker_name(fields["name"], "name"), fields["consent"].strip()
    if flaw(f"/v1/speakers/{quote(name, safe='')}"):
        # A speaker with this name could never be deleted.
        raise RemoteProtocolError("invalid_value", "Invalid name: it cannot be part of a path.", "name")
    if len(consent) > MAX_FIELD_CHARS:
        message = f"Invalid consent: at most {MAX_FIELD_CHARS} characters."
        raise RemoteProtocolError("string_above_max_length", message, "consent")
    try:
        pcm = await in_thread(decode_beginning, io.BytesIO(recording), SAMPLE_RATE_HZ, MAX_S + 1, places=FILE_THREADS)
        if not MIN_S <= len(pcm) / SAMPLE_RATE_HZ <= MAX_S:
            raise UnfitReference(f"it has to last {MIN_S:.0f} to {MAX_S:.0f} s")
        voice = await known_voice(name, pcm, model, clustering, models.required_vad, MIN_SPEECH_S)
    except (MediaError, UnfitReference) as error:
        raise RemoteProtocolError("invalid_value", f"The recording cannot be used: {error}.", "file") from None
    kept = StoredSpeaker(
        name=name,
        consent=consent,
        created_at=int(time.time()),
        encoder=model.profile.id,
        vector=tuple(map(float, voice.vector)),
        speech_s=voice.speech_s,
    )
    await in_thread(state.remembered_speakers(identify(request)).add, kept)
    return json_response(_shown(kept, state))


def _shown(kept: StoredSpeaker, state: ServerState) -> RememberedSpeaker:
    days = state.settings.speech.speaker_days
    expires_at = kept.created_at + days * 86400 if days else None
    return RememberedSpeaker(
        "speaker", kept.name, kept.consent, kept.created_at, expires_at, round(kept.speech_s, 1), kept.encoder
    )
