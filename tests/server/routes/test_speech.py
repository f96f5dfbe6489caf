"""Speech over real sockets: the stream and its faults, the REST twins with the stock client, uploaded voices."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import openai
import psutil
import pytest
import websockets
from websockets.asyncio.client import ClientConnection

from antiphon.audio import Pcm
from antiphon.audio.containers import decode_all
from antiphon.audio.pcm import from_pcm16
from tests.conftest import VOICE, Process, Recording, Serve
from tests.server.test_faults import idle

RATE_HZ = 24_000
PCM = {"response_format": "pcm", "stream_audio": True, "seed": 1}
TEXT = "Hello there. How are you today? It costs $5.20, says Dr. Smith."
SENTENCES = ["Hello there.", "How are you today?", "It costs $5.20, says Dr. Smith."]
LIMIT_S = 60


class Stream:
    """One speech stream; `bytes` holds the sound that came, by (utterance, sentence)."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.seen: list[dict[str, Any]] = []
        self.sound: dict[tuple[int, int], bytes] = {}
        self._at = (0, 0)

    async def say(self, type: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": type} | fields))

    async def read(self) -> dict[str, Any]:
        async with asyncio.timeout(LIMIT_S):
            data = await self.socket.recv()
        if isinstance(data, bytes):
            self.sound[self._at] = self.sound.get(self._at, b"") + data
            return {"type": "sound"}
        frame: dict[str, Any] = json.loads(data)
        if frame["type"] == "audio.start":
            self._at = frame["utterance_index"], frame["sentence_index"]
            self.sound[self._at] = b""
        self.seen.append(frame)
        return frame

    async def until(self, type: str) -> dict[str, Any]:
        while (frame := await self.read())["type"] != type:
            pass
        return frame

    def of(self, type: str) -> list[dict[str, Any]]:
        return [f for f in self.seen if f["type"] == type]


@asynccontextmanager
async def stream(server: Process, **config: Any) -> AsyncIterator[Stream]:
    async with websockets.connect(f"{server.ws}/v1/audio/speech/stream", max_size=None) as socket:
        wire = Stream(socket)
        if config:
            await wire.say("session.config", **config)
        yield wire


def test_text_token_by_token_becomes_sentences_of_sound(speaker: Process) -> None:
    async def main() -> Stream:
        async with stream(speaker, **PCM) as wire:
            for at in range(0, len(TEXT), 3):
                await wire.say("input.text", text=TEXT[at : at + 3])
            # The first two are spoken before the text is complete.
            while len(wire.of("audio.done")) < 2:
                await wire.read()
            await wire.say("input.done")
            assert (await wire.until("session.done"))["total_sentences"] == 3
            # The configuration holds for the next utterance on the same connection.
            await wire.say("input.text", text="Again.")
            await wire.say("input.done")
            done = await wire.until("session.done")
            assert (done["utterance_index"], done["total_sentences"]) == (1, 1)
            await wire.say("session.close")
            await wire.socket.wait_closed()
            assert wire.socket.close_code == 1000
            return wire

    wire = asyncio.run(main())
    assert [f["sentence_text"] for f in wire.of("audio.start")] == [*SENTENCES, "Again."]
    assert all(f["sample_rate"] == RATE_HZ and f["format"] == "pcm" for f in wire.of("audio.start"))
    for done, sound in zip(wire.of("audio.done"), wire.sound.values(), strict=True):
        assert not done["error"]
        assert done["total_bytes"] == len(sound)
        assert np.abs(from_pcm16(sound)).max() > 0.05


@pytest.mark.parametrize("format", ["wav", "pcm", "flac", "mp3", "opus", "aac"])
def test_a_file_a_sentence(speaker: Process, format: str) -> None:
    async def main() -> Stream:
        async with stream(speaker, response_format=format, speed=1.5) as wire:
            await wire.say("input.text", text=TEXT)
            await wire.say("input.done")
            await wire.until("session.done")
            return wire

    wire = asyncio.run(main())
    assert len(wire.sound) == 3
    for data in wire.sound.values():
        pcm = from_pcm16(data) if format == "pcm" else decode_all(io.BytesIO(data), RATE_HZ)
        assert len(pcm) > RATE_HZ // 3
        assert np.abs(pcm).max() > 0.05
        if format == "wav":
            assert struct.unpack_from("<I", data, 40)[0] == len(data) - 44


def test_every_word_with_its_time(speaker: Process) -> None:
    async def main() -> Stream:
        async with stream(speaker, **PCM, word_timestamps=True) as wire:
            await wire.say("input.text", text=TEXT)
            await wire.say("input.done")
            await wire.until("session.done")
            return wire

    wire = asyncio.run(main())
    for sentence, text in enumerate(SENTENCES):
        chunks = [f for f in wire.of("audio.chunk") if f["sentence_index"] == sentence]
        assert [c["chunk_id"] for c in chunks] == list(range(len(chunks)))
        assert all(c["timestamps"] is None for c in chunks[:-1])
        words = chunks[-1]["timestamps"]
        assert [w["word"] for w in words] == text.split()
        length_ms = sum(len(base64.b64decode(c["audio_b64"])) for c in chunks) / 2 / RATE_HZ * 1000
        assert words[-1]["end_ms"] <= length_ms + 1
        assert chunks[-1]["chunk_end_ms"] == pytest.approx(length_ms, abs=1)


def test_cancelling_stops_the_sound_and_the_next_utterance_is_whole(speaker: Process) -> None:
    async def main() -> tuple[Stream, dict[str, Any]]:
        async with stream(speaker, **PCM) as wire:
            await wire.say("input.text", text="This sentence goes on, " * 400)
            await wire.say("input.text", text="and ends. And another one. ")
            await wire.say("input.done")
            while not wire.sound or len(next(iter(wire.sound.values()))) < RATE_HZ:
                await wire.read()
            await wire.say("input.cancel")
            cancelled = await wire.until("session.done")
            await wire.say("input.text", text="Whole.")
            await wire.say("input.done")
            await wire.until("session.done")
            return wire, cancelled

    wire, cancelled = asyncio.run(main())
    assert cancelled == {"type": "session.done", "utterance_index": 0, "total_sentences": 1, "cancelled": True}
    first, last = wire.of("audio.done")
    assert first["cancelled"]
    assert first["total_bytes"] == len(wire.sound[(0, 0)])
    # A sentence of 400 clauses is several minutes.
    assert first["total_bytes"] / 2 / RATE_HZ < 120
    assert last["utterance_index"] == 1
    assert not last["error"]


def test_what_a_client_does_wrong_is_answered_and_the_stream_lives(speaker: Process) -> None:
    bad: list[tuple[str | bytes, str]] = [
        ("{", "Invalid JSON message"),
        ("[]", "WebSocket messages must be JSON objects"),
        (b"\xff\xfe\xfd", "Invalid JSON message"),
        (json.dumps({"type": "boo"}), "Unknown message type: boo"),
        (json.dumps({"type": "input.text", "text": 7}), "input.text requires a string value"),
        (json.dumps({"type": "input.text", "text": "x" * (128 << 10)}), "input.text message too large"),
        (json.dumps({"type": "session.config", "speed": 9}), "Invalid value for 'speed'"),
        (json.dumps({"type": "session.config", "model": "nonsense"}), "does not exist"),
        ("x" * ((4 << 20) + 1), "WebSocket message too large"),
    ]

    async def main() -> Stream:
        async with stream(speaker, **PCM) as wire:
            for data, message in bad:
                await wire.socket.send(data)
                assert message in (await wire.until("error"))["message"]
            await wire.say("input.text", text="Not yet")
            await wire.say("session.config", **PCM)
            assert "while an utterance is in progress" in (await wire.until("error"))["message"]
            await wire.say("input.done")
            await wire.until("session.done")
            await wire.say("session.config", response_format="wav")
            await wire.say("input.text", text="Good.")
            await wire.say("input.done")
            await wire.until("session.done")
            return wire

    wire = asyncio.run(main())
    assert [f["format"] for f in wire.of("audio.start")] == ["pcm", "wav"]


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ('{"type":"input.text","text":"Hi"}', "Expected session.config, got: input.text"),
        ("{", "Invalid JSON message"),
        ('{"type":"session.config","speed":9}', "Invalid value for 'speed'"),
        ('{"type":"session.config","model":"nonsense"}', "The model `nonsense` does not exist."),
        ("x" * ((4 << 20) + 1), "WebSocket message too large"),
        (None, "Timeout waiting for session.config"),
    ],
)
def test_a_handshake_that_fails_closes(speaker: Process, first: str | None, message: str) -> None:
    async def main() -> None:
        async with stream(speaker) as wire:
            if first is not None:
                await wire.socket.send(first)
            assert message in (await wire.until("error"))["message"]
            await wire.socket.wait_closed()

    asyncio.run(main())


