"""A voice of a Wyoming server, on a real socket: its audio, its voices, and faults."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

import msgspec
import numpy as np
import pytest

from antiphon.contracts import Urgency, VoiceOptions
from antiphon.errors import ModelError, RemoteError
from antiphon.remote.address import SYNTHESIZER, parse_address
from antiphon.remote.synthesizer.synthesizer import RemoteSynthesizer
from antiphon.settings import RemoteSettings
from antiphon.wyoming import WyomingAudio, WyomingDecoder, encode
from tests.remote.synthesizer.scripted_voice import RATE_HZ, SAMPLES, TONE

LIMIT_S = 30
FORMAT = WyomingAudio(RATE_HZ, 2, 1)


class Info(msgspec.Struct):
    """What a server has: programs, each with its voices."""

    tts: list[dict[str, Any]]


class Failure(msgspec.Struct):
    """Why a text is not spoken."""

    text: str


PIPER = Info([{"name": "piper", "voices": [{"name": "alba"}, {"name": "bo"}]}])
SPOKEN = (
    encode("audio-start", FORMAT)
    + encode("audio-chunk", FORMAT, SAMPLES[:1001])
    + encode("audio-chunk", FORMAT, SAMPLES[1001:])
    + encode("audio-stop")
)


def asked(*answers: bytes, use: Callable[[RemoteSynthesizer, list[bytes]], Awaitable[Any]], info: Info = PIPER) -> Any:
    """Run `use` with a voice at a server that gives these answers, and with the requests that the server got."""
    requests: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = WyomingDecoder()
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                for event in decoder.feed(data):
                    if event.kind == "describe":
                        writer.write(encode("info", info))
                        continue
                    requests.append(event.data)
                    writer.write(answers[min(len(requests), len(answers)) - 1])
                    await writer.drain()
                    writer.write_eof()
        # The client has closed its side.
        writer.transport.abort()

    async def main() -> Any:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            url = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            address = parse_address(f"{url}#piper", "--synthesizer", schemes=SYNTHESIZER)
            remote = RemoteSettings(remote_token_s=0.3)
            voice = await asyncio.to_thread(RemoteSynthesizer, address, "", (), remote)
            return await use(voice, requests)

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))


async def spoken(voice: RemoteSynthesizer) -> np.ndarray:
    async with aclosing(voice.speak("Good morning.", VoiceOptions("bo"), lambda: Urgency.FINAL)) as chunks:
        return np.concatenate([chunk.pcm async for chunk in chunks])


def test_a_text_is_spoken_with_a_voice_of_the_server() -> None:
    async def use(voice: RemoteSynthesizer, requests: list[bytes]) -> None:
        assert voice.profile.voices == ("alba", "bo")
        np.testing.assert_allclose(await spoken(voice), TONE, atol=1e-4)
        assert msgspec.json.decode(requests[0]) == {"text": "Good morning.", "voice": {"name": "bo"}}

    asked(SPOKEN, use=use)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (encode("error", Failure("out of memory")), "out of memory"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak the Wyoming protocol"),
        (encode("audio-chunk", Failure("")), "no valid data of audio-chunk"),
        (encode("audio-start", WyomingAudio(4000, 2, 1)), "4000 Hz"),
        (encode("audio-stop"), "no audio"),
        (b"", "closed the connection"),
    ],
)
def test_a_fault_before_the_first_sound_is_tried_again_once(answer: bytes, why: str) -> None:
    async def use(voice: RemoteSynthesizer, requests: list[bytes]) -> None:
        np.testing.assert_allclose(await spoken(voice), TONE, atol=1e-4)
        with pytest.raises(RemoteError, match=why):
            await spoken(voice)
        assert len(requests) == 4

    asked(answer, SPOKEN, answer, answer, use=use)


def test_a_text_that_is_cut_off_fails() -> None:
    async def use(voice: RemoteSynthesizer, requests: list[bytes]) -> None:
        with pytest.raises(RemoteError, match="closed the connection"):
            await spoken(voice)
        assert len(requests) == 1

    asked(SPOKEN[:3000], use=use)


def test_a_server_without_voices_is_refused() -> None:
    async def use(voice: RemoteSynthesizer, requests: list[bytes]) -> None:
        pytest.fail("it was built")

    with pytest.raises(ModelError, match="without voices"):
        asked(use=use, info=Info([]))
