"""POST /v1/audio/transcriptions and /v1/audio/translations: a file to text, whole or streamed.

A file may hold hours of audio in a few kilobytes, so it is decoded in slabs as the transcriber needs them.
"""

from __future__ import annotations

import io
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, closing
from functools import partial
from typing import BinaryIO

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.channels import MAX_MIXED
from antiphon.audio.containers import OneChannel, SkippedAudio, decode_beginning, decode_in_slabs, measure_s
from antiphon.audio.file_parts import view_of
from antiphon.contracts import FileInfo, FileOptions, Transcriber, TranscriptionTask, TranscriptSegment
from antiphon.errors import MediaError, ModelError, Refused, RemoteProtocolError
from antiphon.protocols.rest import transcriptions as openai_rest
from antiphon.protocols.rest.transcription_form import MAX_REFERENCES, FileRequest, parse_form
from antiphon.server.access_log import current_request
from antiphon.server.credentials import Caller
from antiphon.server.http.auth import identify
from antiphon.server.http.body import FIELD_BYTES, FORM_BYTES, limited_form
from antiphon.server.http.disconnect import HeldStream, unless_disconnected
from antiphon.server.http.errors import BodyTooLarge
from antiphon.server.live.known_speakers import remembered
from antiphon.server.state import ServerState
from antiphon.sessions.transcription.file_channels import CHANNEL_PAUSE_S, Parts, channels_to_hear, in_order, surveyed
from antiphon.sessions.transcription.file_speakers import FileVoices, UnfitReference, known_voice
from antiphon.sessions.transcription.file_speech import FILE_VAD, segments_by_words, transcribe_speech
from antiphon.shares.threads import FILE_THREADS, in_thread
from antiphon.turns.voices.speakers import SpeakerHints

MAX_FIELDS = 40
# Seconds of audio that are decoded at a time. They take 2 MB, and about 50 ms.
SLAB_S = 30.0
# The response header with the seconds of a damaged file that could not be decoded.
SKIPPED_HEADER = "antiphon-skipped-seconds"
# Seconds of a reference that are used, and maximum bytes of its form field.
MAX_REFERENCE_S, REFERENCE_BYTES = 10.0, 1 << 20
NO_SPEAKERS = (
    "No speaker model is loaded, so voices cannot be distinguished: start the server with "
    "`antiphon serve --speaker-model resemblyzer`. For a file with one person on each channel, `channels=separate` "
    "needs no model."
)


async def transcriptions(request: Request) -> Response:
    """Transcribe a file, in the request's `language` or in the language that is detected.

    The request holds one of its caller's places from before its body is read until its response ends.
    """
    return await _respond(request, "transcribe")


async def translations(request: Request) -> Response:
    """Translate a file's speech to English. 400 if the loaded model does not translate."""
    return await _respond(request, "translate")


async def _respond(request: Request, task: TranscriptionTask) -> Response:
    state: ServerState = request.app.state.antiphon
    models = state.loaded()
    transcriber = models.required_transcriber
    async with AsyncExitStack() as stack:
        stack.enter_context(state.admission.admit(identify(request), kind="captions"))
        asked, file = await _read(request, state, transcriber, stack)
        if task == "translate" and (not transcriber.profile.translates or transcriber.profile.languages == ("en",)):
            raise RemoteProtocolError("invalid_value", "The loaded model does not translate.", "model")
        options = FileOptions(asked.language, asked.prompt, asked.temperature, task, asked.needs_word_times)
        transcript = FileTranscription(state, identify(request), asked, options)
        parts = await transcript.parts(file, stack)
        if asked.stream:
            return HeldStream(_events(parts, transcript), stack.pop_all())
        return await unless_disconnected(request, lambda: _whole(parts, transcript))


