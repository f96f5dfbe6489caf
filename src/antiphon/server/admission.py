"""Decides by limits, memory and headroom which sessions and requests a server admits, and gives each a place."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from antiphon.admission import certificate as certificates
from antiphon.admission.certificate import Kind
from antiphon.admission.headroom import MOST_YOUNG, MOST_YOUNG_GPU, Headroom
from antiphon.contracts import NativeLoad
from antiphon.errors import Refused
from antiphon.server.credentials import Caller
from antiphon.server.memory import MemoryLedger
from antiphon.settings import Settings
from antiphon.signals import Signal


@dataclass(slots=True)
class Place:
    """The place that one session or request holds, with its kind."""

    kind: Kind
    _held: Counter[Kind]

    def becomes(self, kind: Kind) -> None:
        """Change the kind of the place, for a session whose upgrade request did not show its kind. Never refuses."""
        self.release()
        self.kind = kind
        self._held[kind] += 1

    def release(self) -> None:
        """Stop counting the place. The owner calls it, once."""
        self._held[self.kind] -= 1
        if not self._held[self.kind]:
            del self._held[self.kind]


_current_place: ContextVar[Place] = ContextVar("place")


def current_place() -> Place | None:
    """Return the place that this task's session or request holds; None if the task runs for no session or request."""
    return _current_place.get(None)


class Admission:
    """Holds the places of one server. Raises SettingsError for a certificate that cannot be read.

    `native_load` returns how full the native model is; None without one.
    """

    def __init__(
        self, settings: Settings, memory: MemoryLedger, native_load: Callable[[], NativeLoad | None] = lambda: None
    ) -> None:
        self._server, self._memory, self._native_load = settings.server, memory, native_load
        server = settings.server
        certificate = certificates.read(Path(server.certificate).expanduser()) if server.certificate else None
        by_device = MOST_YOUNG if settings.models.device == "cpu" else MOST_YOUNG_GPU
        # Decides whether one more session fits. Used only while its signals are watched.
        self.headroom = Headroom(certificate, server.max_sessions, burst=server.burst_sessions or by_device)
        self.asks_headroom = False
        # True after the first signal to stop. No session is admitted then.
        self.draining = False
        # Sessions admitted since the start.
        self.num_admitted = 0
        # Number of places taken, for each key. The first counts the places of sessions and requests, the second the
        # places of WebSockets that wait for their first event.
        self._by_key: Counter[str] = Counter()
        self._awaiting: Counter[str] = Counter()
        # The same places as in `_by_key`, by kind.
        self.by_kind: Counter[Kind] = Counter()
        self._left = Signal()

    @contextmanager
    def admit(self, caller: Caller, kind: Kind, *, resumes: bool = False) -> Iterator[None]:
        """Hold a place for one session of the caller's API key while the block runs. `current_place` returns it there.

        `resumes` is true for a session from another host, which is admitted even while headroom is short. Does not
        wait, so the sessions of a burst are admitted one by one. Raises Refused while the server drains, and if the
        server or the caller has no place left (`--max-sessions`, `--sessions-per-key`, headroom) or has reached its
        memory limit.
        """
        self.refuse_if_draining()
        self.refuse_without_kv(kind)
        with self._memory.opened(caller.key) as account:
            account.check(0)
        with self._place(self._by_key, caller, "sessions"):
            now_s, client = time.monotonic(), caller.client
            if self.asks_headroom:
                self.headroom.admit(kind, self.by_kind, now_s, resumes=resumes, client=client)
            self.num_admitted += 1
            self.by_kind[kind] += 1
            place = Place(kind, self.by_kind)
            token = _current_place.set(place)
            try:
                yield
            finally:
                place.release()
                self.headroom.left(now_s, time.monotonic(), kind, client)
                with suppress(ValueError):
                    # The block may end in another task than it began in, since a call outlives its request.
                    _current_place.reset(token)

    def refuse_if_draining(self) -> None:
        """Raise Refused while the server drains."""
        if self.draining:
            raise Refused("the server is shutting down", 5.0)

    def refuse_without_kv(self, kind: Kind) -> None:
        """Raise Refused if a native model has no room for another conversation.

        Sessions that were admitted and have not opened their conversation yet count as conversations.
        """
        if kind == "native" and (load := self._native_load()):
            opening = max(0, self.by_kind[kind] - load.conversations)
            if load.room <= opening:
                reason = f"there is no room for another conversation beside {load.conversations + opening}"
                raise Refused(reason, self.headroom.next_end_s(time.monotonic()))

    def refuse_early(self, caller: Caller, kind: Kind) -> None:
        """Raise Refused if headroom would not admit a new session of this kind now. Takes no place."""
        if self.asks_headroom:
            self.headroom.check(kind, self.by_kind, time.monotonic(), client=caller.client)

    @contextmanager
    def await_first_event(self, caller: Caller) -> Iterator[None]:
        """Hold a place for one WebSocket that waits for its first event, while the block runs.

        These places have the same limits as places of sessions but are counted separately, so that a client can resume
        its session on a full server. Raises Refused if no place is left.
        """
        with self._place(self._awaiting, caller, "connections without a first event"):
            yield

    @contextmanager
    def _place(self, held: Counter[str], caller: Caller, what: str) -> Iterator[None]:
        server = self._server
        if held.total() >= server.max_sessions:
            raise Refused(f"the server holds {server.max_sessions} {what}", self.headroom.next_end_s(time.monotonic()))
        if held[caller.key] >= server.sessions_per_key:
            retry_s = self.headroom.next_end_s(time.monotonic())
            raise Refused(f"this key holds {server.sessions_per_key} {what}", retry_s, by_own_limit=True)
        held[caller.key] += 1
        try:
            yield
        finally:
            held[caller.key] -= 1
            if not held[caller.key]:
                del held[caller.key]
            self._left.notify()

    async def all_left(self) -> None:
        """Wait until no session and no request holds a place."""
        while self._by_key:
            await self._left.wait()

    @property
    def num_sessions(self) -> int:
        """Number of places taken by live sessions, by REST requests that hold a place, and by handshakes."""
        return self.num_under_way + self._awaiting.total()

    @property
    def num_under_way(self) -> int:
        """Number of places that a drain waits for: those of sessions, and those of REST requests."""
        return self._by_key.total()

    def load(self) -> float | None:
        """Return the fraction of the machine's capacity that is taken; None without a certificate."""
        return self.headroom.load(self.by_kind)
