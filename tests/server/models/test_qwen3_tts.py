"""Qwen3-TTS with tiny random weights on a real server: its voices, live text, and voices cloned from recordings."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import wave
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import connect

from tests.adapters import tiny_qwen3_tts as tiny
from tests.conftest import Process, Serve
from tests.server.test_fetch import Site


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Process:
    folder = tiny.write(tmp_path_factory.mktemp("tiny-tts"))
    return serve("--synthesizer", str(folder), "--weights", "fp32")


@pytest.fixture(scope="module")
def cloning(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Process:
    folder = tiny.write(tmp_path_factory.mktemp("tiny-base"), "base")
    return serve("--synthesizer", str(folder), "--weights", "fp32")


def spoken(server: Process, **fields: Any) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/audio/speech",
        json={"model": "default", "input": "Hello there, friend.", "response_format": "pcm"} | fields,
        timeout=60,
    )


def sample() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(24000)
        out.writeframes((tiny.reference() * 32767).astype(np.int16).tobytes())
    return file.getvalue()


def test_voices_languages_and_instructions_change_the_audio(server: Process) -> None:
    assert httpx.get(f"{server.url}/v1/audio/voices").json()["voice_names"] == ["ada", "eric"]
    plain = spoken(server, language="English")
    # The golden case: nine frames.
    assert len(plain.content) == 2 * 9 * tiny.FRAME_SAMPLES
    assert plain.content == spoken(server, language="en", voice="Ada").content
    reported = spoken(server, language="English", instructions="Whisper it.")
    other = spoken(server, language="English", voice="eric")
    assert len({plain.content, reported.content, other.content}) == 3
    assert len(spoken(server, language="English", max_new_tokens=4).content) == 2 * 4 * tiny.FRAME_SAMPLES
    assert len(spoken(server, language="English", sample_rate=8000).content) * 3 == len(plain.content)
    assert spoken(server, language="English", non_streaming_mode=True).content == plain.content
    beside = spoken(server, language="English", non_streaming_mode=False, max_new_tokens=9)
    drawn = spoken(server, language="English", extra_params={"temperature": 1.5}, max_new_tokens=9)
    assert beside.content != plain.content != drawn.content
    refused = spoken(server, extra_params={"cfg_scale": 3})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "extra_params.cfg_scale")
    assert spoken(server, task_type="VoiceDesign").status_code == 400
    assert spoken(server, ref_audio=base64.b64encode(sample()).decode()).status_code == 400
    assert spoken(server, language="fr").status_code == 400


def test_when_text_is_live_then_audio_comes_before_it_is_complete(server: Process) -> None:
    async def main() -> list[str]:
        seen = []
        async with connect(server.url.replace("http", "ws") + "/v1/audio/speech/stream", max_size=None) as socket:
            await socket.send(
                json.dumps(
                    {
                        "type": "session.config",
                        "response_format": "pcm",
                        "stream_audio": True,
                        "split_granularity": "none",
                        "max_new_tokens": 60,
                    }
                )
            )
            await socket.send(json.dumps({"type": "input.text", "text": "Hello there, "}))
            while True:
                message = await asyncio.wait_for(socket.recv(), 30)
                if isinstance(message, bytes):
                    # Audio arrives before the client has completed the text.
                    break
                seen.append(json.loads(message)["type"])
            await socket.send(json.dumps({"type": "input.text", "text": "friend."}))
            await socket.send(json.dumps({"type": "input.done"}))
            while not seen or seen[-1] != "session.done":
                message = await asyncio.wait_for(socket.recv(), 30)
                if isinstance(message, str):
                    seen.append(json.loads(message)["type"])
        return seen

    seen = asyncio.run(main())
    assert seen[0] == "audio.start"
    assert seen[-2:] == ["audio.done", "session.done"]


def test_when_a_sample_is_given_then_its_voice_is_cloned(cloning: Process) -> None:
    sound = sample()
    assert spoken(cloning, max_new_tokens=12).status_code == 200
    given = {"ref_audio": base64.b64encode(sound).decode(), "x_vector_only_mode": True}
    along = spoken(cloning, language="English", max_new_tokens=12, **given)
    assert along.status_code == 200
    assert len(along.content) > 0
    upload = httpx.post(
        f"{cloning.url}/v1/audio/voices",
        data={"name": "Mia", "consent": "she said so"},
        files={"audio_sample": ("mia.wav", sound, "audio/wav")},
    )
    assert upload.status_code == 200, upload.text
    mine = spoken(cloning, language="English", max_new_tokens=12, voice="mia")
    assert mine.content == along.content
    assert mine.content != spoken(cloning, language="English", max_new_tokens=12).content
    no_sound = {"ref_audio": base64.b64encode(b"no sound at all").decode(), "ref_text": "Hi."}
    without_text = {"ref_text": "", "ref_audio": given["ref_audio"]}
    for wrong in (no_sound, without_text, {"speaker_embedding": [0.5] * 3}):
        refused = spoken(cloning, **wrong)
        assert refused.status_code == 400, wrong
        assert refused.json()["error"]["param"] in wrong
    assert len(spoken(cloning, max_new_tokens=4, speaker_embedding=[0.1] * 64).content) == 2 * 4 * tiny.FRAME_SAMPLES


def test_when_a_sample_is_at_a_url_of_a_listed_host_then_it_is_fetched_and_else_the_session_lives(
    serve: Serve, tmp_path_factory: pytest.TempPathFactory
) -> None:
    site, folder = Site(), tiny.write(tmp_path_factory.mktemp("tiny-fetching"), "base")
    host = f"127.0.0.1:{site.port}"
    server = serve("--synthesizer", str(folder), "--weights", "fp32", "--fetch-from", host)
    site.sound = sample()
    common = {"x_vector_only_mode": True, "language": "English", "max_new_tokens": 4}
    given = spoken(server, ref_audio=base64.b64encode(sample()).decode(), **common)
    assert spoken(server, ref_audio=f"http://{host}/again/1", **common).content == given.content
    batch = httpx.post(
        f"{server.url}/v1/audio/speech/batch",
        json={
            "response_format": "pcm",
            "items": [{"input": "Hello there, friend.", "ref_audio": f"http://{host}/{p}"} for p in ("sound", "page")],
        }
        | common,
        timeout=60,
    ).json()
    assert [r["status"] for r in batch["results"]] == ["success", "error"]
    assert base64.b64decode(batch["results"][0]["audio_data"]) == given.content
    for url in ("http://127.0.0.2/a.wav", f"http://{host}/elsewhere/127.0.0.2", f"http://{host}/endless"):
        refused = spoken(server, ref_audio=url, **common)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "ref_audio"), url

    async def main() -> list[str]:
        seen = []
        async with connect(server.url.replace("http", "ws") + "/v1/audio/speech/stream", max_size=None) as socket:
            for path in ("sound", "page", "elsewhere/127.0.0.2", "again/0"):
                config = {"type": "session.config", "ref_audio": f"http://{host}/{path}"} | common
                await socket.send(json.dumps(config))
            await socket.send(json.dumps({"type": "input.text", "text": "Hello there."}))
            await socket.send(json.dumps({"type": "input.done"}))
            async for message in socket:
                event = json.loads(message) if isinstance(message, str) else {"type": "sound"}
                seen.append(event.get("message") or event["type"])
                if seen[-1] == "session.done":
                    return seen
        return seen

    page, elsewhere, *spoke = asyncio.run(main())
    assert page == "Invalid value for 'ref_audio': it is text/html, not an audio file."
    assert "'127.0.0.2' is not among those of --fetch-from" in elsewhere
    assert spoke == ["audio.start", "sound", "audio.done", "session.done"]
    site.close()
