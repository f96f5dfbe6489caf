"""WebSocket clients that fall silent, read slowly or do not read, on real sockets. Time passes only when nothing else
can happen: the event loop's clock jumps to its next timer.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.server import ServerState
from websockets.client import ClientProtocol
from websockets.frames import OP_CLOSE, OP_PING, Close, Frame
from websockets.uri import parse_uri

from antiphon.server.http.connections import (
    PING_INTERVAL_S,
    SILENCE_S,
    SLOWEST_BYTES_PER_S,
    BoundedConfig,
    Connections,
)

MESSAGE = "x" * 16_000
MAX_JUMP_S = 2.0


class JumpingSelector(selectors.DefaultSelector):
    """Does not wait for timers, but adds their time to `jumped_s`. Waits a moment for data on its way to a socket."""

    jumped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout if timeout is None else min(timeout, 0.002))
        if timeout and not ready:
            self.jumped_s += min(timeout, MAX_JUMP_S)
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.jumped_s


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(main())


App = Callable[[Callable[[], Awaitable[Any]], Callable[[dict[str, Any]], Awaitable[None]]], Awaitable[None]]


class Client:
    """A client that reads and answers only when the test calls it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._protocol = ClientProtocol(parse_uri("ws://127.0.0.1/"), max_size=None)
        self.num_read = 0

    async def open(self) -> None:
        self._protocol.send_request(self._protocol.connect())
        self.write()
        self._protocol.receive_data(await self._reader.readuntil(b"\r\n\r\n"))
        assert len(self._protocol.events_received()) == 1

    def write(self) -> None:
        """Send all waiting data, including pongs."""
        self._writer.write(b"".join(self._protocol.data_to_send()))

    def say(self) -> None:
        """Send a message without a pong."""
        self._protocol.data_to_send()
        self._protocol.send_text(b"here")
        self.write()

    async def read(self, size: int = 1 << 16) -> list[Frame]:
        """Read the available data, up to `size`. If the connection has ended, its close frame was read earlier."""
        data = await self._reader.read(size)
        assert data
        self.num_read += len(data)
        self._protocol.receive_data(data)
        return [e for e in self._protocol.events_received() if isinstance(e, Frame)]

    async def until_closed(self) -> tuple[list[Frame], Close]:
        frames: list[Frame] = []
        while not frames or frames[-1].opcode is not OP_CLOSE:
            frames += await self.read()
        return frames, Close.parse(bytes(frames[-1].data))


@asynccontextmanager
async def served(app: App, buffers: int = 0) -> AsyncIterator[tuple[Client, Connections]]:
    """Yield a client of a server that runs `app` after accepting the WebSocket.

    `buffers` is the size of the socket buffers on both sides, in bytes; 0 for the system's default.
    """

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await app(receive, send)

    connections, state = Connections(8, 8, lambda: None), ServerState()
    config = BoundedConfig(asgi, connections, 10.0, log_config=None, ws_per_message_deflate=False, lifespan="off")
    config.load()
    loop = asyncio.get_running_loop()
    protocol: Any = config.http_protocol_class
    server = await loop.create_server(lambda: protocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0)
    sock = socket.socket()
    if buffers:
        server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffers)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffers)
    sock.connect(server.sockets[0].getsockname())
    reader, writer = await asyncio.open_connection(sock=sock)
    client = Client(reader, writer)
    await client.open()
    try:
        yield client, connections
    finally:
        writer.close()
        server.close()


async def listening(receive: Any, send: Any) -> None:
    while (await receive())["type"] != "websocket.disconnect":
        pass


def now_s() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("num_messages", [0, 3])
def test_a_client_that_answers_no_ping_is_closed_a_minute_after_its_last_bytes(num_messages: int) -> None:
    async def main() -> None:
        async with served(listening) as (client, connections):
            pings = 0
            for _ in range(num_messages):
                await asyncio.sleep(SILENCE_S - 1)
                client.say()
                pings += sum(f.opcode is OP_PING for f in await client.read())
            frames, close = await client.until_closed()
            assert now_s() == pytest.approx(num_messages * (SILENCE_S - 1) + SILENCE_S)
            assert (close.code, close.reason) == (1001, "client_silent")
            pings += sum(f.opcode is OP_PING for f in frames)
            assert pings >= (num_messages + 1) * 2
            await asyncio.sleep(1)
            assert connections.num_open == 0

    run(main)


def test_a_client_that_answers_pings_stays() -> None:
    async def main() -> None:
        async with served(listening) as (client, connections):
            while now_s() < 6 * SILENCE_S:
                frames = await client.read()
                assert [f.opcode for f in frames] == [OP_PING]
                assert now_s() % PING_INTERVAL_S == pytest.approx(0)
                client.write()
            assert connections.num_open == 1

    run(main)


@pytest.mark.parametrize(("pace", "buffers"), [(1.2, 0), (0.6, 50_000)])
def test_a_client_that_reads_at_the_pace_of_speech_stays(pace: float, buffers: int) -> None:
    # The pings wait behind all the data. If the socket buffers hold all of it, the server knows only how much it has
    # sent. Otherwise it sees that the client reads.
    bytes_per_s = pace * SLOWEST_BYTES_PER_S
    size = int(130 * bytes_per_s) // len(MESSAGE) * len(MESSAGE)

    async def speaking(receive: Any, send: Any) -> None:
        for _ in range(size // len(MESSAGE)):
            await send({"type": "websocket.send", "text": MESSAGE})
        await listening(receive, send)

    async def main() -> None:
        async with served(speaking, buffers) as (client, connections):
            while client.num_read < size:
                await asyncio.sleep(1)
                while client.num_read < min(size, now_s() * bytes_per_s):
                    assert OP_CLOSE not in [f.opcode for f in await client.read(4096)]
                    client.write()
            assert now_s() > 2 * SILENCE_S
            # After all pongs, the timeout is a minute again, from the time that the client's system took the last
            # bytes.
            await client.read()
            client.write()
            start_s = now_s()
            await client.until_closed()
            assert SILENCE_S <= now_s() - start_s < 2 * SILENCE_S
            await asyncio.sleep(1)
            assert connections.num_open == 0

    run(main)


def test_a_client_that_takes_no_bytes_is_cut_off() -> None:
    ended = asyncio.Event()

    async def speaking(receive: Any, send: Any) -> None:
        with pytest.raises(ClientDisconnected):
            while True:
                await send({"type": "websocket.send", "text": MESSAGE})
        ended.set()

    async def main() -> None:
        async with served(speaking) as (client, connections), asyncio.timeout(6 * SILENCE_S):
            client.say()
            await ended.wait()
            await asyncio.sleep(1)
            assert connections.num_open == 0

    run(main)


def test_what_the_server_has_yet_to_read_is_not_the_clients_silence() -> None:
    async def busy(receive: Any, send: Any) -> None:
        await asyncio.sleep(3 * SILENCE_S)
        await listening(receive, send)

    async def main() -> None:
        async with served(busy) as (client, _):
            client.say()
            await client.until_closed()
            assert now_s() >= 4 * SILENCE_S

    run(main)
