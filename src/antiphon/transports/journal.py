"""The journal and the resume token of a session that can be resumed. See docs/wire/index.md, "Resume".

The journal is a queue of frames. It numbers frames when they are sent, keeps them until the client acknowledges them,
and returns them again for a new connection. It neither uses a socket nor waits: the Outbox does the waiting.
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
    """Raised if frames that the client lacks are no longer kept, so that the session cannot be resumed.

    `reason` is sent to the client. `journal_gap`: the frames are older than the kept frames. `journal_overflow`: the
    session produced more frames than are kept while no client was connected.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A frame that was not sent yet. `data`: the encoded frame without a number."""

    frame: Frame
    data: str | bytes

    @property
    def size(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A frame in the form in which it was sent, with its number."""

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
    """A numbered frame that is handed over to another host: the encoded `text` or `data`, and its epoch, if any."""

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


# The last field of a numbered JSON frame, as `Frame.encode` writes it.
_SEQ = ',"server_event_seq":'


@dataclass(slots=True)
class Journal:
    """A queue of frames to one client; `len()` is the number of waiting frames.

    Sent frames are kept up to `max_bytes` and `max_s`; beyond these limits the oldest are dropped. The caller limits
    the waiting frames. It stops pushing if an attached client is slow, and ends the session if no client is attached
    and the journal `is_overfull`. Sizes are in characters, which equal bytes for nearly all frames.
    """

    # Monotonic clock, in seconds.
    now_s: Callable[[], float]
    # If True, frames get a `server_event_seq` and can be sent again. If False, this is a plain queue.
    numbered: bool = False
    # Maximum size of the kept frames, and of the waiting frames if no client is attached, in bytes.
    max_bytes: int = 8 << 20
    # Time for which sent frames are kept, in seconds.
    max_s: float = 60.0
    _waiting: deque[_Waiting | _Sent] = field(default_factory=deque)
    _waiting_bytes: int = 0
    _sent: deque[_Sent] = field(default_factory=deque)
    _sent_bytes: int = 0
    _seq: int = 0
    # Frames up to this number were acknowledged or dropped, so they cannot be sent again.
    _floor: int = 0
    _epoch: int = 0

    def __len__(self) -> int:
        """Return the number of waiting frames, including frames that are sent again."""
        return len(self._waiting)

    def push(self, frame: Frame, *, first: bool = False) -> None:
        """Add a frame after the waiting frames, or before them if it is the `first` of a connection.

        The frame gets its number only when it is sent.
        """
        waiting = _Waiting(frame, frame.encode())
        self._waiting_bytes += waiting.size
        if first:
            self._waiting.appendleft(waiting)
        else:
            self._waiting.append(waiting)

    def raise_epoch(self, epoch: int) -> int:
        """Drop the waiting text and audio frames of older epochs. Returns the number of dropped frames.

        Other frames stay. From now on, `rewind` also skips text and audio frames of older epochs. Their numbers are not
        used again.
        """
        self._epoch = epoch
        before = len(self._waiting)
        kept = [w for w in self._waiting if not self._stale(w)]
        self._waiting = deque(kept)
        self._waiting_bytes = sum(w.size for w in kept)
        return before - len(kept)

    def next(self) -> str | bytes | None:
        """Remove the next waiting frame and return it encoded; None if there is none. If `numbered`, also keep it."""
        if not self._waiting:
            return None
        waiting = self._waiting.popleft()
        self._waiting_bytes -= waiting.size
        numbered = self._number(waiting)
        if isinstance(numbered, _Sent):
            self._keep(numbered)
        return numbered.data

    def acknowledge(self, seq: int) -> None:
        """Drop the kept frames up to this number, because the client has received them.

        No-op for a number below an earlier one.

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
        """Raise the errors of `rewind` without changing anything, to check a resume before it replaces a connection."""
        if not 0 <= last_received <= self._seq:
            raise RemoteProtocolError(
                "invalid_event_ack",
                f"No event {last_received} was sent; the last was {self._seq}.",
                "last_received_server_event_seq",
            )
        if last_received < self._floor:
            raise JournalGap("journal_gap")

    def rewind(self, last_received: int) -> None:
        """Put the sent frames after this number, which the client did not receive, before the waiting frames.

        They keep their numbers. Skips text and audio of an older epoch. Raises JournalGap if one of the frames is no
        longer kept, and RemoteProtocolError (`invalid_event_ack`) if the number was never sent.
        """
        self.check_rewind(last_received)
        self._floor = last_received
        # If a connection broke after an earlier rewind, some frames to send again are still among the waiting frames.
        again = [w for w in self._waiting if isinstance(w, _Sent)]
        missed = sorted((s for s in (*self._sent, *again) if s.seq > last_received), key=lambda s: s.seq)
        fresh = [w for w in self._waiting if not isinstance(w, _Sent)]
        self._sent.clear()
        self._sent_bytes = 0
        self._waiting = deque([*(m for m in missed if not self._stale(m)), *fresh])
        self._waiting_bytes = sum(w.size for w in self._waiting)

    @property
    def waiting_bytes(self) -> int:
        """The total size of the waiting frames."""
        return self._waiting_bytes

    @property
    def num_bytes(self) -> int:
        """The total size of the waiting frames and the kept frames."""
        return self._waiting_bytes + self._sent_bytes

    @property
    def end(self) -> int:
        """The number that the newest frame has, or will get when it is sent."""
        return self._seq + sum(isinstance(w, _Waiting) and w.frame.numbered for w in self._waiting)

    @property
    def acknowledged(self) -> int:
        """The number of the last frame that the client has acknowledged, or that is no longer kept."""
        return self._floor

    @property
    def is_overfull(self) -> bool:
        """Whether more than `max_bytes` are waiting. If no client is attached then, the session has to end."""
        return self._waiting_bytes > self.max_bytes

    def continue_from(self, seq: int) -> None:
        """Give the next frame the number `seq` + 1. For a restored session whose client has the frames up to `seq`."""
        self._seq = self._floor = seq

    def hand_over(self, max_bytes: int) -> list[SentFrame] | None:
        """Number the waiting frames. Returns all frames that the client may lack, for the host that takes over.

        Returns None if they exceed `max_bytes`. The other host then has to generate some of them again, as after a
        crash.
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

        These are the unacknowledged sent frames, the waiting frames, and the frames in `coming`, which will be pushed
        next. They have their current or future numbers. Skips pieces of responses. If the frames exceed `max_bytes`,
        skips the oldest.
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
        """Give a waiting frame the number with which it will be sent. Without `numbered`, it stays unchanged."""
        if isinstance(waiting, _Sent) or not self.numbered or not waiting.frame.numbered:
            return waiting
        self._seq += 1
        frame = waiting.frame
        return _Sent(self._seq, frame.encode(self._seq), frame.epoch, self.now_s(), frame.is_piece)

    def take_over(self, frames: Sequence[SentFrame], last_received: int) -> bool:
        """Continue another host's journal with the frames that it has handed over.

        Returns True if `frames` contain all frames after `last_received`. Otherwise returns False and changes nothing.
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
    """The token with which a client resumes its session: 32 random bytes in base64. Only its SHA-256 is kept.

    Each resume creates a new token. The previous token stays valid until the client sends something on its new
    connection, because the message with the new token may have been lost.
    """

    # Takes a number of bytes and returns URL-safe text. Tests inject their own.
    random: Callable[[int], str] = secrets.token_urlsafe
    _hash: bytes = b""
    _previous_hash: bytes = b""

    def renew(self) -> str:
        """Return a new token, as URL-safe text.

        The current token becomes the previous token, which is valid until `confirm`. The token before that is invalid.
        """
        value = self.random(32)
        self._previous_hash, self._hash = self._hash, _digest(value)
        return value

    def matches(self, value: str) -> bool:
        """Whether this is the current token, or the previous token if that is still valid. Compares in constant time.

        If the previous token matches, it becomes the current token again, because the client never saw the newer one.
        """
        given = _digest(value)
        is_current = hmac.compare_digest(given, self._hash)
        is_previous = hmac.compare_digest(given, self._previous_hash)
        if is_previous and not is_current:
            self._hash = self._previous_hash
        return is_current or is_previous

    def is_previous(self, value: str) -> bool:
        """Whether this is the previous token and still valid. A client that sends it has not seen the current token."""
        return bool(self._previous_hash) and hmac.compare_digest(_digest(value), self._previous_hash)

    def confirm(self) -> None:
        """Invalidate the previous token. Call it when the client has sent something on its new connection."""
        self._previous_hash = b""

    @property
    def hash(self) -> bytes:
        """The stored form of the token: its SHA-256 (32 bytes), followed by that of a still valid previous token."""
        return self._hash + self._previous_hash

    @classmethod
    def stored(cls, hash: bytes) -> ResumeToken:
        """Return the token with this stored `hash`, for a session from before a restart. Its text is unknown."""
        return cls(_hash=hash[:32], _previous_hash=hash[32:])


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode()).digest()