class FileTranscription:
    """The making of one file's transcript, and what is known of the file. Other vendors' routes use it too.

    - `state`, `caller`, `asked`, `options`: the server, the client, the request, and how to transcribe.
    - `skipped`: counts the audio that could not be decoded.
    - `channels`: what became of the channels, if they are transcribed one by one.
    - `voices`: finds out who says what, if speakers are distinguished by voice.
    """

    def __init__(self, state: ServerState, caller: Caller, asked: FileRequest, options: FileOptions) -> None:
        self.state, self.caller, self.asked, self.options = state, caller, asked, options
        self.skipped = SkippedAudio()
        self.channels: list[openai_rest.ChannelNote] = []
        self.voices: FileVoices | None = None

    async def parts(self, file: BinaryIO, stack: AsyncExitStack) -> Parts:
        """Return the segments of a file, then its FileInfo. `stack` ends the transcription.

        Raises BodyTooLarge for a file that is too long.
        """
        max_s = self.state.settings.audio.max_file_s
        if await in_thread(measure_s, file, max_s, places=FILE_THREADS) > max_s:
            raise _too_long(max_s)
        heard = None
        if self.asked.channels != "mix":
            facts = await surveyed(file, partial(in_thread, places=FILE_THREADS))
            heard = channels_to_hear(facts, self.asked.channels, self.asked.channel_names)
        if heard is None:
            if self.asked.tells_speakers:
                self.voices = await self._listener()
            return segments_by_words(await self._of_audio(_slabs(self.state, file, self.skipped), stack))
        if len(heard) > MAX_MIXED:
            message = f"{len(heard)} channels have sounds of their own; at most {MAX_MIXED} are transcribed separately."
            raise RemoteProtocolError("invalid_value", message, "channels")
        if len(heard) * await in_thread(measure_s, file, max_s, places=FILE_THREADS) > max_s:
            raise BodyTooLarge(f"The channels hold more than {max_s:.0f} s of audio.", "file_too_long", "file")
        self.channels = openai_rest.channel_notes(facts, heard)
        made: dict[str, Parts] = {}
        for channel, name in heard.items():
            # The damage of a file counts once.
            skipped = SkippedAudio() if made else self.skipped
            slabs = _slabs(self.state, view_of(file), skipped, OneChannel(channel, facts))
            made[name] = segments_by_words(await self._of_audio(slabs, stack), CHANNEL_PAUSE_S)
        return in_order(made)

    async def whole(self, parts: Parts) -> tuple[FileInfo, list[TranscriptSegment]]:
        """Read all parts, and return what they hold. The segments have their speakers, if those are asked for."""
        started_s = time.monotonic()
        info, segments = FileInfo(self.options.language or "en", 0.0), list[TranscriptSegment]()
        async for part in parts:
            if isinstance(part, TranscriptSegment):
                segments.append(part)
            else:
                info = part
        if self.voices:
            segments = await self.voices.labelled(segments)
        self.state.metrics.measure("file", time.monotonic() - started_s)
        return info, segments

    async def _listener(self) -> FileVoices:
        """Return what finds out who speaks. Raises RemoteProtocolError without a model, or for an unfit speaker."""
        models, asked = self.state.loaded(), self.asked
        model = models.speaker_model
        clustering = model.profile.clustering if model else None
        if model is None or clustering is None:
            param = "response_format" if asked.format == "diarized_json" else "speaker_labels"
            raise RemoteProtocolError("model_not_found", NO_SPEAKERS, param)
        known = []
        for name, reference in asked.known_speakers:
            if not reference:
                store = self.state.remembered_speakers(self.caller)
                known.append(await remembered(name, "known_speaker_names", store, model))
                continue
            try:
                pcm = await in_thread(
                    decode_beginning, io.BytesIO(reference), SAMPLE_RATE_HZ, MAX_REFERENCE_S, places=FILE_THREADS
                )
                known.append(await known_voice(name, pcm, model, clustering, models.required_vad))
            except (MediaError, UnfitReference) as error:
                message = f"The reference of '{name}' cannot be used: {error}."
                raise RemoteProtocolError("invalid_value", message, "known_speaker_references") from None
        return FileVoices(model, clustering, SpeakerHints(tuple(known), asked.speakers, asked.max_speakers))

    async def _of_audio(self, slabs: AsyncGenerator[Pcm, None], stack: AsyncExitStack) -> Parts:
        models = self.state.loaded()
        transcriber = models.required_transcriber
        await stack.enter_async_context(aclosing(slabs))
        if self.asked.speech_detection is None:
            if self.voices:
                slabs = await stack.enter_async_context(aclosing(self.voices.heard(slabs)))
            parts = transcriber.transcribe(slabs, self.options)
        else:
            vad = FILE_VAD if self.asked.speech_detection == "auto" else self.asked.speech_detection
            listener = self.voices.hear if self.voices else None
            parts = transcribe_speech(transcriber, models.required_vad, slabs, self.options, vad, listener)
        await stack.enter_async_context(aclosing(parts))  # type: ignore[type-var]
        return parts


