"""What a session has to say, on its way to whoever is attached to it. Waits where a client does not read; keeps what one that left will ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from antiphon.protocols.resume.journal import Journal
from antiphon.signals import Signal


@dataclass(frozen=True, slots=True)
class CloseFrame:
    """The last thing a writer does."""

    code: int
    reason: str


class Outbox:
    """One session's. Bound: `most` frames while a client is attached, then whoever puts waits; the journal's bytes while none is.

    `waits_detached`: while none is, whoever puts waits too. `overflowed` is called where what nobody takes is too much.
    """

    def __init__(
        self,
        journal: Journal,
        most: int,
        *,
        waits_detached: bool = False,
        overflowed: Callable[[], None] = lambda: None,
    ) -> None:
        self.journal = journal
        self._most = most
        self._waits_detached = waits_detached
        self._overflowed = overflowed
        self._end: CloseFrame | None = None
        self._attached = False
        self._changed = Signal()

    @property
    def ended(self) -> bool:
        """Nothing more comes."""
        return self._end is not None

    def put(self, frame: str) -> None:
        """A frame, behind all others. Does not wait; `room` does."""
        self.journal.push(frame)
        self._changed.notify()

    async def room(self) -> None:
        """Wait until an attached client has read enough."""
        while len(self.journal) > self._most and (self._attached or self._waits_detached) and self._end is None:
            await self._changed.wait()
        if not self._attached and self._end is None and self.journal.check_overflow():
            self._overflowed()

    async def get(self) -> str | CloseFrame:
        """The next frame, waiting for it; the End once all is sent."""
        while True:
            frame = self.journal.next()
            if frame is not None:
                self._changed.notify()
                return frame
            if self._end is not None:
                return self._end
            await self._changed.wait()

    def raise_epoch(self, epoch: int) -> None:
        """What older epochs have said and was not sent is not sent."""
        self.journal.raise_epoch(epoch)
        self._changed.notify()

    def end(self, code: int, reason: str) -> None:
        """Nothing more comes: who has sent all closes with this. The first reason stays."""
        if self._end is None:
            self._end = CloseFrame(code, reason)
        self._changed.notify()

    def attach(self, *, attached: bool) -> None:
        """Somebody reads, or nobody does."""
        self._attached = attached
        self._changed.notify()
