"""ElevenLabs' transcription of files, Scribe. Its live transcription is a dialect."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import BinaryIO

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from antiphon.contracts import FileOptions
from antiphon.errors import RemoteProtocolError
from antiphon.protocols.elevenlabs import scribe_files
from antiphon.server.access_log import current_request
from antiphon.server.http.auth import identify
from antiphon.server.http.body import FORM_BYTES, json_response, limited_form
from antiphon.server.http.disconnect import unless_disconnected
from antiphon.server.http.errors import BodyTooLarge
from antiphon.server.routes.transcriptions import MAX_FIELDS, FileTranscription
from antiphon.server.state import ServerState


async def speech_to_text(request: Request) -> Response:
    """POST: transcribe the file of a form. The request holds one of its caller's places until its response ends."""
    state: ServerState = request.app.state.antiphon
    caller = identify(request)
    async with AsyncExitStack() as stack:
        stack.enter_context(state.admission.admit(caller, kind="captions"))
        fields, file = await _read(request, state, stack)
        languages = state.loaded().required_transcriber.profile.languages
        asked = scribe_files.read_form(fields, languages.__contains__, state.transcriber_names.loaded[0])
        options = FileOptions(asked.language, asked.prompt, asked.temperature, word_times=True)
        transcription = FileTranscription(state, caller, asked, options)
        parts = await transcription.parts(file, stack)
        granularity = fields.get("timestamps_granularity", ["word"])[-1]

        async def whole() -> Response:
            info, segments = await transcription.whole(parts)
            return json_response(scribe_files.transcript(info, segments, granularity, current_request().id))

        return await unless_disconnected(request, whole)


async def _read(request: Request, state: ServerState, stack: AsyncExitStack) -> tuple[dict[str, list[str]], BinaryIO]:
    """Return the form's text fields and its file, which `stack` closes. Raises RemoteProtocolError, BodyTooLarge."""
    max_bytes = state.settings.audio.max_file_bytes
    too_large = BodyTooLarge(f"The file is larger than {max_bytes} bytes.", "file_too_large", "file")
    bounded = limited_form(request, max_bytes + FORM_BYTES, max_fields=MAX_FIELDS, error=too_large)
    form = await stack.enter_async_context(bounded)
    fields: dict[str, list[str]] = {}
    for name, value in form.multi_items():
        if isinstance(value, str):
            fields.setdefault(name.removesuffix("[]"), []).append(value)
    state.log_ignored(fields.keys() - scribe_files.FIELDS, "/v1/speech-to-text")
    model = fields.get("model_id", [""])[-1]
    if model and state.transcriber_names.lenient(model) is None:
        raise RemoteProtocolError("model_not_found", f"The model `{model[:100]}` does not exist.", "model_id")
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise RemoteProtocolError("missing_required_parameter", "Missing required parameter: 'file'.", "file")
    return fields, file.file
