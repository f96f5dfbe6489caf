"""Frames that wait while the session is being stored: a client is told of nothing that its store does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from antiphon.protocols.wire import Frame


class UnsentFrames:
    """The frames of one session on their way to its outbox, in their order. `send` takes each, and does not wait.

    `frames`: those that wait. While anything is being stored, all do, whoever has written them.
    """

    def __init__(self, first: Iterable[Frame], send: Callable[[Frame], None]) -> None:
        self.frames = list(first)
        self._send = send
        self._num_storing = 0
        self._is_closed = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have all frames wait while the block runs. `push` sends them afterwards."""
        self._num_storing += 1
        try:
            yield
        finally:
            self._num_storing -= 1

    def push(self, frames: Iterable[Frame] = (), *, at_once: bool = False) -> None:
        """Send the frames that wait and then these, unless something is being stored; `at_once`: even then."""
        self.frames += frames
        if self._num_storing and not at_once:
            return
        unsent, self.frames = self.frames, []
        for frame in () if self._is_closed else unsent:
            self._send(frame)

    def close_with(self, last: Iterable[Frame]) -> None:
        """Drop the frames that wait, send these at once, and nothing from then on."""
        self.frames.clear()
        self.push(last, at_once=True)
        self._is_closed = True
