"""/v1/audio/voices: lists the synthesizer's and the caller's own voices, and uploads and deletes voices."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from typing import Literal
from urllib.parse import quote

import msgspec
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from antiphon.audio.containers import decode
from antiphon.errors import MediaError, RemoteProtocolError
from antiphon.protocols.model_names import HOSTED_VOICES
from antiphon.protocols.speech import rest as openai_speech
from antiphon.server.http.auth import identify
from antiphon.server.http.body import FORM_BYTES, json_response, limited_form
from antiphon.server.http.errors import BodyTooLarge
from antiphon.server.routes.speech import synthesizer_of
from antiphon.server.state import ServerState
from antiphon.shares.threads import FILE_THREADS, in_thread
from antiphon.store.voices import StoredVoice
from antiphon.transports.paths import flaw

MAX_SAMPLE_BYTES, MAX_NAME_CHARS = 10 << 20, 64


class UploadedVoice(msgspec.Struct):
    """An uploaded voice, without its recording."""

    # The name that requests use.
    name: str
    # The consent that was given, in the client's words.
    consent: str
    # When it was uploaded, in Unix seconds.
    created_at: int
    # The transcript of the recording.
    ref_text: str
    # The client's description of the speaker.
    speaker_description: str
    # "direct" if the voice was uploaded as an embedding, "audio" if it was uploaded as a recording.
    embedding_source: Literal["direct", "audio"]
    # The length of the embedding; None for a recording.
    embedding_dim: int | None
    # The size of the recording in bytes; 0 for an embedding.
    file_size: int
    # The media type of the recording, as the client sent it.
    mime_type: str

    @classmethod
    def of(cls, voice: StoredVoice) -> UploadedVoice:
        """Return the part of a stored voice that clients may see."""
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
    """A voice that requests may name by its `id`, with the languages that it speaks. `language` is the first."""

    id: str
    name: str
    language: str | None
    languages: list[str]


class VoiceList(msgspec.Struct):
    """All usable voices, their names, and the voices that the caller has uploaded.

    `voices` and `voice_names` include uploaded voices only if the synthesizer can clone them. With `?legacy=true`, as
    Kokoro-FastAPI has it, `voices` are the names too.
    """

    voices: Sequence[Voice | str]
    voice_names: list[str]
    uploaded_voices: list[UploadedVoice]


class VoiceUploaded(msgspec.Struct):
    """The response to a successful upload. A failed one is an error in OpenAI's format."""

    success: Literal[True]
    voice: UploadedVoice


class VoiceDeleted(msgspec.Struct):
    """The response to the deletion of an uploaded voice. `name` is spelled as in the request."""

    success: Literal[True]
    name: str
    deleted: Literal[True]


async def voices(request: Request) -> Response:
    """GET: list the synthesizer's voices and the caller's uploaded ones. POST: upload a voice, as a recording or an
    embedding.
    """
    state: ServerState = request.app.state.antiphon
    return await (_upload if request.method == "POST" else _list)(request, state)


def _own_voices(state: ServerState) -> tuple[str, ...]:
    """Return the synthesizer's voices; none if only a speaker model uses the uploaded voices."""
    if state.loaded().synthesizer is None and state.loaded().speaker_model:
        return ()
    return synthesizer_of(state).profile.voices


async def _list(request: Request, state: ServerState) -> Response:
    uploaded = await in_thread(state.uploaded_voices(identify(request)).list)
    own, synthesizer = _own_voices(state), state.loaded().synthesizer
    profile = synthesizer.profile if synthesizer else None
    names = [*own, *(voice.name for voice in uploaded if profile and profile.clones_voices)]
    listed = [UploadedVoice.of(voice) for voice in uploaded]
    if request.query_params.get("legacy", "").lower() in ("true", "1"):
        return json_response(VoiceList(names, names, listed))
    voices = list[Voice | str]()
    for name in names:
        languages = list(profile.languages_of(name)) if profile else []
        shown = name.capitalize() if name.isalpha() and name.islower() else name
        voices.append(Voice(name, shown, languages[0] if languages else None, languages))
    return json_response(VoiceList(voices, names, listed))


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
    stored = await keep_voice(request, asked, sample, mime_type, "audio_sample")
    return json_response(VoiceUploaded(True, UploadedVoice.of(stored)))


async def keep_voice(
    request: Request, asked: openai_speech.VoiceUpload, sample: bytes | None, mime_type: str, param: str
) -> StoredVoice:
    """Check an upload and store it for the caller's key. Replaces the key's voice of the same name.

    `param` is the name of the field with the recording. Raises RemoteProtocolError (`invalid_value`) for a name that is
    taken or unfit, or a recording that cannot be decoded; StoreError if the key has too many voices.
    """
    state: ServerState = request.app.state.antiphon
    if len(asked.name) > MAX_NAME_CHARS or not asked.name.isprintable():
        raise RemoteProtocolError(
            "invalid_value", f"Invalid value for 'name': at most {MAX_NAME_CHARS} printable characters.", "name"
        )
    if flaw(f"/v1/audio/voices/{quote(asked.name, safe='')}"):
        # A voice with this name could never be deleted.
        raise RemoteProtocolError("invalid_value", "Invalid value for 'name': it cannot be part of a path.", "name")
    taken = {v.lower() for v in _own_voices(state)} | HOSTED_VOICES
    if asked.name.lower() in taken:
        raise RemoteProtocolError("invalid_value", f"The name `{asked.name}` is taken.", "name")
    if sample is not None:
        await in_thread(_check_sample, sample, param, places=FILE_THREADS)
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
    return stored


def _check_sample(sample: bytes, param: str) -> None:
    """Raise RemoteProtocolError if a sample cannot be decoded. Decodes only its beginning."""
    try:
        next(iter(decode(io.BytesIO(sample))), None)
    except MediaError as error:
        raise RemoteProtocolError("invalid_value", f"Invalid value for '{param}': {error}.", param) from None


async def voice(request: Request) -> Response:
    """DELETE: remove a voice that the caller has uploaded, with its files. 404 (`voice_not_found`) for other names."""
    state: ServerState = request.app.state.antiphon
    name = request.path_params["name"]
    if not await in_thread(state.uploaded_voices(identify(request)).delete, name):
        raise RemoteProtocolError("voice_not_found", f"No voice `{name[:MAX_NAME_CHARS]}` was uploaded.", "name")
    return json_response(VoiceDeleted(True, name, True))
