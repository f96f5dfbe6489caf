"""The lists that programs for ElevenLabs' service read: GET /v1/voices, and its form of GET /v1/models.

Fields are those of the elevenlabs package 2.78. Fields that do not apply here are left out.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from antiphon.contracts import SynthesizerProfile
from antiphon.server.http.auth import ELEVENLABS_KEY
from antiphon.server.http.body import json_response
from antiphon.server.routes.speech import synthesizer_of


class VerifiedLanguage(msgspec.Struct):
    """A language of a voice, as an ISO-639-1 code, and the model that speaks it."""

    language: str
    model_id: str


class ElevenLabsVoice(msgspec.Struct):
    """A voice. `voice_id` and `name` are its name in requests, and `labels` has its first `language`."""

    voice_id: str
    name: str
    category: Literal["premade"]
    labels: dict[str, str]
    verified_languages: list[VerifiedLanguage]


class ElevenLabsVoices(msgspec.Struct):
    """The loaded voices, all on one page."""

    voices: list[ElevenLabsVoice]
    has_more: Literal[False]
    total_count: int


class ModelLanguage(msgspec.Struct):
    """A language of a model, as an ISO-639-1 code. `name` is the same code."""

    language_id: str
    name: str


class ElevenLabsModel(msgspec.Struct):
    """The loaded synthesizer."""

    model_id: str
    name: str
    can_do_text_to_speech: Literal[True]
    languages: list[ModelLanguage]


def is_elevenlabs(request: Request) -> bool:
    """Return whether a request is of a program for ElevenLabs' service, which sends its key in a header of its own."""
    return ELEVENLABS_KEY in request.headers


async def elevenlabs_voices(request: Request) -> Response:
    """GET: list the synthesizer's voices. 404 without a synthesizer."""
    profile = synthesizer_of(request.app.state.antiphon).profile
    voices = [_voice(profile, name) for name in profile.voices]
    return json_response(ElevenLabsVoices(voices, False, len(voices)))


def elevenlabs_models(profile: SynthesizerProfile | None) -> list[ElevenLabsModel]:
    """Return the list of models for a program of ElevenLabs: the synthesizer, or none."""
    if profile is None:
        return []
    languages = [ModelLanguage(code, code) for code in profile.languages]
    return [ElevenLabsModel(profile.id, profile.id, True, languages)]


def _voice(profile: SynthesizerProfile, name: str) -> ElevenLabsVoice:
    languages = profile.languages_of(name)
    labels = {"language": languages[0]} if languages else {}
    verified = [VerifiedLanguage(code, profile.id) for code in languages]
    return ElevenLabsVoice(name, name, "premade", labels, verified)
