"""The listening socket."""

from __future__ import annotations

import asyncio
import socket

import pytest

from antiphon.errors import SettingsError
from antiphon.server.run import _bind


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_small_frames_do_not_wait_for_each_other(host: str) -> None:
    async def main() -> int:
        seen: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listening = _bind(host, 0)
        async with await asyncio.start_server(accepted, sock=listening):
            _, writer = await asyncio.open_connection(host, listening.getsockname()[1])
            nodelay = await seen
            writer.close()
            await writer.wait_closed()
            return nodelay

    try:
        socket.socket(socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    assert asyncio.run(main()) == 1


def test_an_address_that_is_taken_is_a_clear_error() -> None:
    with _bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(SettingsError, match="cannot listen on"):
            _bind("127.0.0.1", taken.getsockname()[1])
