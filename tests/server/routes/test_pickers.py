"""The lists of voices and models, as other programs read them. Each client is the request code of one program."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace

import httpx
import pytest

from antiphon.audio.containers import decode_all
from antiphon.pipelines.by_language import SeveralVoices
from antiphon.settings import Settings
from tests.pipelines.test_by_language import Voice
from tests.server.scripted import Echo, ScriptedTranscriber, scripted_models, serving

KEY = "sk-home"
BEARER = {"Authorization": f"Bearer {KEY}"}
NAMES = ["ann", "de_DE-eva-low", "de_DE-eva-low:p1"]


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    """Yield the base URL of a server with three voices of two languages, which requires a key."""
    voices = SeveralVoices([Voice(0.2, {"ann": "en"}), Voice(0.4, dict.fromkeys(NAMES[1:], "de"))])
    ears = ScriptedTranscriber()
    names = (ears.profile.id, voices.profile.id)
    models = replace(scripted_models(Echo(), ears), synthesizer=voices, names=names)
    settings = Settings()
    settings = replace(settings, server=replace(settings.server, api_keys=(KEY,)))
    with serving(settings, models=models) as (url, _, _):
        yield f"http{url.removeprefix('ws')}/v1"


def open_webui(base: str) -> list[str]:
    """Open WebUI: routers/audio.py, get_available_models, get_available_voices and speech."""
    models = httpx.get(f"{base}/audio/models", headers=BEARER).json().get("models", [])
    listed = httpx.get(f"{base}/audio/voices", headers=BEARER).json().get("voices", [])
    voices = {voice["id"]: voice["name"] for voice in listed}
    assert voices["ann"] == "Ann"
    payload = {"model": models[0]["id"], "input": "Hello", "voice": list(voices)[1]}
    assert heard(httpx.post(f"{base}/audio/speech", json=payload, headers=BEARER))
    return list(voices)


def silly_tavern(base: str) -> list[str]:
    """SillyTavern: openai-compatible.js. It asks for no list: the voices are a line of its settings."""
    names = httpx.get(f"{base}/audio/voices", headers=BEARER).json()["voice_names"]
    available = ",".join(names).split(",")
    for voice in available:
        payload = {"model": "tts-1", "voice": voice, "input": "Hello", "response_format": "mp3", "speed": 1}
        assert heard(httpx.post(f"{base}/audio/speech", json=payload, headers=BEARER))
    return available


def libre_chat(base: str) -> list[str]:
    """LibreChat: TTSService.js. It asks for no list: the voices are in librechat.yaml."""
    voices = list(httpx.get(f"{base}/audio/voices", headers=BEARER).json()["voice_names"])
    data = {"input": "Hello", "model": "tts-1", "voice": voices[-1], "backend": ""}
    assert heard(httpx.post(f"{base}/audio/speech", json=data, headers=BEARER))
    return voices


def kokoro(base: str) -> list[str]:
    """Clients of Kokoro-FastAPI, of 0.4 and before: objects, and strings if `legacy` is set."""
    now = httpx.get(f"{base}/audio/voices", headers=BEARER).json()["voices"]
    before = httpx.get(f"{base}/audio/voices?legacy=true", headers=BEARER).json()["voices"]
    assert before == [voice["id"] for voice in now]
    return sorted("+".join(before).split("+"))


def eleven_labs(base: str) -> list[str]:
    """Clients of ElevenLabs, such as Open WebUI's: the key is in a header of its own."""
    headers = {"xi-api-key": KEY, "Content-Type": "application/json"}
    (model,) = httpx.get(f"{base}/models", headers=headers).json()
    assert (model["model_id"], model["can_do_text_to_speech"]) == ("voice0.2", True)
    assert [one["language_id"] for one in model["languages"]] == ["en", "de"]
    found = httpx.get(f"{base}/voices", headers=headers).json()
    assert (found["has_more"], found["total_count"]) == (False, 3)
    assert [voice["labels"]["language"] for voice in found["voices"]] == ["en", "de", "de"]
    return list({voice["voice_id"]: voice["name"] for voice in found["voices"]})


def heard(answer: httpx.Response) -> bool:
    assert answer.status_code == 200, answer.text
    return bool(decode_all(io.BytesIO(answer.content)).any())


@pytest.mark.parametrize("client", [open_webui, silly_tavern, libre_chat, kokoro, eleven_labs])
def test_a_program_shows_the_voices(base: str, client: Callable[[str], list[str]]) -> None:
    assert client(base) == NAMES


def test_a_voice_has_its_own_language(base: str) -> None:
    voices = httpx.get(f"{base}/audio/voices", headers=BEARER).json()["voices"]
    assert [(voice["language"], voice["languages"]) for voice in voices] == [
        ("en", ["en"]),
        ("de", ["de"]),
        ("de", ["de"]),
    ]


def test_each_model_says_what_it_is_for_and_a_hosted_name_is_answered_as_in_requests(base: str) -> None:
    listed = httpx.get(f"{base}/models", headers=BEARER).json()["data"]
    tasks = {entry["id"]: entry.get("task") for entry in listed}
    assert tasks["voice0.2"] == "text-to-speech"
    assert tasks[ScriptedTranscriber().profile.id] == "automatic-speech-recognition"
    for hosted, task in {"tts-1-hd": "text-to-speech", "whisper-1": "automatic-speech-recognition"}.items():
        entry = httpx.get(f"{base}/models/{hosted}", headers=BEARER).json()
        assert (entry["id"], entry["task"]) == (hosted, task)
        assert tasks[entry["root"]] == task


def test_a_wrong_key_in_the_header_of_elevenlabs_is_refused(base: str) -> None:
    for headers in ({"xi-api-key": "wrong"}, {}):
        assert httpx.get(f"{base}/voices", headers=headers).status_code == 401
