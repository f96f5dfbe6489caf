"""Bodies of ElevenLabs' REST endpoints for speech: /v1/text-to-speech/… and the lists of voices and models.

See docs/wire/elevenlabs.md. Fields are those of the elevenlabs package 2.78.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.audio.encode import MEDIA_TYPES, StreamEncoding
from antiphon.contracts import SynthesizerProfile
from antiphon.errors import RemoteProtocolError
from antiphon.events.speech import SpeechConfig
from antiphon.events.words import Word
from antiphon.protocols.elevenlabs.alignment import FileAlignment, char_times, file_alignment
from antiphon.protocols.elevenlabs.voices import (
    DEFAULT_FORMAT,
    MEDIA_TYPES_OF_RAW,
    VoiceSettings,
    read_format,
    read_voice,
    speed_of,
)
from antiphon.protocols.fields import Text, decode, json_object, warnings_of
from antiphon.protocols.speech.fields import SpeechCatalog
from antiphon.protocols.wire import ShapedError

MAX_TEXT_CHARS = 10_000
# The paths at which errors have ElevenLabs' shape.
ELEVENLABS_PATHS = ("/v1/text-to-speech", "/v1/speech-to-text", "/v1/convai", "/v1/voices", "/v2/voices")
_encoder = msgspec.json.Encoder()


class TextToSpeechBody(msgspec.Struct):
    """The body of a request. Null counts as missing, and unknown fields are ignored."""

    # The text to speak.
    text: str
    # Name of the model.
    model_id: Text | None = None
    # ISO-639-1 code of the language; None to detect it.
    language_code: Text | None = None
    # How the voice speaks.
    voice_settings: VoiceSettings | None = None
    # Random seed.
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class TextToSpeech:
    """A checked request. `ignored`: names of its fields and parameters that have no effect."""

    text: str
    config: SpeechConfig
    encoding: StreamEncoding
    ignored: tuple[str, ...] = ()

    @property
    def media_type(self) -> str:
        """The media type of the audio."""
        codec = self.encoding.codec
        return MEDIA_TYPES_OF_RAW.get(codec) or MEDIA_TYPES[codec]  # type: ignore[index]


class _TimedAudio(msgspec.Struct):
    # The audio, in the requested format.
    audio_base64: str
    # The characters of the text, with their times.
    alignment: FileAlignment | None
    # The same, since texts are not normalized.
    normalized_alignment: FileAlignment | None


def elevenlabs_error(status: int, code: str, message: str, request_id: str) -> ShapedError:
    """Return a refusal in ElevenLabs' shape."""
    return ShapedError({"detail": {"status": code, "message": message, "request_id": request_id}}, {})


def read_request(voice_id: str, query: Mapping[str, str], body: bytes, catalog: SpeechCatalog) -> TextToSpeech:
    """Read a request. Blocks while it reads an uploaded voice. Raises RemoteProtocolError."""
    try:
        found = decode(body, TextToSpeechBody)
    except RemoteProtocolError:
        # If the body is not a JSON object, raise the same error as other routes.
        json_object(body)
        raise
    if not found.text.strip():
        raise RemoteProtocolError("invalid_value", "There is no text to speak.", "text")
    if len(found.text) > MAX_TEXT_CHARS:
        message = f"A text has at most {MAX_TEXT_CHARS} characters."
        raise RemoteProtocolError("max_character_limit_exceeded", message, "text")
    encoding = read_format(query.get("output_format") or DEFAULT_FORMAT)
    config = read_voice(
        voice_id,
        catalog,
        encoding,
        model_id=found.model_id,
        language_code=found.language_code,
        seed=found.seed,
    )
    config = replace(config, speed=speed_of(found.voice_settings), granularity="none")
    unread = (warning.param for warning in warnings_of(body, TextToSpeechBody))
    return TextToSpeech(found.text, config, encoding, (*unread, *(set(query) - {"output_format"})))


def timed_audio(data: bytes, text: str, words: Iterable[Word], end_s: float) -> bytes:
    """Return the body of an answer with timestamps. `end_s`: the end of the audio, in seconds."""
    alignment = file_alignment(char_times(text, words, end_s))
    return _encoder.encode(_TimedAudio(b64encode(data).decode(), alignment, alignment))


def timed_piece(data: bytes) -> bytes:
    """Return one line of a stream with timestamps that has audio only. The alignment is in the last line."""
    return _encoder.encode(_TimedAudio(b64encode(data).decode(), None, None)) + b"\n"


class VerifiedLanguage(msgspec.Struct):
    """A language of a voice, as an ISO-639-1 code, and the model that speaks it."""

    language: str
    model_id: str


class ElevenLabsVoice(msgspec.Struct):
    """A loaded voice, or one that the caller has uploaded."""

    # Its name in requests.
    voice_id: str
    # The same.
    name: str
    # `premade` for a loaded voice, `cloned` for an uploaded one.
    category: Literal["premade", "cloned"]
    # The first `language` of a loaded voice.
    labels: dict[str, str]
    # The languages that it speaks.
    verified_languages: list[VerifiedLanguage]
    # What the upload said of it.
    description: str | UnsetType = UNSET


class AddedVoice(msgspec.Struct):
    """The answer to an upload. `voice_id` is the voice's name."""

    voice_id: str
    requires_verification: Literal[False]


class DeletedVoice(msgspec.Struct):
    """The answer to the deletion of an uploaded voice."""

    status: Literal["ok"]


class SignedUrl(msgspec.Struct):
    """The answer to a client that wants to open a conversation with an agent: the URL of its WebSocket."""

    signed_url: str


class ElevenLabsVoices(msgspec.Struct):
    """The voices that the caller may use, all on one page."""

    voices: list[ElevenLabsVoice]
    has_more: Literal[False]
    total_count: int


class ModelLanguage(msgspec.Struct):
    """A language of a model, as an ISO-639-1 code. `name` is the same code."""

    language_id: str
    name: str


class ElevenLabsModel(msgspec.Struct):
    """The loaded synthesizer, as an entry of the list of models."""

    model_id: str
    name: str
    can_do_text_to_speech: Literal[True]
    languages: list[ModelLanguage]


def voices_of(profile: SynthesizerProfile, uploaded: Iterable[ElevenLabsVoice] = ()) -> ElevenLabsVoices:
    """Return the list of voices, with the default voice first and the `uploaded` ones last."""
    voices = [*(voice_of(profile, name) for name in profile.voices), *uploaded]
    return ElevenLabsVoices(voices, False, len(voices))


def voice_of(profile: SynthesizerProfile, name: str) -> ElevenLabsVoice:
    """Return one voice. `name` is one of the profile's voices."""
    languages = profile.languages_of(name)
    labels = {"language": languages[0]} if languages else {}
    verified = [VerifiedLanguage(code, profile.id) for code in languages]
    return ElevenLabsVoice(name, name, "premade", labels, verified)


def cloned_voice(profile: SynthesizerProfile, name: str, description: str) -> ElevenLabsVoice:
    """Return an uploaded voice. It speaks all languages of the model."""
    verified = [VerifiedLanguage(code, profile.id) for code in profile.languages]
    return ElevenLabsVoice(name, name, "cloned", {}, verified, description)


def models_of(profile: SynthesizerProfile | None) -> list[ElevenLabsModel]:
    """Return the list of models: the synthesizer, or none."""
    if profile is None:
        return []
    languages = [ModelLanguage(code, code) for code in profile.languages]
    return [ElevenLabsModel(profile.id, profile.id, True, languages)]
