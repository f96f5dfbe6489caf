"""The server within a program: the same code path as `antiphon serve`, without its signal handlers."""

from __future__ import annotations

import asyncio
import signal
import socket

import pytest

import antiphon
from antiphon.client import SessionEnded
from antiphon.errors import SettingsError
from tests.conftest import Recording

pytestmark = pytest.mark.server
LIMIT_S = 120
CAPTIONS = {"language_model": "none", "synthesizer": "none"}


def test_a_program_serves_and_uses_its_own_server(recordings: dict[str, Recording]) -> None:
    async def main() -> str:
        handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
        async with antiphon.Server(**CAPTIONS, api_keys=("secret",)) as server:
            assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == handlers
            async with server.client() as client, client.captions(language="en") as captions:
                captions.feed([recordings["lj-LJ001-0008"].pcm])
                text = "".join([words async for words in captions])
            async with antiphon.client.Client(server.url, "wrong") as other:
                with pytest.raises(SessionEnded, match="invalid_api_key"):
                    await other.transcribe(b"")
        async with server.client() as client:
            with pytest.raises(SessionEnded, match="connection_lost"):
                await client.transcribe(b"")
        return text

    assert "surpassed" in asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_what_cannot_be_served_is_raised_and_leaves_no_socket() -> None:
    async def enter(**options: object) -> None:
        async with antiphon.Server(**CAPTIONS | options):
            pass

    with pytest.raises(SettingsError, match="transcribre: no such setting"):
        asyncio.run(enter(transcribre="x"))
    with pytest.raises(SettingsError, match="no API key is set"):
        asyncio.run(enter(host="0.0.0.0"))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SettingsError, match="cannot listen"):
        asyncio.run(enter(port=taken.getsockname()[1]))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(SettingsError, match="nonsense"):
        asyncio.run(enter(port=port, transcriber="nonsense"))
    # The port is free again.
    socket.create_server(("127.0.0.1", port)).close()
