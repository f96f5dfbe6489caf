"""`/v1/audio/speech/stream` over real sockets: text in, sentences of audio out, and faults of clients."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import websockets
from websockets.asyncio.client import ClientConnection

from antiphon.audio.containers import decode_all
from antiphon.audio.pcm import from_pcm16
from tests.conftest import VOICE, Process, Serve
from tests.server.clients import until_idle

RATE_HZ = 24_000
PCM = {"response_format": "pcm", "stream_audio": True, "seed": 1}
TEXT = "Hello there. How are you today? It costs $5.20, says Dr. Smith."
SENTENCES = ["Hello there.", "How are you today?", "It costs $5.20, says Dr. Smith."]
LIMIT_S = 60


class Stream:
    """One speech stream. `sound` has the received audio by (utterance, sentence)."""

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


def test_when_text_comes_token_by_token_then_sentences_are_spoken_before_it_is_complete(speaker: Process) -> None:
    async def main() -> Stream:
        async with stream(speaker, **PCM) as wire:
            for at in range(0, len(TEXT), 3):
                await wire.say("input.text", text=TEXT[at : at + 3])
            # The first two sentences are spoken before the text is complete.
            while len(wire.of("audio.done")) < 2:
                await wire.read()
            await wire.say("input.done")
            assert (await wire.until("session.done"))["total_sentences"] == 3
            # The configuration also applies to the next utterance on the same connection.
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
def test_when_a_format_is_asked_for_then_each_sentence_is_a_file_of_it(speaker: Process, format: str) -> None:
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


def test_when_word_times_are_asked_for_then_each_sentences_last_chunk_has_them(speaker: Process) -> None:
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


def test_when_an_utterance_is_cancelled_then_its_audio_stops_and_the_next_is_whole(speaker: Process) -> None:
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
    # A sentence of 400 clauses would take several minutes.
    assert first["total_bytes"] / 2 / RATE_HZ < 120
    assert last["utterance_index"] == 1
    assert not last["error"]


def test_when_messages_are_wrong_then_each_is_answered_and_the_stream_lives(speaker: Process) -> None:
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
def test_when_the_first_message_is_wrong_then_the_stream_closes(
    speaker: Process, first: str | None, message: str
) -> None:
    async def main() -> None:
        async with stream(speaker) as wire:
            if first is not None:
                await wire.socket.send(first)
            assert message in (await wire.until("error"))["message"]
            await wire.socket.wait_closed()

    asyncio.run(main())


def test_when_a_client_is_idle_then_the_stream_ends_after_its_audio(speaker: Process) -> None:
    async def main() -> None:
        async with stream(speaker, **PCM) as wire:
            await wire.say("input.text", text="A word. ")
            assert (await wire.until("error"))["message"] == "Idle timeout: no message received"
            await wire.socket.wait_closed()
            assert len(wire.of("audio.done")) == 1

    asyncio.run(main())


@pytest.mark.parametrize("text", ["", "   \n\t ", "😀🎉", "...", "\x00\x07", "<speak/>"])
def test_when_text_has_nothing_to_speak_then_it_is_one_sentence_of_a_short_silence(speaker: Process, text: str) -> None:
    async def main() -> Stream:
        async with stream(speaker, **PCM) as wire:
            await wire.say("input.text", text=text)
            await wire.say("input.done")
            await wire.until("session.done")
            return wire

    wire = asyncio.run(main())
    # Without text there is no sentence.
    num = 1 if text else 0
    silence = 2 * round(0.08 * RATE_HZ)
    assert [(f["error"], f["total_bytes"]) for f in wire.of("audio.done")] == [(False, silence)] * num
    assert b"".join(wire.sound.values()) == bytes(silence * num)
    assert wire.of("session.done")[0]["total_sentences"] == len(wire.of("audio.start")) == num
    assert not wire.of("error")


def test_when_tags_are_cut_over_messages_then_they_are_not_spoken_and_a_pause_is_in_the_word_times(
    speaker: Process,
) -> None:
    async def main(text: str) -> Stream:
        async with stream(speaker, **PCM, word_timestamps=True) as wire:
            for at in range(0, len(text), 3):
                await wire.say("input.text", text=text[at : at + 3])
            await wire.say("input.done")
            await wire.until("session.done")
            return wire

    wire = asyncio.run(main('<think>Hm.</think>One and <break time="900ms"/> two.'))
    assert [f["sentence_text"] for f in wire.of("audio.start")] == ["One and two."]
    (words,) = (f["timestamps"] for f in wire.of("audio.chunk") if f["timestamps"])
    assert [w["word"] for w in words] == ["One", "and", "two."]
    assert 900 <= words[2]["start_ms"] - words[1]["end_ms"] < 1300


def test_when_the_voice_cannot_speak_a_text_then_it_is_skipped_or_refused(speaker: Process) -> None:
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


def test_when_a_sentence_has_100000_characters_then_its_audio_begins_at_once(speaker: Process) -> None:
    async def main() -> None:
        async with stream(speaker, **PCM) as wire:
            await wire.say("input.text", text="word " * 20_000)
            await wire.say("input.done")
            # The audio of this text begins as early as that of a short sentence.
            while not wire.sound.get((0, 0)):
                await wire.read()
            await wire.say("input.cancel")
            await wire.until("session.done")

    asyncio.run(main())


def test_when_a_client_stops_reading_then_memory_is_bounded_and_synthesis_pauses(speaker: Process) -> None:
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
            # Waits until synthesis pauses. About eight hours of audio were requested.
            while (now := spoken()) != steps:
                steps = now
                await asyncio.sleep(0.5)
            assert process.memory_info().rss - before < 64 << 20
            # The client reads again, and synthesis continues.
            for _ in range(200):
                await socket.recv()
            assert spoken() > steps

    asyncio.run(main())
    asyncio.run(until_idle(speaker))


def test_when_clients_vanish_then_nothing_is_left_and_nothing_logged(speaker: Process) -> None:
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
        await until_idle(speaker)
        fds = process.num_fds()
        for _ in range(2):
            await asyncio.gather(*(vanish(k) for k in range(100)), return_exceptions=True)
        await until_idle(speaker)
        for _ in range(LIMIT_S * 10):
            if process.num_fds() <= fds + 4:
                break
            await asyncio.sleep(0.1)
        assert process.num_fds() <= fds + 4

    asyncio.run(main())
    # The log is checked for errors when the server stops. A client that leaves does not even cause a warning. On a slow
    # machine, 100 clients at once may cause a warning about the event loop.
    warnings = [line for line in speaker.log.read_text().splitlines() if " WARNING " in line]
    assert [line for line in warnings if "server.watches" not in line] == []


def test_when_the_server_drains_then_a_stream_is_spoken_to_its_end(serve: Serve) -> None:
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


def test_when_a_client_leaves_while_errors_are_sent_then_nothing_is_logged(speaker: Process) -> None:
    async def main() -> None:
        for _ in range(10):
            async with websockets.connect(f"{speaker.ws}/v1/audio/speech/stream") as socket:
                await socket.send(json.dumps({"type": "session.config"} | PCM))
                for _ in range(20):
                    await socket.send("{")
        await until_idle(speaker)

    asyncio.run(main())
