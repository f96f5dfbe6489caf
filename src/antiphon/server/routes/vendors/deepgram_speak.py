"""Deepgram's speech, /v1/speak: over HTTP, and of text in pieces over a WebSocket. See docs/wire/deepgram.md."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from antiphon.audio.encode import MEDIA_TYPES
from antiphon.errors import ModelError, Refused, RemoteProtocolError
from antiphon.protocols.deepgram.forms import model_uuid
from antiphon.protocols.deepgram.query import DeepgramQuery
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
from antiphon.protocols.speech.rest import MAX_INPUT_CHARS, SpeechRequest
from antiphon.protocols.wire import random_id
from antiphon.server.access_log import current_request
from antiphon.server.credentials import Caller
from antiphon.server.http.auth import identify
from antiphon.server.http.body import FIELD_BYTES, limited
from antiphon.server.http.errors import BodyTooLarge
from antiphon.server.live.handshake import accept
from antiphon.server.live.speech import LiveSpeech
from antiphon.server.live.speech_catalog import speech_catalog
from antiphon.server.routes.speech import log_failure, synthesized, synthesizer_of
from antiphon.server.state import ServerState
from antiphon.transports.http import CutStream
from antiphon.transports.websocket import WebSocketTransport


async def speak(request: Request) -> Response:
    """POST /v1/speak: speak the text of the body, streamed."""
    state: ServerState = request.app.state.antiphon
    synthesizer, caller = synthesizer_of(state), identify(request)
    asked = SpeakQuery(query_of(request, state, PARAMETERS), _voice_finder(state, caller), live=False)
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
    asked = SpeakQuery(query_of(websocket, state, PARAMETERS), _voice_finder(state, caller), live=True)
    with state.admission.admit(caller, "speech"):
        await accept(websocket)
        wire, socket = SpeakConnection(asked, synthesizer.profile.id, random_id), WebSocketTransport(websocket)
        await LiveSpeech(socket, state, caller, None, wire, wire.dialect, wire.open()).run()


def query_of(connection: HTTPConnection, state: ServerState, known: frozenset[str]) -> DeepgramQuery:
    """Return the query of a request without keys, and log the names of parameters that are ignored."""
    pairs = [(name, value) for name, value in connection.query_params.multi_items() if name not in URL_KEYS]
    state.log_ignored({name for name, _ in pairs} - known, connection.scope["path"])
    return DeepgramQuery(pairs)


def _voice_finder(state: ServerState, caller: Caller) -> FindVoice:
    catalog = speech_catalog(state, caller)
    return voice_finder(catalog.voices, catalog.languages, catalog.models.lenient, catalog.log_alias)
