"""The sessions, calls and requests under way on this server, and the store that knows the sessions of other hosts."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import anyio

from antiphon.protocols.resume import ResumeRequest
from antiphon.server.credentials import Caller
from antiphon.server.live.moving.alive_hosts import AliveHosts
from antiphon.shares.fair_cache import FairCache
from antiphon.store.sessions import SessionStore
from antiphon.transports.attachment import AttachedSession
from antiphon.transports.leg import Leg

if TYPE_CHECKING:
    from antiphon.server.live.sideband import SharedSession

# Maximum number of ids of overflowed sessions that are kept.
MAX_OVERFLOWED = 10_000


class LiveCall(Protocol):
    """A live session over WebRTC or the telephone, which its caller's key may hang up."""

    @property
    def id(self) -> str:
        """The session's id on the wire."""
        ...

    @property
    def caller(self) -> Caller:
        """The caller that opened the session."""
        ...

    def hang_up(self) -> None:
        """Let the session finish the audio that it has received, then close. Returns at once."""
        ...


@dataclass(slots=True)
class SessionRegistry:
    """The sessions and requests under way on one server. With a `store`, the server is one of the store's hosts."""

    # The full name of this server among the hosts of the store. It is different after each start.
    host_name: str
    # The base URL at which the store's other hosts reach this host; "" if they cannot reach it.
    address: str = ""
    # The store of conversations that outlive the server; None without `--state`.
    store: SessionStore | None = None
    # Caches what the store says about other hosts.
    alive_hosts: AliveHosts = field(default_factory=AliveHosts)
    # All live sessions.
    live: set[AttachedSession] = field(default_factory=set)
    # The live sessions that can be resumed, by id.
    resumable: dict[str, AttachedSession] = field(default_factory=dict)
    # The live sessions, and the answered calls, that a second connection may join, by id.
    shared: dict[str, SharedSession] = field(default_factory=dict)
    # Connected calls, by id.
    calls: dict[str, LiveCall] = field(default_factory=dict)
    # The legs of those that are telephone calls, by the same id.
    legs: dict[str, Leg] = field(default_factory=dict)
    # Cancels each HTTP request that is under way.
    requests: set[anyio.CancelScope] = field(default_factory=set)
    # Requests that are restoring a session from the store, by the session's id, so that only one connection restores
    # it. Each request has shown the session's key and token.
    restoring: dict[str, ResumeRequest] = field(default_factory=dict)
    # For each key, the ids of its sessions that ended because their journal overflowed while the client was away.
    overflowed: FairCache[str, bool] = field(default_factory=lambda: FairCache(MAX_OVERFLOWED))

    def enter(self, session: AttachedSession) -> None:
        """Add a session that begins. If it has a token, clients can resume it."""
        self.live.add(session)
        if session.attachment.token:
            self.resumable[session.id] = session

    def leave(self, session: AttachedSession) -> None:
        """Remove a session that has ended. Does nothing for an unknown session."""
        self.live.discard(session)
        if self.resumable.get(session.id) is session:
            del self.resumable[session.id]

    @property
    def may_resume(self) -> bool:
        """True if a session that can be resumed may exist, here or in the store."""
        return bool(self.resumable) or self.store is not None

    @property
    def awaits_client(self) -> bool:
        """True if a session without a transport waits for its client, here or in the store."""
        return self.store is not None or any(not s.attachment.state.has_transport for s in self.resumable.values())

    def backlog_s(self) -> float:
        """Return the longest backlog of all live sessions, in seconds of audio; 0 without a live session."""
        return max((s.backlog_s for s in self.live), default=0.0)


def host_name(configured: str) -> str:
    """Return a full name for a server that starts now: the configured or the machine's name, and a random suffix."""
    return f"{configured or socket.gethostname()}/{secrets.token_hex(4)}"
