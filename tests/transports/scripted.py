"""A live session and a transport that tests control, without sockets and without waiting for a clock."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import anyio
import anyio.lowlevel

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.resume import control, refused_frame, replaced_frame, resumed_frame
from antiphon.server.credentials import Caller
from antiphon.signals import Signal


def new_id(prefix: str) -> str:
    return f"{prefix}1"


def note(text: str) -> Any:
    """Return a frame that `ScriptedTransport.notes` finds again."""
    return refused_frame(new_id, RemoteProtocolError(text, ""))


class ScriptedSession:
    """An AttachedSession that does nothing of its own accord."""

    id = "sess"
    caller = Caller()
    num_bytes = 0
    backlog_s = 0.0
    idle_s: float | None = None

    async def handle(self, data: Any) -> None:
        return

    async def end_if_idle(self) -> None:
        return

    async def wind_up(self) -> None:
        return

    def drain(self) -> None:
        return

    def control(self, data: str | bytes) -> dict[str, Any] | None:
        return control(data)

    async def reject(self, error: RemoteProtocolError, event_id: Any) -> None:
        return

    async def resumed(self, token: str, how: str) -> Any:
        return resumed_frame(new_id, self.id, {}, resume_token=token)

    def replaced(self) -> Any:
        return [replaced_frame(new_id, self.id)]


class ScriptedTransport:
    """A transport whose client sends what is passed to `say`, and reads unless it is stalled."""

    playback = None

    def __init__(self, *, is_stalled: bool = False) -> None:
        self._is_stalled = is_stalled
        self.sent: list[str | bytes] = []
        self.closed: tuple[int, str] | None = None
        self._arrived: deque[str | None] = deque()
        self._changed = Signal()

    def say(self, text: str) -> None:
        self._arrived.append(text)
        self._changed.notify()

    def stall(self, is_stalled: bool) -> None:
        """Make the client stop reading, or read again."""
        self._is_stalled = is_stalled
        self._changed.notify()

    def leave(self) -> None:
        """Close the connection from the client's end."""
        self._arrived.append(None)
        self._changed.notify()

    @property
    def notes(self) -> list[str]:
        """One word for each frame that was sent: the code of a note, or the type of another frame."""
        words = []
        for data in self.sent:
            event = json.loads(data)
            words.append(event["error"]["code"] if event["type"] == "error" else event["type"])
        return words

    async def receive(self) -> str | None:
        while not self._arrived:
            await self._changed.wait()
        return self._arrived.popleft()

    async def send(self, data: str | bytes) -> None:
        while self._is_stalled:
            await self._changed.wait()
        await anyio.lowlevel.checkpoint()
        self.sent.append(data)

    async def close(self, code: int, reason: str) -> None:
        await anyio.lowlevel.checkpoint()
        self.closed = code, reason
