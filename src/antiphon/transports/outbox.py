"""The queue of frames that a live session sends. It applies backpressure, and keeps frames for clients that resume.

The journal (`transports/journal.py`) numbers frames, and decides which are kept and sent again. The attachment sends
the frames.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from antiphon.protocols.wire import Frame
from antiphon.signals import Signal
from antiphon.transports.journal import Journal

# Maximum size of the waiting frames, in bytes, above which the session waits. One more frame may have any size.
MAX_WAITING_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class CloseFrame:
    """The last entry of an outbox. It closes the transport with this WebSocket code and reason."""

    code: int
    reason: str


class Outbox:
    """The frames of one live session that wait for its transport. All calls come from one event loop.

    If a transport is attached, the limits are `max_waiting` frames and MAX_WAITING_BYTES. Above them, the session waits
    in `wait_for_room`. If no transport is attached, the limit is the journal's `max_bytes`. Above it, `on_overflow` is
    called. With `waits_detached`, the session waits even if no transport is attached.
    """

    def __init__(
        self,
        journal: Journal,
        max_waiting: int,
        *,
        waits_detached: bool = False,
        on_overflow: Callable[[], None] = lambda: None,
    ) -> None:
        self.journal = journal
        self._max_waiting = max_waiting
        self._waits_detached = waits_detached
        self._on_overflow = on_overflow
        self._end: CloseFrame | None = None
        self._attached = False
        self._changed = Signal()

    @property
    def num_waiting(self) -> int:
        """Number of frames that `get` has not returned yet."""
        return len(self.journal)

    def put(self, frame: Frame) -> None:
        """Queue a frame after all others. Never waits: the task that produces frames calls `wait_for_room` too."""
        self.journal.push(frame)
        self._changed.notify()

    async def wait_for_room(self) -> None:
        """Wait until the waiting frames are within the limits. Waits only as long as a transport can take frames.

        Returns at once after `end`. Calls `on_overflow` if no transport is attached and the limit is exceeded.
        """
        while self._is_full and self._may_wait:
            await self._changed.wait()
        if not self._attached and self._end is None and self.journal.is_overfull:
            self._on_overflow()

    @property
    def _is_full(self) -> bool:
        return self.num_waiting > self._max_waiting or self.journal.waiting_bytes > MAX_WAITING_BYTES

    @property
    def _may_wait(self) -> bool:
        return (self._attached or self._waits_detached) and self._end is None

    async def get(self) -> str | bytes | CloseFrame:
        """Wait for the next frame, and return it encoded. After all frames, returns the CloseFrame."""
        while True:
            frame = self.journal.next()
            if frame is not None:
                self._changed.notify()
                return frame
            if self._end is not None:
                return self._end
            await self._changed.wait()

    def raise_epoch(self, epoch: int) -> None:
        """Drop the waiting frames with audio or text of an epoch before `epoch`."""
        self.journal.raise_epoch(epoch)
        self._changed.notify()

    def end(self, code: int, reason: str) -> None:
        """Close the transport with `code` and `reason` after the waiting frames. Later calls are no-ops."""
        if self._end is None:
            self._end = CloseFrame(code, reason)
        self._changed.notify()

    def set_attached(self, attached: bool) -> None:
        """Set whether a transport takes frames (`AttachmentState.takes_frames`). `wait_for_room` waits only then."""
        self._attached = attached
        self._changed.notify()

    def put_first(self, frame: Frame) -> None:
        """Queue a frame before all others. It is the first frame for a client that has resumed the session."""
        self.journal.push(frame, first=True)
        self._changed.notify()
