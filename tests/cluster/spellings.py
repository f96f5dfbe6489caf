"""Spellings of hidden paths and of paths for clients, and an upstream that echoes the requests it gets."""

from __future__ import annotations

import http.client
import posixpath
import re
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

HIDDEN = ("metrics", "internal/hosts", "internal/drain", "start_profile", "stop_profile")
_ALL = "".join
# Spellings of a hidden path, without its leading slash.
SPELLINGS = {
    "plain": "/{0}",
    "a letter": "/{first}{rest}",
    "a letter, large": "/{FIRST}{rest}",
    "all letters": "/{every}",
    "encoded twice": "/%25{twice}{rest}",
    "encoded three times": "/%2525{twice}{rest}",
    "up and down": "/x/../{0}",
    "out of v1": "/v1/../{0}",
    "out of v1 twice": "/v1/x/../../{0}",
    "out of the page": "/web/../{0}",
    "above the root": "/../{0}",
    "above the root, encoded": "/%2e%2e/{0}",
    "encoded dots": "/v1/%2e%2e/{0}",
    "encoded dots, large": "/v1/%2E%2E/{0}",
    "half-encoded dots": "/v1/.%2e/{0}",
    "encoded slash": "/v1/..%2f{0}",
    "encoded slash, large": "/v1/..%2F{0}",
    "both encoded": "/v1/%2e%2e%2f{0}",
    "before v1's end": "/v1%2f..%2f{0}",
    "dots encoded twice": "/v1/%252e%252e/{0}",
    "all encoded twice": "/v1/%252e%252e%252f{0}",
    "dots and a letter": "/v1/../{first}{rest}",
    "one dot": "/./{0}",
    "one dot, encoded": "/%2e/{0}",
    "two slashes": "//{0}",
    "three slashes": "///{0}",
    "slashes encoded": "/%2f{0}",
    "slashes before v1": "//v1/../{0}",
    "slashes behind v1": "/v1//../{0}",
    "dots with parameters": "/v1/..;/{0}",
    "dots with a value": "/v1/..;a=b/{0}",
    "parameters encoded": "/v1/..%3b/{0}",
    "parameters": "/{0};x=y",
    "parameters before": "/;x=y/{0}",
    "a slash behind": "/{0}/",
    "a slash behind, encoded": "/{0}%2f",
    "a dot behind a slash": "/{0}/.",
    "a dot behind": "/{0}.",
    "dots behind": "/{0}..",
    "a space behind": "/{0}%20",
    "backslash": "/v1/..\\{0}",
    "backslash encoded": "/v1/..%5c{0}",
    "backslash encoded twice": "/v1/..%255c{0}",
    "backslash at the root": "/\\{0}",
    "NUL": "/{0}%00",
    "NUL and a name": "/{0}%00.js",
    "tab": "/{0}%09",
    "line end": "/{0}%0a",
    "overlong dots": "/v1/%c0%ae%c0%ae/{0}",
    "overlong slash": "/v1/..%c0%af{0}",
    "overlong dots of three": "/v1/%e0%80%ae%e0%80%ae/{0}",
    "no UTF-8": "/{0}%ff",
    "wide letter": "/%ef%bd%8d{rest}",
    "wide dots": "/v1/%ef%bc%8e%ef%bc%8e/{0}",
    "four hex digits": "/v1/%u002e%u002e/{0}",
    "no hex digits": "/v1/%2g../{0}",
    "large letters": "/{LARGE}",
    "absolute": "http://voice.example/{0}",
    "absolute, out of v1": "http://voice.example/v1/../{0}",
    "absolute, without a path": "http://{0}",
    "fragment": "/{0}#x",
    "fragment encoded": "/{0}%23x",
    "behind a fragment": "/v1#/../../{0}",
    "query": "/{0}?x=/v1/",
    "query encoded": "/{0}%3fx=/v1/",
    "dots before a query": "/v1/..?/{0}",
    "long": "/v1/" + "x/" * 3000 + "../" * 3001 + "{0}",
}
# Paths that clients may request: as a client spells them, and as a host then gets them.
SERVED = {
    "/": "/",
    "/?x=/../metrics": "/?x=/../metrics",
    "/web/app.js": "/web/app.js",
    "/v1/models": "/v1/models",
    "/v1/models/gpt-4.1-mini": "/v1/models/gpt-4.1-mini",
    "/v1/models/Qwen%2FQwen3-8B": "/v1/models/Qwen%2FQwen3-8B",
    "/v1/models/..7B": "/v1/models/..7B",
    "/v1/audio/voices/J%C3%BCrgen%20%26%20100%25": "/v1/audio/voices/J%C3%BCrgen%20%26%20100%25",
    "/v1/models/%2Fmodels%2Fqwen": "/v1/models/%2Fmodels%2Fqwen",
    "/v1/audio/voices/a%2F%2Fb%5Cc": "/v1/audio/voices/a%2F%2Fb%5Cc",
    "/v1/models?a=%2e%2e%2f&b=%6d&c=//": "/v1/models?a=%2e%2e%2f&b=%6d&c=//",
    "//v1/models": "/v1/models",
    "/v1//models": "/v1/models",
    "/realtime?model=x": "/realtime?model=x",
    "/ws/duplex?a=b": "/ws/duplex?a=b",
}