def test_a_silent_client_is_let_go_and_a_listening_one_is_not(speaker: Process) -> None:
    async def main() -> None:
        async with stream(speaker, **PCM) as wire:
            await wire.say("input.text", text="A word. ")
            assert (await wire.until("error"))["message"] == "Idle timeout: no message received"
            await wire.socket.wait_closed()
            assert len(wire.of("audio.done")) == 1

    asyncio.run(main())


@pytest.mark.parametrize("text", ["", "   \n\t ", "😀🎉", "...", "\x00\x07"])
def test_nothing_to_say(speaker: Process, text: str) -> None:
    async def main() -> Stream:
        async with stream(speaker, **PCM) as wire:
            await wire.say("input.text", text=text)
            await wire.say("input.done")
            await wire.until("session.done")
            return wire

    wire = asyncio.run(main())
    assert all(not f["error"] and f["total_bytes"] == 0 for f in wire.of("audio.done"))
    assert wire.of("session.done")[0]["total_sentences"] == len(wire.of("audio.start")) <= 1
    assert not wire.of("error")


def test_what_the_voice_cannot_speak_is_skipped_and_told_or_refused(speaker: Process) -> None:
    async def main() -> Stream:
        async with stream(speaker, **PCM) as wire:
            await wire.say("input.text", text="The word 你好 means hello. 我很好。 Done.")
            await wire.say("input.done")
            await wire.until("session.done")
            return wire

    wire = asyncio.run(main())
    mixed, foreign, plain = wire.of("audio.done")
    assert mixed["skipped"] == "你好"
    assert foreign["error"]
    (error,) = wire.of("error")
    assert error["message"].startswith("Generation failed for utterance 0, sentence 1: the voice speaks English")
    assert "skipped" not in plain
    assert len(wire.sound[(0, 2)]) > 0


