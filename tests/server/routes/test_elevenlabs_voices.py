"""ElevenLabs' routes for a key's own things: uploaded voices, and URLs that open a conversation without a key."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from antiphon.contracts import SpeechChunk, Urgency, VoiceOptions
from antiphon.settings import Settings
from tests.audio.sound_files import pcm16, wav
from tests.pipelines.test_by_language import Voice
from tests.server.scripted import Echo, ScriptedTranscriber, scripted_models, serving

SAMPLE = wav(pcm16(np.full(1600, 0.1, np.float32)))


class Cloning(Voice):
    """A synthesizer that clones voices. `heard` are the recordings with which it spoke."""

    def __init__(self) -> None:
        super().__init__(0.2, {"ann": "en"})
        self.profile = replace(self.profile, clones_voices=True)
        self.heard = list[bytes]()

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        self.heard.append(options.sample.audio if options.sample else b"")
        async for chunk in super().speak(text, options, urgency):
            yield chunk


VOICE = Cloning()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the http:// URL of a server with two keys and a voice that clones others."""
    settings, ears = Settings(), ScriptedTranscriber()
    settings = replace(
        settings,
        server=replace(settings.server, api_keys=("alice", "bob")),
        models=replace(settings.models, home=str(tmp_path_factory.mktemp("home"))),
    )
    models = replace(scripted_models(Echo(), ears), synthesizer=VOICE, names=(ears.profile.id, VOICE.profile.id))
    with serving(settings, models=models) as (url, _, _):
        yield url.replace("ws", "http", 1)


def asked(base: str, method: str, path: str, key: str = "alice", **options: Any) -> httpx.Response:
    return httpx.request(method, f"{base}/v1/{path}", headers={"xi-api-key": key} if key else {}, **options)


def added(base: str, name: str, *files: bytes, **fields: str) -> httpx.Response:
    parts = [("files", (f"{number}.wav", data, "audio/wav")) for number, data in enumerate(files)]
    return asked(base, "POST", "voices/add", data={"name": name, **fields}, files=parts)


def names(base: str, key: str = "alice") -> list[str]:
    return [voice["voice_id"] for voice in asked(base, "GET", "voices", key).json()["voices"]]


def status_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["detail"]["status"]


def test_an_uploaded_voice_is_listed_spoken_with_and_deleted_by_its_key_alone(base: str) -> None:
    made = added(base, "Grandma", SAMPLE, SAMPLE[:100], description="warm", labels="null")
    assert made.json() == {"voice_id": "Grandma", "requires_verification": False}
    assert names(base) == ["ann", "Grandma"]
    shown = asked(base, "GET", "voices/Grandma").json()
    assert (shown["category"], shown["description"]) == ("cloned", "warm")
    assert [one["language"] for one in shown["verified_languages"]] == ["en"]
    speech = "text-to-speech/Grandma?output_format=pcm_24000"
    assert asked(base, "POST", speech, json={"text": "Hello."}).status_code == 200
    assert VOICE.heard == [SAMPLE]
    # It is the voice of our own routes too, with the consent that the call stands for.
    (kept,) = asked(base, "GET", "audio/voices").json()["uploaded_voices"]
    assert (kept["name"], kept["consent"]) == ("Grandma", "POST /v1/voices/add")
    assert names(base, "bob") == ["ann"]
    for method in ("GET", "DELETE"):
        assert status_of(asked(base, method, "voices/Grandma", "bob")) == (404, "voice_not_found")
    assert status_of(asked(base, "POST", speech, "bob", json={"text": "Hello."})) == (404, "voice_not_found")
    assert asked(base, "DELETE", "voices/Grandma").json() == {"status": "ok"}
    assert names(base) == ["ann"]
    assert status_of(asked(base, "DELETE", "voices/Grandma")) == (404, "voice_not_found")


@pytest.mark.parametrize(
    ("name", "files", "code"),
    [
        ("Grandpa", (), "missing_required_parameter"),
        ("", (SAMPLE,), "missing_required_parameter"),
        ("Grandpa", (b"no sound",), "invalid_value"),
        ("ann", (SAMPLE,), "invalid_value"),
        ("x" * 65, (SAMPLE,), "invalid_value"),
    ],
)
def test_an_upload_that_cannot_be_kept_is_refused_in_their_shape(
    base: str, name: str, files: tuple[bytes, ...], code: str
) -> None:
    assert status_of(added(base, name, *files)) == (400, code)
    assert names(base) == ["ann"]


def test_a_signed_url_opens_a_conversation_without_a_key(base: str, caplog: pytest.LogCaptureFixture) -> None:
    assert status_of(asked(base, "GET", "convai/conversation/get-signed-url?agent_id=mine", "")) == (
        401,
        "invalid_api_key",
    )
    assert status_of(asked(base, "GET", "convai/conversation/get-signed-url")) == (400, "missing_required_parameter")
    with caplog.at_level(logging.INFO):
        url = asked(base, "GET", "convai/conversation/get_signed_url?agent_id=mine").json()["signed_url"]
        assert url.startswith(base.replace("http", "ws", 1))
        with connect(f"{url}&source=js_sdk", subprotocols=["convai"]) as socket:  # type: ignore[list-item]
            assert socket.subprotocol == "convai"
            socket.send(json.dumps({"type": "conversation_initiation_client_data"}))
            assert json.loads(socket.recv(10))["type"] == "conversation_initiation_metadata"
    token = url.rpartition("token=")[2]
    assert token.startswith("ek_")
    # `quiet_log` drops the lines of uvicorn.
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("antiphon")]
    assert any("conv_" in line for line in lines)
    assert not [line for line in lines if token in line]
    socket_url = f"{base.replace('http', 'ws', 1)}/v1/convai/conversation"
    with pytest.raises(InvalidStatus):
        connect(f"{socket_url}?token=ek_other")
    # A browser sends a key in a subprotocol.
    with connect(socket_url, subprotocols=["convai", "bearer.alice"]) as socket:  # type: ignore[list-item]
        assert socket.subprotocol == "convai"