def spelled(hidden: str) -> dict[str, str]:
    """Return all spellings of a hidden path, by description."""
    code = f"{ord(hidden[0]):02x}"
    words = {
        "first": f"%{code}",
        "FIRST": f"%{code.upper()}",
        "twice": code,
        "rest": hidden[1:],
        "every": _ALL(f"%{ord(c):02x}" if c.isalpha() else c for c in hidden),
        "LARGE": hidden.upper(),
    }
    return {name: form.format(hidden, **words) for name, form in SPELLINGS.items()}


def meaning(target: str) -> str:
    """Return the path that a lenient server would read in a request's target, whatever its spelling."""
    path = re.sub(r"^https?://[^/?#]*", "", target).split("?")[0]
    for _ in range(4):
        path = unquote(path, "latin-1")
    path = re.sub(r"[#?\0\t\n ].*", "", path.replace("\\", "/"), flags=re.DOTALL)
    path = posixpath.normpath("/" + re.sub(r";[^/]*", "", path).lstrip("/"))
    return path.rstrip(".").lower()


def is_hidden(target: str) -> bool:
    """Return whether a lenient server would take a target for a hidden path."""
    return meaning(target).lstrip("/") in HIDDEN


_HEAD = b"HTTP/1.1 %d x\r\nSet-Cookie: one=client; Path=/\r\nContent-Length: %d\r\n\r\n"


@dataclass(slots=True)
class Echo:
    """An HTTP server that answers each request with the request's target and a cookie.

    It keeps the target, headers and body of each request. The values of a repeated header are joined with `|`.
    """

    port: int
    seen: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@contextmanager
def echo(status: int = 200) -> Iterator[Echo]:
    """Run an Echo during the block. It answers with this status."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                method, target = line.decode("latin-1").rsplit(" ", 1)[0].split(" ", 1)
                headers: dict[str, str] = {}
                while given := self.rfile.readline().decode("latin-1").strip():
                    name, value = given.split(":", 1)
                    before = headers.get(name.lower())
                    headers[name.lower()] = value.strip() if before is None else f"{before}|{value.strip()}"
                found.seen.append((target, headers, self._body(headers)))
                answer = target.encode()
                self.wfile.write(_HEAD % (status, len(answer)) + (b"" if method == "HEAD" else answer))

        def _body(self, headers: dict[str, str]) -> bytes:
            if "chunked" not in headers.get("transfer-encoding", ""):
                return self.rfile.read(int(headers.get("content-length", 0)))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

        def handle_error(self, *_: object) -> None:
            """Ignore errors, because a proxy may drop connections at any time."""

    with Server(("127.0.0.1", 0), Handler) as server:
        found = Echo(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


def ask(
    url: str,
    target: str,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    body: bytes = b"",
    source: str = "127.0.0.1",
) -> tuple[int, str]:
    """Send one request with exactly this target and these headers, from the address `source`.

    Returns the status and the body of the response. The status is 0 if the response was not complete.
    """
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, 20, (source, 0))
    given = {"Host": where.netloc} | (headers or {})
    connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
    for name, value in given.items():
        connection.putheader(name, value)
    connection.endheaders(body or None)
    try:
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (ConnectionError, http.client.HTTPException):
        # A dropped connection is a refusal, too.
        return 0, ""
    finally:
        connection.close()
