"""Frames on their way to a client that may lose its connection: numbered as they are sent, kept until acknowledged, sent again. Sans-IO."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.wire import BinaryFrame, MediaFrame

# Frames of the connection itself are not numbered: who has missed one has a new one, and a number would make those after it look old.
UNNUMBERED = ('{"type":"session.created"', '{"type":"session.resumed"', '{"type":"session.replaced"')


class JournalGap(Exception):
    """What the client lacks is not here any more. `reason`: journal_gap or journal_overflow."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class _Sent:
    seq: int
    frame: str
    at_s: float


@dataclass(slots=True)
class Journal:
    """`numbered`: frames get their `server_event_seq` and can be sent again; else they are a plain queue.

    Bound of what was sent: `max_bytes` and `max_s`, the oldest go. What waits is bounded by whoever pushes while a client is there, and by
    `max_bytes` while none is (`overflow`).
    """

    now_s: Callable[[], float]
    numbered: bool = False
    max_bytes: int = 8 << 20
    max_s: float = 60.0
    overflowed: bool = False
    _waiting: deque[str | _Sent] = field(default_factory=deque)
    _waiting_bytes: int = 0
    _sent: deque[_Sent] = field(default_factory=deque)
    _sent_bytes: int = 0
    _seq: int = 0
    # Up to here the client has all, or what it has not is gone.
    _floor: int = 0
    _epoch: int = 0

    def __len__(self) -> int:
        """Frames that wait to be sent."""
        return len(self._waiting)

    def push(self, frame: str, *, first: bool = False) -> None:
        """A frame to be sent, behind what waits, or before it."""
        self._waiting_bytes += len(frame)
        if first:
            self._waiting.appendleft(frame)
        else:
            self._waiting.append(frame)

    def raise_epoch(self, epoch: int) -> int:
        """Throw away what an older epoch has said and was not sent; how many frames that were."""
        self._epoch = epoch
        before = len(self._waiting)
        kept = [w for w in self._waiting if not self._stale(_frame(w))]
        self._waiting = deque(kept)
        self._waiting_bytes = sum(len(_frame(w)) for w in kept)
        return before - len(kept)

    def next(self) -> str | None:
        """The next frame to send, as it is sent; None where none waits."""
        if not self._waiting:
            return None
        waiting = self._waiting.popleft()
        self._waiting_bytes -= len(_frame(waiting))
        if isinstance(waiting, _Sent):
            self._keep(waiting)
            return waiting.frame
        if not self.numbered or waiting.startswith(UNNUMBERED):
            return waiting
        self._seq += 1
        if isinstance(waiting, BinaryFrame):
            # It has no room for its number: its place among the frames is it.
            self._keep(_Sent(self._seq, waiting, self.now_s()))
            return waiting
        numbered: str = f'{waiting[:-1]},"server_event_seq":{self._seq}}}'
        if isinstance(waiting, MediaFrame):
            numbered = MediaFrame(numbered, waiting.epoch)
        self._keep(_Sent(self._seq, numbered, self.now_s()))
        return numbered

    def acknowledge(self, seq: int) -> None:
        """The client has all up to this number. Raises RemoteProtocolError (invalid_event_ack)."""
        if not 0 <= seq <= self._seq:
            raise RemoteProtocolError(
                "invalid_event_ack", f"No event {seq} was sent; the last was {self._seq}.", "server_event_seq"
            )
        self._floor = max(self._floor, seq)
        while self._sent and self._sent[0].seq <= seq:
            self._sent_bytes -= len(self._sent.popleft().frame)

    def check_rewind(self, last_received: int) -> None:
        """Whether `rewind` would do. Raises as it does."""
        if self.overflowed:
            raise JournalGap("journal_overflow")
        if not 0 <= last_received <= self._seq:
            raise RemoteProtocolError(
                "invalid_event_ack",
                f"No event {last_received} was sent; the last was {self._seq}.",
                "last_received_server_event_seq",
            )
        if last_received < self._floor:
            raise JournalGap("journal_gap")

    def rewind(self, last_received: int) -> None:
        """Send again what came after this number, before what waits. Raises JournalGap, RemoteProtocolError (invalid_event_ack)."""
        self.check_rewind(last_received)
        self._floor = last_received
        # What was to be sent again and was not yet is among what waits.
        again = [w for w in self._waiting if isinstance(w, _Sent)]
        missed = sorted((s for s in (*self._sent, *again) if s.seq > last_received), key=lambda s: s.seq)
        fresh = [w for w in self._waiting if not isinstance(w, _Sent)]
        self._sent.clear()
        self._sent_bytes = 0
        self._waiting = deque([*(m for m in missed if not self._stale(m.frame)), *fresh])
        self._waiting_bytes = sum(len(_frame(w)) for w in self._waiting)

    def check_overflow(self) -> bool:
        """Nobody is there to be sent anything: True if what waits is too much to go on."""
        if self._waiting_bytes > self.max_bytes or self.overflowed:
            self.overflowed = True
            self._sent.clear()
            self._waiting.clear()
            self._sent_bytes = self._waiting_bytes = 0
        return self.overflowed

    def continue_from(self, seq: int) -> None:
        """Number what follows from here on: the session was restored, and its client has seen as many."""
        self._seq = self._floor = seq

    def _keep(self, sent: _Sent) -> None:
        self._sent.append(sent)
        self._sent_bytes += len(sent.frame)
        oldest_s = self.now_s() - self.max_s
        while self._sent and (self._sent_bytes > self.max_bytes or self._sent[0].at_s < oldest_s):
            self._floor = self._sent[0].seq
            self._sent_bytes -= len(self._sent.popleft().frame)

    def _stale(self, frame: str) -> bool:
        return isinstance(frame, MediaFrame) and frame.epoch < self._epoch


def _frame(waiting: str | _Sent) -> str:
    return waiting.frame if isinstance(waiting, _Sent) else waiting


@dataclass(slots=True)
class ResumeToken:
    """What a client shows to take its session up again: 32 random bytes, kept as a hash, another after each use.

    The one before stays good until the client is heard after its resume: what told it the new one may have been lost.
    """

    random: Callable[[int], str] = secrets.token_urlsafe
    _hash: bytes = b""
    _before: bytes = b""

    def renew(self) -> str:
        """A new token."""
        value = self.random(32)
        self._before, self._hash = self._hash, _digest(value)
        return value

    def matches(self, value: str) -> bool:
        """In constant time."""
        given = _digest(value)
        now, before = hmac.compare_digest(given, self._hash), hmac.compare_digest(given, self._before)
        if before and not now:
            # The new one was never seen.
            self._hash = self._before
        return now or before

    def confirm(self) -> None:
        """The client has the token."""
        self._before = b""

    @property
    def hash(self) -> bytes:
        """As it is stored: the hash, and that of the one before while it is good."""
        return self._hash + self._before

    @classmethod
    def stored(cls, hash: bytes) -> ResumeToken:
        """One from before a restart."""
        return cls(_hash=hash[:32], _before=hash[32:])


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode()).digest()
