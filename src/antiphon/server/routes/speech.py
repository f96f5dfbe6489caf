"""POST /v1/audio/speech and /v1/audio/speech/batch, and the voices of /v1/audio/voices."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

import anyio
import msgspec
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from antiphon.audio.containers import decode
from antiphon.audio.encode import MEDIA_TYPES
from antiphon.contracts import Synthesizer
from antiphon.errors import MediaError, ModelError, Refused, RemoteProtocolError
from antiphon.events.words import Word
from antiphon.protocols.model_names import HOSTED_VOICES
from antiphon.protocols.speech import rest as openai_speech
from antiphon.protocols.speech.rest import BatchItem, BatchResults, SpeechRequest
from antiphon.server.access_log import current_request
from antiphon.server.auth import identify
from antiphon.server.body import FORM_BYTES, json_response, limited, limited_form
from antiphon.server.credentials import Caller
from antiphon.server.disconnect import unless_disconnected
from antiphon.server.errors import BodyTooLarge
from antiphon.server.live.speech_catalog import speech_catalog, with_sample
from antiphon.server.state import ServerState
from antiphon.sessions.speech.render import EncodedSpeech, speak
from antiphon.shares.threads import FILE_THREADS, in_thread
from antiphon.store.voices import StoredVoice
from antiphon.text.markup import plain
from antiphon.transports.cut_stream import CutStream
from antiphon.transports.paths import flaw

log = logging.getLogger(__name__)
MAX_BODY_BYTES, MAX_SAMPLE_BYTES = 16 << 20, 10 << 20
MAX_NAME_CHARS = 64
# Of a batch: items that are synthesized at the same time, and seconds of audio in all.
MAX_CONCURRENT_ITEMS, MAX_BATCH_S = 4, 3600.0


async def speech(request: Request) -> Response:
    """Synthesize one text, in the format that the request asks for.

    The response is streamed as it is made, as bytes or as events; a WAV whose stream was not asked for is sent whole.
    It holds one of the caller's places until it ends.
    """
    return await _speech(request, request.app.state.antiphon)


async def batch(request: Request) -> Response:
    """Synthesize up to 32 texts at once, MAX_BATCH_S of audio in all. An item that fails does not fail the others."""
    return await _batch(request, request.app.state.antiphon)


async def voices(request: Request) -> Response:
    """GET: list the synthesizer's voices and those that the caller has uploaded. POST: upload a voice, as a sample or
    an embedding.
    """
    handler = _upload if request.method == "POST" else _list
    return await handler(request, request.app.state.antiphon)


async def voice(request: Request) -> Response:
    """DELETE: remove a voice that the caller has uploaded, with its files. 404 (`voice_not_found`) for others."""
    return await _delete(request, request.app.state.antiphon)


def _synthesizer(state: ServerState) -> Synthesizer:
    found = state.loaded().synthesizer
    if found is None:
        raise RemoteProtocolError("model_not_found", "No speech synthesizer is loaded.", "model")
    return found


def _own_voices(state: ServerState) -> tuple[str, ...]:
    """The synthesizer's voices; none where only a speaker model uses what is uploaded."""
    if state.loaded().synthesizer is None and state.loaded().speaker_model:
        return ()
    return _synthesizer(state).profile.voices


# --- speech -----------------------------------------------------------------------------------------------------------


async def _speech(request: Request, state: ServerState) -> Response:
    synthesizer = _synthesizer(state)
    caller = identify(request)
    body = await limited(request, MAX_BODY_BYTES).body()
    asked = await in_thread(openai_speech.parse, body, speech_catalog(state, caller))
    chunks = _synthesized(state, caller, synthesizer, asked)
    media_type = MEDIA_TYPES[asked.config.format]
    if asked.whole:

        async def whole() -> Response:
            async with aclosing(chunks):
                return Response(b"".join([chunk.data async for chunk in chunks]), media_type=media_type)

        return await unless_disconnected(request, whole)
    # The first audio is awaited before the status is sent: what is wrong with a request is known by then.
    first = await anext(chunks, None)
    if asked.sse:
        return StreamingResponse(_events(asked, first, chunks), media_type="text/event-stream")
    return CutStream(_bytes(first, chunks), (ModelError, Refused), _log_failure, media_type=media_type)


async def _synthesized(
    state: ServerState, caller: Caller, synthesizer: Synthesizer, asked: SpeechRequest
) -> AsyncGenerator[EncodedSpeech, None]:
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


def _log_failure(error: Exception) -> None:
    log.error("speech failed under way: %s", error)


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
            _log_failure(error)
            yield openai_speech.error_event("The model failed on this text.")
            return
    yield openai_speech.done_event(num_symbols, num_frames, words if asked.config.word_times else None, skipped)


@dataclass(slots=True)
class _AudioBudget:
    """Seconds of audio that a batch may still have; below 0 its other items fail."""

    left_s: float


async def _batch(request: Request, state: ServerState) -> Response:
    synthesizer = _synthesizer(state)
    caller = identify(request)
    body = await limited(request, MAX_BODY_BYTES).body()
    asked = await in_thread(openai_speech.parse_batch, body, speech_catalog(state, caller))
    results: dict[int, BatchItem] = {}
    # The batch holds one place, synthesizes a few items at a time, and shares one limit on its audio.
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
                    raise RemoteProtocolError("too_long", f"a batch may hold {MAX_BATCH_S:.0f} s of sound", "items")
                data.append(chunk.data)
                words += chunk.words
                skipped += chunk.skipped
    except (RemoteProtocolError, Refused, ModelError) as error:
        return openai_speech.batch_failure(index, error if isinstance(error, RemoteProtocolError) else str(error))
    return openai_speech.batch_item(index, config.format, b"".join(data), words if config.word_times else None, skipped)


