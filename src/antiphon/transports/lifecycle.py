"""The two state machines of a live session: its lifecycle, and which transport is attached.

Only these two states decide what the server and the attachment may do with a session. This module has no I/O.
docs/design/resume.md shows the tables of transitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from antiphon.state_machine import StateMachine


class Lifecycle(Enum):
    """The stages of a live session.

    OPEN: the session reads frames. DRAINING: the server ends the session, which first processes the input that it has
    received. FLUSHING and CLOSING: the session produces nothing more, and its waiting frames are sent before the
    transport is closed. In CLOSING, the client has closed the session, so it will not be resumed. CLOSED is final.
    """

    OPEN = auto()
    DRAINING = auto()
    FLUSHING = auto()
    CLOSING = auto()
    CLOSED = auto()

    @property
    def reads_frames(self) -> bool:
        """Whether the client's frames are read and handled. If not, they stay in the transport."""
        return self is Lifecycle.OPEN

    @property
    def is_running(self) -> bool:
        """Whether the session still processes its input, and may produce more frames.

        If the transport is gone in one of these states, a session with a resume token waits for its client. In the
        other states, the session ends.
        """
        return self in (Lifecycle.OPEN, Lifecycle.DRAINING)

    @property
    def resumable(self) -> bool:
        """Whether a client with the right token may attach another transport, replacing the current one."""
        return self in (Lifecycle.OPEN, Lifecycle.DRAINING, Lifecycle.FLUSHING)


class LifecycleEvent(Enum):
    """The events of a live session's lifecycle.

    - ENDED: the server ends the session, because of a drain, a limit, an error or an inactive client.
    - FINISHED: the session has put its last frame into the outbox.
    - CLIENT_CLOSED: the client has requested the end of the session.
    - CLOSE_SENT: the last frame was sent, and the transport closed.
    - ABANDONED: no client is attached, and no client can resume.
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
    """Return the lifecycle of a new session, in the state OPEN. The session and its attachment share it."""
    return StateMachine(LIFECYCLE_TRANSITIONS, Lifecycle.OPEN)


class AttachmentState(Enum):
    """Whether a transport has the slot of a live session.

    - LEAVING: the transport takes no more frames. A frame of the client may still be in progress.
    - REPLACED: same as LEAVING, but a client that resumes waits for the slot.
    - RESUMING: the slot is empty, but reserved for a client that resumes, until its first frames are ready.
    """

    DETACHED = auto()
    ATTACHED = auto()
    LEAVING = auto()
    REPLACED = auto()
    RESUMING = auto()

    @property
    def takes_frames(self) -> bool:
        """Whether frames are being sent, so that the session may wait for room in the outbox."""
        return self is AttachmentState.ATTACHED

    @property
    def has_transport(self) -> bool:
        """Whether a transport has the slot, even if it takes no more frames."""
        return self in (AttachmentState.ATTACHED, AttachmentState.LEAVING, AttachmentState.REPLACED)

    @property
    def expects_client(self) -> bool:
        """Whether a client is attached or about to be, so that the session's last frames can still be sent."""
        return self is not AttachmentState.DETACHED


class AttachmentEvent(Enum):
    """The events of a live session's slot.

    - TRANSPORT_ATTACHED: a transport takes the slot.
    - TRANSPORT_STOPPED: the transport takes no more frames.
    - TRANSPORT_GONE: the transport has left the slot, and no task uses it.
    - RESUME_BEGAN: a client with the right token requests the slot.
    - RESUME_FAILED: the client that was resuming has left, or could not be served.
    """

    TRANSPORT_ATTACHED = auto()
    TRANSPORT_STOPPED = auto()
    TRANSPORT_GONE = auto()
    RESUME_BEGAN = auto()
    RESUME_FAILED = auto()


ATTACHMENT_TRANSITIONS: Mapping[AttachmentState, Mapping[AttachmentEvent, AttachmentState]] = {
    AttachmentState.DETACHED: {
        AttachmentEvent.TRANSPORT_ATTACHED: AttachmentState.ATTACHED,
        AttachmentEvent.RESUME_BEGAN: AttachmentState.RESUMING,
    },
    AttachmentState.ATTACHED: {
        AttachmentEvent.TRANSPORT_STOPPED: AttachmentState.LEAVING,
        AttachmentEvent.TRANSPORT_GONE: AttachmentState.DETACHED,
        AttachmentEvent.RESUME_BEGAN: AttachmentState.REPLACED,
    },
    AttachmentState.LEAVING: {
        AttachmentEvent.TRANSPORT_GONE: AttachmentState.DETACHED,
        AttachmentEvent.RESUME_BEGAN: AttachmentState.REPLACED,
    },
    AttachmentState.REPLACED: {
        AttachmentEvent.TRANSPORT_GONE: AttachmentState.RESUMING,
        AttachmentEvent.RESUME_FAILED: AttachmentState.LEAVING,
    },
    AttachmentState.RESUMING: {
        AttachmentEvent.TRANSPORT_ATTACHED: AttachmentState.ATTACHED,
        AttachmentEvent.RESUME_FAILED: AttachmentState.DETACHED,
    },
}
AttachmentMachine = StateMachine[AttachmentState, AttachmentEvent]


def new_attachment() -> AttachmentMachine:
    """Return the state of an attachment before its first transport, which is DETACHED."""
    return StateMachine(ATTACHMENT_TRANSITIONS, AttachmentState.DETACHED)
