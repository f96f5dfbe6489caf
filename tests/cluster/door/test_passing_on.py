"""The requests that a door forwards. The door is a real process, in front of an upstream that echoes what it gets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from starlette.datastructures import QueryParams

from antiphon.protocols.connection import Resume
from antiphon.protocols.dialects import dialect_of
from antiphon.protocols.opening import opening_of
from antiphon.transports.http import REFUSED_LINES
from tests.attack.doors import UPGRADE, as_key
from tests.cluster.processes import Cluster, Host, cluster
from tests.cluster.spellings import HIDDEN, SERVED, Echo, ask, echo, is_hidden, spelled

pytestmark = pytest.mark.server
SAID = {"X-Forwarded-For": "192.0.2.66", "Forwarded": "for=192.0.2.67", "X-Real-IP": "192.0.2.68"}


@pytest.fixture(scope="module")
def upstream() -> Iterator[Echo]:
    with echo() as found:
        yield found


@pytest.fixture(scope="module")
def doors() -> Iterator[Cluster]:
    with cluster("", num_hosts=0) as found:
        yield found


@pytest.fixture(scope="module")
def door(doors: Cluster, upstream: Echo) -> Host:
    found = doors.add_door("--behind", f"http://{upstream.address}")
    found.wait()
    return found


@pytest.fixture(scope="module")
def inner(doors: Cluster, upstream: Echo) -> Host:
    """Return a door behind a load balancer on this machine. It has a metrics key, and listens on all addresses."""
    given = ("--trusted-proxies", "127.0.0.1", "--metrics-key", "scrape", "--allow-anonymous")
    found = doors.add_door("--behind", f"http://{upstream.address}", *given)
    found.wait()
    return found


@pytest.fixture(autouse=True)
def _forget(upstream: Echo) -> None:
    upstream.seen.clear()


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("headers", [{}, UPGRADE], ids=["http", "websocket"])
def test_what_is_hidden_reaches_no_host_in_any_spelling(
    door: Host, upstream: Echo, hidden: str, headers: dict[str, str]
) -> None:
    for name, target in spelled(hidden).items():
        status, body = ask(door.url, target, headers=headers)
        assert not [seen for seen, *_ in upstream.seen if is_hidden(seen)], name
        assert status in (400, 404) or upstream.seen or "antiphon_door_connections" in body, name
        upstream.seen.clear()


@pytest.mark.parametrize(("target", "seen"), SERVED.items())
def test_what_clients_ask_for_is_passed_on_as_it_came(door: Host, upstream: Echo, target: str, seen: str) -> None:
    assert ask(door.url, target) == (200, seen)
    path, _, query = seen.partition("?")
    ask(door.url, target, headers=UPGRADE)
    # The door adds a parameter to request a resumable session, if the dialect has such sessions. urlencode then encodes
    # the other parameters again.
    asked = upstream.seen[1][0]
    assert asked.partition("?")[0] == path
    resumes = dialect_of(opening_of(path, QueryParams(), {})).resume is Resume.ON_REQUEST
    assert ("resume=1" in asked) is resumes
    assert query.split("=")[0] in asked


def test_a_cookie_of_one_client_goes_to_no_other(door: Host, upstream: Echo) -> None:
    for cookie in ({}, {"Cookie": "mine=1"}, {}):
        ask(door.url, "/v1/models", headers=cookie)
    assert [headers.get("cookie") for _, headers, _ in upstream.seen] == [None, "mine=1", None]


def test_the_name_of_a_host_is_no_part_of_what_a_host_is_asked(door: Host, upstream: Echo) -> None:
    for name in ("x/internal/hosts?", "x/metrics#", "key:word@x", "x\\metrics", "x?"):
        ask(door.url, "/v1/realtime", headers=UPGRADE | {"Host": name})
    assert {target.split("?")[0] for target, *_ in upstream.seen} == {"/v1/realtime"}
    assert not any("authorization" in headers for _, headers, _ in upstream.seen)


CHUNKED = {"Transfer-Encoding": "chunked"}
IN_CHUNKS = b"5\r\nhello\r\n0\r\n\r\n"


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE", "POST"])
@pytest.mark.parametrize(
    ("headers", "sent", "body"),
    [
        ({"Content-Length": "5"}, b"hello", b"hello"),
        ({"Content-Length": "0"}, b"", b""),
        ({}, b"", b""),
        (CHUNKED, IN_CHUNKS, b"hello"),
        ({"Content-Length": "5"} | CHUNKED, IN_CHUNKS, b"hello"),
        ({"Content-Length": "99"} | CHUNKED, IN_CHUNKS, b"hello"),
        ({"Content-Length": "5", "Expect": "100-continue"}, b"hello", b"hello"),
    ],
)
def test_a_body_is_passed_on_with_any_method(
    door: Host, upstream: Echo, method: str, headers: dict[str, str], sent: bytes, body: bytes
) -> None:
    before = door.log
    assert ask(door.url, "/v1/models", method, headers, sent)[0] == 200
    ((target, given, seen),) = upstream.seen
    assert (target, seen) == ("/v1/models", body)
    assert not ("content-length" in given and "transfer-encoding" in given)
    assert door.log == before


def test_when_a_host_has_no_room_or_drains_then_another_host_gets_the_request(doors: Cluster, upstream: Echo) -> None:
    requests: list[tuple[str, dict[str, str], bytes]] = [
        ("GET", {}, b""),
        ("POST", {"Content-Length": "5"}, b"hello"),
        # The door does not know the size of this body, and streams it.
        ("POST", CHUNKED, IN_CHUNKS),
    ]
    with echo(503) as full:
        both = doors.add_door("--behind", f"http://{full.address}", "--behind", f"http://{upstream.address}")
        neither = doors.add_door("--behind", f"http://{full.address}")
        for door in (both, neither):
            door.wait()
        for method, headers, sent in requests[:2]:
            assert [ask(both.url, "/v1/models", method, headers, sent)[0] for _ in range(4)] == [200] * 4
            assert ask(neither.url, "/v1/models", method, headers, sent) == (503, "/v1/models")
        assert {seen for _, _, seen in upstream.seen} == {b"", b"hello"}
        assert sorted({ask(both.url, "/v1/models", *requests[2])[0] for _ in range(4)}) == [200, 503]
        assert {seen for _, _, seen in full.seen} == {b"", b"hello"}
    for door in (both, neither):
        door.kill()


@pytest.mark.parametrize("sent", [b"half", b""])
def test_a_body_that_does_not_come_is_refused(doors: Cluster, upstream: Echo, sent: bytes) -> None:
    door = doors.add_door("--behind", f"http://{upstream.address}", "--body-timeout-s", "0.1")
    door.wait()
    status, body = ask(door.url, "/v1/models", "POST", {"Content-Length": "9"}, sent)
    door.kill()
    assert (status, "request_timeout" in body) == (408, True)


def test_a_host_logs_the_address_of_a_client_behind_doors_and_not_what_it_says() -> None:
    trusting = ("--trusted-proxies", "127.0.0.1")
    with cluster("", *trusting, num_hosts=1, api_key="right") as found:
        (host,) = found.hosts
        for flags in ((), trusting):
            door = found.add_door("--behind", host.url, *flags)
            door.wait()
            for headers in ({}, UPGRADE):
                given = {"X-Forwarded-For": "192.0.2.66"} | as_key("wrong") | headers
                assert ask(door.url, "/v1/realtime", headers=given, source="127.0.0.2")[0] in (401, 404)
        # A host logs a request after it has answered it.
        deadline_s = time.monotonic() + 10
        while host.log.count("refusal=") < 4 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        lines = [line for line in host.log.splitlines() if "refusal=" in line]
    assert len(lines) == 4
    assert all("address=127.0.0.2" in line for line in lines), lines


def test_a_host_knows_a_client_by_the_address_of_its_connection(door: Host, upstream: Echo) -> None:
    for headers in ({}, UPGRADE):
        ask(door.url, "/v1/realtime", headers=SAID | headers | {"X-Forwarded-Proto": "https"})
    for _, headers, _ in upstream.seen:
        assert (headers["x-forwarded-for"], headers["x-forwarded-proto"]) == ("127.0.0.1", "http")
        assert not {"forwarded", "x-real-ip"} & set(headers)
    assert len(upstream.seen) == 2


@pytest.mark.parametrize(
    ("said", "address"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("192.0.2.66, 203.0.113.9", "203.0.113.9"),
        ("192.0.2.66, 203.0.113.9, 127.0.0.1", "203.0.113.9"),
        ("2001:db8::9", "2001:db8::9"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("203.0.113.9:4711", "203.0.113.9"),
        ("[2001:db8::9]:4711", "2001:db8::9"),
        # Without a forwarded address, the address of the connection counts.
        ("unknown", "127.0.0.1"),
        ("_hidden", "127.0.0.1"),
        ("fe80::1%key=forged level=error", "127.0.0.1"),
        ("", "127.0.0.1"),
    ],
)
def test_what_a_trusted_balancer_says_is_the_address(inner: Host, upstream: Echo, said: str, address: str) -> None:
    for headers in ({}, UPGRADE):
        ask(inner.url, "/v1/realtime", headers=headers | {"X-Forwarded-For": said})
    assert [headers["x-forwarded-for"] for _, headers, _ in upstream.seen] == [address] * 2


@pytest.mark.parametrize("path", ["/metrics", "/health"])
def test_what_a_door_answers_itself_is_not_for_pages_of_other_sites(door: Host, inner: Host, path: str) -> None:
    for name in ("127.0.0.1:1", "localhost", "[::1]"):
        assert ask(door.url, path, headers={"Host": name})[0] == 200
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        status, body = ask(door.url, path, headers=headers)
        assert (status, "not_allowed" in body) == (403, True)


def test_the_metrics_of_a_door_have_a_key(inner: Host) -> None:
    keys = ({}, as_key("scrape-"), {"Authorization": "Basic scrape"}, as_key("scrape"))
    assert [ask(inner.url, "/metrics", headers=key)[0] for key in keys] == [401, 401, 401, 200]
    assert ask(inner.url, "/health")[0] == 200


@contextmanager
def broken(answer: bytes) -> Iterator[str]:
    """Yield the URL of a server that sends this to each connection, and then closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"", 502),
        (b"nonsense\r\n\r\n", 502),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", 502),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", 0),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", 0),
    ],
)
def test_when_a_host_breaks_off_then_a_line_says_so_a_few_times_a_minute(
    doors: Cluster, answer: bytes, status: int
) -> None:
    with broken(answer) as url:
        door = doors.add_door("--behind", url)
        door.wait()
        before = len(door.log)
        assert {ask(door.url, "/v1/models")[0] for _ in range(REFUSED_LINES + 10)} == {status}
        lines = door.log[before:].splitlines()
        door.kill()
    assert len(lines) == REFUSED_LINES, lines
    assert all("has broken off" in line for line in lines)


def test_what_a_client_without_a_key_sends_does_not_fill_the_log(doors: Cluster) -> None:
    door = doors.add_door("--behind", "http://127.0.0.1:9", "--metrics-key", "scrape")
    door.wait()
    before = len(door.log)
    sent = {
        "not HTTP": b"\x16\x03\x01\r\n\r\n",
        "another upgrade": b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n",
        "a wrong key": b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n",
        "no host": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        "a body that ends": b"POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf",
        "a socket": b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\n"
        + b"".join(f"{name}: {value}\r\n".encode() for name, value in UPGRADE.items())
        + b"\r\n",
    }
    for data in sent.values():
        for _ in range(REFUSED_LINES + 5):
            with socket.create_connection(("127.0.0.1", door.port), 20) as connection:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
    lines = door.log[before:].splitlines()
    door.kill()
    # uvicorn limits its lines, and the door has a limit of its own.
    assert len(lines) == 2 * REFUSED_LINES, lines
