"""Calls of Asterisk and FreeSWITCH over real sockets. The switches are written from their sources: none was run."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection
from websockets.typing import Subprotocol

from antiphon.audio.pcm import Resampler, to_pcm16
from antiphon.protocols.telephony.asterisk import DTMF, HANG_UP, UUID, framed
from antiphon.server.state import ServerState
from tests.scripted import speech
from tests.server.scripted import serving
from tests.server.telephone.peers import LIMIT_S, end, settings, stream

ID = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")
START = (
    "MEDIA_START connection_id:c1 channel:WebSocket/conn1/0x7f channel_id:1700.1 format:slin16 "
    "optimal_frame_size:640 ptime:20"
)
Running = tuple[str, ServerState]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(settings(audiosocket="127.0.0.1:0", telephone_start_s=1)) as (ws, state, _):
        yield ws, state


def words(count: int, rate_hz: int) -> list[bytes]:
    """Return frames of 20 ms with words, and a second of silence after them."""
    data = to_pcm16(Resampler(16_000, rate_hz).feed(speech(1, count, 31)))
    size = rate_hz // 25
    return [data[at : at + size].ljust(size, b"\0") for at in range(0, len(data), size)]


async def call_live(state: ServerState, is_live: bool = True) -> None:
    while bool(state.sessions.legs) is not is_live:  # noqa: ASYNC110 (it is of the server's event loop)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("subprotocol", "start", "mark"),
    [
        ("media", START, "MARK_MEDIA m1"),
        (
            "media",
            json.dumps({"event": "MEDIA_START", "channel_id": "1", "format": "slin16", "optimal_frame_size": 640}),
            {"command": "MARK_MEDIA", "correlation_id": "m1"},
        ),
        (
            "audio.jambonz.org",
            json.dumps({"callSid": "c1", "from": "+4930111", "to": "+4930222", "sampleRate": 16000}),
            {"type": "mark", "data": {"name": "m1"}},
        ),
    ],
)
def test_a_switch_brings_a_call_over_a_websocket(subprotocol: str, start: str, mark: object, running: Running) -> None:
    ws, state = running

    async def main() -> tuple[float, list[str]]:
        async with stream(ws, subprotocols=[Subprotocol(subprotocol)]) as socket:
            assert socket.subprotocol == subprotocol
            await socket.send(start)
            for frame in words(3, 16_000):
                await socket.send(frame)
            heard_s, texts = await listened(socket)
            await socket.close()
        await call_live(state, False)
        return heard_s, texts

    heard_s, texts = asyncio.run(main())
    # The scripted model says the words that it heard, 300 ms each.
    assert heard_s == pytest.approx(0.9, abs=0.05)
    assert (texts[0] if isinstance(mark, str) else json.loads(texts[0])) == mark


async def listened(socket: ClientConnection) -> tuple[float, list[str]]:
    """Return the seconds of audio that come before a second without any, and the texts between them."""
    heard_s, texts = 0.0, list[str]()
    try:
        while True:
            async with asyncio.timeout(3.0 if not heard_s else 1.0):
                data = await socket.recv()
            if isinstance(data, bytes):
                assert len(data) % 640 == 0
                heard_s += len(data) / 32_000
            else:
                texts.append(data)
    except TimeoutError:
        return heard_s, texts


def test_a_switchs_stream_in_a_wrong_form_is_closed(running: Running) -> None:
    ws, state = running

    async def main(subprotocol: str, *messages: str | bytes) -> tuple[int, str]:
        async with stream(ws, subprotocols=[Subprotocol(subprotocol)]) as socket:
            for message in messages:
                await socket.send(message)
            return await end(socket)

    assert asyncio.run(main("media", bytes(640))) == (1008, "bad_event")
    assert asyncio.run(main("media", START, START)) == (1008, "bad_event")
    assert asyncio.run(main("media", START.replace("slin16", "g722"))) == (1008, "unsupported_format")
    assert asyncio.run(main("media", "{")) == (1008, "invalid_json")
    assert asyncio.run(main("audio.drachtio.org", "{}")) == (1008, "unsupported_format")
    assert asyncio.run(main("audio.drachtio.org", bytes(640))) == (1008, "bad_event")
    assert not state.sessions.legs


# --- AudioSocket

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def audio_socket(state: ServerState, *first: bytes) -> AsyncIterator[Streams]:
    port = state.listeners.ports["audiosocket"]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(LIMIT_S):
            for frame in first:
                writer.write(frame)
            yield reader, writer
    finally:
        writer.close()


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    header = await reader.readexactly(3)
    return header[0], await reader.readexactly(int.from_bytes(header[1:], "big"))


@pytest.mark.parametrize(("kind", "rate_hz"), [(0x10, 8000), (0x12, 16_000)])
def test_asterisk_brings_a_call_over_audio_socket(kind: int, rate_hz: int, running: Running) -> None:
    _, state = running

    async def main() -> None:
        async with audio_socket(state, framed(UUID, ID.bytes)) as (reader, writer):
            for frame in words(3, rate_hz):
                writer.write(framed(kind, frame))
            times_s, loop = list[float](), asyncio.get_running_loop()
            while len(times_s) < 45:
                found, payload = await read_frame(reader)
                assert (found, len(payload)) == (kind, rate_hz // 25)
                times_s.append(loop.time())
            # Asterisk plays what it gets, so nothing comes long before it is due.
            assert times_s[-1] - times_s[0] > 0.9 - 0.02 - 0.1
            ((_, leg),) = state.sessions.legs.items()
            assert (leg.call.carrier, leg.call.id) == ("audiosocket", str(ID))
            writer.write(framed(DTMF, b"5") + framed(DTMF, b"#"))
            # Audio makes the leg look for the end of the keys.
            writer.write(framed(kind, bytes(rate_hz // 25)))
            assert (await read_frame(reader))[0] == kind
            writer.write(framed(HANG_UP))
            while (await read_frame(reader))[0] != HANG_UP:
                pass
            assert await reader.read() == b""
        await call_live(state, False)

    asyncio.run(main())


def test_a_connection_that_is_no_call_is_closed(running: Running) -> None:
    _, state = running
    header = framed(UUID, ID.bytes)

    async def main(*first: bytes, is_left: bool = False) -> bytes:
        async with audio_socket(state, *first) as (reader, writer):
            if is_left:
                writer.write_eof()
            return await reader.read()

    for first in (
        (framed(0x10, bytes(320)),),
        (framed(UUID, b"123"),),
        (header, header),
        (header, framed(0x10, bytes(320)), framed(0x77, b"x")),
        (b"GET / HTTP/1.1\r\n\r\n" * 2000,),
        # Nothing, or half a frame, comes within `--telephone-start-s`.
        (),
        (header, b"\x10\x01"),
    ):
        # The server hangs up.
        assert asyncio.run(main(*first))[-3:] == framed(HANG_UP), first
    assert asyncio.run(main(header, is_left=True))[-3:] == framed(HANG_UP)
    assert not state.sessions.legs


def test_a_call_over_audio_socket_without_room_is_hung_up(running: Running) -> None:
    _, state = running

    async def main() -> bytes:
        async with audio_socket(state) as (reader, _):
            return await reader.read()

    state.admission.draining = True
    try:
        assert asyncio.run(main()) == framed(HANG_UP)
    finally:
        state.admission.draining = False


def test_a_frame_of_half_a_sample_is_dropped_and_the_call_goes_on(running: Running) -> None:
    _, state = running
    size = 320

    async def main() -> None:
        async with audio_socket(state, framed(UUID, ID.bytes), framed(0x10, bytes(size))) as (reader, writer):
            await call_live(state)
            writer.write(framed(0x10, bytes(size + 1)))
            for frame in words(2, 8000):
                writer.write(framed(0x10, frame))
            assert (await read_frame(reader))[0] == 0x10
        await call_live(state, False)

    asyncio.run(main())
    assert not np.any([leg.is_refused for leg in state.sessions.legs.values()])
