"""Bodies from hostile clients: without a declared length, without end, in expensive charsets, or cut off."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from antiphon.settings import Settings
from tests.server.scripted import serving

LIMIT_S = 30
MAX_FILE_BYTES = 100_000
FORM = "multipart/form-data; boundary=B"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Yield the URL of a server that accepts files of MAX_FILE_BYTES, and waits a second for each body."""
    settings = Settings()
    settings = replace(
        settings,
        audio=replace(settings.audio, max_file_bytes=MAX_FILE_BYTES),
        server=replace(settings.server, body_timeout_s=1.0),
    )
    with serving(settings) as (ws, *_):
        yield ws.replace("ws", "http", 1)


def part(name: str, more: str = "") -> bytes:
    return f'--B\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode()


def post(url: str, path: str, content: object, content_type: str) -> httpx.Response:
    return httpx.post(f"{url}{path}", content=content, headers={"content-type": content_type}, timeout=LIMIT_S)


class Endless:
    """A chunked body that ends only when the server stops reading. `num_bytes` counts the bytes that were read."""

    def __init__(self, head: bytes = b"", max_bytes: int = 1 << 30) -> None:
        self.num_bytes, self._head, self._max_bytes = 0, head, max_bytes

    def __iter__(self) -> Iterator[bytes]:
        yield self._head
        while self.num_bytes < self._max_bytes:
            self.num_bytes += 1 << 16
            yield b"x" * (1 << 16)


@pytest.mark.parametrize(
    ("path", "head", "content_type", "code"),
    [
        ("/v1/realtime/client_secrets", b"", "application/json", "request_too_large"),
        ("/v1/realtime/calls", b"v=0", "application/sdp", "request_too_large"),
        ("/v1/realtime/calls", part("sdp", '; filename="a"'), FORM, "request_too_large"),
        ("/v1/audio/transcriptions", part("file", '; filename="a.wav"'), FORM, "file_too_large"),
        ("/v1/audio/translations", part("file", '; filename="a.wav"'), FORM, "file_too_large"),
        ("/v1/audio/voices", part("audio_sample", '; filename="a.wav"'), FORM, "file_too_large"),
        ("/v1/audio/transcriptions", b"a=", "application/x-www-form-urlencoded", "invalid_value"),
    ],
)
def test_when_a_body_without_a_length_does_not_end_then_it_is_refused_by_name_at_the_routes_limit(
    url: str, path: str, head: bytes, content_type: str, code: str
) -> None:
    body = Endless(head)
    response = post(url, path, body, content_type)
    assert response.status_code == (400 if code == "invalid_value" else 413)
    assert response.json()["error"]["code"] == code
    # The largest limit is that of a voice's recording. Further bytes are in the buffers of the sockets.
    assert body.num_bytes < 32 << 20


def test_when_a_body_stops_arriving_then_it_is_refused_and_the_connection_closed(url: str) -> None:
    _, _, port = url.rpartition(":")
    with socket.create_connection(("127.0.0.1", int(port)), LIMIT_S) as raw:
        raw.sendall(b"POST /v1/realtime/client_secrets HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        answer = b"".join(iter(lambda: raw.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer


def test_when_a_sender_leaves_within_a_body_then_nothing_fails(url: str, caplog: pytest.LogCaptureFixture) -> None:
    _, _, port = url.rpartition(":")
    head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FORM}\r\n"
    with caplog.at_level(logging.WARNING):
        with socket.create_connection(("127.0.0.1", int(port)), LIMIT_S) as raw:
            raw.sendall(head.encode() + b"Content-Length: 90000\r\n\r\n" + part("file", '; filename="a.wav"'))
        # When another request has its response, the server has noticed the end of the first one.
        assert httpx.get(f"{url}/health", timeout=LIMIT_S).status_code == 200
    assert not caplog.records


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/voices", "/v1/realtime/calls"])
@pytest.mark.parametrize("charset", ["punycode", "unicode_escape", "utf-7", "idna", "utf_16", "no-such"])
def test_when_a_forms_charset_is_not_one_of_three_then_it_is_refused_before_a_field_is_decoded(
    url: str, path: str, charset: str
) -> None:
    # If this field is decoded as punycode, it occupies the event loop for 1.2 s.
    body = part("model") + b"a-" * 100_000 + b"\r\n--B--\r\n"
    response = post(url, path, body, f"{FORM}; charset={charset}")
    assert response.status_code == 415
    assert charset in response.json()["error"]["message"]


@pytest.mark.parametrize("charset", ["utf-8", "UTF-8", '"us-ascii"', "ISO-8859-1", "latin-1"])
def test_when_a_forms_charset_is_a_plain_one_then_its_fields_are_read(url: str, charset: str) -> None:
    body = part("model") + b"default\r\n--B--\r\n"
    response = post(url, "/v1/audio/transcriptions", body, f"{FORM}; charset={charset}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "file")


def test_when_a_field_is_larger_than_any_needs_to_be_then_the_form_is_refused(url: str) -> None:
    body = part("prompt") + b"x" * (300 << 10) + b"\r\n--B--\r\n"
    response = post(url, "/v1/audio/transcriptions", body, FORM)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_value")