def test_a_hundred_thousand_characters_without_an_end(speaker: Process) -> None:
    async def main() -> None:
        async with stream(speaker, **PCM) as wire:
            await wire.say("input.text", text="word " * 20_000)
            await wire.say("input.done")
            # Its sound begins like that of any other.
            while not wire.sound.get((0, 0)):
                await wire.read()
            await wire.say("input.cancel")
            await wire.until("session.done")

    asyncio.run(main())


def test_a_reader_that_stops_costs_bounded_memory_and_pauses_the_synthesis(speaker: Process) -> None:
    process = psutil.Process(speaker.popen.pid)

    def spoken() -> float:
        text = httpx.get(f"{speaker.url}/metrics").text
        line = next(
            x
            for x in text.splitlines()
            if x.startswith('antiphon_step_seconds_count{lane="synthesizer",urgency="bulk"')
        )
        return float(line.rsplit(" ", 1)[1])

    async def main() -> None:
        async with websockets.connect(f"{speaker.ws}/v1/audio/speech/stream", max_size=None, max_queue=1) as socket:
            before = process.memory_info().rss
            await socket.send(json.dumps({"type": "session.config"} | PCM))
            for _ in range(4):
                await socket.send(json.dumps({"type": "input.text", "text": "This goes on, " * 7000}))
            await socket.send(json.dumps({"type": "input.done"}))
            steps = -1.0
            # Until nothing more is made: about eight hours of sound were asked for.
            while (now := spoken()) != steps:
                steps = now
                await asyncio.sleep(0.5)
            assert process.memory_info().rss - before < 64 << 20
            # It reads again, and there is more.
            for _ in range(200):
                await socket.recv()
            assert spoken() > steps

    asyncio.run(main())
    asyncio.run(idle(speaker))


