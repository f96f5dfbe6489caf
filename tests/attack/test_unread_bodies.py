"""Requests that are answered before their bodies have arrived. The client gets the whole response, and no reset."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from antiphon.server.http import body
from tests.server.scripted import serving

LIMIT_S = 30.0


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with serving() as (ws, _, _):
        parts = urlsplit(ws)
        yield str(parts.hostname), int(parts.port or 0)


def answered(address: tuple[str, int], first: str, body: list[bytes], *headers: str) -> bytes:
    """Return the bytes that a client reads if it sends the rest of its body after the response has begun."""
    head = "\r\n".join([first, "Host: 127.0.0.1", *headers, "", ""])
    with socket.create_connection(address, LIMIT_S) as connection:
        connection.sendall(head.encode() + body[0])
        assert select.select([connection], [], [], LIMIT_S)[0], "no answer"
        for piece in body[1:]:
            connection.sendall(piece)
        answer = b""
        while more := connection.recv(1 << 16):
            answer += more
    return answer


CHUNK = b"5\r\nhello\r\n"
MANY = b"10000\r\n" + bytes(1 << 16) + b"\r\n"


@pytest.mark.parametrize(
    ("first", "status"),
    [
        ("POST /v1/nothing HTTP/1.1", b"404"),
        ("PUT /v1/models HTTP/1.1", b"405"),
        ("GET /v1/models HTTP/1.1", b"200"),
        ("DELETE /v1/audio/voices/x HTTP/1.1", b"404"),
        ("OPTIONS / HTTP/1.1", b"405"),
    ],
)
@pytest.mark.parametrize("rest", [[CHUNK, b"0\r\n\r\n"], [MANY] * 40 + [b"0\r\n\r\n"]], ids=["small", "2.5 MB"])
def test_when_a_request_is_answered_before_its_body_has_come_then_its_client_has_the_whole_answer(
    address: tuple[str, int], first: str, status: bytes, rest: list[bytes]
) -> None:
    answer = answered(address, first, [CHUNK, *rest], "Transfer-Encoding: chunked")
    head, _, found = answer.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == status
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: ")]
    assert not lengths or len(found) == int(lengths[0].rpartition(b" ")[2])


def test_when_a_body_does_not_end_then_its_connection_is_closed_all_the_same(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "LINGER_S", 0.05)
    answer = answered(address, "POST /v1/nothing HTTP/1.1", [CHUNK], "Transfer-Encoding: chunked")
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"connection: close" in answer.lower()
