"""Cartesia's routes: text to speech in contexts over a WebSocket, and over HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.websockets import WebSocket

from antiphon.errors import ModelError, Refused, RemoteProtocolError
from antiphon.events.words import Word
from antiphon.protocols.cartesia import speaking
from antiphon.protocols.cartesia.speaking import CartesiaSpeech, CartesiaStreams, EventsRequest, SpokenRequest
from antiphon.protocols.contexts import ContextWire
from antiphon.protocols.fields import decode, json_object, warnings_of
from antiphon.protocols.speech.fields import SpeechCatalog
from antiphon.protocols.speech.rest import SpeechRequest
from antiphon.protocols.wire import message
from antiphon.server.http.auth import identify
from antiphon.server.http.body import limited
from antiphon.server.live.contexts import AsyncEncoder, serve_contexts
from antiphon.server.live.session import CLOSE_POLICY
from antiphon.server.live.speech_catalog import speech_catalog
from antiphon.server.routes.speech import MAX_BODY_BYTES, log_failure, synthesized, synthesizer_of
from antiphon.server.state import ServerState
from antiphon.sessions.speech.render import EncodedSpeech
from antiphon.shares.threads import in_thread
from antiphon.transports.http import CutStream


async def speak_in_contexts(websocket: WebSocket) -> None:
    """Serve one WebSocket with contexts. `serve_contexts` says how it is refused."""

    def make(catalog: SpeechCatalog) -> ContextWire:
        # Voices are named in messages, which are read in the event loop, and uploaded voices are read from files.
        return CartesiaStreams(replace(catalog, uploaded=lambda name: None))

    await serve_contexts(websocket, make, lambda error: (message(type="error", error=error.message), CLOSE_POLICY))


async def speak_bytes(request: Request) -> Response:
    """POST: the audio of a text, as it is made. A failure after the first audio cuts the answer off."""
    asked, chunks = await _asked(request, SpokenRequest)

    async def audio() -> AsyncIterator[bytes]:
        encoder = AsyncEncoder(asked.encoding)
        async with aclosing(chunks):
            async for chunk in chunks:
                if data := await encoder.feed(chunk.data):
                    yield data
        if rest := await encoder.finish():
            yield rest

    pieces = audio()
    # Waits for the first audio before sending the status, so that most errors of the request still get a status.
    first = await anext(pieces, b"")

    async def all_pieces() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    failures = (ModelError, Refused, RemoteProtocolError)
    return CutStream(all_pieces(), failures, log_failure, media_type=asked.media_type)


async def speak_events(request: Request) -> Response:
    """POST: the audio of a text, as it is made, in server-sent events."""
    asked, chunks = await _asked(request, EventsRequest)
    # Waits for the first audio before sending the status, so that most errors of the request still get a status.
    first = await anext(chunks, None)

    async def events() -> AsyncIterator[bytes]:
        encoder, words, chunk = AsyncEncoder(asked.encoding), tuple[Word, ...](), first
        async with aclosing(chunks):
            try:
                while chunk:
                    words += chunk.words
                    if data := await encoder.feed(chunk.data):
                        yield speaking.sse_piece(asked, data, (chunk.end_s - chunk.start_s) * 1000)
                    chunk = await anext(chunks, None)
            except (ModelError, Refused, RemoteProtocolError) as error:
                log_failure(error)
                yield speaking.sse_error("The model failed on this text.")
                return
        if rest := await encoder.finish():
            yield speaking.sse_piece(asked, rest, 0.0)
        yield speaking.sse_end(asked, words)

    return StreamingResponse(events(), media_type="text/event-stream")


async def _asked(
    request: Request, kind: type[SpokenRequest]
) -> tuple[CartesiaSpeech, AsyncGenerator[EncodedSpeech, None]]:
    state: ServerState = request.app.state.antiphon
    synthesizer, caller = synthesizer_of(state), identify(request)
    body = await limited(request, MAX_BODY_BYTES).body()

    def read(catalog: SpeechCatalog) -> CartesiaSpeech:
        try:
            found = decode(body, kind)
        except RemoteProtocolError:
            # If the body is not a JSON object, raise the same error as other routes.
            json_object(body)
            raise
        if not found.transcript.strip():
            raise RemoteProtocolError("invalid_value", "There is no text to speak.", "transcript")
        return speaking.read_request(found, catalog, files=True)

    asked = await in_thread(read, speech_catalog(state, caller))
    state.log_ignored({warning.param for warning in warnings_of(body, kind)}, "/tts")
    return asked, synthesized(state, caller, synthesizer, SpeechRequest(asked.text, asked.config))
