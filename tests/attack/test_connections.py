"""Connections without a key that send nothing or send very slowly, and more connections than the server can hold."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from antiphon.server.http.connections import Connections, connection_limit, log_failed_accepts
from tests.attack.scripted_server import LIMIT_S, ScriptedServer, scripted_server

DESCRIPTORS = 240
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def dial(server: ScriptedServer, source: str = "127.0.0.1") -> socket.socket:
    where = urlsplit(server.url)
    return socket.create_connection((where.hostname, where.port or 0), LIMIT_S, source_address=(source, 0))


def until_closed(connection: socket.socket) -> bytes:
    """Read until the server closes the connection; return what it sent."""
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    return data


@pytest.mark.server
def test_when_a_request_head_does_not_come_then_its_connection_is_closed(tmp_path: Path) -> None:
    with scripted_server(tmp_path, "--head-timeout-s", "0.5") as server, ExitStack() as stack:
        silent, cut, dribbling, second = (stack.enter_context(dial(server)) for _ in range(4))
        cut.sendall(HEAD[:-2])
        second.sendall(HEAD)
        data = b""
        while not data.endswith(b"}"):
            data += second.recv(65536)
        second.sendall(HEAD[:-2])
        assert until_closed(silent) == until_closed(cut) == until_closed(second) == b""
        # Each byte arrives in time, but the whole head does not.
        dribbling.sendall(HEAD[:-2] + b"X: ")
        dribbling.settimeout(0.05)
        closed = False
        while not closed:
            try:
                closed = dribbling.recv(1) == b""
            except TimeoutError:
                dribbling.sendall(b"a")
            except ConnectionError:
                closed = True
        # An open WebSocket may stay silent after an upgrade that was in time.
        with connect(f"{server.url.replace('http', 'ws')}/v1/realtime") as opened:
            assert until_closed(stack.enter_context(dial(server))) == b""
            assert opened.ping().wait(LIMIT_S)
        server.until("antiphon_connections 1.0")


UPGRADE = (
    b"GET %b HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eHh4eHh4eHh4eHh4eHh4eA==\r\n%b\r\n"
)


@pytest.mark.server
def test_an_upgrade_that_cannot_be_read_is_answered_and_gives_its_place_back(tmp_path: Path) -> None:
    """The HTTP parser accepts a head of 64 KiB. The parser of upgrades accepts only lines of 8 KiB and 128 headers.

    Without the server's own check, such an upgrade would get no response.
    """
    wrong = {
        "a long header": (b"/v1/realtime", b"tracestate: a=" + b"x" * 8200 + b"\r\n"),
        "a long list of cookies": (b"/v1/realtime", b"Cookie: " + b"a=b; " * 2000 + b"\r\n"),
        "a long name": (b"/v1/realtime", b"x" * 8200 + b": 1\r\n"),
        "many headers": (b"/v1/realtime", b"baggage: k=v\r\n" * 130),
        "a control character": (b"/v1/realtime", b"traceparent: a\x01b\r\n"),
        "a long URL": (b"/v1/realtime?instructions=" + b"x" * 8200, b""),
    }
    with scripted_server(tmp_path) as server, ExitStack() as stack:
        opened = [stack.enter_context(dial(server)) for _ in wrong]
        for connection, (url, headers) in zip(opened, wrong.values(), strict=True):
            connection.sendall(UPGRADE % (url, headers))
        for connection, name in zip(opened, wrong, strict=True):
            head, _, body = until_closed(connection).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 "), name
            assert json.loads(body)["error"]["code"] == "invalid_upgrade"
        server.until("antiphon_connections 1.0")
        # Browsers send far less than this.
        fine = stack.enter_context(dial(server))
        fine.sendall(UPGRADE % (b"/v1/realtime?x=" + b"y" * 7000, b"Cookie: " + b"x" * 8000 + b"\r\n"))
        assert fine.recv(12) == b"HTTP/1.1 101"
    assert "Traceback" not in server.log.read_text()


@pytest.mark.server
def test_when_silent_connections_flood_the_server_then_others_are_served_and_the_log_stays_quiet(
    tmp_path: Path,
) -> None:
    with scripted_server(tmp_path, ANTIPHON_TEST_DESCRIPTORS=str(DESCRIPTORS)) as server, ExitStack() as stack:
        flood = [stack.enter_context(dial(server)) for _ in range(DESCRIPTORS // 4 + 20)]
        refused = until_closed(flood[-1])
        assert refused.startswith(b"HTTP/1.1 503")
        assert b'"code":"too_many_connections"' in refused
        with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2")) as other:
            assert other.get(f"{server.url}/ready").status_code == 200
            # A third address takes the rest of the first half of the descriptors. After that, no address gets more.
            flood += [stack.enter_context(dial(server, "127.0.0.3")) for _ in range(DESCRIPTORS)]
            assert until_closed(flood[-1]).startswith(b"HTTP/1.1 503")
            text = other.get(f"{server.url}/metrics").text
        assert f"antiphon_connections {DESCRIPTORS // 2:.1f}" in text.splitlines()
        stack.close()
        while True:
            try:
                server.until("antiphon_connections 1.0")
                break
            except httpx.TransportError:
                continue
        server.popen.terminate()
        assert server.exit_code() == 0


def test_when_nothing_can_be_accepted_then_it_is_logged_once_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.new_event_loop()
    log_failed_accepts(loop)
    for number in (errno.EMFILE, errno.ENFILE):
        loop.call_exception_handler({"message": "", "exception": OSError(number, "no more"), "socket": None})
    loop.call_exception_handler({"message": "another", "exception": ValueError("bad")})
    loop.close()
    warning, error = caplog.records
    assert (warning.levelno, warning.exc_info) == (logging.WARNING, None)
    assert error.getMessage() == "another"


def test_an_address_has_half_of_the_connections_unless_it_is_given_more() -> None:
    refused: list[str] = []
    connections = Connections(4, 0, lambda: refused.append("half"))
    assert [connections.take("a") for _ in range(3)] == [True, True, False]
    assert [connections.take(address) for address in "bcd"] == [True, True, False]
    connections.give_back("a")
    assert connections.take("d")
    assert (connections.num_open, refused) == (4, ["half", "half"])
    assert all(Connections(4, 4, refused.clear).take("proxy") for _ in range(4))
    assert connection_limit(10) <= 276


def fragments() -> Iterator[str]:
    """Yield the fragments of an endless message."""
    while True:
        yield "x" * 10_000


@pytest.mark.server
def test_when_sockets_send_no_first_event_then_they_hold_places_and_are_told_to_go(tmp_path: Path) -> None:
    flags = ("--sessions-per-key", "2")
    with scripted_server(tmp_path, *flags) as server, ExitStack() as stack:
        url = server.url.replace("http", "ws")
        live = stack.enter_context(connect(f"{url}/v1/realtime?resume=1"))
        waiting = [stack.enter_context(connect(f"{url}{path}")) for path in ("/v1/duplex", "/v1/realtime?resume=x")]
        assert server.ready()["sessions"] == 3
        more = stack.enter_context(connect(f"{url}/v1/duplex"))
        assert json.loads(more.recv(LIMIT_S))["error"]["code"] == "resource_exhausted"
        with pytest.raises(ConnectionClosed) as closed:
            more.recv(LIMIT_S)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1013
        # A socket that may only resume a session accepts no more bytes than a session.resume needs.
        with pytest.raises(ConnectionClosed):
            waiting[1].send(fragments())
        # Sockets that wait for their first frame do not take places of sessions, nor the other way round.
        waiting[0].send('{"type": "session.create"}')
        assert json.loads(waiting[0].recv(LIMIT_S))["type"] == "session.created"
        assert server.ready()["sessions"] == 2
        assert live.ping().wait(LIMIT_S)
        with connect(f"{url}/v1/realtime?resume=x") as resuming:
            resuming.send('{"type": "session.resume", "session_id": "x", "resume_token": "x"}')
            assert json.loads(resuming.recv(LIMIT_S))["error"]["code"] == "unknown_session"
