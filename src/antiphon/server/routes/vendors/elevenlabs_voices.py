"""ElevenLabs' routes for voices: the loaded ones, and those that the caller's key has uploaded.

Uploaded voices are those of /v1/audio/voices (routes/voices.py). They are shown only if the synthesizer can clone them.
"""

from __future__ import annotations

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.elevenlabs import rest
from antiphon.protocols.model_names import loaded_voice, voice_not_found
from antiphon.protocols.speech.rest import parse_voice
from antiphon.server.http.auth import identify
from antiphon.server.http.body import FORM_BYTES, json_response, limited_form
from antiphon.server.http.errors import BodyTooLarge
from antiphon.server.routes.speech import synthesizer_of
from antiphon.server.routes.voices import MAX_SAMPLE_BYTES, keep_voice
from antiphon.server.state import ServerState
from antiphon.shares.threads import in_thread

# The hosted service takes up to this number of recordings. Only the first is kept here.
MAX_FILES = 25
# Kept as the consent of a voice: ElevenLabs' API has no field for it, and its users agree to have it.
CONSENT = "POST /v1/voices/add"


async def elevenlabs_voices(request: Request) -> Response:
    """GET: list the voices that the caller may use. 404 without a synthesizer."""
    state: ServerState = request.app.state.antiphon
    profile = synthesizer_of(state).profile
    uploaded = await in_thread(state.uploaded_voices(identify(request)).list) if profile.clones_voices else []
    cloned = [rest.cloned_voice(profile, voice.name, voice.description) for voice in uploaded]
    return json_response(rest.voices_of(profile, cloned))


async def elevenlabs_voice(request: Request) -> Response:
    """GET: one of these voices. DELETE: remove one that the caller has uploaded. 404 for other names."""
    state: ServerState = request.app.state.antiphon
    profile, name = synthesizer_of(state).profile, request.path_params["voice_id"]
    store = state.uploaded_voices(identify(request))
    if request.method == "DELETE":
        if not await in_thread(store.delete, name):
            raise voice_not_found(name, profile.voices, "voice_id")
        return json_response(rest.DeletedVoice("ok"))
    if own := loaded_voice(name, profile.voices):
        return json_response(rest.voice_of(profile, own))
    found = await in_thread(store.get, name) if profile.clones_voices else None
    if found is None:
        raise voice_not_found(name, profile.voices, "voice_id")
    return json_response(rest.cloned_voice(profile, found.name, found.description))


async def add_voice(request: Request) -> Response:
    """POST: upload a voice as a recording. 400 (`voice_not_supported`) if the synthesizer cannot clone voices."""
    state: ServerState = request.app.state.antiphon
    if not synthesizer_of(state).profile.clones_voices:
        raise RemoteProtocolError("voice_not_supported", "The loaded model cannot clone voices.", "files")
    too_large = BodyTooLarge(f"A recording may have {MAX_SAMPLE_BYTES} bytes.", "file_too_large", "files")
    limit = MAX_SAMPLE_BYTES + FORM_BYTES
    async with limited_form(request, limit, max_fields=20, max_files=MAX_FILES, error=too_large) as form:
        fields = {key: value for key, value in form.items() if isinstance(value, str)}
        files = [file for file in form.getlist("files") if isinstance(file, UploadFile)]
        if not files:
            raise RemoteProtocolError("missing_required_parameter", "Missing required parameter: 'files'.", "files")
        if (files[0].size or 0) > MAX_SAMPLE_BYTES:
            raise too_large
        sample, mime_type = await files[0].read(), files[0].content_type or ""
    ignored = [*(fields.keys() - {"name", "description"}), *(["files after the first"] if len(files) > 1 else [])]
    state.log_ignored(ignored, "/v1/voices/add")
    described = {"name": fields.get("name", ""), "speaker_description": fields.get("description", "")}
    asked = parse_voice(described | {"consent": CONSENT}, has_sample=True)
    stored = await keep_voice(request, asked, sample, mime_type, "files")
    return json_response(rest.AddedVoice(stored.name, False))
