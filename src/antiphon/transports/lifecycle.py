"""The lifecycle of a live session: its states, and the table of what moves it from one to the next.

What the server and the attachment may do with a session follows from its state alone. Pure: the table is printed in
docs/design/resume.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from antiphon.state_machine import StateMachine


class Lifecycle(Enum):
    """How far a live session has come.

    Frames are read in OPEN. A session that the server ends is DRAINING until it has worked off what it received. In
    FLUSHING and CLOSING nothing more is produced, and the frames that wait are sent before the transport is closed.
    CLOSING is for a session that its client has closed: it will not be resumed. CLOSED is final.
    """

    OPEN = auto()
    DRAINING = auto()
    FLUSHING = auto()
    CLOSING = auto()
    CLOSED = auto()

    @property
    def reads_frames(self) -> bool:
        """Whether frames of the client are read and handled. False: they stay in the transport."""
        return self is Lifecycle.OPEN

    @property
    def is_running(self) -> bool:
        """Whether the session still works on what it received, and may have more to send.

        With a resume token, it then waits for its client when the transport is gone; in all other states it is over.
        """
        return self in (Lifecycle.OPEN, Lifecycle.DRAINING)

    @property
    def resumable(self) -> bool:
        """Whether a client with the right token may attach another transport, in place of one that is still there."""
        return self in (Lifecycle.OPEN, Lifecycle.DRAINING, Lifecycle.FLUSHING)


class LifecycleEvent(Enum):
    """What happens to a live session.

    ENDED: the server ends it, since it drains, or for a limit, an error or a client without activity. FINISHED: the
    session has put its last frame. CLIENT_CLOSED: the client has asked for the end. CLOSE_SENT: the last frame was
    sent, and the transport closed. ABANDONED: no client is attached, and none may come any more.
    """

    ENDED = auto()
    FINISHED = auto()
    CLIENT_CLOSED = auto()
    CLOSE_SENT = auto()
    ABANDONED = auto()


LIFECYCLE_TRANSITIONS: Mapping[Lifecycle, Mapping[LifecycleEvent, Lifecycle]] = {
    Lifecycle.OPEN: {
        LifecycleEvent.ENDED: Lifecycle.DRAINING,
        LifecycleEvent.FINISHED: Lifecycle.FLUSHING,
        LifecycleEvent.CLIENT_CLOSED: Lifecycle.CLOSING,
        LifecycleEvent.ABANDONED: Lifecycle.CLOSED,
    },
    Lifecycle.DRAINING: {
        LifecycleEvent.FINISHED: Lifecycle.FLUSHING,
        LifecycleEvent.CLIENT_CLOSED: Lifecycle.CLOSING,
        LifecycleEvent.ABANDONED: Lifecycle.CLOSED,
    },
    Lifecycle.FLUSHING: {
        LifecycleEvent.CLOSE_SENT: Lifecycle.CLOSED,
        LifecycleEvent.ABANDONED: Lifecycle.CLOSED,
    },
    Lifecycle.CLOSING: {
        LifecycleEvent.CLOSE_SENT: Lifecycle.CLOSED,
        LifecycleEvent.ABANDONED: Lifecycle.CLOSED,
    },
}
LifecycleMachine = StateMachine[Lifecycle, LifecycleEvent]


def new_lifecycle() -> LifecycleMachine:
    """Make the lifecycle of a session that begins: OPEN. The session and its attachment share it."""
    return StateMachine(LIFECYCLE_TRANSITIONS, Lifecycle.OPEN)
