"""ElevenLabs' routes: text to speech over HTTP and WebSockets, and the URLs of conversations with agents."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from urllib.parse import urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from antiphon.errors import ModelError, Refused, RemoteProtocolError
from antiphon.events.words import Word
from antiphon.protocols.contexts import ContextWire
from antiphon.protocols.elevenlabs import rest
from antiphon.protocols.elevenlabs.agent import PATH
from antiphon.protocols.elevenlabs.rest import TextToSpeech
from antiphon.protocols.elevenlabs.streams import CLOSE_REFUSED, PARAMETERS, ElevenLabsStreams, refusal
from antiphon.protocols.opening import URL_KEYS
from antiphon.protocols.speech.fields import SpeechCatalog
from antiphon.protocols.speech.rest import SpeechRequest
from antiphon.server.http.auth import ELEVENLABS_KEY, identify
from antiphon.server.http.body import json_response, limited
from antiphon.server.http.disconnect import unless_disconnected
from antiphon.server.live.contexts import AsyncEncoder, serve_contexts
from antiphon.server.live.speech_catalog import speech_catalog
from antiphon.server.routes.client_secrets import new_secret
from antiphon.server.routes.speech import MAX_BODY_BYTES, log_failure, synthesized, synthesizer_of
from antiphon.server.state import ServerState
from antiphon.sessions.speech.render import EncodedSpeech
from antiphon.shares.threads import in_thread
from antiphon.transports.http import CutStream

# The session that a signed URL opens, and the seconds for which it does.
CONVERSATION, SIGNED_S = msgspec.Raw(b'{"type":"realtime"}'), 900.0


def is_elevenlabs(request: Request) -> bool:
    """Return whether a request is of a program for ElevenLabs' service, which sends its key in a header of its own."""
    return ELEVENLABS_KEY in request.headers


async def signed_url(request: Request) -> Response:
    """GET: the URL of a conversation with an agent, which needs no key for SIGNED_S seconds."""
    caller = identify(request)
    agent_id = request.query_params.get("agent_id", "")
    if not agent_id:
        raise RemoteProtocolError("missing_required_parameter", "Missing required parameter: 'agent_id'.", "agent_id")
    token = new_secret(request.app.state.antiphon, caller, CONVERSATION, SIGNED_S)
    query = urlencode({"agent_id": agent_id, "token": token})
    scheme = request.url.scheme.replace("http", "ws", 1)
    return json_response(rest.SignedUrl(str(request.url.replace(scheme=scheme, path=PATH, query=query))))


# --- text to speech over WebSockets


async def stream_input(websocket: WebSocket) -> None:
    """Speak one text, which arrives in pieces. `serve_contexts` says how a WebSocket is refused."""
    await _speak_in_contexts(websocket, multi=False)


async def multi_stream_input(websocket: WebSocket) -> None:
    """Speak several texts, each in a context."""
    await _speak_in_contexts(websocket, multi=True)


async def _speak_in_contexts(websocket: WebSocket, *, multi: bool) -> None:
    state: ServerState = websocket.app.state.antiphon
    query, voice_id = websocket.query_params, websocket.path_params["voice_id"]
    state.log_ignored(query.keys() - PARAMETERS - {*URL_KEYS}, "/v1/text-to-speech")

    def make(catalog: SpeechCatalog) -> ContextWire:
        return ElevenLabsStreams(voice_id, query, catalog, time.monotonic, multi=multi)

    await serve_contexts(websocket, make, lambda error: (refusal(error), CLOSE_REFUSED))


# --- text to speech over HTTP


@dataclass(slots=True)
class _Spoken:
    """A request that is being spoken, and what is known of its audio so far: its words and its end in seconds."""

    asked: TextToSpeech
    chunks: AsyncGenerator[EncodedSpeech, None]
    words: list[Word] = field(default_factory=list)
    end_s: float = 0.0

    async def audio(self) -> AsyncIterator[bytes]:
        """Yield the audio in the requested format, as it is made."""
        encoder = AsyncEncoder(self.asked.encoding)
        async with aclosing(self.chunks):
            async for chunk in self.chunks:
                self.words += chunk.words
                self.end_s = chunk.end_s
                if data := await encoder.feed(chunk.data):
                    yield data
        if rest_of_file := await encoder.finish():
            yield rest_of_file


async def text_to_speech(request: Request) -> Response:
    """POST: the audio of a text, whole."""
    spoken = await _spoken(request)

    async def whole() -> Response:
        return Response(b"".join([data async for data in spoken.audio()]), media_type=spoken.asked.media_type)

    return await unless_disconnected(request, whole)


async def text_to_speech_timed(request: Request) -> Response:
    """POST: the audio of a text, whole, in JSON with the times of its characters."""
    spoken = await _spoken(request)

    async def whole() -> Response:
        data = b"".join([data async for data in spoken.audio()])
        body = rest.timed_audio(data, spoken.asked.text, spoken.words, spoken.end_s)
        return Response(body, media_type="application/json")

    return await unless_disconnected(request, whole)


async def text_to_speech_stream(request: Request) -> Response:
    """POST: the audio of a text, as it is made. A failure after the first audio cuts the answer off."""
    spoken = await _spoken(request)
    return await _streamed(spoken.audio(), spoken.asked.media_type)


async def text_to_speech_timed_stream(request: Request) -> Response:
    """POST: the audio as it is made, in lines of JSON. The last line has the times of the characters."""
    spoken = await _spoken(request)

    async def lines() -> AsyncIterator[bytes]:
        async for data in spoken.audio():
            yield rest.timed_piece(data)
        yield rest.timed_audio(b"", spoken.asked.text, spoken.words, spoken.end_s) + b"\n"

    return await _streamed(lines(), "application/json")


async def _spoken(request: Request) -> _Spoken:
    state: ServerState = request.app.state.antiphon
    synthesizer, caller = synthesizer_of(state), identify(request)
    body = await limited(request, MAX_BODY_BYTES).body()
    voice_id, query = request.path_params["voice_id"], dict(request.query_params)
    asked = await in_thread(rest.read_request, voice_id, query, body, speech_catalog(state, caller))
    state.log_ignored(asked.ignored, "/v1/text-to-speech")
    return _Spoken(asked, synthesized(state, caller, synthesizer, SpeechRequest(asked.text, asked.config)))


async def _streamed(pieces: AsyncIterator[bytes], media_type: str) -> Response:
    # Waits for the first audio before sending the status, so that most errors of the request still get a status.
    first = await anext(pieces, b"")

    async def all_pieces() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    return CutStream(all_pieces(), (ModelError, Refused, RemoteProtocolError), log_failure, media_type=media_type)
