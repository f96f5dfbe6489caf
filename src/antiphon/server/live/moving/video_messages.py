"""What another host needs to continue a video stream, besides its configuration: which of the client's messages it gets
again, and the questions and answers so far. Pure.

Images and audio are not stored. The client keeps its newest messages and sends them again to the next host. A message
is *settled* if the next host does not need it: the client has acknowledged everything that the message caused, and no
later question uses its image or audio. The snapshot covers all messages up to the last of the settled ones at the
beginning. It lists later messages whose results have a number: a client that has received that number does not get
these results again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from antiphon.events.video import (
    AppendFrame,
    AppendVideoAudio,
    AskQuestion,
    FinishVideo,
    VideoCommand,
    VideoConfig,
)
from antiphon.sessions.video.session import VideoState

# The most messages, and bytes of messages, that the client sends again. A client that resumes keeps 8 MiB.
MAX_AGAIN, MAX_AGAIN_BYTES = 5000, 4 << 20
# The most characters of the newest questions and answers that are stored. A model gets fewer, see `said_so_far`.
MAX_SAID_CHARS = 8000
# Bounds that reveal a damaged row.
MAX_NUMBER = 10**15

# "end": the client's end of the session, which every host has to get.
Kind = Literal["frame", "audio", "question", "end", "other"]


class LaterMessage(msgspec.Struct, array_like=True):
    """A message after those that a snapshot covers: its number, whether it is a frame, and the number of the last event
    that it caused.
    """

    number: int
    is_frame: bool
    seq: int


class Exchange(msgspec.Struct, array_like=True):
    """A question with its answer, and the number of the answer's last event."""

    question: str
    answer: str
    seq: int


class VideoPoint(msgspec.Struct):
    """The stored state of a video stream."""

    # The name of the video model.
    model: str
    # The client's `session.config`, as it came.
    config: str
    # Whether audio events have GA names.
    ga: bool
    # The snapshot covers all messages of the client up to this number.
    received: int
    # Later messages whose results the client may have.
    later: list[LaterMessage]
    # The newest questions and their answers.
    exchanges: list[Exchange]
    # The times and counts of the session.
    state: VideoState
    # Whether the model has heard audio that the client does not send again.
    has_heard: bool = False
    # Whether it has seen such frames.
    has_seen: bool = False

    def for_client(self, last_received: int) -> VideoPoint:
        """Return the point for a client that has received the events up to `last_received`. A question whose answer it
        lacks is open again: the client sends it again.
        """
        return msgspec.structs.replace(
            self,
            later=[each for each in self.later if each.seq <= last_received],
            exchanges=[each for each in self.exchanges if each.seq <= last_received],
        )

    @property
    def is_possible(self) -> bool:
        """False if the numbers show that the row is damaged."""
        numbers = [each.number for each in self.later]
        is_ordered = all(a < b for a, b in zip([self.received, *numbers], numbers, strict=False))
        return is_ordered and 0 <= self.received < MAX_NUMBER and self.state.num_kept >= 0


@dataclass(slots=True)
class _Message:
    """One message of the client. `seq`: the number of the last event that it caused; None: not all were sent."""

    number: int
    kind: Kind
    num_bytes: int
    seq: int | None = None


