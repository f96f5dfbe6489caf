"""Requests as a browser, or a client with the wrong key, sends them. Only the status of the response matters."""

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
    """Return the status of a WebSocket upgrade (101 if it is accepted). The socket is closed at once."""
    with httpx.stream("GET", f"{server.url}{path}", headers=UPGRADE | headers, timeout=30) as response:
        return response.status_code


def as_key(key: str) -> dict[str, str]:
    """Return the header that carries an API key or a client secret."""
    return {"Authorization": f"Bearer {key}"}
