"""Deepgram's transcripts of files, POST /v1/listen: docs/wire/deepgram.md. Live transcription is a dialect."""

from __future__ import annotations

import hashlib
import io
import time
from contextlib import AsyncExitStack
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, cast

from starlette.requests import Request
from starlette.responses import Response

from antiphon.audio.channels import MAX_MIXED
from antiphon.audio.wav import ALAW, FLOAT, PCM, ULAW, wav_header
from antiphon.contracts import FileOptions
from antiphon.errors import RemoteProtocolError
from antiphon.protocols.deepgram import files
from antiphon.protocols.deepgram.query import RAW, DeepgramQuery
from antiphon.protocols.fields import decode
from antiphon.protocols.realtime.input_fields import NO_SPEAKER_MODEL
from antiphon.protocols.rest.transcription_form import FileRequest
from antiphon.server.access_log import current_request
from antiphon.server.http.auth import identify
from antiphon.server.http.body import FIELD_BYTES, json_response, limited
from antiphon.server.http.disconnect import unless_disconnected
from antiphon.server.http.errors import BodyTooLarge
from antiphon.server.live.open_wire import context_of
from antiphon.server.routes.transcriptions import FileTranscription
from antiphon.server.routes.vendors.deepgram_speak import query_of
from antiphon.server.state import ServerState

# Bytes of an uploaded file that stay in memory; the rest is in a temporary file.
SPOOLED_BYTES = 1 << 20
# The format tag of a WAV file for each encoding without a header.
_TAGS = {"linear16": PCM, "linear32": FLOAT, "mulaw": ULAW, "alaw": ALAW}


async def listen(request: Request) -> Response:
    """POST /v1/listen: transcribe the file in the body, or at the URL that a JSON body names."""
    state: ServerState = request.app.state.antiphon
    caller = identify(request)
    query, context = query_of(request, state, files.PARAMETERS), context_of(state, caller)
    query.check_model(context)
    diarize = query.flag("diarize") or bool(query.text("diarize_model"))
    if diarize and not context.tells_voices:
        raise RemoteProtocolError("unsupported_parameter", NO_SPEAKER_MODEL, "diarize")
    separate = query.flag("multichannel")
    asked = FileRequest(
        context.models.loaded[0],
        "verbose_json",
        query.language(context),
        ", ".join(query.terms()),
        words=True,
        channels="separate" if separate else "mix",
        channel_names=tuple(map(str, range(MAX_MIXED))) if separate else (),
        speaker_labels=diarize and not separate,
    )
    options = FileOptions(asked.language, asked.prompt, word_times=True)
    async with AsyncExitStack() as stack:
        stack.enter_context(state.admission.admit(caller, kind="captions"))
        file, sha256 = await _file(request, state, query, stack)
        transcript = FileTranscription(state, caller, asked, options)
        parts = await transcript.parts(file, stack)

        async def whole() -> Response:
            info, segments = await transcript.whole(parts)
            names = [str(note.channel) for note in transcript.channels]
            heard = files.TranscribedFile(segments, info, names, sha256)
            return json_response(files.file_transcript(query, heard, asked.model, current_request().id, time.time()))

        return await unless_disconnected(request, whole)


async def _file(
    request: Request, state: ServerState, query: DeepgramQuery, stack: AsyncExitStack
) -> tuple[BinaryIO, str]:
    """Return the file that a request is about, and the SHA-256 of its bytes. `stack` closes it. Raises BodyTooLarge."""
    max_bytes = state.settings.audio.max_file_bytes
    too_large = BodyTooLarge(f"The file is larger than {max_bytes} bytes.", "file_too_large", "file")
    header = _header(query)
    if request.headers.get("content-type", "").startswith("application/json"):
        url = decode(await limited(request, FIELD_BYTES).body(), files.FileUrl).url
        data = await state.fetcher.audio(url, "url", max_bytes)
        return io.BytesIO(header + data), hashlib.sha256(data).hexdigest()
    spooled = SpooledTemporaryFile(SPOOLED_BYTES)  # noqa: SIM115
    file = cast(BinaryIO, stack.enter_context(spooled))
    digest, has_audio = hashlib.sha256(), False
    file.write(header)
    async for chunk in limited(request, max_bytes, too_large).stream():
        digest.update(chunk)
        has_audio = has_audio or bool(chunk)
        file.write(chunk)
    if not has_audio:
        raise RemoteProtocolError("invalid_value", "The body has no audio.", "file")
    file.seek(0)
    return file, digest.hexdigest()


def _header(query: DeepgramQuery) -> bytes:
    """Return the WAV header before samples without one; b"" for a file in a container."""
    encoding = query.text("encoding")
    if encoding not in RAW:
        query.check_encoding()
        return b""
    rate_hz, channels = query.raw_format()
    return wav_header(rate_hz, tag=_TAGS[encoding], channels=channels)
