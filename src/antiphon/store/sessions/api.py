"""The contract of a session store: conversations that outlive their host, each of which one host owns at a time.

Pure: no backend, clock or thread. What a snapshot and a chunk of the tail hold is up to their writer. Resume tokens and
API keys are stored as hashes. docs/design/hosts.md says what is kept where, and what holds when hosts and stores fail.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

# The version of the rows that this code writes and reads.
ROW_VERSION = 1
# The most bytes of a row's snapshot: what a backend takes in its time (`BUSY_S`) on a machine that is busy. A session
# with more would have all of its host's sessions wait.
MAX_SNAPSHOT_BYTES = 16 << 20
# The most bytes of a session's tail: six minutes of Opus at 24 kbit/s.
MAX_TAIL_BYTES = 1 << 20
# How long a host is alive without renewing its key, and how much of that it lets pass before it does.
HOST_TTL_S, RENEWED_AFTER = 5.0, 0.3


@dataclass(frozen=True, slots=True)
class Hold:
    """What a host shows to write to a session: that it is its owner, by this fence.

    `owner`: the host's full name, such as `host-3/9f2c41d0`. `fence`: from 1 on.
    """

    session_id: str
    owner: str
    fence: int


@dataclass(frozen=True, slots=True)
class ReceivedCounts:
    """What the owner had taken from its client when it made a snapshot.

    `events`: frames of the client. `audio_ms`: milliseconds of its audio.
    """

    events: int = 0
    audio_ms: int = 0


@dataclass(frozen=True, slots=True)
class StoredSession:
    """The row of one conversation.

    - `key_hash`: the hash of the API key that opened it. `token`: the hash of the token that resumes it.
    - `snapshot`: its state, as JSON.
    - `owner`: the full name of the host that has it; "" where no host has, because the last one released it.
    - `fence`: counts the owners, from 1 on; 0 for a row of before there were owners.
    - `received`: what the client need not send again to a host that restores this snapshot.
    - `restores`: how many hosts have claimed it since its last turn was kept, or since it was released.
    - `version`: of the row. A row of another version is refused.
    """

    id: str
    key_hash: str
    token: bytes
    snapshot: bytes
    owner: str = ""
    fence: int = 0
    received: ReceivedCounts = ReceivedCounts()
    restores: int = 0
    version: int = ROW_VERSION

    @property
    def hold(self) -> Hold:
        """What the row's owner shows to write to it."""
        return Hold(self.id, self.owner, self.fence)


@dataclass(frozen=True, slots=True)
class TailChunk:
    """A piece of the sound of the turn under way. `at_ms`: where in the audio of the session it begins, by which chunks
    are told apart and ordered. `data`: encoded as its writer likes.
    """

    at_ms: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Host:
    """What is known of a host while it lives.

    `name`: its full name, with its incarnation behind a slash: a process that starts anew is another host. `address`:
    the base URL at which other hosts reach it; "" where they cannot. `load`: the part that is taken of what its
    certificate says it holds, in [0, 1]; None without a certificate. `draining`: it takes no new sessions, and gives
    those away that it has.
    """

    name: str
    address: str = ""
    load: float | None = None
    draining: bool = False


class ClaimRefusal(Enum):
    """Why a session was not claimed.

    - UNKNOWN: there is no such session.
    - OWNER_ALIVE: a host that lives owns it, and has not released it.
    - SUPERSEDED: its fence is not the one that was seen: another host was faster.
    """

    UNKNOWN = "unknown"
    OWNER_ALIVE = "owner alive"
    SUPERSEDED = "superseded"


class Ownership(Protocol):
    """Which host has which session, and which hosts live. Methods block, and raise StoreError where the backend cannot
    be had. No clock but the backend's decides anything.
    """

    def tail(self, session_id: str) -> tuple[TailChunk, ...]:
        """The chunks of the session's tail, by `at_ms`. Read it after `claim`, when nobody else adds to it any more."""
        ...

    def claim(self, session_id: str, new_owner: str, seen_fence: int) -> StoredSession | ClaimRefusal:
        """Make `new_owner` the owner of a session whose owner is dead or has released it, and return the new row.

        One of any number of hosts that saw the same fence succeeds: the fence is raised by one, and `restores` too. The
        backend itself refuses it while the owner's key lives, unless that is `new_owner`. A store first writes what
        waits of the session. Raises RowError, and changes nothing, for a row that is damaged or of another version.
        Where it raises StoreError it may have succeeded: the row tells.
        """
        ...

    def renew(self, host: Host) -> None:
        """Have a host live for another TTL, with this load. The first call makes its key. No write depends on it."""
        ...

    def unregister(self, name: str) -> None:
        """Have a host be dead at once: its own word when it stops, or that of a supervisor, which has seen it die.

        A name without an incarnation means all incarnations of it. A host that lives after all is back when it renews.
        """
        ...

    def hosts(self) -> tuple[Host, ...]:
        """The hosts that live: those of a store by name, those of a backend in any order."""
        ...

    def host(self, name: str) -> Host | None:
        """The host of this full name; None if it does not live."""
        ...


class SessionStore(Ownership, Protocol):
    """The stored conversations, and which hosts live. All hosts of a store share them.

    Writes do not wait: they return a future that is done when the backend has them, and writes of one session that wait
    become one. It fails with StoreError where the backend cannot be written to: after a second or two, and at once
    while the store is degraded. What was to be written waits then, and is tried again every two seconds. It fails with
    SupersededError where the hold is not the newest: nothing of that write was or will be written.

    All other methods block, and callers on an event loop run them in a thread. All may be called from any thread.
    """

    @property
    def degraded(self) -> str | None:
        """Why what was written last could not be; None while all is written."""
        ...

    def put(self, session: StoredSession, *, turn_kept: bool = False) -> Future[None]:
        """Replace the row of a session, which `session.hold` has to own. Its first row, of fence 1, makes the session.
        Fails with RowError, and leaves the row as it was, for a snapshot of more than MAX_SNAPSHOT_BYTES.

        `turn_kept`: the snapshot holds the turn under way, so that the tail is emptied.
        """
        ...

    def append_tail(self, hold: Hold, chunk: TailChunk) -> Future[None]:
        """Add a chunk to the tail of a session that is stored. One that is there with its `at_ms` is not added again.

        Chunks that would make the tail larger than MAX_TAIL_BYTES are not added: the next owner hears how so long a
        turn began.
        """
        ...

    def release(self, hold: Hold) -> Future[None]:
        """Give a session away, with what was put before: from then on any host may claim it, and `hold` is void.

        Its `restores` become 0, since no host died of it. Does nothing for a session that is not stored.
        """
        ...

    def forget(self, hold: Hold) -> Future[None]:
        """Delete a session that is over: its row, its snapshot and its tail.

        What stays until the row would have been too old is its id and fence, so that no earlier owner makes it anew.
        Does nothing for a session that is not stored.
        """
        ...

    def get(self, session_id: str) -> StoredSession | None:
        """The latest row of a session, also one that this store object was given and has not written yet.

        None where there is none, and where it is too old. Raises RowError for a damaged row, and one of another
        version.
        """
        ...

    def close(self, host_name: str = "") -> None:
        """Write what waits, once, and end. Blocks for at most ten seconds, and does not raise.

        `host_name`: of the host that stops with it, which is unregistered after the last write.
        """
        ...
