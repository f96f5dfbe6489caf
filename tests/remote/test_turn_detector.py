"""A turn detector on another server: what it gets, and what counts as no answer."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from antiphon.errors import RemoteError
from antiphon.remote import turn_detector
from antiphon.remote.turn_detector import RemoteTurnDetector

Reply = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def judged(reply: Reply, num_samples: int = 16000) -> float:
    """Return the judgement of a turn by a real server that answers each request with `reply`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        (size,) = (line.split(b":")[1] for line in head.lower().splitlines() if line.startswith(b"content-length"))
        body = await reader.readexactly(int(size))
        assert b"authorization: bearer k" in head.lower()
        try:
            await reply(body, writer)
            await writer.drain()
        finally:
            writer.close()

    async def main() -> float:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            pcm = np.arange(num_samples, dtype=np.float32)
            return await RemoteTurnDetector(f"http://127.0.0.1:{port}/judge", "K").complete(pcm)

    return asyncio.run(main())


def answered(status: str, body: bytes) -> Reply:
    async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body))

    return reply


def test_the_server_gets_the_last_seconds_of_the_turn_and_its_probability_is_returned() -> None:
    got: list[np.ndarray] = []

    async def reply(body: bytes, writer: asyncio.StreamWriter) -> None:
        got.append(np.load(io.BytesIO(body)))
        await answered("200 OK", b'{"prediction": 1, "probability": 0.75}')(body, writer)

    assert judged(reply, 10 * 16000) == 0.75
    assert (got[0].dtype, len(got[0]), got[0][-1]) == (np.float32, 8 * 16000, 10 * 16000 - 1)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        ("500 Error", b"{}"),
        ("422 Error", b'{"detail": "8000 Hz"}'),
        ("200 OK", b"no"),
        ("200 OK", b"{}"),
        ("200 OK", b"x" * (1 << 17)),
    ],
)
def test_any_other_answer_is_a_failure(status: str, body: bytes) -> None:
    with pytest.raises(RemoteError):
        judged(answered(status, body))


def test_a_server_that_does_not_answer_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_detector, "ANSWER_S", 0.01)

    async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)

    with pytest.raises(RemoteError, match="no answer"):
        judged(reply)
