"""Requests over real sockets: to every route of a scripted host, and through a door in front of it.

An input is a request as JSON: its method, its exact target, its headers, its body as Latin-1, and whether the client
leaves before the answer. Two things are finds: a log record with a traceback, and an answer through the door with
something that a door hides.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import random
import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from starlette.routing import Route, WebSocketRoute

from antiphon.loading.loaded import LoadedModels
from antiphon.server.routes.table import ROUTES
from antiphon.settings import Settings
from tests.cluster.test_moving import door
from tests.fuzz.mutations import mutated_frame, mutated_text, recorded_bodies
from tests.server.live.test_ownership import Server
from tests.server.scripted import serving
from tests.traces import models

ANSWER_S = 30.0
# Text that a door must never let through, from a host's metrics and from its list of hosts.
HIDDEN = (b"antiphon_event_loop_lag", b'"draining":')
METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH", "BREW", "")
KINDS = (
    *("application/json", "application/json; charset=utf-16", "text/plain", "application/sdp", ""),
    *("multipart/form-data; boundary=B", "multipart/form-data", "multipart/form-data; boundary=B; charset=punycode"),
)
ODD_HEADERS = (
    *("Authorization: Bearer", "Authorization: Bearer \xff", "Authorization: Basic eA==", "Accept: \xff", "Range: x"),
    *("Content-Encoding: gzip", "Expect: 100-continue", "Origin: null", "Origin: http://evil.example", "X-Empty:"),
    *("X-Forwarded-For: ?, ::1", "Forwarded: for=_", "traceparent: 00-x", "Connection: Upgrade", "Upgrade: websocket"),
    *("X-Request-Id: \xe9", "Cookie: " + "a" * 3000, "Accept-Language: " + "x," * 500, "Sec-WebSocket-Key: x"),
)
PIECES = (
    "..",
    ".",
    "%2e%2e",
    "%2f",
    "%00",
    "%ff",
    "%25",
    "//",
    ";x",
    "?",
    "?a=%ff",
    "#",
    "\\",
    "*",
    "x" * 300,
    "%",
    "{}",
)
SDP = (
    "v=0\r\no=- 1 2 IN IP4 127.0.0.1\r\ns=-\r\nt=0 0\r\na=group:BUNDLE 0\r\nm=audio 9 UDP/TLS/RTP/SAVPF 111\r\n"
    "c=IN IP4 0.0.0.0\r\na=mid:0\r\na=sendrecv\r\na=rtcp-mux\r\na=rtpmap:111 opus/48000/2\r\na=ice-ufrag:abcd\r\n"
    "a=ice-pwd:0123456789012345678901\r\na=fingerprint:sha-256 00:11\r\na=setup:actpass\r\n"
    "a=candidate:1 1 udp 2130706431 127.0.0.1 9 typ host\r\n"
)


def form(draw: random.Random) -> str:
    """Return a multipart body with some of the fields that forms have, and a file. It may be cut off."""
    fields = ("file", "model", "audio_sample", "name", "consent", "prompt", "sdp", "session", "response_format", "x")
    values = ("", "default", "en", "{}", '{"type":"realtime"}', SDP, "RIFF", "\0", "[1, 2]", "a" * 2000, "srt")
    parts = [
        f'--B\r\nContent-Disposition: form-data; name="{name}"'
        + ('; filename="a.wav"\r\nContent-Type: audio/wav' if draw.random() < 0.3 else "")
        + f"\r\n\r\n{draw.choice(values)}\r\n"
        for name in draw.sample(fields, draw.randrange(6))
    ]
    text = "".join(parts) + "--B--\r\n"
    return mutated_text(text, draw) if draw.random() < 0.3 else text


def targets() -> list[tuple[str, str]]:
    """Return the method and path of every route."""
    found = [("GET", route.path) for route in ROUTES if isinstance(route, WebSocketRoute)]
    for route in ROUTES:
        if isinstance(route, Route):
            found += [(method, route.path) for method in sorted(route.methods or ())]
    # This route would stop the host.
    return [(method, path) for method, path in found if path != "/internal/drain"]


def draw_request(draw: random.Random) -> str:
    """Return a request to one of the routes, with some parts mutated."""
    method, path = draw.choice(targets())
    target = path.replace("{id:path}", "default").replace("{id}", "rtc-0").replace("{name:path}", "nobody")
    target = target.replace("{name}", draw.choice(("app.js", "x", "..")))
    bodies = recorded_bodies().get(f"{method} {path}")
    headers = [f"Content-Type: {draw.choice(KINDS)}"]
    if bodies:
        body = mutated_frame(bodies, draw)
        headers = ["Content-Type: application/json"] if draw.random() < 0.9 else headers
    elif path.endswith("calls") and draw.random() < 0.6:
        body, headers = mutated_text(SDP, draw), ["Content-Type: application/sdp"]
    elif method == "POST":
        body, headers = form(draw), ["Content-Type: multipart/form-data; boundary=B"]
    else:
        body = draw.choice(("", "", "hello"))
    if draw.random() < 0.3:
        headers += draw.sample(ODD_HEADERS, draw.randrange(1, 4))
    if draw.random() < 0.2:
        at = draw.randrange(len(target) + 1)
        target = target[:at] + draw.choice(PIECES) + target[at:]
    if draw.random() < 0.1:
        method = draw.choice(METHODS)
    asked = {"method": method, "target": target, "headers": headers, "body": body, "leaves": draw.random() < 0.02}
    return json.dumps(asked)


class Failures(logging.Handler):
    """Collects the log records that have a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1]:
            self.found.append(record.exc_info[1])


