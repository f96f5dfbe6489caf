"""Audio that a client names by a URL, fetched from real servers on this machine: allowed URLs, and each refusal."""

from __future__ import annotations

import asyncio
import ipaddress
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from antiphon.errors import RemoteProtocolError, SettingsError
from antiphon.remote.allowed_hosts import is_public
from antiphon.server import fetch
from antiphon.server.fetch import Fetcher
from antiphon.shares.places import current_owner
from antiphon.signals import become

SOUND = b"RIFF" + bytes(4000)
MAX_BYTES = 1 << 20


class Files(BaseHTTPRequestHandler):
    """Responds according to the path. `asked` has the requested paths, in order."""

    asked: list[str]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.asked.append(f"{self.headers['host']}{self.path}")
        port = self.server.server_address[1]
        name, _, rest = self.path[1:].partition("/")
        match name:
            case "sound":
                self.answer(self.server.site.sound, "audio/wav; codecs=1")  # type: ignore[attr-defined]
            case "untyped":
                self.answer(SOUND, "")
            case "page":
                self.answer(b"<html>", "text/html")
            case "zipped":
                self.answer(SOUND, "audio/wav", ("Content-Encoding", "gzip"))
            case "again":
                self.redirect(f"/again/{int(rest) - 1}" if int(rest) else "/sound")
            case "broken":
                self.redirect("http://[::1")
            case "elsewhere":
                self.redirect(f"http://{rest}:{port}/secret")
            case "endless":
                self.send_response(200)
                self.send_header("Connection", "close")
                self.end_headers()
                self.close_connection = True
                try:
                    while True:
                        self.wfile.write(bytes(65536))
                except OSError:
                    pass
            case "silent":
                self.server.site.gate.wait()  # type: ignore[attr-defined]
                self.close_connection = True
            case "rude":
                self.wfile.write(b"hello\r\n\r\n")
                self.close_connection = True
            case _:
                self.send_error(404)

    def answer(self, body: bytes, kind: str, *headers: tuple[str, str]) -> None:
        self.send_response(200)
        for header, value in (
            *headers,
            ("Content-Length", str(len(body))),
            *([("Content-Type", kind)] if kind else []),
        ):
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(body)

    def redirect(self, to: str) -> None:
        self.send_response(302)
        self.send_header("Location", to)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class Site:
    """A server of Files on every address of this machine. `sound`: its audio file."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.sound, self.gate = SOUND, threading.Event()
        handler = type("Handler", (Files,), {"asked": self.asked})
        self._server = ThreadingHTTPServer(("0.0.0.0", 0), handler)
        self._server.daemon_threads = True
        self._server.site = self  # type: ignore[attr-defined]
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(name="site")
def _site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


def fetched(url: str, *hosts: str) -> bytes:
    return asyncio.run(Fetcher(hosts).audio(url, "ref_audio", MAX_BYTES))


def refused(url: str, *hosts: str) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        fetched(url, *hosts)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "ref_audio")
    return caught.value.message.removeprefix("Invalid value for 'ref_audio': ")


def test_a_file_of_a_listed_host_is_fetched_and_redirects_are_followed(site: Site) -> None:
    host = f"127.0.0.1:{site.port}"
    for path in ("sound", "untyped", "again/2"):
        assert fetched(f"http://{host}/{path}", host) == SOUND
    assert site.asked == [f"{host}/{p}" for p in ("sound", "untyped", "again/2", "again/1", "again/0", "sound")]
    # A host can be requested by its name and by its address if both are listed.
    assert (
        fetched(f"http://LOCALHOST:{site.port}/sound#x", f"localhost:{site.port}", host, f"[::1]:{site.port}") == SOUND
    )


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("page", "it is text/html, not an audio file."),
        ("zipped", "it is compressed."),
        ("nothing", "its server answered 404."),
        ("endless", "at most 1 MiB."),
        ("again/9", "it has more than 3 redirects."),
        ("rude", "its server cannot be reached."),
        ("broken", "it redirects to an invalid URL."),
    ],
)
def test_when_a_server_gives_something_else_then_the_error_says_what(site: Site, path: str, why: str) -> None:
    host = f"127.0.0.1:{site.port}"
    assert refused(f"http://{host}/{path}", host) == why


def test_when_a_server_says_nothing_then_it_is_not_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_FETCH_S", 0.2)
    host = f"127.0.0.1:{site.port}"
    assert refused(f"http://{host}/silent", host).startswith("it took longer than")


async def fetch_as(key: str, fetcher: Fetcher, url: str) -> bytes | str:
    current_owner.set(key)
    try:
        return await fetcher.audio(url, "ref_audio", MAX_BYTES)
    except RemoteProtocolError as error:
        return error.message


def test_when_a_keys_servers_say_nothing_then_another_keys_file_comes_meanwhile(site: Site) -> None:
    host = f"127.0.0.1:{site.port}"

    async def main() -> None:
        fetcher = Fetcher([host])
        slow = [asyncio.create_task(fetch_as("a", fetcher, f"http://{host}/silent")) for _ in range(32)]
        await become(lambda: len(site.asked) == 2, 0.001)
        assert await asyncio.create_task(fetch_as("b", fetcher, f"http://{host}/sound")) == SOUND
        assert not any(task.done() for task in slow)
        assert sorted(site.asked) == [f"{host}/silent"] * 2 + [f"{host}/sound"]
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)

    asyncio.run(main())


def test_when_a_key_waits_for_its_own_fetches_then_the_wait_is_of_the_fetchs_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "MAX_FETCH_S", 0.2)
    host = f"127.0.0.1:{site.port}"

    async def main() -> list[bytes | str]:
        fetcher = Fetcher([host])
        return await asyncio.gather(*(fetch_as("a", fetcher, f"http://{host}/silent") for _ in range(5)))

    assert all("it took longer than" in str(found) for found in asyncio.run(main()))
    # Three requests were never sent.
    assert len(site.asked) == 2


@pytest.mark.parametrize("name", ["a..b", "x" * 64 + ".example.com", "xn--.example.com", ".", "..", "[::1%25lo]"])
def test_when_a_host_is_no_name_then_the_url_is_refused(name: str) -> None:
    refused(f"http://{name}:9/", "*:9")


def test_when_an_address_is_private_then_nothing_is_sent_to_it(site: Site) -> None:
    private = "its host has no public address."
    # Any host is allowed by the list, but none of these hosts has a public address.
    for host in ("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "2130706433", "127.1"):
        assert refused(f"http://{host}:{site.port}/secret", f"*:{site.port}") == private, host
    assert site.asked == []
    # An address that is listed with one port is refused at another port.
    assert refused(f"http://127.0.0.1:{site.port}/secret", f"*:{site.port}", "127.0.0.1:9") == private
    assert site.asked == []
    # A redirect from a listed address leads to a private one.
    for host in ("127.0.0.2", "0.0.0.0"):
        url = f"http://127.0.0.1:{site.port}/elsewhere/{host}"
        assert refused(url, f"127.0.0.1:{site.port}", f"*:{site.port}") == private, host
        unlisted = f"the host '{host}' is not among those of --fetch-from."
        assert refused(url, f"127.0.0.1:{site.port}") == unlisted
    assert not any("secret" in path for path in site.asked)


def test_addresses_that_stand_for_a_private_one_are_private() -> None:
    private = (
        "127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255 "
        "192.88.99.1 192.0.0.8 198.18.0.1 203.0.113.1 240.0.0.1 "
        "::1 :: fe80::1 fec0::1 fd00::1 ff02::1 ff0e::1 100::1 5f00::1 3fff::1 4000::1 "
        "2001:db8::1 2001:2::1 2001:20::1 "
        "::127.0.0.1 ::8.8.8.8 ::ffff:10.0.0.1 ::ffff:192.88.99.1 ::ffff:0:127.0.0.1 ::ffff:0:8.8.8.8 "
        "64:ff9b::7f00:1 64:ff9b::a00:1 64:ff9b:1::7f00:1 64:ff9b:1::808:808 "
        "2002:7f00:1:: 2002:a00:1::1 2001:0:7f00:1:: "
        "2606:4700::5efe:a00:1 2606:4700::200:5efe:7f00:1"
    )
    for text in private.split():
        assert not is_public(ipaddress.ip_address(text)), text
    public = "8.8.8.8 2606:4700::1111 2a00:1450:4001::200e ::ffff:8.8.8.8 64:ff9b::808:808 2002:808:808::1"
    for text in public.split():
        assert is_public(ipaddress.ip_address(text)), text


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://cdn.example.com/a.wav", "it is not an http or https URL."),
        ("file:///etc/passwd", "it is not an http or https URL."),
        ("http:///a.wav", "it is not an http or https URL."),
        ("http://cdn.example.com:99999/a", "it is not a URL."),
        ("http://cdn.exämple.com/a", "it is not a URL."),
        ("http://cdn.example.com/a b", "it is not an http or https URL."),
        ("http://cdn.example.com/\r\nHost: x", "it is not an http or https URL."),
        ("http://cdn.example.com/" + "a" * 2048, "it is not an http or https URL."),
        ("http://me:secret@cdn.example.com/a", "a URL may not have a user or password."),
        ("http://example.com/a", "the host 'example.com' is not among those of --fetch-from."),
        ("http://cdn.example.com:8080/a", "the host 'cdn.example.com' is not among those of --fetch-from."),
        (
            "http://cdn.example.com.evil.org/a",
            "the host 'cdn.example.com.evil.org' is not among those of --fetch-from.",
        ),
        ("http://evilexample.org/a", "the host 'evilexample.org' is not among those of --fetch-from."),
    ],
)
def test_when_a_url_is_not_allowed_then_it_is_refused_unseen(url: str, why: str) -> None:
    fetcher = Fetcher(("cdn.example.com", "*.example.org"))
    fetcher.check("https://CDN.example.com/a.wav?b=c#d", "ref_audio")
    fetcher.check("http://a.b.example.org./a", "ref_audio")
    with pytest.raises(RemoteProtocolError) as caught:
        fetcher.check(url, "ref_audio")
    assert caught.value.message == f"Invalid value for 'ref_audio': {why}"


def test_when_no_host_is_listed_then_nothing_is_fetched() -> None:
    assert refused("http://example.com/a.wav").startswith("nothing is fetched; give the file as base64")


@pytest.mark.parametrize(
    "entry", ["https://cdn.example.com", "cdn.example.com/a", "", "a b", "me@host", "h:port", "*x"]
)
def test_when_an_entry_is_no_host_then_the_server_does_not_start(entry: str) -> None:
    with pytest.raises(SettingsError, match="--fetch-from: expected a host"):
        Fetcher((entry,))
