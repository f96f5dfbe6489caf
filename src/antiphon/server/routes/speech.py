"""POST /v1/audio/speech and /v1/audio/speech/batch: text to speech, streamed or whole."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import anyio
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from antiphon.audio.encode import MEDIA_TYPES
from antiphon.contracts import Synthesizer
from antiphon.errors import ModelError, Refused, RemoteProtocolError
from antiphon.events.words import Word
from antiphon.protocols.speech import rest as openai_speech
from antiphon.protocols.speech.rest import BatchItem, BatchResults, SpeechRequest
from antiphon.server.access_log import current_request
from antiphon.server.credentials import Caller
from antiphon.server.http.auth import identify
from antiphon.server.http.body import json_response, limited
from antiphon.server.http.disconnect import unless_disconnected
from antiphon.server.live.speech_catalog import speech_catalog, with_sample
from antiphon.server.state import ServerState
from antiphon.sessions.speech.render import EncodedSpeech, speak
from antiphon.shares.threads import in_thread
from antiphon.text.markup import plain
from antiphon.transports.http import CutStream

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 16 << 20
# Limits of a batch: items that are synthesized concurrently, and seconds of audio in total.
MAX_CONCURRENT_ITEMS, MAX_BATCH_S = 4, 3600.0


def synthesizer_of(state: ServerState) -> Synthesizer:
    """Return the synthesizer. Raises RemoteProtocolError if none is loaded, and Refused while models load."""
    found = state.loaded().synthesizer
    if found is None:
        raise RemoteProtocolError("model_not_found", "No speech synthesizer is loaded.", "model")
    return found


async def speech(request: Request) -> Response:
    """Synthesize one text, in the format of the request.

    Streams the response as it is made, as bytes or as events. A WAV is sent whole unless the request asks for a stream.
    The request holds one of the caller's places until its response ends.
    """
    state: ServerState = request.app.state.antiphon
    synthesizer = synthesizer_of(state)
    caller = identify(request)
    body = await limited(request, MAX_BODY_BYTES).body()
    asked = await in_thread(openai_speech.parse, body, speech_catalog(state, caller))
    chunks = synthesized(state, caller, synthesizer, asked)
    media_type = MEDIA_TYPES[asked.config.format]
    if asked.whole:

        async def whole() -> Response:
            async with aclosing(chunks):
                return Response(b"".join([chunk.data async for chunk in chunks]), media_type=media_type)

        return await unless_disconnected(request, whole)
    # Waits for the first audio before sending the status, so that most errors of the request still get a status.
    first = await anext(chunks, None)
    if asked.sse:
        return StreamingResponse(_events(asked, first, chunks), media_type="text/event-stream")
    return CutStream(_bytes(first, chunks), (ModelError, Refused), log_failure, media_type=media_type)


async def synthesized(
    state: ServerState, caller: Caller, synthesizer: Synthesizer, asked: SpeechRequest
) -> AsyncGenerator[EncodedSpeech, None]:
    """Speak a request's text, and count it. Holds one of the caller's places until the end or `aclose`."""
    with state.admission.admit(caller, "speech"):
        started_s, begun = time.monotonic(), False
        config = await with_sample(state, asked.config)
        async with aclosing(speak(synthesizer, plain(asked.text), config)) as chunks:
            async for chunk in chunks:
                if not begun:
                    state.metrics.measure("first_sound", time.monotonic() - started_s)
                begun = True
                state.metrics.audio_s.labels("spoken").inc(chunk.end_s - chunk.start_s)
                current_request().audio_s += chunk.end_s - chunk.start_s
                yield chunk


async def _bytes(first: EncodedSpeech | None, chunks: AsyncGenerator[EncodedSpeech, None]) -> AsyncIterator[bytes]:
    async with aclosing(chunks):
        if first:
            yield first.data
        async for chunk in chunks:
            yield chunk.data


def log_failure(error: Exception) -> None:
    """Log an error that cut off a response."""
    log.error("speech failed while it was streamed: %s", error)


async def _events(
    asked: SpeechRequest, first: EncodedSpeech | None, chunks: AsyncGenerator[EncodedSpeech, None]
) -> AsyncIterator[bytes]:
    words: list[Word] = []
    skipped, num_symbols, num_frames = "", 0, 0
    chunk = first
    async with aclosing(chunks):
        try:
            while chunk:
                words += chunk.words
                skipped += chunk.skipped
                num_symbols, num_frames = num_symbols + chunk.num_symbols, num_frames + chunk.num_frames
                if chunk.data:
                    yield openai_speech.delta_event(chunk.data)
                chunk = await anext(chunks, None)
        except (ModelError, Refused) as error:
            log_failure(error)
            yield openai_speech.error_event("The model failed on this text.")
            return
    yield openai_speech.done_event(num_symbols, num_frames, words if asked.config.word_times else None, skipped)


@dataclass(slots=True)
class _AudioBudget:
    """The seconds of audio that a batch may still make. When they fall below 0, the batch's remaining items fail."""

    left_s: float


async def batch(request: Request) -> Response:
    """Synthesize up to 32 texts, with at most MAX_BATCH_S of audio. A failed item does not affect the others."""
    state: ServerState = request.app.state.antiphon
    synthesizer = synthesizer_of(state)
    caller = identify(request)
    body = await limited(request, MAX_BODY_BYTES).body()
    asked = await in_thread(openai_speech.parse_batch, body, speech_catalog(state, caller))
    results: dict[int, BatchItem] = {}
    # The batch holds one place, synthesizes a few items concurrently, and has one limit for all its audio.
    limiter, budget = anyio.CapacityLimiter(MAX_CONCURRENT_ITEMS), _AudioBudget(MAX_BATCH_S)

    async def one(index: int, item: SpeechRequest | RemoteProtocolError) -> None:
        async with limiter:
            results[index] = await _result(state, synthesizer, index, item, budget)

    async def respond() -> Response:
        with state.admission.admit(caller, "speech"):
            async with anyio.create_task_group() as group:
                for index, item in enumerate(asked):
                    group.start_soon(one, index, item)
        state.metrics.audio_s.labels("spoken").inc(MAX_BATCH_S - budget.left_s)
        current_request().audio_s = MAX_BATCH_S - budget.left_s
        return json_response(BatchResults.of([results[index] for index in range(len(asked))]))

    return await unless_disconnected(request, respond)


async def _result(
    state: ServerState,
    synthesizer: Synthesizer,
    index: int,
    item: SpeechRequest | RemoteProtocolError,
    budget: _AudioBudget,
) -> BatchItem:
    if isinstance(item, RemoteProtocolError):
        return openai_speech.batch_failure(index, item)
    data, words, skipped = [], list[Word](), ""
    try:
        config = await with_sample(state, item.config)
        async with aclosing(speak(synthesizer, plain(item.text), config)) as chunks:
            async for chunk in chunks:
                budget.left_s -= chunk.end_s - chunk.start_s
                if budget.left_s < 0:
                    raise RemoteProtocolError("too_long", f"a batch may hold {MAX_BATCH_S:.0f} s of audio", "items")
                data.append(chunk.data)
                words += chunk.words
                skipped += chunk.skipped
    except (RemoteProtocolError, Refused, ModelError) as error:
        return openai_speech.batch_failure(index, error if isinstance(error, RemoteProtocolError) else str(error))
    return openai_speech.batch_item(index, config.format, b"".join(data), words if config.word_times else None, skipped)
