"""Other vendors' routes on a real server: formats that FFmpeg encodes, hosted names, and parameters without effect."""

from __future__ import annotations

import base64
import io
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.containers import decode_all
from antiphon.settings import Settings
from tests.pipelines.test_by_language import Voice
from tests.server.scripted import Echo, ScriptedTranscriber, scripted_models, serving

# A voice of ElevenLabs' and one of Cartesia's, as their SDKs' examples name them.
RACHEL, SONIC_VOICE = "21m00Tcm4TlvDq8ikWAM", "6ccbfb76-1fc6-48f7-b71d-91ac6298247b"
RAW = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 24_000}


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    """Yield the ws:// URL of a server with one voice, which says each text in 100 ms."""
    voice, ears = Voice(0.2, {"ann": "en"}), ScriptedTranscriber()
    names = (ears.profile.id, voice.profile.id)
    models = replace(scripted_models(Echo(), ears), synthesizer=voice, names=names)
    with serving(Settings(), models=models) as (url, _, _):
        yield url


def http(base: str, path: str) -> str:
    return f"http{base.removeprefix('ws')}{path}"


def duration_s(data: bytes) -> float:
    return len(decode_all(io.BytesIO(data))) / SAMPLE_RATE_HZ


def spoken(url: str, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Send these messages, and return those of the server until it closes."""
    with connect(url) as socket:
        for message in messages:
            socket.send(json.dumps(message))
        found = []
        try:
            while True:
                found.append(json.loads(socket.recv(10)))
        except ConnectionClosed:
            return found


def test_the_mp3_of_all_messages_is_one_file(base: str) -> None:
    texts = ({"text": " "}, {"text": "Hello there. How are you? "}, {"text": "Fine. "}, {"text": ""})
    found = spoken(f"{base}/v1/text-to-speech/ann/stream-input", *texts)
    data = b"".join(base64.b64decode(message["audio"]) for message in found if message["audio"])
    # Three sentences, and the codec's padding.
    assert duration_s(data) == pytest.approx(0.3, abs=0.1)
    assert data[:3] == b"ID3" or data[0] == 0xFF
    assert found[-1]["isFinal"] is True


@pytest.mark.parametrize("name", ["mp3_22050_32", "mp3_44100_192", "opus_48000_64", "wav_16000"])
def test_a_file_of_each_container_holds_the_text(base: str, name: str) -> None:
    url = http(base, f"/v1/text-to-speech/{RACHEL}/stream?output_format={name}")
    answer = httpx.post(url, json={"text": "Hello.", "model_id": "eleven_multilingual_v2"})
    assert answer.status_code == 200
    assert duration_s(answer.content) == pytest.approx(0.1, abs=0.08)


@pytest.mark.parametrize(("name", "num_bytes"), [("pcm_44100", 8820), ("ulaw_8000", 800), ("alaw_8000", 800)])
def test_raw_audio_has_the_rate_that_was_asked_for(base: str, name: str, num_bytes: int) -> None:
    url = http(base, f"/v1/text-to-speech/ann?output_format={name}")
    assert len(httpx.post(url, json={"text": "Hello."}).content) == pytest.approx(num_bytes, abs=20)


def test_hosted_voices_stand_for_the_first_one_and_others_do_not(base: str) -> None:
    found = spoken(
        f"{base}/v1/text-to-speech/{RACHEL}/stream-input?output_format=pcm_16000", {"text": "Hi. "}, {"text": ""}
    )
    assert found[-1]["isFinal"] is True
    body = {"transcript": "Hi.", "model_id": "sonic-3", "output_format": RAW}
    for name, status in ((SONIC_VOICE, 200), ("ann", 200), ("nobody", 404)):
        answer = httpx.post(http(base, "/tts/bytes"), json=body | {"voice": {"mode": "id", "id": name}})
        assert answer.status_code == status
        assert status == 200 or answer.json()["error_code"] == "voice_not_found"


def test_a_model_that_clones_no_voices_takes_none(base: str) -> None:
    answer = httpx.post(http(base, "/v1/voices/add"), data={"name": "eva"}, files={"files": b"RIFF"})
    assert (answer.status_code, answer.json()["detail"]["status"]) == (400, "voice_not_supported")
    assert httpx.get(http(base, "/v1/voices")).json()["total_count"] == 1


def test_parameters_without_effect_are_logged_once_and_without_their_values(
    base: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{base}/v1/text-to-speech/ann/stream-input?output_format=pcm_16000&enable_logging=secret-value"
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            spoken(url, {"text": "Hi. "}, {"text": ""})
    # `quiet_log` drops the lines of uvicorn.
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("antiphon")]
    assert sum("enable_logging" in line for line in lines) == 1
    assert not [line for line in lines if "secret-value" in line]


def test_refusals_have_the_shape_of_each_vendor(base: str) -> None:
    eleven = httpx.post(http(base, "/v1/text-to-speech/ann?output_format=mp3_1_1"), json={"text": "Hi."})
    assert (eleven.status_code, eleven.json()["detail"]["status"]) == (400, "output_format_not_allowed")
    scribe = httpx.post(http(base, "/v1/speech-to-text"), data={"webhook": "true"}, files={"file": b"RIFF"})
    assert scribe.json()["detail"]["status"] == "unsupported_parameter"
    cartesia = httpx.post(
        http(base, "/tts/bytes"), json={"transcript": "Hi.", "output_format": RAW | {"container": "ogg"}}
    )
    assert (cartesia.status_code, cartesia.json()["error_code"]) == (400, "invalid_value")
