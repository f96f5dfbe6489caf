"""A voice over the WebSocket of speech streams: its messages as vLLM-Omni sends them, and faults in every phase."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.server import ServerConnection

from antiphon.contracts import Urgency, VoiceOptions
from antiphon.errors import ModelError, Refused, RemoteError
from antiphon.remote.address import parse_address
from antiphon.remote.synthesizer.synthesizer import RemoteSynthesizer
from antiphon.settings import RemoteSettings
from tests.remote.scripted_sockets import Script, Server, scripted_sockets, tell
from tests.remote.synthesizer.scripted_voice import RATE_HZ, SAMPLES, TONE, base64

KEY, LIMIT_S = "sk-not-to-be-seen", 30


def asked(*scripts: Script, use: Callable[[RemoteSynthesizer, Server], Awaitable[Any]], answer_s: float = 20.0) -> Any:
    async def main() -> Any:
        async with scripted_sockets("input.done", *scripts) as server:
            address = parse_address(f"{server.url}/audio/speech/stream#clever", "--synthesizer", schemes=("ws",))
            remote = RemoteSettings(remote_answer_s=answer_s, remote_token_s=0.3)
            voice = await asyncio.to_thread(RemoteSynthesizer, address, KEY, (), remote)
            return await use(voice, server)

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))


async def spoken(voice: RemoteSynthesizer, name: str = "default") -> np.ndarray:
    async with aclosing(voice.speak("Good morning.", VoiceOptions(name), lambda: Urgency.FINAL)) as chunks:
        return np.concatenate([chunk.pcm async for chunk in chunks])


async def speaks(socket: ServerConnection) -> None:
    await tell(socket, "audio.start", format="pcm", sample_rate=RATE_HZ)
    await socket.send(SAMPLES[:1001])
    await socket.send(SAMPLES[1001:])
    await tell(socket, "audio.done", total_bytes=len(SAMPLES), error=False)
    await tell(socket, "session.done", total_sentences=1)


async def speaks_in_stereo(socket: ServerConnection) -> None:
    await tell(socket, "audio.start", format="pcm", sample_rate=RATE_HZ // 2, channels=2)
    await socket.send(np.repeat(np.frombuffer(SAMPLES, "<i2"), 2).tobytes())
    await tell(socket, "session.done")


async def speaks_in_json(socket: ServerConnection) -> None:
    await tell(socket, "audio.start", format="pcm")
    await tell(socket, "audio.chunk", audio_b64=base64(SAMPLES), timestamps=None)
    await tell(socket, "audio.chunk", audio_b64="", timestamps=[{"word": "Good", "start_ms": 0, "end_ms": 50}])
    await tell(socket, "session.done")


def test_texts_are_spoken_over_one_connection_and_configured_once() -> None:
    async def use(voice: RemoteSynthesizer, server: Server) -> None:
        for name in ("default", "default", "bo"):
            np.testing.assert_allclose(await spoken(voice, name), TONE, atol=1e-4)
        assert server.num_opened == 1
        kinds = [message["type"] for message in server.messages]
        text = ["input.text", "input.done"]
        assert kinds == ["session.config", *text, *text, "session.config", *text]
        assert server.messages[0] == {
            "type": "session.config", "model": "clever", "response_format": "pcm", "stream_audio": True,
            "split_granularity": "none",
        }  # fmt: skip
        assert server.messages[5]["voice"] == "bo"

    asked(speaks, use=use)


def test_the_servers_rate_and_channels_count() -> None:
    async def use(voice: RemoteSynthesizer, server: Server) -> None:
        assert len(await spoken(voice)) == pytest.approx(2 * len(TONE), abs=2)
        np.testing.assert_allclose(await spoken(voice), TONE, atol=1e-4)

    asked(speaks_in_stereo, speaks_in_json, use=use)


async def hangs(socket: ServerConnection) -> None:
    await socket.wait_closed()


async def closes(socket: ServerConnection) -> None:
    await socket.close(1011, "out of memory")


async def fails(socket: ServerConnection) -> None:
    await tell(socket, "error", message="Generation failed for utterance 0, sentence 0: out of memory")
    await tell(socket, "audio.done", error=True)
    await tell(socket, "session.done")


async def says_nothing(socket: ServerConnection) -> None:
    await tell(socket, "session.done", total_sentences=0)


async def sends_garbage(socket: ServerConnection) -> None:
    await socket.send("{{{")


async def stops(socket: ServerConnection) -> None:
    await socket.send(SAMPLES)
    await socket.wait_closed()


async def dies(socket: ServerConnection) -> None:
    await socket.send(SAMPLES)
    socket.transport.abort()


async def half(socket: ServerConnection) -> None:
    await socket.send(SAMPLES[:-1])
    await tell(socket, "session.done")


BEFORE = {
    "hangs": (hangs, "gave no answer within"),
    "closes": (closes, "1011 out of memory"),
    "fails": (fails, "out of memory"),
    "says nothing": (says_nothing, "no audio"),
    "garbage": (sends_garbage, "no valid message"),
}
AFTER = {"stops": (stops, "was silent for"), "dies": (dies, "broke off"), "half a sample": (half, "within a sample")}


@pytest.mark.parametrize("fault", BEFORE)
def test_a_fault_before_the_first_sound_is_tried_again_once(fault: str) -> None:
    script, why = BEFORE[fault]

    async def use(voice: RemoteSynthesizer, server: Server) -> None:
        np.testing.assert_allclose(await spoken(voice), TONE, atol=1e-4)
        server.scripts = (script,)
        with pytest.raises(RemoteError, match=why):
            await spoken(voice)
        assert server.num_asked == 4

    asked(script, speaks, use=use, answer_s=0.4 if fault == "hangs" else 20.0)


@pytest.mark.parametrize("fault", AFTER)
def test_a_fault_after_the_first_sound_ends_the_text(fault: str) -> None:
    script, why = AFTER[fault]

    async def use(voice: RemoteSynthesizer, server: Server) -> None:
        with pytest.raises(RemoteError, match=why):
            await spoken(voice)
        assert server.num_asked == 1
        np.testing.assert_allclose(await spoken(voice), TONE, atol=1e-4)

    asked(script, speaks, use=use)


@pytest.mark.parametrize(
    ("status", "kind", "why"),
    [
        (401, ModelError, "does not accept the key"),
        (404, ModelError, "no WebSocket at this path"),
        (302, RemoteError, "status 302"),
        (500, RemoteError, "status 500"),
        (503, Refused, "no room"),
    ],
)
def test_a_refused_upgrade_is_told(status: int, kind: type[Exception], why: str) -> None:
    async def use(voice: RemoteSynthesizer, server: Server) -> None:
        server.status = status
        with pytest.raises(kind, match=why):
            await spoken(voice)

    asked(speaks, use=use)


def test_closing_ends_the_work_at_once_and_the_next_connection_is_opened_in_advance() -> None:
    async def endless(socket: ServerConnection) -> None:
        while True:
            await socket.send(SAMPLES)

    async def use(voice: RemoteSynthesizer, server: Server) -> None:
        chunks = voice.speak("Good morning.", VoiceOptions("default"), lambda: Urgency.FINAL)
        await anext(chunks)
        await chunks.aclose()
        await server.left.wait()
        for _ in range(2):
            await server.opened.acquire()
        np.testing.assert_allclose(await spoken(voice), TONE, atol=1e-4)
        assert server.num_opened == 2

    asked(endless, speaks, use=use)


def test_a_connection_that_the_server_has_closed_is_not_used_again() -> None:
    async def use(voice: RemoteSynthesizer, server: Server) -> None:
        for _ in range(2):
            np.testing.assert_allclose(await spoken(voice), TONE, atol=1e-4)
            await asyncio.sleep(0.05)
        assert server.num_opened == 2

    async def speaks_and_closes(socket: ServerConnection) -> None:
        await speaks(socket)
        await socket.close()

    asked(speaks_and_closes, speaks, use=use)