@dataclass
class Site:
    """A host, a door in front of it, and the failures that both have logged."""

    host: str
    door: str
    failures: Failures


@functools.cache
def site() -> Site:
    """Return the host and the door. They are started at the first call, and run until the process ends."""
    stack = ExitStack()
    atexit.register(stack.close)
    home = stack.enter_context(tempfile.TemporaryDirectory())
    settings = Settings()
    settings = replace(
        settings,
        server=replace(settings.server, body_timeout_s=1.0, sessions_per_key=1000, max_sessions=1000),
        models=replace(settings.models, home=home),
        cluster=replace(settings.cluster, internal_key="internal"),
    )
    loaded = LoadedModels(
        models.Ears(),
        models.Detector(),
        models.Judge(),
        models.Writer(),
        models.Voice(),
        models.Reader(),
        None,
        None,
        ("ears", "writer", "voice"),
        (),
    )
    url, state, _ = stack.enter_context(serving(settings, models=loaded))
    state.sessions.address = url.replace("ws", "http", 1)
    in_front = stack.enter_context(door(Server(url, state, None, None)))  # type: ignore[arg-type]
    failures = Failures()
    logging.getLogger().addHandler(failures)
    return Site(url, in_front, failures)


def asking(through_door: bool) -> Callable[[str | bytes], str]:
    """Return a function that sends requests to the host or through the door, and returns the status of each answer."""

    def ask(data: str | bytes) -> str:
        at = site()
        try:
            asked = json.loads(data)
            raw = request(asked)
        except (ValueError, TypeError, KeyError, AttributeError):
            # A file of the corpus as bytes, or a request so mutated that it is none any more.
            return ""
        address = urlsplit(at.door if through_door else at.host)
        answer = b""
        with socket.create_connection((address.hostname, address.port), ANSWER_S) as connection:
            connection.sendall(raw)
            while not asked.get("leaves") and (more := connection.recv(1 << 16)):
                answer += more
        if at.failures.found:
            failure = at.failures.found[0]
            at.failures.found.clear()
            raise failure
        assert not through_door or not any(mark in answer for mark in HIDDEN), "a door has shown what it hides"
        return answer.split(b" ", 2)[1].decode("latin-1") if answer.count(b" ") > 1 else ""

    return ask


def request(asked: dict[str, Any]) -> bytes:
    """Return a request as the bytes to send."""
    body = asked["body"].encode("utf-8", "replace")
    length = f"Content-Length: {len(body)}"
    head = [f"{asked['method']} {asked['target']} HTTP/1.1", "Host: 127.0.0.1", *asked["headers"], length]
    return "\r\n".join([*head, "Connection: close", "", ""]).encode("latin-1", "replace") + body
