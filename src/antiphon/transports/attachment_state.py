"""The states of an attachment: whether a transport has the place, leaves it, or is being replaced by another.

It says nothing of the session, whose lifecycle is another table. Pure: the table is printed in docs/design/resume.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from antiphon.state_machine import StateMachine


class AttachmentState(Enum):
    """Which transport has the place of a live session.

    LEAVING: the transport takes no more frames; a frame of its client may still be handled to its end. REPLACED: the
    same, and a client that resumes waits for the place. RESUMING: the place is empty and kept for that client, while
    its first frames are prepared.
    """

    DETACHED = auto()
    ATTACHED = auto()
    LEAVING = auto()
    REPLACED = auto()
    RESUMING = auto()

    @property
    def takes_frames(self) -> bool:
        """Whether frames are sent, so that a session may wait for room in the outbox."""
        return self is AttachmentState.ATTACHED

    @property
    def has_transport(self) -> bool:
        """Whether a transport has the place, even if it takes no more frames."""
        return self in (AttachmentState.ATTACHED, AttachmentState.LEAVING, AttachmentState.REPLACED)

    @property
    def expects_client(self) -> bool:
        """Whether a client is there, or is about to be: the last frames of the session will be sent to it."""
        return self is not AttachmentState.DETACHED


class AttachmentEvent(Enum):
    """What happens to the place of a live session.

    TRANSPORT_ATTACHED: a transport has the place. TRANSPORT_STOPPED: it takes no more frames. TRANSPORT_GONE: it has
    left the place, and no task uses it. RESUME_BEGAN: a client with the right token wants the place. RESUME_FAILED: it
    has left, or could not be served.
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
    """Make the state of an attachment that no transport has had yet: DETACHED."""
    return StateMachine(ATTACHMENT_TRANSITIONS, AttachmentState.DETACHED)
