"""The journal of a session that can be resumed, and its resume token. See docs/wire/index.md, "Resume".

The journal is a queue of frames. It numbers them as they are sent, keeps them until the client acknowledges them, and
sends them again on a new connection. It knows no socket and does not wait: an Outbox pushes, takes and waits.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.wire import Frame


class JournalGap(Exception):
    """Frames that the client lacks are no longer kept, so the session cannot be resumed.

    `reason` is sent to the client: `journal_gap` (older than what is kept) or `journal_overflow` (while no client was
    connected, more was produced than is kept).
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A frame that was not sent yet. `data`: its encoding without a number."""

    frame: Frame
    data: str | bytes

    @property
    def size(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A frame as it was sent, with its number."""

    seq: int
    data: str | bytes
    epoch: int | None
    at_s: float
    is_piece: bool = False

    @property
    def size(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class SentFrame:
    """A numbered frame for another host, as it is sent to the client: `text` or `data`, and its epoch, if any."""

    seq: int
    text: str | None = None
    data: bytes | None = None
    epoch: int | None = None

    @property
    def frame(self) -> str | bytes:
        return self.text if self.text is not None else self.data or b""

    def renumbered(self, seq: int) -> SentFrame:
        """Return the frame with the number `seq`."""
        text = self.text
        if text is not None and text.endswith(tail := f"{_SEQ}{self.seq}}}"):
            text = f"{text[: -len(tail)]}{_SEQ}{seq}}}"
        return SentFrame(seq, text, self.data, self.epoch)


# The last field of a numbered frame, as `Frame.encode` writes it.
_SEQ = ',"server_event_seq":'


@dataclass(slots=True)
class Journal:
    """A queue of frames to one client; `len()` is the number of waiting frames.

    Sent frames are kept up to `max_bytes` and `max_s`; beyond that the oldest are dropped. The caller bounds the
    waiting frames: it stops pushing while an attached client is slow, and applies `max_bytes` while none is attached
    (`is_overfull`). Sizes are in characters, which equal bytes for nearly all frames.
    """

    # Returns monotonic seconds.
    now_s: Callable[[], float]
    # Frames get a `server_event_seq` and can be sent again. Otherwise this is a plain queue that keeps nothing.
    numbered: bool = False
    # The most bytes of sent frames that are kept, and of waiting frames without a client.
    max_bytes: int = 8 << 20
    # Seconds for which sent frames are kept.
    max_s: float = 60.0
    _waiting: deque[_Waiting | _Sent] = field(default_factory=deque)
    _waiting_bytes: int = 0
    _sent: deque[_Sent] = field(default_factory=deque)
    _sent_bytes: int = 0
    _seq: int = 0
    # Frames up to this number are acknowledged or dropped, and cannot be sent again.
    _floor: int = 0
    _epoch: int = 0

    def __len__(self) -> int:
        """Return the number of waiting frames, including those to send again."""
        return len(self._waiting)

    def push(self, frame: Frame, *, first: bool = False) -> None:
        """Add a frame after those that wait, or before them if it is the `first` of a connection.

        It has no number yet.
        """
        waiting = _Waiting(frame, frame.encode())
        self._waiting_bytes += waiting.size
        if first:
            self._waiting.appendleft(waiting)
        else:
            self._waiting.append(waiting)

    def raise_epoch(self, epoch: int) -> int:
        """Drop the waiting words and audio of older epochs, and return the number of dropped frames.

        Other frames stay. From now on `rewind` also skips media frames of older epochs; their numbers stay used.
        """
        self._epoch = epoch
        before = len(self._waiting)
        kept = [w for w in self._waiting if not self._stale(w)]
        self._waiting = deque(kept)
        self._waiting_bytes = sum(w.size for w in kept)
        return before - len(kept)

    def next(self) -> str | bytes | None:
        """Remove and return the next frame in the form to send, numbered and kept if frames are; None if none waits."""
        if not self._waiting:
            return None
        waiting = self._waiting.popleft()
        self._waiting_bytes -= waiting.size
        numbered = self._number(waiting)
        if isinstance(numbered, _Sent):
            self._keep(numbered)
        return numbered.data

    def acknowledge(self, seq: int) -> None:
        """Drop the kept frames up to this number, which the client has received. A lower number changes nothing.

        Raises RemoteProtocolError (`invalid_event_ack`) if the number was never sent.
        """
        if not 0 <= seq <= self._seq:
            raise RemoteProtocolError(
                "invalid_event_ack", f"No event {seq} was sent; the last was {self._seq}.", "server_event_seq"
            )
        self._floor = max(self._floor, seq)
        while self._sent and self._sent[0].seq <= seq:
            self._sent_bytes -= self._sent.popleft().size

    def check_rewind(self, last_received: int) -> None:
        """Raise the errors of `rewind`, without a change: a resume is checked before it replaces a connection."""
        if not 0 <= last_received <= self._seq:
            raise RemoteProtocolError(
                "invalid_event_ack",
                f"No event {last_received} was sent; the last was {self._seq}.",
                "last_received_server_event_seq",
            )
        if last_received < self._floor:
            raise JournalGap("journal_gap")

    def rewind(self, last_received: int) -> None:
        """Put the sent frames after this number, which did not arrive, before those that wait.

        They keep their numbers; words and audio of an older epoch are left out. Raises JournalGap if a frame is no
        longer kept, and RemoteProtocolError (`invalid_event_ack`) if the number was never sent.
        """
        self.check_rewind(last_received)
        self._floor = last_received
        # If a connection broke during an earlier rewind, frames to send again are still among the waiting ones.
        again = [w for w in self._waiting if isinstance(w, _Sent)]
        missed = sorted((s for s in (*self._sent, *again) if s.seq > last_received), key=lambda s: s.seq)
        fresh = [w for w in self._waiting if not isinstance(w, _Sent)]
        self._sent.clear()
        self._sent_bytes = 0
        self._waiting = deque([*(m for m in missed if not self._stale(m)), *fresh])
        self._waiting_bytes = sum(w.size for w in self._waiting)

    @property
    def waiting_bytes(self) -> int:
        """The size of the waiting frames."""
        return self._waiting_bytes

    @property
    def num_bytes(self) -> int:
        """The size of all frames here: waiting ones, and sent ones that are kept."""
        return self._waiting_bytes + self._sent_bytes

    @property
    def is_overfull(self) -> bool:
        """Whether more than `max_bytes` wait. A session without an attached client has to end then."""
        return self._waiting_bytes > self.max_bytes

    def continue_from(self, seq: int) -> None:
        """Number the next frame `seq` + 1: the session was restored, and its client has the frames up to `seq`."""
        self._seq = self._floor = seq

    def hand_over(self, max_bytes: int) -> list[SentFrame] | None:
        """Number the waiting frames, and return all frames that the client may lack, for the host that takes over.

        Returns None if they are larger than `max_bytes`; then some of them have to be produced again, as after a crash.
        """
        self._waiting = deque(self._number(waiting) for waiting in self._waiting)
        self._waiting_bytes = sum(waiting.size for waiting in self._waiting)
        frames = [*self._sent, *(w for w in self._waiting if isinstance(w, _Sent))]
        frames.sort(key=lambda sent: sent.seq)
        if sum(sent.size for sent in frames) > max_bytes:
            return None
        return [
            SentFrame(sent.seq, sent.data, None, sent.epoch)
            if isinstance(sent.data, str)
            else SentFrame(sent.seq, None, sent.data, sent.epoch)
            for sent in frames
        ]

    def unacknowledged(self, coming: Sequence[Frame], max_bytes: int) -> list[SentFrame]:
        """Return the frames that the client may lack, oldest first.

        These are the sent and unacknowledged frames, the waiting frames, and `coming`, which are pushed next, under
        their current or future numbers. Pieces of responses, and everything older than the newest `max_bytes`, are left
        out.
        """
        if not self.numbered:
            return []
        fresh = [w.frame for w in self._waiting if isinstance(w, _Waiting)]
        fresh = [frame for frame in (*fresh, *coming) if frame.numbered]
        again = [w for w in self._waiting if isinstance(w, _Sent)]
        found: list[SentFrame] = []
        size = 0
        for seq, frame in zip(range(self._seq + len(fresh), self._seq, -1), reversed(fresh), strict=True):
            if frame.is_piece:
                continue
            text = frame.encode(seq)
            size += len(text)
            if size > max_bytes:
                return found[::-1]
            found.append(SentFrame(seq, str(text)))
        for sent in sorted((*self._sent, *again), key=lambda sent: -sent.seq):
            if sent.is_piece or sent.seq <= self._floor:
                continue
            size += sent.size
            if size > max_bytes:
                break
            found.append(SentFrame(sent.seq, str(sent.data), epoch=sent.epoch))
        return found[::-1]

    def _number(self, waiting: _Waiting | _Sent) -> _Waiting | _Sent:
        """Give a waiting frame the number under which it is sent later. A frame without numbers stays unchanged."""
        if isinstance(waiting, _Sent) or not self.numbered or not waiting.frame.numbered:
            return waiting
        self._seq += 1
        frame = waiting.frame
        return _Sent(self._seq, frame.encode(self._seq), frame.epoch, self.now_s(), frame.is_piece)

    def take_over(self, frames: Sequence[SentFrame], last_received: int) -> bool:
        """Continue another host's journal with the frames that it has handed over.

        Returns whether these contain all frames after `last_received`, so that the client can have them. Otherwise
        nothing changes.
        """
        if not frames or not frames[0].seq - 1 <= last_received <= frames[-1].seq:
            return False
        self._seq, self._floor = frames[-1].seq, last_received
        again = [_Sent(f.seq, f.frame, f.epoch, self.now_s()) for f in frames if f.seq > last_received]
        self._waiting.extendleft(reversed(again))
        self._waiting_bytes += sum(sent.size for sent in again)
        return True

    def _keep(self, sent: _Sent) -> None:
        self._sent.append(sent)
        self._sent_bytes += sent.size
        oldest_s = self.now_s() - self.max_s
        while self._sent and (self._sent_bytes > self.max_bytes or self._sent[0].at_s < oldest_s):
            self._floor = self._sent[0].seq
            self._sent_bytes -= self._sent.popleft().size

    def _stale(self, queued: _Waiting | _Sent) -> bool:
        epoch = queued.epoch if isinstance(queued, _Sent) else queued.frame.epoch
        return epoch is not None and epoch < self._epoch


@dataclass(slots=True)
class ResumeToken:
    """The token with which a client resumes its session: 32 random bytes as base64, of which only the SHA-256 is kept.

    Each resume creates a new token. The previous one stays valid until the client sends something on its new
    connection, because the message with the new token may have been lost.
    """

    # Takes a number of bytes and returns URL-safe text. Tests inject their own.
    random: Callable[[int], str] = secrets.token_urlsafe
    _hash: bytes = b""
    _previous_hash: bytes = b""

    def renew(self) -> str:
        """Return a new token, as URL-safe text.

        The previous one stays valid until `confirm`; the one before it ends.
        """
        value = self.random(32)
        self._previous_hash, self._hash = self._hash, _digest(value)
        return value

    def matches(self, value: str) -> bool:
        """Whether this is the current token, or the previous one while that is valid. Compares in constant time.

        A match of the previous token makes it the current one again, because the client never saw the newer one.
        """
        given = _digest(value)
        is_current = hmac.compare_digest(given, self._hash)
        is_previous = hmac.compare_digest(given, self._previous_hash)
        if is_previous and not is_current:
            self._hash = self._previous_hash
        return is_current or is_previous

    def is_previous(self, value: str) -> bool:
        """Whether this is the previous token, while that is valid. Its client has not seen the current one."""
        return bool(self._previous_hash) and hmac.compare_digest(_digest(value), self._previous_hash)

    def confirm(self) -> None:
        """End the previous token: the client has sent something on its new connection, so it has the current one."""
        self._previous_hash = b""

    @property
    def hash(self) -> bytes:
        """The stored form of the token: its SHA-256 (32 bytes), then that of the previous one while it is valid."""
        return self._hash + self._previous_hash

    @classmethod
    def stored(cls, hash: bytes) -> ResumeToken:
        """Return the token of a session from before a restart, from its `hash` then. The token's text is unknown."""
        return cls(_hash=hash[:32], _previous_hash=hash[32:])


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode()).digest()