class VideoMessages:
    """Tracks the messages of one video stream. `before` is the stored state of a stream from another host.

    With `stores_frames`, the newest frames are stored, so that the client need not send them again. Events are reported
    in the order in which they are sent.
    """

    def __init__(self, *, stores_frames: bool = False, before: VideoPoint | None = None) -> None:
        self._stores_frames = stores_frames
        self._waiting: deque[_Message] = deque()
        self._waiting_bytes = 0
        self.received = before.received if before else 0
        self._known = {each.number: each for each in before.later} if before else {}
        self.exchanges = deque[Exchange](before.exchanges if before else ())
        self.has_heard, self.has_seen = (before.has_heard, before.has_seen) if before else (False, False)
        # The question that is being answered.
        self._asked: _Message | None = None

    @property
    def has_question(self) -> bool:
        """Whether a question waits for its answer, or for the end of it."""
        return any(each.kind == "question" and each.seq is None for each in self._waiting)

    def known(self, number: int) -> LaterMessage | None:
        """Return what the client has already received about this message from another host; None if nothing."""
        return self._known.get(number)

    def took(self, number: int, commands: Sequence[VideoCommand | VideoConfig], num_bytes: int, end: int) -> None:
        """Record a message before its commands are carried out. `end`: the number of the last event so far.

        Without commands, everything that the message caused is among these events.
        """
        kind: Kind = "other"
        for command in commands:
            match command:
                case AskQuestion():
                    kind = "question"
                case AppendFrame():
                    kind = "frame"
                case FinishVideo():
                    kind = "end"
                case AppendVideoAudio() if kind == "other":
                    kind = "audio"
        known = self._known.pop(number, None)
        seq = known.seq if known else end if kind == "other" else None
        self._waiting.append(_Message(number, kind, num_bytes, seq))
        self._waiting_bytes += num_bytes

    def frame_done(self, seq: int) -> None:
        """Record that the result of the next frame was reported. `seq`: the number of that event."""
        if frame := self._next("frame"):
            frame.seq = seq

    def answer_began(self, end: int) -> None:
        """Record that the answer to the next question begins. The answer before it has ended at the event `end`."""
        self._end_question(end)
        self._asked = self._next("question")

    def question_refused(self, seq: int) -> None:
        """Record that the next question gets no answer, which the event `seq` reports."""
        self.answer_began(seq)
        self._end_question(seq)

    def answer_done(self, question: str, answer: str, seq: int) -> None:
        """Record that the answer under way ends with the event `seq`. A failed answer is ""."""
        self._end_question(seq)
        if answer:
            self.exchanges.append(Exchange(question, answer, seq))
            while len(self.exchanges) > 1 and self._num_chars > MAX_SAID_CHARS:
                self.exchanges.popleft()

    @property
    def _num_chars(self) -> int:
        return sum(len(each.question) + len(each.answer) for each in self.exchanges)

    def _end_question(self, seq: int) -> None:
        if self._asked is None:
            return
        for each in self._waiting:
            if each.kind == "audio" and each.seq is None:
                each.seq, self.has_heard = seq, True
            if each is self._asked:
                each.seq, self._asked = seq, None
                return

    def _next(self, kind: Kind) -> _Message | None:
        """Return the first message of a kind whose events were not all sent."""
        return next(
            (each for each in self._waiting if each.kind == kind and each.seq is None and each is not self._asked), None
        )

    def settle(self, acknowledged: int, max_frames: int) -> None:
        """Drop the settled messages at the beginning, up to the first that is not.

        `acknowledged`: the number of the last event that the client has acknowledged. The newest `max_frames` frames
        are not settled unless frames are stored. If the messages exceed MAX_AGAIN_BYTES, images and audio at the
        beginning are given up: the next host does not get them.
        """
        num_frames = sum(each.kind == "frame" for each in self._waiting)
        while self._waiting:
            first = self._waiting[0]
            is_over = self._waiting_bytes > MAX_AGAIN_BYTES or len(self._waiting) > MAX_AGAIN
            is_media = first.kind in ("frame", "audio")
            is_used = first.kind == "frame" and not self._stores_frames and num_frames <= max_frames
            is_settled = first.seq is not None and first.seq <= acknowledged and not is_used
            if not (is_settled or (is_over and is_media)):
                return
            self._waiting.popleft()
            self._waiting_bytes -= first.num_bytes
            num_frames -= first.kind == "frame"
            self.received = first.number
            self.has_seen |= first.kind == "frame"
            self.has_heard |= first.kind == "audio"

    def later(self) -> list[LaterMessage]:
        """Return the messages after `received` of which all events were sent, and those that are still to be sent again
        by the client.
        """
        found = [LaterMessage(m.number, m.kind == "frame", m.seq) for m in self._waiting if m.seq is not None]
        return sorted([*found, *self._known.values()], key=lambda each: each.number)