def test_clients_that_vanish_leave_nothing(speaker: Process) -> None:
    process = psutil.Process(speaker.popen.pid)

    async def vanish(k: int) -> None:
        async with websockets.connect(f"{speaker.ws}/v1/audio/speech/stream", max_size=None) as socket:
            if k % 4:
                await socket.send(json.dumps({"type": "session.config"} | PCM))
            if k % 4 > 1:
                await socket.send(json.dumps({"type": "input.text", "text": "This goes on, " * 500}))
            if k % 4 > 2:
                await socket.send(json.dumps({"type": "input.done"}))
                await socket.recv()
            socket.transport.abort()

    async def main() -> None:
        await idle(speaker)
        fds = process.num_fds()
        for _ in range(2):
            await asyncio.gather(*(vanish(k) for k in range(100)), return_exceptions=True)
        await idle(speaker)
        for _ in range(LIMIT_S * 10):
            if process.num_fds() <= fds + 4:
                break
            await asyncio.sleep(0.1)
        assert process.num_fds() <= fds + 4

    asyncio.run(main())
    # The log is read when the server is stopped: a client that leaves is no error. Above INFO nothing is said of it now either.
    assert " WARNING " not in speaker.log.read_text()


# --- REST -----------------------------------------------------------------------------------------------------------------


def client(server: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("format", ["mp3", "opus", "aac", "flac", "wav", "pcm"])
def test_the_stock_client_gets_every_format(speaker: Process, format: Any) -> None:
    with client(speaker) as stock:
        data = stock.audio.speech.create(
            model="tts-1", voice="alloy", input=TEXT, response_format=format, speed=1.25
        ).content
    pcm = from_pcm16(data) if format == "pcm" else decode_all(io.BytesIO(data), RATE_HZ)
    assert 3 < len(pcm) / RATE_HZ < 8


def test_a_stream_is_the_file(speaker: Process) -> None:
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


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"input": ""}, 400, "invalid_value", "input"),
        ({"input": " \n"}, 400, "invalid_value", "input"),
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
def test_an_error_is_never_a_200(speaker: Process, fields: dict[str, Any], status: int, code: str, param: str) -> None:
    answer = httpx.post(f"{speaker.url}/v1/audio/speech", json=fields, timeout=LIMIT_S)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["param"] == param


def test_a_body_that_is_no_json_or_too_large(speaker: Process) -> None:
    assert httpx.post(f"{speaker.url}/v1/audio/speech", content=b"{").status_code == 400
    assert httpx.post(f"{speaker.url}/v1/audio/speech", content=b"[]").status_code == 400
    assert httpx.post(f"{speaker.url}/v1/audio/speech", content=b"x" * (17 << 20)).status_code == 413
    assert httpx.get(f"{speaker.url}/v1/audio/speech").status_code == 405


def test_a_batch_gives_each_item_its_own_result(speaker: Process) -> None:
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


