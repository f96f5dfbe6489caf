"""Deepgram's REST routes and its stream of speech: docs/wire/deepgram.md. Its live transcription is a dialect."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, cast

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from antiphon.audio.channels import MAX_MIXED
from antiphon.audio.encode import MEDIA_TYPES
from antiphon.audio.wav import ALAW, FLOAT, PCM, ULAW, wav_header
from antiphon.contracts import FileOptions
from antiphon.errors import ModelError, Refused, RemoteProtocolError
from antiphon.protocols.deepgram import files
from antiphon.protocols.deepgram.forms import model_uuid
from antiphon.protocols.deepgram.query import RAW, Query
from antiphon.protocols.deepgram.speak import (
    PARAMETERS,
    FindVoice,
    SpeakBody,
    SpeakConnection,
    SpeakQuery,
    voice_finder,
)
from antiphon.protocols.fields import decode
from antiphon.protocols.opening import URL_KEYS
from antiphon.protocols.realtime.input_fields import NO_SPEAKER_MODEL
from antiphon.protocols.rest.transcription_form import FileRequest
from antiphon.protocols.speech.rest import MAX_INPUT_CHARS, SpeechRequest
from antiphon.protocols.wire import random_id
from antiphon.server.access_log import current_request
from antiphon.server.credentials import Caller
from antiphon.server.http.auth import identify
from antiphon.server.http.body import FIELD_BYTES, json_response, limited
from antiphon.server.http.disconnect import unless_disconnected
from antiphon.server.http.errors import BodyTooLarge
from antiphon.server.live.handshake import accept
from antiphon.server.live.open_wire import context_of
from antiphon.server.live.speech import LiveSpeech
from antiphon.server.live.speech_catalog import speech_catalog
from antiphon.server.routes.speech import log_failure, synthesized, synthesizer_of
from antiphon.server.routes.transcriptions import FileTranscription
from antiphon.server.state import ServerState
from antiphon.transports.http import CutStream
from antiphon.transports.websocket import WebSocketTransport

# Bytes of an uploaded file that stay in memory; the rest is in a temporary file.
SPOOLED_BYTES = 1 << 20
# The format tag of a WAV file for each encoding without a header.
_TAGS = {"linear16": PCM, "linear32": FLOAT, "mulaw": ULAW, "alaw": ALAW}


async def listen(request: Request) -> Response:
    """POST /v1/listen: transcribe the file in the body, or at the URL that a JSON body names."""
    state: ServerState = request.app.state.antiphon
    caller = identify(request)
    query, context = _query(request, state, files.PARAMETERS), context_of(state, caller)
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
            heard = files.HeardFile(segments, info, names, sha256)
            return json_response(files.file_transcript(query, heard, asked.model, current_request().id, time.time()))

        return await unless_disconnected(request, whole)


async def speak(request: Request) -> Response:
    """POST /v1/speak: speak the text of the body, streamed."""
    state: ServerState = request.app.state.antiphon
    synthesizer, caller = synthesizer_of(state), identify(request)
    asked = SpeakQuery(_query(request, state, PARAMETERS), _voice_finder(state, caller), live=False)
    text = decode(await limited(request, FIELD_BYTES).body(), SpeakBody).text
    if not text.strip():
        raise RemoteProtocolError("invalid_value", "There is no text to speak.", "text")
    if len(text) > MAX_INPUT_CHARS:
        raise BodyTooLarge(f"A text has at most {MAX_INPUT_CHARS} characters.", "string_above_max_length", "text")
    chunks = synthesized(state, caller, synthesizer, SpeechRequest(text, asked.config))
    first = await anext(chunks, None)

    async def body() -> AsyncIterator[bytes]:
        async with aclosing(chunks):
            if header := asked.header():
                yield header
            if first:
                yield asked.encoded(first.data)
            async for chunk in chunks:
                yield asked.encoded(chunk.data)

    name = synthesizer.profile.id
    headers = {
        "dg-model-name": name,
        "dg-model-uuid": model_uuid(name),
        "dg-char-count": str(len(text)),
        "dg-request-id": current_request().id,
    }
    media_type = asked.media_type or MEDIA_TYPES[asked.config.format]
    return CutStream(body(), (ModelError, Refused), log_failure, headers=headers, media_type=media_type)


async def speak_stream(websocket: WebSocket) -> None:
    """WS /v1/speak: speak pieces of text."""
    state: ServerState = websocket.app.state.antiphon
    caller = identify(websocket)
    state.admission.refuse_if_draining()
    synthesizer = synthesizer_of(state)
    asked = SpeakQuery(_query(websocket, state, PARAMETERS), _voice_finder(state, caller), live=True)
    with state.admission.admit(caller, "speech"):
        await accept(websocket)
        wire, socket = SpeakConnection(asked, synthesizer.profile.id, random_id), WebSocketTransport(websocket)
        await LiveSpeech(socket, state, caller, None, wire, wire.dialect, wire.open()).run()


def _query(connection: HTTPConnection, state: ServerState, known: frozenset[str]) -> Query:
    """Return the query of a request without keys, and log the names of parameters that are ignored."""
    pairs = [(name, value) for name, value in connection.query_params.multi_items() if name not in URL_KEYS]
    state.log_ignored({name for name, _ in pairs} - known, connection.scope["path"])
    return Query(pairs)


def _voice_finder(state: ServerState, caller: Caller) -> FindVoice:
    catalog = speech_catalog(state, caller)
    return voice_finder(catalog.voices, catalog.languages, catalog.models.lenient, catalog.log_alias)


async def _file(request: Request, state: ServerState, query: Query, stack: AsyncExitStack) -> tuple[BinaryIO, str]:
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


def _header(query: Query) -> bytes:
    """Return the WAV header before samples without one; b"" for a file in a container."""
    encoding = query.text("encoding")
    if encoding not in RAW:
        query.check_encoding()
        return b""
    rate_hz, channels = query.raw_format()
    return wav_header(rate_hz, tag=_TAGS[encoding], channels=channels)
