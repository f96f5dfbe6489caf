"""POST /v1/audio/transcriptions and /v1/audio/translations: a file to text, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import BinaryIO

import anyio.to_thread
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.containers import decode_all
from antiphon.contracts import FileInfo, FileOptions, Transcriber, TranscriptionTask, TranscriptSegment
from antiphon.errors import ModelError, Refused, RemoteProtocolError
from antiphon.protocols.rest import transcriptions as openai_rest
from antiphon.protocols.rest.transcriptions import FileRequest
from antiphon.server.body import FORM_BYTES, limited_form
from antiphon.server.errors import BodyTooLarge
from antiphon.server.state import ServerState

MAX_FIELDS = 40


async def transcriptions(request: Request) -> Response:
    """Transcribe a file in its own language, or in the `language` that the request names."""
    return await _respond(request, "transcribe")


async def translations(request: Request) -> Response:
    """Translate a file's speech to English. 400 where the loaded model does not translate."""
    return await _respond(request, "translate")


async def _respond(request: Request, task: TranscriptionTask) -> Response:
    state: ServerState = request.app.state.antiphon
    transcriber = state.loaded().required_transcriber
    asked, pcm = await _read(request, state, transcriber)
    if task == "translate" and (not transcriber.profile.translates or transcriber.profile.languages == ("en",)):
        raise RemoteProtocolError("invalid_value", "The loaded model does not translate.", "model")
    state.metrics.audio_s.labels("file").inc(len(pcm) / SAMPLE_RATE_HZ)
    options = FileOptions(asked.language, asked.prompt, asked.temperature, task, asked.words)
    return await _run(state, transcriber, pcm, asked, options)


async def _read(request: Request, state: ServerState, transcriber: Transcriber) -> tuple[FileRequest, Pcm]:
    """Return the form's fields, and its file decoded to 16 kHz.

    Raises RemoteProtocolError, BodyTooLarge, MediaError.
    """
    max_bytes = state.settings.audio.max_file_bytes
    too_large = BodyTooLarge(f"The file is larger than {max_bytes} bytes.", "file_too_large", "file")
    async with limited_form(request, max_bytes + FORM_BYTES, max_fields=MAX_FIELDS, error=too_large) as form:
        fields: dict[str, list[str]] = {}
        for key, value in form.multi_items():
            if isinstance(value, str):
                fields.setdefault(key, []).append(value)
        asked = openai_rest.parse_form(fields, transcriber.profile.languages)
        if state.transcriber_names.lenient(asked.model) is None:
            raise RemoteProtocolError("model_not_found", f"The model `{asked.model}` does not exist.", "model")
        if state.transcriber_names.exact(asked.model) is None:
            state.log_alias(asked.model)
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise RemoteProtocolError("missing_required_parameter", "Missing required parameter: 'file'.", "file")
        if (file.size or 0) > max_bytes:
            raise too_large
        source: BinaryIO = file.file
        return asked, await anyio.to_thread.run_sync(decode_all, source)


async def _run(
    state: ServerState, transcriber: Transcriber, pcm: Pcm, asked: FileRequest, options: FileOptions
) -> Response:
    if asked.stream:
        return StreamingResponse(_events(transcriber, pcm, options), media_type="text/event-stream")
    started_s = time.monotonic()
    info, segments = FileInfo(options.language or "en", 0.0), list[TranscriptSegment]()
    async with aclosing(transcriber.transcribe(pcm, options)) as parts:  # type: ignore[type-var]
        async for part in parts:
            if isinstance(part, TranscriptSegment):
                segments.append(part)
            else:
                info = part
    state.metrics.measure("file", time.monotonic() - started_s)
    media_type, text = openai_rest.body(asked, options.task, info, segments)
    return Response(text, media_type=media_type)


async def _events(transcriber: Transcriber, pcm: Pcm, options: FileOptions) -> AsyncIterator[str]:
    info, sent, num_tokens = FileInfo(options.language or "en", 0.0), "", 0
    try:
        async with aclosing(transcriber.transcribe(pcm, options)) as parts:  # type: ignore[type-var]
            async for part in parts:
                if not isinstance(part, TranscriptSegment):
                    info = part
                    continue
                text = part.text if sent else part.text.lstrip()
                num_tokens += len(part.tokens)
                if text:
                    sent += text
                    yield openai_rest.delta_event(text)
    except (ModelError, Refused) as error:
        yield openai_rest.error_event(str(error))
        return
    yield openai_rest.done_event(sent, info, num_tokens)
