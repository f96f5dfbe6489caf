"""The contract of a session store: conversations that outlive their host. One host at a time owns each of them.

Pure: no backend, clock or thread. The writer of snapshots and of chunks of the tail decides what they contain. Resume
tokens and API keys are stored as hashes. docs/design/hosts.md describes what is stored, and the guarantees when hosts
and stores fail.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

# The version of the rows that this code writes and reads.
ROW_VERSION = 1
# Limit on a row's snapshot, in bytes. A backend can write a snapshot of this size within `BUSY_S` on a busy machine. A
# larger snapshot would delay all sessions of its host.
MAX_SNAPSHOT_BYTES = 16 << 20
# Limit on a session's tail, in bytes: six minutes of Opus at 24 kbit/s.
MAX_TAIL_BYTES = 1 << 20
# The lifetime of a host's key, in seconds, and the fraction of it after which the host renews the key.
HOST_TTL_S, RENEWED_AFTER = 5.0, 0.3


@dataclass(frozen=True, slots=True)
class Hold:
    """The proof that a host owns a session. Each write presents it.

    `owner`: the host's full name, such as `host-3/9f2c41d0`. `fence`: counts the owners, from 1 on.
    """

    session_id: str
    owner: str
    fence: int


@dataclass(frozen=True, slots=True)
class ReceivedCounts:
    """How much the owner had received from its client when it made a snapshot.

    `events`: the number of the client's frames. `audio_ms`: the duration of its audio.
    """

    events: int = 0
    audio_ms: int = 0


@dataclass(frozen=True, slots=True)
class StoredSession:
    """The row of one conversation in the store."""

    # The session's id.
    id: str
    # The hash of the API key that opened the session.
    key_hash: str
    # The hash of the resume token.
    token: bytes
    # The session's state, as JSON.
    snapshot: bytes
    # The full name of the host that owns the session; "" after its owner released it.
    owner: str = ""
    # Counts the owners, from 1 on; 0 for a row written before rows had owners.
    fence: int = 0
    # The counts of frames and audio that the client need not send again to a host that restores this snapshot.
    received: ReceivedCounts = ReceivedCounts()
    # The number of claims since the last turn was stored, or since a release.
    restores: int = 0
    # The format of the row. A row of another version is refused.
    version: int = ROW_VERSION

    @property
    def hold(self) -> Hold:
        """The hold that the row's owner presents when it writes the row."""
        return Hold(self.id, self.owner, self.fence)


@dataclass(frozen=True, slots=True)
class TailChunk:
    """A piece of the audio of the turn under way.

    `at_ms`: its start in the session's audio, which identifies and orders chunks. `data`: the audio, in an encoding
    that its writer chooses.
    """

    at_ms: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Host:
    """A host that is alive.

    `name`: its full name, `NAME/INCARNATION`; a restarted process is another host. `address`: the base URL at which
    other hosts reach it; "" if they cannot reach it. `load`: the used fraction of its certified capacity, in [0, 1];
    None without a certificate. `draining`: it accepts no new sessions, and hands its sessions over.
    """

    name: str
    address: str = ""
    load: float | None = None
    draining: bool = False


class ClaimRefusal(Enum):
    """Why a session was not claimed.

    - UNKNOWN: the session does not exist.
    - OWNER_ALIVE: its owner is alive and has not released it.
    - SUPERSEDED: its fence is newer than the fence that the host saw, because another host was faster.
    """

    UNKNOWN = "unknown"
    OWNER_ALIVE = "owner alive"
    SUPERSEDED = "superseded"


class Ownership(Protocol):
    """The owners of sessions, and the hosts that are alive. All times are those of the backend's clock.

    Methods block, and raise StoreError if the backend is unavailable.
    """

    def tail(self, session_id: str) -> tuple[TailChunk, ...]:
        """Return the chunks of the session's tail, by `at_ms`. Call it after `claim`, when no other host adds to it."""
        ...

    def claim(self, session_id: str, new_owner: str, seen_fence: int) -> StoredSession | ClaimRefusal:
        """Make `new_owner` the owner of a session whose owner is dead or has released it, and return the new row.

        Of all hosts that saw the same fence, one succeeds: `fence` and `restores` are incremented. The backend itself
        refuses the claim while the owner's key is alive, unless the owner is `new_owner`. A store first applies the
        session's pending writes. Raises RowError, and changes nothing, if the row is damaged or of another version. If
        it raises StoreError, the claim may have succeeded; the row shows whether it did.
        """
        ...

    def renew(self, host: Host) -> None:
        """Keep a host alive for another TTL, and store its load. The first call creates its key. Writes to sessions do
        not depend on it.
        """
        ...

    def unregister(self, name: str) -> None:
        """Mark a host as dead at once. Called by a host when it stops, or by a supervisor that saw the host end.

        A name without an incarnation stands for all its incarnations. If the host is in fact alive, its next `renew`
        registers it again.
        """
        ...

    def hosts(self) -> tuple[Host, ...]:
        """Return the hosts that are alive. A store sorts them by name; a backend does not."""
        ...

    def host(self, name: str) -> Host | None:
        """Return the host with this full name; None if it is not alive."""
        ...


class SessionStore(Ownership, Protocol):
    """The stored conversations, and the hosts that are alive. All hosts of a store share them.

    Writes do not wait. They return a future that is done when the backend has stored them; pending writes of one
    session are merged. The future fails with StoreError if the backend cannot be written to: after a second or two, or
    at once while the store is degraded. The write then stays pending and is retried every two seconds. The future fails
    with SupersededError if the hold is not the newest. No part of that write is ever stored.

    All other methods block; callers on an event loop run them in a thread. All methods may be called from any thread.
    """

    @property
    def degraded(self) -> str | None:
        """The reason that the last write failed; None if it succeeded."""
        ...

    def put(self, session: StoredSession, *, turn_kept: bool = False) -> Future[None]:
        """Replace the row of a session, which `session.hold` has to own. The first row, with fence 1, creates it.

        `turn_kept`: the snapshot includes the turn under way, so the tail is deleted. The future fails with RowError,
        and the row stays as it was, if the snapshot exceeds MAX_SNAPSHOT_BYTES.
        """
        ...

    def append_tail(self, hold: Hold, chunk: TailChunk) -> Future[None]:
        """Add a chunk to the tail of a stored session. Does nothing if the tail has a chunk with this `at_ms`.

        A chunk that would make the tail larger than MAX_TAIL_BYTES is dropped, so the next owner gets only the
        beginning of a very long turn.
        """
        ...

    def release(self, hold: Hold) -> Future[None]:
        """Release a session after its pending writes. From then on any host may claim it, and `hold` is invalid.

        Sets `restores` to 0, since the session did not crash its host. Does nothing if the session is not stored.
        """
        ...

    def forget(self, hold: Hold) -> Future[None]:
        """Delete a session that is over: its row, its snapshot and its tail.

        The session's id and fence stay until the row would have expired, so that no earlier owner can create the row
        again. Does nothing if the session is not stored.
        """
        ...

    def get(self, session_id: str) -> StoredSession | None:
        """Return the latest row of a session, including a pending write of this store object.

        Returns None if the row does not exist or has expired. Raises RowError if the row is damaged or of another
        version.
        """
        ...

    def close(self, host_name: str = "") -> None:
        """Try the pending writes once, then close the store. Blocks for at most ten seconds, and does not raise.

        `host_name`: the host to unregister after the last write; "" for none.
        """
        ...
