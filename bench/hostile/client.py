"""Shared parts of the attacks: the target, names for its replies, and sockets that count errors."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import websockets
from websockets.asyncio.client import ClientConnection

# Seconds to wait for a reply.
PATIENCE_S = 60.0
SERVED, NO_ANSWER, LOST = "served", "no answer", "connection lost"


@dataclass(slots=True)
class Target:
    """The server under attack, the attacker's key, and the counted replies."""

    # Address of the server.
    url: str
    # The attacker's key.
    key: str
    # True for smaller numbers, in a trial run.
    quick: bool = False
    # URL of an extra server, for the attacks that need one.
    beside: str = ""
    # Number of replies by name: "served"; "413 file_too_long" for HTTP; the code of an error event; "closed 1009" for a
    # socket; "no answer" after PATIENCE_S; "connection lost".
    outcomes: Counter[str] = field(default_factory=Counter)
    # Number of inputs that were sent.
    tried: int = 0

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    @property
    def ws(self) -> str:
        return self.url.replace("http", "ws", 1)

    def client(self) -> httpx.AsyncClient:
        """Return an HTTP client with the attacker's key and an unlimited number of connections."""
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, headers=self.headers, timeout=PATIENCE_S, limits=limits)

    async def request(self, client: httpx.AsyncClient, method: str, path: str, **options: Any) -> httpx.Response | None:
        """Send one request and count its reply. Returns None if there was none."""
        self.tried += 1
        try:
            answer = await client.request(method, path, **options)
        except httpx.TimeoutException:
            self.outcomes[NO_ANSWER] += 1
            return None
        except httpx.TransportError:
            # A server that refuses a body while it arrives may reset the connection before the client reads the reply.
            self.outcomes[LOST] += 1
            return None
        self.outcomes[named(answer)] += 1
        return answer

    async def raw(self, first: str, *headers: str, body: bytes = b"", leaves: bool = False) -> bytes:
        """Send a request's exact bytes on a new connection, without a key, and count the reply by its status.

        Returns the reply with its head; empty if there was none. With `leaves`, the client disconnects before the
        reply.
        """
        self.tried += 1
        address = urlsplit(self.url)
        head = "\r\n".join([first, f"Host: {address.netloc}", *headers, "Connection: close", "", ""])
        writer = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
                writer.write(head.encode("latin-1") + body)
                answer = b"" if leaves else await reader.read()
        except (OSError, TimeoutError) as error:
            self.outcomes[NO_ANSWER if isinstance(error, TimeoutError) else LOST] += 1
            return b""
        finally:
            if writer:
                writer.transport.abort()
        status = answer.split(b" ", 2)[1].decode("latin-1") if answer.count(b" ") > 1 else "no answer"
        self.outcomes["left" if leaves else SERVED if status < "400" else status] += 1
        return answer

    @asynccontextmanager
    async def socket(self, path: str = "/v1/realtime", **options: Any) -> AsyncIterator[ClientConnection | None]:
        """Yield a WebSocket, which is dropped without a close frame at the end; None if the upgrade fails.

        If the server closes the connection, the block ends. `note_errors` then counts the close by its code.
        """
        self.tried += 1
        try:
            connection = await websockets.connect(
                f"{self.ws}{path}",
                additional_headers=self.headers,
                max_size=None,
                compression=None,
                open_timeout=PATIENCE_S,
                **options,
            )
        except websockets.InvalidStatus as refused:
            self.outcomes[f"{refused.response.status_code} {code_of(refused.response.body)}".strip()] += 1
            yield None
            return
        except (TimeoutError, OSError, websockets.InvalidMessage):
            self.outcomes[NO_ANSWER] += 1
            yield None
            return
        try:
            yield connection
        except websockets.ConnectionClosed:
            pass
        finally:
            connection.transport.abort()

    async def send_all(
        self, messages: Iterable[str | dict[str, Any]], patience_s: float | None, path: str = "/v1/realtime"
    ) -> None:
        """Send messages on a new socket.

        Counts errors until it is closed, or until `patience_s` after the last message.
        """
        async with self.socket(path) as socket:
            if socket is None:
                return
            noting = asyncio.create_task(self.note_errors(socket))
            for message in messages:
                self.tried += 1
                await socket.send(message if isinstance(message, str) else json.dumps(message))
            await asyncio.wait([noting], timeout=patience_s)
            noting.cancel()

    async def note_errors(self, connection: ClientConnection) -> None:
        """Read until the server closes. Counts each error event, and the close, by their codes."""
        with suppress(websockets.ConnectionClosed):
            while True:
                text = await connection.recv()
                event = json.loads(text) if isinstance(text, str) else {}
                if isinstance(event, dict) and event.get("type") == "error":
                    self.outcomes[error_code(event)] += 1
        self.outcomes[f"closed {connection.close_code}"] += 1


def named(answer: httpx.Response) -> str:
    """Return the name of a reply: "served", or its status and its error's code."""
    return SERVED if answer.status_code < 400 else f"{answer.status_code} {code_of(answer.content)}".strip()


def code_of(body: bytes | None) -> str:
    """Return the code in an error's body; empty if there is none, as in a plain 500."""
    try:
        return error_code(json.loads(body or b""))
    except ValueError:
        return ""


def error_code(document: Any) -> str:
    """Return an error's code, or else its type, in the format of any dialect."""
    error = document.get("error", document) if isinstance(document, dict) else {}
    if not isinstance(error, dict):
        return str(document.get("code") or "error")
    return str(error.get("code") or error.get("type") or "error")


async def hold() -> None:
    """Wait until the attack is cancelled."""
    await asyncio.Event().wait()
