"""Speech over HTTP with the stock client: files, streams, batches and uploaded voices."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
from typing import Any
from urllib.parse import quote

import av
import httpx
import openai
import pytest
import websockets

from antiphon.audio import Pcm
from antiphon.audio.containers import decode_all, decode_beginning
from antiphon.audio.encode import Encoder
from antiphon.audio.pcm import from_pcm16
from tests.conftest import VOICE, Process, Recording, Serve
from tests.server.routes.test_speech_stream import LIMIT_S, PCM, RATE_HZ, TEXT, Stream, stream


def client(server: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("format", ["mp3", "opus", "aac", "flac", "wav", "pcm"])
def test_when_the_stock_client_asks_then_it_gets_every_format(speaker: Process, format: Any) -> None:
    with client(speaker) as stock:
        data = stock.audio.speech.create(
            model="tts-1", voice="alloy", input=TEXT, response_format=format, speed=1.25
        ).content
    pcm = from_pcm16(data) if format == "pcm" else decode_all(io.BytesIO(data), RATE_HZ)
    assert 3 < len(pcm) / RATE_HZ < 8


@pytest.mark.parametrize("format", ["mp3", "opus", "aac", "flac", "wav", "pcm"])
def test_when_there_is_nothing_to_say_then_every_format_is_a_short_valid_file(speaker: Process, format: str) -> None:
    for text in ("...", "\u200b", " \n", "😀", "<think>Well.</think>"):
        body = {"input": text, "response_format": format}
        answer = httpx.post(f"{speaker.url}/v1/audio/speech", json=body, timeout=LIMIT_S)
        assert answer.status_code == 200, answer.text
        data = answer.content
        pcm = from_pcm16(data) if format == "pcm" else decode_all(io.BytesIO(data), RATE_HZ)
        # Codecs round up to whole frames.
        assert 0.07 < len(pcm) / RATE_HZ < 0.2
        assert not len(pcm) or abs(pcm).max() < 0.01


def test_when_speech_is_streamed_then_it_is_the_file(speaker: Process) -> None:
    fields = {"input": TEXT, "voice": "heart", "seed": 5}
    with client(speaker) as stock:
        whole = stock.audio.speech.create(
            model=VOICE, response_format="wav", extra_body=fields, voice="heart", input=TEXT
        )
        assert struct.unpack_from("<I", whole.content, 40)[0] == len(whole.content) - 44
        with stock.audio.speech.with_streaming_response.create(
            model=VOICE, response_format="wav", extra_body=fields | {"stream": True}, voice="heart", input=TEXT
        ) as response:
            chunks = list(response.iter_bytes())
    streamed = b"".join(chunks)
    assert struct.unpack_from("<I", streamed, 40)[0] == 0xFFFFFFFF
    assert streamed[44:] == whole.content[44:]
    events = httpx.post(
        f"{speaker.url}/v1/audio/speech",
        json=fields | {"response_format": "pcm", "stream_format": "sse", "word_timestamps": True},
        timeout=LIMIT_S,
    )
    assert events.headers["content-type"].startswith("text/event-stream")
    parsed = [json.loads(line[6:]) for line in events.text.splitlines() if line.startswith("data: ")]
    assert b"".join(base64.b64decode(e["audio"]) for e in parsed[:-1]) == whole.content[44:]
    done = parsed[-1]
    assert done["type"] == "speech.audio.done"
    assert done["usage"]["total_tokens"] == done["usage"]["input_tokens"] + done["usage"]["output_tokens"] > 100
    assert [w["word"] for w in done["words"]] == TEXT.split()


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus", "aac"])
@pytest.mark.parametrize("rate_hz", [8000, 48000])
def test_when_a_rate_is_asked_for_then_a_file_of_any_format_has_it(speaker: Process, format: str, rate_hz: int) -> None:
    body = {"input": "Good morning.", "response_format": format, "seed": 5}
    asked = httpx.post(f"{speaker.url}/v1/audio/speech", json=body | {"sample_rate": rate_hz}, timeout=LIMIT_S)
    plain = httpx.post(f"{speaker.url}/v1/audio/speech", json=body, timeout=LIMIT_S)
    assert asked.status_code == 200, asked.text
    with av.open(io.BytesIO(asked.content)) as file:
        # Opus has only one rate.
        assert file.streams.audio[0].rate == (48000 if format == "opus" else rate_hz)
    seconds = [len(decode_beginning(io.BytesIO(a.content), 16000, 60)) / 16000 for a in (asked, plain)]
    # AAC has frames of 1,024 samples: one before the first sound, and one that the end is in.
    assert seconds[0] == pytest.approx(seconds[1], abs=max(0.15, 2 * 1024 / rate_hz) if format == "aac" else 0.15)


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"input": ""}, 400, "invalid_value", "input"),
        ({"input": "x" * 4097}, 400, "string_above_max_length", "input"),
        ({"input": 5}, 400, "invalid_type", "input"),
        ({}, 400, "missing_required_parameter", "input"),
        ({"input": "x", "voice": "nobody"}, 404, "voice_not_found", "voice"),
        ({"input": "x", "model": "nonsense"}, 404, "model_not_found", "model"),
        ({"input": "x", "speed": 5}, 400, "invalid_value", "speed"),
        ({"input": "x", "response_format": "midi"}, 400, "invalid_value", "response_format"),
        ({"input": "x", "stream_format": "smoke"}, 400, "invalid_value", "stream_format"),
        ({"input": "x", "ref_audio": "https://x.y/z.wav"}, 400, "not_supported", "ref_audio"),
        ({"input": "你好"}, 400, "unsupported_text", "input"),
    ],
)
def test_when_a_field_is_wrong_then_the_response_names_it(
    speaker: Process, fields: dict[str, Any], status: int, code: str, param: str
) -> None:
    answer = httpx.post(f"{speaker.url}/v1/audio/speech", json=fields, timeout=LIMIT_S)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["param"] == param


def test_when_a_body_is_not_a_request_or_too_large_then_it_is_refused(speaker: Process) -> None:
    assert httpx.post(f"{speaker.url}/v1/audio/speech", content=b"{").status_code == 400
    assert httpx.post(f"{speaker.url}/v1/audio/speech", content=b"[]").status_code == 400
    assert httpx.post(f"{speaker.url}/v1/audio/speech", content=b"x" * (17 << 20)).status_code == 413
    assert httpx.get(f"{speaker.url}/v1/audio/speech").status_code == 405


def test_when_some_items_of_a_batch_fail_then_the_others_succeed(speaker: Process) -> None:
    items = [{"input": "One."}, {"input": ""}, {"input": "Two.", "response_format": "wav"}, {"input": "你好"}]
    answer = httpx.post(
        f"{speaker.url}/v1/audio/speech/batch", json={"items": items, "response_format": "flac"}, timeout=LIMIT_S
    )
    assert answer.status_code == 200
    body = answer.json()
    assert [r["status"] for r in body["results"]] == ["success", "error", "success", "error"]
    assert (body["total"], body["succeeded"], body["failed"]) == (4, 2, 2)
    for index, format in ((0, "flac"), (2, "wav")):
        result = body["results"][index]
        assert (result["index"], result["format"]) == (index, format)
        assert len(decode_all(io.BytesIO(base64.b64decode(result["audio_data"])), RATE_HZ)) > RATE_HZ // 4
    assert body["results"][3]["error"]["code"] == "unsupported_text"
    for wrong in ({}, {"items": []}, {"items": [{"input": "x"}] * 33}, {"items": 5}, {"items": [5]}):
        assert httpx.post(f"{speaker.url}/v1/audio/speech/batch", json=wrong).status_code == 400


def test_when_voices_are_uploaded_then_they_are_listed_and_can_be_deleted(
    serve: Serve, recordings: dict[str, Recording], tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.mktemp("home")
    server = serve("--synthesizer", VOICE, "--home", str(home))
    url = f"{server.url}/v1/audio/voices"
    sample = recordings["lj-LJ001-0008"].path.read_bytes()

    def upload(**form: Any) -> httpx.Response:
        files = {"audio_sample": ("a.flac", form.pop("sample"), "audio/flac")} if "sample" in form else None
        return httpx.post(url, data=form, files=files, timeout=LIMIT_S)

    good = {"name": "/home/Ähm//..x", "consent": "yes, recorded 2026-11-21", "sample": sample}
    languages = httpx.get(url).json()["voices"][0]["languages"]
    assert httpx.get(url).json() == {
        # The voices are listed as objects, for programs that show a choice, and as strings.
        "voices": [{"id": "heart", "name": "Heart", "language": "en", "languages": languages}],
        "voice_names": ["heart"],
        "uploaded_voices": [],
    }
    before = {p for p in home.parent.rglob("*") if "voices" not in p.parts}
    assert upload(**good).json()["success"]
    (stored,) = httpx.get(url).json()["uploaded_voices"]
    assert (stored["name"], stored["file_size"], stored["mime_type"]) == (good["name"], len(sample), "audio/flac")
    # The name did not lead outside of the folder of voices.
    assert {p for p in home.parent.rglob("*") if "voices" not in p.parts} == before
    assert (
        upload(name="vec", consent="yes", speaker_embedding=json.dumps([0.1] * 256)).json()["voice"]["embedding_dim"]
        == 256
    )
    for wrong, code in (
        ({"consent": "yes", "sample": sample}, 400),
        ({"name": "a", "sample": sample}, 400),
        ({"name": "a", "consent": "false", "sample": sample}, 400),
        ({"name": "a", "consent": "yes"}, 400),
        ({"name": "a", "consent": "yes", "sample": sample, "speaker_embedding": "[1]"}, 400),
        ({"name": "a", "consent": "yes", "speaker_embedding": "[]"}, 400),
        ({"name": "a", "consent": "yes", "speaker_embedding": "{"}, 400),
        ({"name": "a", "consent": "yes", "sample": b"no sound at all"}, 400),
        ({"name": "a" * 65, "consent": "yes", "sample": sample}, 400),
        ({"name": "a\nb", "consent": "yes", "sample": sample}, 400),
        # This name cannot be part of a path.
        ({"name": "../../Ähm/..", "consent": "yes", "sample": sample}, 400),
        ({"name": "Heart", "consent": "yes", "sample": sample}, 400),
        ({"name": "Alloy", "consent": "yes", "sample": sample}, 400),
        ({"name": "a", "consent": "x" * 2001, "sample": sample}, 400),
        ({"name": "a", "consent": "yes", "sample": bytes(11 << 20)}, 413),
    ):
        answer = upload(**wrong)
        assert answer.status_code == code, (wrong.keys(), answer.text)
    spoken = httpx.post(f"{server.url}/v1/audio/speech", json={"input": "Hi", "voice": "vec"})
    assert (spoken.status_code, spoken.json()["error"]["code"]) == (400, "voice_not_supported")
    # This body has no declared length.
    endless = (b"x" * (1 << 20) for _ in range(20))
    kind = {"content-type": "multipart/form-data; boundary=x"}
    assert httpx.post(url, content=endless, headers=kind, timeout=LIMIT_S).status_code in (400, 413)
    assert httpx.delete(f"{url}/VEC").status_code == 200
    assert httpx.delete(f"{url}/vec").status_code == 404
    assert httpx.delete(f"{url}/heart").status_code == 404
    assert [v["name"] for v in httpx.get(url).json()["uploaded_voices"]] == ["/home/Ähm//..x"]
    assert httpx.delete(f"{url}/{quote('/home/Ähm//..x', safe='')}").status_code == 200
    assert httpx.get(url).json()["uploaded_voices"] == []


def test_when_no_synthesizer_is_loaded_then_it_is_a_404(server: Process) -> None:
    assert httpx.post(f"{server.url}/v1/audio/speech", json={"input": "Hi"}).status_code == 404

    async def main() -> int:
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(f"{server.ws}/v1/audio/speech/stream")
        return refused.value.response.status_code

    assert asyncio.run(main()) == 404


def joined(wire: Stream) -> Pcm:
    return from_pcm16(b"".join(wire.sound.values()))


def test_when_speech_is_transcribed_then_it_is_the_text(speaker: Process) -> None:
    """Transcribe the synthesized speech with the server's own transcriber."""
    text = "The weather will be mild tomorrow. Please remember to take your umbrella with you."

    async def main() -> Stream:
        async with stream(speaker, **PCM) as wire:
            await wire.say("input.text", text=text)
            await wire.say("input.done")
            await wire.until("session.done")
            return wire

    with client(speaker) as stock:
        encoder = Encoder("wav", RATE_HZ, whole=True)
        encoder.feed(joined(asyncio.run(main())))
        heard = stock.audio.transcriptions.create(model="default", file=("a.wav", encoder.finish())).text
    assert heard.strip() == text
