"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, BinaryIO

import anyio.to_thread
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from antiphon.audio.containers import decode_all
from antiphon.contracts import FileInfo, FileOptions, Transcriber, TranscriptionTask, TranscriptSegment
from antiphon.errors import MediaError, ModelError, Refused, RemoteProtocolError
from antiphon.protocols.rest import transcriptions as openai_rest
from antiphon.protocols.rest.transcriptions import FileRequest
from antiphon.server.errors import error_response
from antiphon.server.state import ServerState

log = logging.getLogger(__name__)
MAX_FIELDS = 40


async def transcriptions(request: Request) -> Response:
    """A file to text in its own language."""
    return await _answer(request, "transcribe")


async def translations(request: Request) -> Response:
    """A file to English text."""
    return await _answer(request, "translate")


async def _answer(request: Request, task: TranscriptionTask) -> Response:
    state: ServerState = request.app.state.antiphon
    most = state.settings.audio.max_file_bytes
    try:
        transcriber = state.loaded().transcriber
        if int(request.headers.get("content-length", "0") or 0) > most + (1 << 20):
            return error_response(413, f"The file is larger than {most} bytes.", code="file_too_large", param="file")
        async with request.form(max_files=1, max_fields=MAX_FIELDS) as form:
            fields: dict[str, list[str]] = {}
            for key, value in form.multi_items():
                if isinstance(value, str):
                    fields.setdefault(key, []).append(value)
            asked = openai_rest.parse_form(fields, transcriber.profile.languages)
            if state.names.lenient(asked.model) is None:
                raise RemoteProtocolError("model_not_found", f"The model `{asked.model}` does not exist.", "model")
            if state.names.exact(asked.model) is None:
                state.stand_in(asked.model)
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise RemoteProtocolError("missing_required_parameter", "Missing required parameter: 'file'.", "file")
            if (file.size or 0) > most:
                return error_response(
                    413, f"The file is larger than {most} bytes.", code="file_too_large", param="file"
                )
            source: BinaryIO = file.file
            pcm = await anyio.to_thread.run_sync(decode_all, source)
        if task == "translate" and (not transcriber.profile.translates or transcriber.profile.languages == ("en",)):
            raise RemoteProtocolError("invalid_value", "The loaded model does not translate.", "model")
        state.metrics.audio_s.labels("file").inc(len(pcm) / 16000)
        options = FileOptions(asked.language, asked.prompt, asked.temperature, task, asked.words)
        return await _run(state, transcriber, pcm, asked, options)
    except RemoteProtocolError as error:
        status = 404 if error.code == "model_not_found" else 400
        return error_response(status, error.message, code=error.code, param=error.param)
    except MediaError as error:
        return error_response(400, str(error), code="invalid_value", param="file")
    except Refused as refusal:
        return error_response(503, str(refusal), code="rate_limit_exceeded", retry_after_s=refusal.retry_after_s)
    except ModelError as error:
        log.error("a file failed: %s", error)
        return error_response(500, "The model failed on this file.", code="processing_error")
    except HTTPException as error:
        return error_response(error.status_code, error.detail, code="invalid_value")


async def _run(
    state: ServerState, transcriber: Transcriber, pcm: Any, asked: FileRequest, options: FileOptions
) -> Response:
    if asked.stream:
        return StreamingResponse(_events(transcriber, pcm, options), media_type="text/event-stream")
    started = time.monotonic()
    info, segments = FileInfo(options.language or "en", 0.0), list[TranscriptSegment]()
    async with aclosing(transcriber.transcribe(pcm, options)) as parts:  # type: ignore[type-var]
        async for part in parts:
            if isinstance(part, TranscriptSegment):
                segments.append(part)
            else:
                info = part
    state.metrics.measure("file", time.monotonic() - started)
    media_type, text = openai_rest.body(asked, options.task, info, segments)
    return Response(text, media_type=media_type)


async def _events(transcriber: Transcriber, pcm: Any, options: FileOptions) -> AsyncIterator[str]:
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