def test_voices_are_stored_listed_and_forgotten(
    serve: Serve, recordings: dict[str, Recording], tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.mktemp("home")
    server = serve("--synthesizer", VOICE, "--home", str(home))
    url = f"{server.url}/v1/audio/voices"
    sample = recordings["lj-LJ001-0008"].path.read_bytes()

    def upload(**form: Any) -> httpx.Response:
        files = {"audio_sample": ("a.flac", form.pop("sample"), "audio/flac")} if "sample" in form else None
        return httpx.post(url, data=form, files=files, timeout=LIMIT_S)

    good = {"name": "../../Ähm/..", "consent": "yes, recorded 2026-11-21", "sample": sample}
    assert httpx.get(url).json() == {"voices": ["heart"], "uploaded_voices": []}
    before = {p for p in home.parent.rglob("*") if "voices" not in p.parts}
    assert upload(**good).json()["success"]
    (stored,) = httpx.get(url).json()["uploaded_voices"]
    assert (stored["name"], stored["file_size"], stored["mime_type"]) == ("../../Ähm/..", len(sample), "audio/flac")
    # The name led nowhere.
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
        ({"name": "Heart", "consent": "yes", "sample": sample}, 400),
        ({"name": "Alloy", "consent": "yes", "sample": sample}, 400),
        ({"name": "a", "consent": "x" * 2001, "sample": sample}, 400),
        ({"name": "a", "consent": "yes", "sample": bytes(11 << 20)}, 413),
    ):
        answer = upload(**wrong)
        assert answer.status_code == code, (wrong.keys(), answer.text)
    spoken = httpx.post(f"{server.url}/v1/audio/speech", json={"input": "Hi", "voice": "vec"})
    assert (spoken.status_code, spoken.json()["error"]["code"]) == (400, "voice_not_supported")
    # However long the body says it is.
    endless = (b"x" * (1 << 20) for _ in range(20))
    kind = {"content-type": "multipart/form-data; boundary=x"}
    assert httpx.post(url, content=endless, headers=kind, timeout=LIMIT_S).status_code in (400, 413)
    assert httpx.delete(f"{url}/VEC").status_code == 200
    assert httpx.delete(f"{url}/vec").status_code == 404
    assert httpx.delete(f"{url}/heart").status_code == 404
    assert [v["name"] for v in httpx.get(url).json()["uploaded_voices"]] == ["../../Ähm/.."]
    assert httpx.delete(f"{url}/{quote('../../Ähm/..', safe='')}").status_code == 200
    assert httpx.get(url).json()["uploaded_voices"] == []


def test_without_a_synthesizer_there_is_no_speech(server: Process) -> None:
    assert httpx.post(f"{server.url}/v1/audio/speech", json={"input": "Hi"}).status_code == 404

    async def main() -> int:
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(f"{server.ws}/v1/audio/speech/stream")
        return refused.value.response.status_code

    assert asyncio.run(main()) == 404


def test_a_stream_is_finished_before_the_server_stops(serve: Serve) -> None:
    server = serve("--synthesizer", VOICE)

    async def main() -> Stream:
        async with stream(server, **PCM) as wire:
            await wire.say("input.text", text=TEXT)
            await wire.say("input.done")
            await wire.until("audio.start")
            server.terminate()
            done = await wire.until("session.done")
            assert (done["total_sentences"], "cancelled" in done) == (3, False)
            await wire.socket.wait_closed()
            assert wire.socket.close_code == 1001
            return wire

    assert len(asyncio.run(main()).of("audio.done")) == 3


def test_a_client_that_leaves_while_it_is_answered_is_no_error(speaker: Process) -> None:
    async def main() -> None:
        for _ in range(10):
            async with websockets.connect(f"{speaker.ws}/v1/audio/speech/stream") as socket:
                await socket.send(json.dumps({"type": "session.config"} | PCM))
                for _ in range(20):
                    await socket.send("{")
        await idle(speaker)

    asyncio.run(main())


def joined(wire: Stream) -> Pcm:
    return from_pcm16(b"".join(wire.sound.values()))


def test_what_is_spoken_is_heard(speaker: Process) -> None:
    """The stream's sound, back through the server's own transcriber."""
    text = "The weather will be mild tomorrow. Please remember to take your umbrella with you."

    async def main() -> Stream:
        async with stream(speaker, **PCM) as wire:
            await wire.say("input.text", text=text)
            await wire.say("input.done")
            await wire.until("session.done")
            return wire

    with client(speaker) as stock:
        from antiphon.audio.encode import Encoder

        encoder = Encoder("wav", RATE_HZ, whole=True)
        encoder.feed(joined(asyncio.run(main())))
        heard = stock.audio.transcriptions.create(model="default", file=("a.wav", encoder.finish())).text
    assert heard.strip() == text
