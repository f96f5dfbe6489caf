"""Attacks on a door: other spellings of hidden paths, and malformed requests that it forwards without a key."""

from __future__ import annotations

from bench.hostile.client import Target

# The key for `/internal/` of the host behind the door. The attacker is assumed to have it.
INTERNAL_KEY = "of-the-supervisor"
# Strings that occur only in the metrics of a host, and in its list of hosts. A reply with one of them is a leak.
HIDDEN = {"metrics": b"antiphon_event_loop_lag", "internal/hosts": b'"draining"'}
SPELLINGS = (
    *("/{}", "//{}", "/./{}", "/x/../{}", "/x/..%2f{}", "/x/%2e%2e/{}", "/x/.%2e/{}", "/x/%252e%252e/{}", "/%2f{}"),
    *(
        "/x//../../{}",
        "/v1/../{}",
        "/v1/models/../../{}",
        "/v1/models/%2e%2e/%2e%2e/{}",
        "/web/../{}",
        "/web/%2e%2e/{}",
    ),
    *("/;/{}", "/x/..;/{}", "/{}/", "/{}/.", "/{}%00", "/{}%20", "/{};x", "/{}?x=/../", "/{}%3f", "\\{}", "/x\\..\\{}"),
    *("http://127.0.0.1/{}", "http://host/x/../{}", "*/{}", "{}"),
)
# Encodings of the first letter of a path.
LETTERS = ("%{:02x}", "%25{:02x}", "%u00{:02x}", "%c1%{:02x}")


def spellings(path: str) -> list[str]:
    """Return spellings of a path in a request line that some server would read as that path."""
    first, rest = ord(path[0]), path[1:]
    return [spelling.format(path) for spelling in SPELLINGS] + [
        *(f"/{letter.format(first)}{rest}" for letter in LETTERS),
        *(f"/x/../{letter.format(first)}{rest}" for letter in LETTERS),
        f"/{path.upper()}",
        f"/{path.replace('/', '%2f')}/",
    ]


async def paths(target: Target) -> None:
    """Request a host's hidden paths in every spelling, without a key and with the internal key. Counts leaks."""
    for path, mark in HIDDEN.items():
        for spelling in spellings(path):
            for key in ("", INTERNAL_KEY):
                body = await target.raw(f"GET {spelling} HTTP/1.1", *as_bearer(key))
                if mark in body:
                    target.outcomes[f"LEAK {spelling}"] += 1


def as_bearer(key: str) -> list[str]:
    return [f"Authorization: Bearer {key}"] if key else []


CHUNKED = "Transfer-Encoding: chunked"
CHUNKS = b"5\r\nhello\r\n0\r\n\r\n"


async def bodies(target: Target) -> None:
    """Send requests without a key, whose bodies, lengths and paths the door and the host must read the same way."""
    for method in ("GET", "HEAD", "OPTIONS", "DELETE", "PUT"):
        for path in ("/v1/models", "/", "/web/x"):
            first = f"{method} {path} HTTP/1.1"
            await target.raw(first, "Content-Length: 5", body=b"hello")
            await target.raw(first, CHUNKED, body=CHUNKS)
            await target.raw(first, "Content-Length: 5", CHUNKED, body=CHUNKS)
            await target.raw(first, "Content-Length: 0")
            await target.raw(first, "Content-Length: 5", "Expect: 100-continue", body=b"hello")
    # A truncated body, and request heads that a client library would refuse to send.
    await target.raw("GET /v1/models HTTP/1.1", "Content-Length: 50", body=b"hello", leaves=True)
    await target.raw("POST /v1/chat/completions HTTP/1.1", "Content-Length: 50", body=b"hello", leaves=True)
    await target.raw(f"GET /{'a' * 70_000} HTTP/1.1")
    await target.raw(f"GET /?{'a' * 60_000} HTTP/1.1")
    await target.raw("GET /%ff%fe HTTP/1.1")
    await target.raw("GET /v1/models HTTP/1.1", "X-Odd: \xff\xfe", "X-Empty:", *(f"X-{n}: {n}" for n in range(90)))
    await target.raw("GET /v1/models HTTP/1.1", "Connection: close, Authorization", "X-Forwarded-For: 203.0.113.9")