async def _read(
    request: Request, state: ServerState, transcriber: Transcriber, stack: AsyncExitStack
) -> tuple[FileRequest, BinaryIO]:
    """Return the form's fields and its file, which `stack` closes. Raises RemoteProtocolError, BodyTooLarge."""
    max_bytes = state.settings.audio.max_file_bytes
    too_large = BodyTooLarge(f"The file is larger than {max_bytes} bytes.", "file_too_large", "file")
    form = await stack.enter_async_context(
        limited_form(
            request,
            max_bytes + FORM_BYTES + MAX_REFERENCES * REFERENCE_BYTES,
            max_fields=MAX_FIELDS,
            error=too_large,
            max_field_bytes=REFERENCE_BYTES,
        )
    )
    fields: dict[str, list[str]] = {}
    for key, value in form.multi_items():
        if isinstance(value, str):
            if len(value) > FIELD_BYTES and not key.startswith("known_speaker_references"):
                raise RemoteProtocolError("invalid_value", f"The field is longer than {FIELD_BYTES} bytes.", key)
            fields.setdefault(key, []).append(value)
    asked = parse_form(fields, transcriber.profile.languages)
    if state.transcriber_names.lenient(asked.model) is None:
        raise RemoteProtocolError("model_not_found", f"The model `{asked.model}` does not exist.", "model")
    if state.transcriber_names.exact(asked.model) is None:
        state.log_alias(asked.model)
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise RemoteProtocolError("missing_required_parameter", "Missing required parameter: 'file'.", "file")
    if (file.size or 0) > max_bytes:
        raise too_large
    return asked, file.file


async def _slabs(
    state: ServerState, file: BinaryIO, skipped: SkippedAudio, channel: OneChannel | None = None
) -> AsyncGenerator[Pcm, None]:
    """Decode a file slab by slab in a thread, as the transcriber reads. Raises MediaError, BodyTooLarge."""
    max_s, seconds = state.settings.audio.max_file_s, 0.0
    with closing(decode_in_slabs(file, SLAB_S, skipped, channel)) as slabs:
        while (slab := await in_thread(next, slabs, None, places=FILE_THREADS)) is not None:
            seconds += len(slab) / SAMPLE_RATE_HZ
            if seconds > max_s + SLAB_S:
                # The audio is longer than its packets had indicated to `measure_s`.
                raise _too_long(max_s)
            state.metrics.audio_s.labels("file").inc(len(slab) / SAMPLE_RATE_HZ)
            current_request().audio_s += len(slab) / SAMPLE_RATE_HZ
            yield slab


def _too_long(max_s: float) -> BodyTooLarge:
    return BodyTooLarge(f"The file holds more than {max_s:.0f} s of audio.", "file_too_long", "file")


async def _whole(parts: Parts, transcript: FileTranscription) -> Response:
    info, segments = await transcript.whole(parts)
    options, skipped = transcript.options, transcript.skipped
    media_type, text = openai_rest.body(
        transcript.asked, options.task, info, segments, skipped.seconds, transcript.channels
    )
    seconds = openai_rest.skipped_seconds(skipped.seconds)
    return Response(text, media_type=media_type, headers={SKIPPED_HEADER: str(seconds)} if seconds else None)


async def _events(parts: Parts, transcript: FileTranscription) -> AsyncIterator[str]:
    info, sent, num_tokens = FileInfo(transcript.options.language or "en", 0.0), "", 0
    is_diarized = transcript.asked.format == "diarized_json"
    segments = list[TranscriptSegment]()
    try:
        async for part in parts:
            if not isinstance(part, TranscriptSegment):
                info = part
                continue
            text = part.text if sent else part.text.lstrip()
            num_tokens += len(part.tokens)
            if text:
                sent += text
                # A voice is known at the end of the file, and may divide the segment then.
                is_complete = is_diarized and transcript.voices is None
                yield openai_rest.delta_event(text, openai_rest.segment_id(part) if is_complete else None)
                if is_complete:
                    yield openai_rest.segment_event(part)
                segments.append(part)
        if transcript.voices:
            for segment in await transcript.voices.labelled(segments):
                yield openai_rest.segment_event(segment)
    except (ModelError, Refused) as error:
        yield openai_rest.error_event(str(error))
        return
    except MediaError as error:
        yield openai_rest.file_error_event(str(error), "invalid_value")
        return
    except BodyTooLarge as error:
        yield openai_rest.file_error_event(error.detail, error.code or "file_too_long")
        return
    yield openai_rest.done_event(sent, info, num_tokens, transcript.skipped.seconds, transcript.channels)