# --- voices -----------------------------------------------------------------------------------------------------------


class UploadedVoice(msgspec.Struct):
    """A voice that was uploaded, without its recording. `created_at` is in Unix seconds, `file_size` in bytes.

    `embedding_dim` is None for a voice that was uploaded as a recording; `file_size` is then the recording's.
    """

    name: str
    consent: str
    created_at: int
    ref_text: str
    speaker_description: str
    embedding_source: Literal["direct", "audio"]
    embedding_dim: int | None
    file_size: int
    mime_type: str

    @classmethod
    def of(cls, voice: StoredVoice) -> UploadedVoice:
        """What clients are shown of a stored voice."""
        return cls(
            name=voice.name,
            consent=voice.consent,
            created_at=voice.created_at,
            ref_text=voice.ref_text,
            speaker_description=voice.description,
            embedding_source="direct" if voice.embedding else "audio",
            embedding_dim=len(voice.embedding) or None,
            file_size=voice.size,
            mime_type=voice.mime_type,
        )


class Voice(msgspec.Struct):
    """A voice that requests may name by its `id`, and the languages that it speaks, its own first."""

    id: str
    name: str
    language: str | None
    languages: list[str]


class VoiceList(msgspec.Struct):
    """The voices that the synthesizer speaks with, the caller's uploaded ones among them where it clones; their names
    alone; and what the caller has uploaded.
    """

    voices: list[Voice]
    voice_names: list[str]
    uploaded_voices: list[UploadedVoice]


class VoiceUploaded(msgspec.Struct):
    """The response to an upload. One that fails is an error in OpenAI's shape instead."""

    success: Literal[True]
    voice: UploadedVoice


class VoiceDeleted(msgspec.Struct):
    """The response to the deletion of an uploaded voice; `name` is as the client wrote it."""

    success: Literal[True]
    name: str
    deleted: Literal[True]


async def _list(request: Request, state: ServerState) -> Response:
    uploaded = await in_thread(state.uploaded_voices(identify(request)).list)
    own, synthesizer = _own_voices(state), state.loaded().synthesizer
    profile = synthesizer.profile if synthesizer else None
    languages = list(profile.languages) if profile else []
    names = [*own, *(voice.name for voice in uploaded if profile and profile.clones_voices)]
    voices = [
        Voice(name, name[:1].upper() + name[1:], languages[0] if languages else None, languages) for name in names
    ]
    return json_response(VoiceList(voices, names, [UploadedVoice.of(voice) for voice in uploaded]))


async def _upload(request: Request, state: ServerState) -> Response:
    too_large = BodyTooLarge(f"A sample may have {MAX_SAMPLE_BYTES} bytes.", "file_too_large", "audio_sample")
    async with limited_form(request, MAX_SAMPLE_BYTES + FORM_BYTES, max_fields=20, error=too_large) as form:
        fields = {key: value for key, value in form.items() if isinstance(value, str)}
        file = form.get("audio_sample")
        if isinstance(file, UploadFile) and (file.size or 0) > MAX_SAMPLE_BYTES:
            raise too_large
        sample = await file.read() if isinstance(file, UploadFile) else None
        mime_type = (file.content_type if isinstance(file, UploadFile) else "") or ""
    asked = openai_speech.parse_voice(fields, has_sample=sample is not None)
    if len(asked.name) > MAX_NAME_CHARS or not asked.name.isprintable():
        raise RemoteProtocolError(
            "invalid_value", f"Invalid value for 'name': at most {MAX_NAME_CHARS} printable characters.", "name"
        )
    if flaw(f"/v1/audio/voices/{quote(asked.name, safe='')}"):
        # It could never be deleted.
        raise RemoteProtocolError("invalid_value", "Invalid value for 'name': it cannot be part of a path.", "name")
    taken = {v.lower() for v in _own_voices(state)} | HOSTED_VOICES
    if asked.name.lower() in taken:
        raise RemoteProtocolError("invalid_value", f"The name `{asked.name}` is taken.", "name")
    if sample is not None:
        await in_thread(_check_sample, sample, places=FILE_THREADS)
    stored = StoredVoice(
        name=asked.name,
        consent=asked.consent,
        created_at=int(time.time()),
        ref_text=asked.ref_text,
        description=asked.description,
        mime_type=mime_type[:100],
        size=len(sample or b""),
        embedding=asked.embedding or (),
    )
    await in_thread(state.uploaded_voices(identify(request)).add, stored, sample)
    return json_response(VoiceUploaded(True, UploadedVoice.of(stored)))


def _check_sample(sample: bytes) -> None:
    """Raise RemoteProtocolError for a sample that cannot be decoded. Only its beginning is decoded."""
    try:
        next(iter(decode(io.BytesIO(sample))), None)
    except MediaError as error:
        raise RemoteProtocolError(
            "invalid_value", f"Invalid value for 'audio_sample': {error}.", "audio_sample"
        ) from None


async def _delete(request: Request, state: ServerState) -> Response:
    name = request.path_params["name"]
    if not await in_thread(state.uploaded_voices(identify(request)).delete, name):
        raise RemoteProtocolError("voice_not_found", f"No voice `{name[:MAX_NAME_CHARS]}` was uploaded.", "name")
    return json_response(VoiceDeleted(True, name, True))
