"""Faults of clients: the server handles each one, no other client is affected, and no resource leaks."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import socket
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import websockets
from websockets.exceptions import ConnectionClosed, InvalidStatus

from antiphon.settings import AudioSettings
from tests.conftest import SMALL, Process, Recording, Serve
from tests.forking import run
from tests.server.clients import b64, connect, until_idle, vllm
from tests.server.conversations import TEXT_ONLY, talk

LIMIT_S = 60


def test_when_frames_are_bad_then_each_gets_its_error_and_the_session_goes_on(
    server: Process, recordings: dict[str, Recording]
) -> None:
    bad: list[tuple[str, str]] = [
        ("{", "invalid_json"),
        (json.dumps({"type": "boo"}), "unknown_event"),
        (json.dumps({"type": "session.update", "model": "nonsense"}), "model_not_found"),
        (json.dumps({"type": "input_audio_buffer.append", "audio": "%"}), "invalid_audio"),
        (json.dumps({"type": "input_audio_buffer.append", "audio": "AAAA"}), "invalid_audio"),
        (json.dumps({"type": "input_audio_buffer.append", "audio": "hello, can you hear me"}), "invalid_audio"),
        (
            json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(bytes(30 << 20)).decode()})[
                : 30 << 20
            ],
            "invalid_audio",
        ),
    ]

    async def main() -> str:
        async with connect(server.ws, "?dialect=vllm") as wire:
            await wire.say("input_audio_buffer.append", audio=b64(np.zeros(160, np.float32)))
            assert (await wire.until("error"))["code"] == "model_not_validated"
            await wire.say("session.update", model="default")
            for frame, code in bad:
                await wire.socket.send(frame)
                assert (await wire.until("error"))["code"] == code
            return await vllm(wire, recordings["lj-LJ001-0008"].pcm)

    assert "surpassed" in asyncio.run(main())


def test_when_a_frame_is_far_over_the_limit_then_the_connection_closes_with_1009(server: Process) -> None:
    async def main() -> int:
        async with connect(server.ws) as wire:
            with pytest.raises(ConnectionClosed) as closed:
                await wire.socket.send("x" * (AudioSettings().max_frame_bytes * 2 + 1))
                while True:
                    await wire.read()
            assert closed.value.rcvd is not None
            return closed.value.rcvd.code

    assert asyncio.run(main()) == 1009


def test_when_the_url_names_an_unknown_model_then_an_error_is_sent_and_the_connection_closed(server: Process) -> None:
    async def main() -> tuple[dict[str, Any], int]:
        async with connect(server.ws, "?model=nonsense") as wire:
            answer = await wire.read()
            with pytest.raises(ConnectionClosed) as closed:
                await wire.read()
            assert closed.value.rcvd is not None
            return answer, closed.value.rcvd.code

    answer, code = asyncio.run(main())
    assert answer["error"]["code"] == "model_not_found"
    assert code == 1008


def test_when_audio_comes_faster_than_real_time_then_it_is_slowed_and_nothing_is_lost(
    server: Process, recordings: dict[str, Recording]
) -> None:
    one = recordings["lj-LJ001-0008"]
    pcm = np.tile(np.concatenate((one.pcm, np.zeros(8000, np.float32))), 30)

    async def main() -> tuple[int, float]:
        async with connect(server.ws, "?intent=transcription") as wire:
            await wire.say(
                "session.update",
                session={
                    "type": "transcription",
                    "audio": {
                        "input": {
                            "format": {"type": "audio/pcm", "rate": 16000},
                            "turn_detection": {"silence_duration_ms": 400},
                        }
                    },
                },
            )

            async def send() -> None:
                # Like a careless client: frames of 20 ms, as fast as the socket accepts them.
                await wire.sound(pcm, chunk_s=0.02)

            sending = asyncio.create_task(send())
            texts, deepest = [], 0.0
            async with httpx.AsyncClient() as client:
                while len(texts) < 30:
                    frame = await wire.read()
                    if frame["type"].endswith("completed"):
                        texts.append(frame["transcript"])
                        metrics = (await client.get(f"{server.url}/metrics")).text
                        line = next(s for s in metrics.splitlines() if s.startswith("antiphon_backlog_seconds"))
                        deepest = max(deepest, float(line.split()[-1]))
            await sending
            return sum("surpassed" in t for t in texts), deepest

    right, deepest = asyncio.run(asyncio.wait_for(main(), 120))
    assert right >= 29
    assert deepest <= AudioSettings().max_backlog_s + 2


def test_when_clients_vanish_then_no_session_job_or_memory_is_left(
    server: Process, recordings: dict[str, Recording]
) -> None:
    process = psutil.Process(server.popen.pid)
    pcm = recordings["lj-LJ001-0004"].pcm[: 16000 * 2]

    async def vanish(number: int) -> None:
        socket = await websockets.connect(f"{server.ws}/v1/realtime")
        await socket.send(json.dumps({"type": "session.update", "model": "default"}))
        await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": b64(pcm)}))
        await asyncio.sleep(0.05 * (number % 5))
        # No close frame: the connection breaks in the middle of a word.
        socket.transport.abort()

    async def wave() -> None:
        await asyncio.gather(*(vanish(i) for i in range(20)))
        await until_idle(server)

    asyncio.run(wave())
    descriptors, memory = process.num_fds(), process.memory_info().rss
    for _ in range(3):
        asyncio.run(wave())
    assert process.num_fds() <= descriptors + 2
    assert process.memory_info().rss < memory + (40 << 20)


def test_when_some_clients_misbehave_then_others_are_served_as_before(
    server: Process, recordings: dict[str, Recording]
) -> None:
    async def nuisance() -> None:
        for _ in range(5):
            async with connect(server.ws) as wire:
                await wire.socket.send("{")
                await wire.socket.send(b"\x00\xff")
                await wire.say("session.update", model="default")
                await wire.sound(np.random.default_rng(0).normal(0, 0.3, 16000).astype(np.float32))

    async def main() -> str:
        async with connect(server.ws) as wire:
            text, *_ = await asyncio.gather(vllm(wire, recordings["lj-LJ001-0004"].pcm), nuisance(), nuisance())
            return text

    assert "immediate predecessors" in asyncio.run(main())


def test_when_a_client_floods_events_then_the_session_ends_with_rate_limit_exceeded(server: Process) -> None:
    async def main() -> tuple[str, int]:
        async with connect(server.ws, "?intent=transcription") as wire:

            async def flood() -> None:
                for _ in range(20_000):
                    await wire.say("input_audio_buffer.clear")

            flooding = asyncio.create_task(flood())
            error = await wire.until("error")
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    await wire.read()
            assert closed.value.rcvd is not None
            code = closed.value.rcvd.code
            flooding.cancel()
            await asyncio.gather(flooding, return_exceptions=True)
            return error["error"]["code"], code

    assert asyncio.run(main()) == ("rate_limit_exceeded", 1008)
    asyncio.run(until_idle(server))


def test_when_a_client_never_reads_then_the_server_stops_reading_too(
    server: Process, recordings: dict[str, Recording]
) -> None:
    """The client sends and never reads. The server stops reading too, and ends the session when the client leaves."""
    process = psutil.Process(server.popen.pid)
    before = process.memory_info().rss
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.sendall(
            f"GET /v1/realtime?dialect=vllm HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        raw.settimeout(3)
        payload = json.dumps({"type": "x" * 4000}).encode()
        # A client's frame, masked with zeros. Each is answered with an error that the client does not read.
        frame = b"\x81\xfe" + len(payload).to_bytes(2, "big") + bytes(4) + payload
        sent = 0
        # The unread errors of a slow client fill the system's buffers, and the server stops reading. The session of a
        # fast client ends by the limit on events, and its further messages are dropped.
        try:
            for _ in range(100_000):
                raw.sendall(frame)
                sent += len(frame)
        except (TimeoutError, ConnectionError):
            pass
        if sent == 100_000 * len(frame):
            asyncio.run(until_idle(server))
        assert process.memory_info().rss < before + (30 << 20)
    asyncio.run(until_idle(server))


def test_when_keys_and_limits_are_set_then_requests_sessions_and_backlog_are_held_to_them(
    serve: Serve, recordings: dict[str, Recording]
) -> None:
    server = serve(
        "--profile",
        "default",
        "--api-key",
        "one",
        "--api-key",
        "two",
        "--sessions-per-key",
        "2",
        "--cors-origin",
        "https://example.org",
        "--overflow",
        "close",
        "--max-backlog-s",
        "2",
    )
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    assert httpx.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer three"}).status_code == 401
    assert httpx.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer two"}).status_code == 200
    assert httpx.get(f"{server.url}/ready").status_code == 200
    asked = {
        "Origin": "https://example.org",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    allowed = httpx.options(f"{server.url}/v1/audio/transcriptions", headers=asked)
    assert allowed.headers["access-control-allow-origin"] == "https://example.org"

    async def main() -> None:
        with pytest.raises(InvalidStatus) as refused:
            await websockets.connect(f"{server.ws}/v1/realtime")
        assert refused.value.response.status_code == 401
        browser = {"subprotocols": ["realtime", "openai-insecure-api-key.two"]}
        async with connect(server.ws, **browser) as wire:  # type: ignore[arg-type]
            assert wire.socket.subprotocol == "realtime"
            assert (await wire.read())["type"] == "session.created"
        one = {"additional_headers": {"Authorization": "Bearer one"}}
        async with connect(server.ws, **one) as first, connect(server.ws, **one):
            with pytest.raises(InvalidStatus) as full:
                await websockets.connect(f"{server.ws}/v1/realtime", **one)  # type: ignore[arg-type]
            assert full.value.response.status_code == 429
            assert int(full.value.response.headers["Retry-After"]) > 0
            await first.say("session.update", model="default")
            with pytest.raises(ConnectionClosed) as closed:
                for _ in range(50):
                    await first.sound(np.tile(recordings["lj-LJ001-0004"].pcm, 4), chunk_s=10.0)
                while True:
                    await first.read()
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1008, "input_audio_buffer_overflow")
        async with connect(server.ws, **one) as again:
            assert (await again.read())["type"] == "session.created"

    asyncio.run(asyncio.wait_for(main(), 120))


def test_when_sigterm_comes_then_sessions_get_an_error_their_finals_and_a_close(
    serve: Serve, recordings: dict[str, Recording]
) -> None:
    server = serve()

    async def main() -> tuple[list[dict[str, Any]], int]:
        async with connect(server.ws, "?intent=transcription") as wire:
            session = {
                "type": "transcription",
                "audio": {
                    "input": {
                        "format": {"type": "audio/pcm", "rate": 16000},
                        "turn_detection": {"silence_duration_ms": 2000},
                    }
                },
            }
            await wire.say("session.update", session=session)
            await wire.sound(recordings["lj-LJ001-0004"].pcm, chunk_s=0.2)
            await wire.until("speech_started")
            server.terminate()
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    await wire.read()
            assert closed.value.rcvd is not None
            return wire.seen, closed.value.rcvd.code

    seen, code = asyncio.run(asyncio.wait_for(main(), 60))
    reported = next(f for f in seen if f["type"] == "error")
    assert reported["error"]["code"] == "server_shutting_down"
    final = next(f for f in seen if f["type"].endswith("completed"))
    # The part that was read before SIGTERM.
    assert "block" in final["transcript"].lower()
    assert code == 1001
    assert server.popen.wait(30) == 0


def test_when_a_session_expires_then_its_last_words_are_still_transcribed(
    serve: Serve, recordings: dict[str, Recording]
) -> None:
    server = serve("--session-s", "3")

    async def main() -> list[dict[str, Any]]:
        async with connect(server.ws) as wire:
            await wire.say("session.update", model="default")
            await wire.sound(recordings["lj-LJ001-0008"].pcm)
            with pytest.raises(ConnectionClosed):
                while True:
                    await wire.read()
            return wire.seen

    seen = asyncio.run(asyncio.wait_for(main(), 60))
    assert any(f.get("code") == "session_expired" for f in seen)
    assert "surpassed" in seen[-1]["text"]


def test_when_two_hundred_sockets_come_and_go_then_each_is_served(server: Process) -> None:
    async def visit() -> str:
        async with connect(server.ws) as wire:
            return str((await wire.read())["type"])

    async def main() -> list[str]:
        out = []
        for _ in range(10):
            out += await asyncio.gather(*(visit() for _ in range(20)))
        await until_idle(server)
        return out

    assert asyncio.run(main()) == ["session.created"] * 200


@pytest.mark.slow
def test_when_the_address_is_public_and_no_key_is_set_then_the_server_does_not_start() -> None:
    done = run("antiphon", "serve", "--host", "0.0.0.0")
    assert done.returncode == 2
    assert "--api-key" in done.stderr


def test_when_sigint_comes_then_the_server_exits_with_0(serve: Serve) -> None:
    server = serve()
    server.popen.send_signal(signal.SIGINT)
    assert server.popen.wait(30) == 0


def test_when_sigterm_comes_in_an_answer_then_it_is_given_to_its_end_and_nobody_else_is_let_in(serve: Serve) -> None:
    server = serve("--language-model", SMALL, "--drain-s", "50")

    async def main() -> tuple[list[dict[str, Any]], int]:
        async with talk(server, **TEXT_ONLY | {"max_output_tokens": 80}) as wire:
            await wire.text("Tell me about the sea.")
            await wire.say("response.create")
            await wire.until("response.output_text.delta")
            server.terminate()
            async with httpx.AsyncClient() as client:
                while (ready := await client.get(f"{server.url}/ready")).status_code == 200:
                    pass
            assert (ready.status_code, ready.json()["status"]) == (503, "draining")
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    await wire.read()
            assert closed.value.rcvd
            return wire.seen, closed.value.rcvd.code

    seen, code = asyncio.run(asyncio.wait_for(main(), 60))
    done = [f["response"] for f in seen if f["type"] == "response.done"]
    # Completed, or ended by its maximum length, but not cancelled.
    assert [r["status"] for r in done] in (["completed"], ["incomplete"])
    assert [f["error"]["code"] for f in seen if f["type"] == "error"] == ["server_shutting_down"]
    assert code == 1001
    assert server.popen.wait(30) == 0
