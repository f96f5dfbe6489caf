"""Requests as a browser, or a client with the wrong key, would send them: only the status matters."""

from __future__ import annotations

import httpx

from tests.conftest import Process

UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "MDEyMzQ1Njc4OWFiY2RlZg==",
}


def upgrade(server: Process, path: str, **headers: str) -> int:
    """The status of a WebSocket's upgrade: 101 where it is accepted. The socket is dropped at once."""
    with httpx.stream("GET", f"{server.url}{path}", headers=UPGRADE | headers, timeout=30) as response:
        return response.status_code


def as_key(key: str) -> dict[str, str]:
    """The header of an API key, or of a client secret."""
    return {"Authorization": f"Bearer {key}"}
