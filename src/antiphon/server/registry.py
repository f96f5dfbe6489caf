"""The sessions, calls and requests that are here now, and how those that are elsewhere are found."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, field
from typing import Protocol

import anyio

from antiphon.protocols.resume import ResumeRequest
from antiphon.server.credentials import Caller
from antiphon.server.live.moving.alive_hosts import AliveHosts
from antiphon.shares.fair_cache import FairCache
from antiphon.store.sessions import SessionStore
from antiphon.transports.attachment import AttachedSession

# Ids of sessions that overflowed.
MAX_OVERFLOWED = 10_000


class LiveCall(AttachedSession, Protocol):
    """A live session over WebRTC, which its caller's key may hang up."""

    @property
    def caller(self) -> Caller:
        """What opened it."""
        ...

    def hang_up(self) -> None:
        """Have it finish what was heard, and close. Returns at once."""
        ...


@dataclass(slots=True)
class SessionRegistry:
    """What is under way on one server, which is one host of a store of conversations where `store` is given."""

    # The full name of this server among the hosts of the store; each start has another one.
    host_name: str
    # The base URL at which the other hosts of the store reach this one; "" where they cannot.
    address: str = ""
    # Conversations that outlive the server; None where `--state` is not given.
    store: SessionStore | None = None
    # What the store last said of other hosts.
    alive_hosts: AliveHosts = field(default_factory=AliveHosts)
    live: set[AttachedSession] = field(default_factory=set)
    # Those of them that can be resumed, by their id.
    resumable: dict[str, AttachedSession] = field(default_factory=dict)
    # Calls that are connected, by their id.
    calls: dict[str, LiveCall] = field(default_factory=dict)
    # What cancels each HTTP request that is under way.
    requests: set[anyio.CancelScope] = field(default_factory=set)
    # Requests that restore a session from the store, by its id, so that no second connection does; each has shown the
    # session's key and token.
    restoring: dict[str, ResumeRequest] = field(default_factory=dict)
    # Of each key, the ids of its sessions that ended because too much waited for a client that was away.
    overflowed: FairCache[str, bool] = field(default_factory=lambda: FairCache(MAX_OVERFLOWED))

    def enter(self, session: AttachedSession) -> None:
        """Add a session that begins to the live ones, and let clients resume it if it has a token."""
        self.live.add(session)
        if session.attachment.token:
            self.resumable[session.id] = session

    def leave(self, session: AttachedSession) -> None:
        """Take a session that has ended off the live ones. Does nothing for one that is not there."""
        self.live.discard(session)
        if self.resumable.get(session.id) is session:
            del self.resumable[session.id]

    @property
    def may_resume(self) -> bool:
        """Whether there may be a session to resume, here or in the store."""
        return bool(self.resumable) or self.store is not None

    def backlog_s(self) -> float:
        """Return the seconds of audio that wait in the session that is furthest behind; 0 where none is live."""
        return max((s.backlog_s for s in self.live), default=0.0)


def host_name(configured: str) -> str:
    """Return a full name for a server that starts now: the configured name, or else the machine's, and a random end."""
    return f"{configured or socket.gethostname()}/{secrets.token_hex(4)}"
