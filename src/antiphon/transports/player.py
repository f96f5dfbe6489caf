"""Plays the audio of responses in frames of 20 ms, and knows how much of each item was heard.

A transport takes the frames and sends them: a WebRTC track at the moment at which each is due, a telephone carrier a
little ahead of that, because the carrier has a buffer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from antiphon.audio import Pcm
from antiphon.audio.pcm import Resampler
from antiphon.events.conversation import ContentPartDone, ContentPosition, ConversationEvent, ResponseAudioDelta
from antiphon.events.playback import PlaybackStarted, PlaybackStopped
from antiphon.events.transcription import TranscriptionEvent
from antiphon.signals import Signal
from antiphon.transports.transport import ReportPlayback

# Samples as they are sent: int16 [num_samples], mono.
Samples = npt.NDArray[np.int16]
FRAMES_PER_S = 50


@dataclass(slots=True)
class _AudioChunk:
    """Audio of one item, or of none, that waits to be played. `last`: it is the last audio of the item."""

    at: ContentPosition | None
    pcm: Samples
    last: bool = False


@dataclass(frozen=True, slots=True)
class _Passage:
    """Audio of one item, or of none, that was taken. `last`: the item ends with it."""

    at: ContentPosition | None
    num_samples: int
    last: bool


class ResponsePlayer:
    """The `AudioPlayer` of a transport that sends the audio of responses itself, at `rate_hz`.

    Taken samples count as heard at once. With `by_marks`, the peer has a play buffer, and reports the marks that it has
    played: samples then count as heard when the mark after them is `reached`. Its methods do not wait. For one event
    loop. `changed` wakes tasks that wait for audio, or for its end.
    """

    def __init__(self, rate_hz: int, *, by_marks: bool = False) -> None:
        self.rate_hz = rate_hz
        self.frame_samples = rate_hz // FRAMES_PER_S
        self.changed = Signal()
        self._by_marks = by_marks
        # It holds at most the audio of one response, because the next response begins after this response is cut off or
        # done. The tokens of a response are limited.
        self._queue: deque[_AudioChunk] = deque()
        self._resamplers: dict[str, Resampler] = {}
        # Items that were not heard to their end, and the number of samples that were heard.
        self._unfinished: dict[str, ContentPosition] = {}
        self._heard_samples: dict[str, int] = {}
        # Items whose further audio is dropped.
        self._discarded: set[str] = set()
        # What was taken since the last mark, and before each mark that is not reached, oldest first.
        self._passages: list[_Passage] = []
        self._marks: dict[str, list[_Passage]] = {}
        self._num_marks = 0
        self._playing_response: str | None = None
        self._report: ReportPlayback = lambda _: None
        self._is_held = False

    @property
    def has_frame(self) -> bool:
        """Whether a whole frame, or the end of an item, can be taken now."""
        if self._is_held:
            return False
        return any(c.last for c in self._queue) or sum(len(c.pcm) for c in self._queue) >= self.frame_samples

    @property
    def awaits_marks(self) -> bool:
        """Whether the peer may still have audio in its buffer."""
        return bool(self._marks or self._passages)

    @property
    def is_idle(self) -> bool:
        """Whether all audio that arrived so far was heard or dropped, or waits for the rest of a frame."""
        return not (self._queue or self._passages or self._marks)

    def attach(self, report: ReportPlayback) -> None:
        """Set the callback `report`. It is called when the first sample of a response is heard, and after the last
        sample of each item."""
        self._report = report

    def send(self, event: TranscriptionEvent | ConversationEvent) -> None:
        """Queue the event's audio, resampled to `rate_hz`. Ignores events without audio."""
        match event:
            case ResponseAudioDelta(at, pcm, rate_hz) if at.item_id not in self._discarded:
                if at.item_id not in self._resamplers:
                    self._resamplers[at.item_id] = Resampler(rate_hz, self.rate_hz)
                    self._unfinished[at.item_id] = at
                self._queue.append(_AudioChunk(at, _int16(self._resamplers[at.item_id].feed(pcm))))
            case ContentPartDone(at, part) if part.kind == "output_audio":
                self._discarded.discard(at.item_id)
                if resampler := self._resamplers.pop(at.item_id, None):
                    self._queue.append(_AudioChunk(at, _int16(resampler.flush()), last=True))
            case _:
                return
        self.changed.notify()

    def play(self, pcm: Pcm) -> None:
        """Queue audio that belongs to no response, at `rate_hz`. It is dropped as that of responses is."""
        self._queue.append(_AudioChunk(None, _int16(pcm), last=True))
        self.changed.notify()

    def silence(self) -> list[tuple[ContentPosition, int]]:
        """Drop the audio that was not heard, and the further audio of its items. Marks that were not reached are void.

        Returns the items that were not heard to their end, each with its heard duration in milliseconds.
        """
        cut = [
            (at, self._heard_samples.get(item_id, 0) * 1000 // self.rate_hz) for item_id, at in self._unfinished.items()
        ]
        # An item that is still being generated has a resampler.
        self._discarded |= self._resamplers.keys()
        self._queue.clear()
        self._resamplers.clear()
        self._unfinished.clear()
        self._heard_samples.clear()
        self._passages.clear()
        self._marks.clear()
        self._playing_response = None
        self._is_held = False
        self.changed.notify()
        return cut

    def hold(self, held: bool) -> None:
        """If `held`, nothing can be taken. Otherwise continue at the sample at which the hold began."""
        self._is_held = held
        self.changed.notify()

    def take(self) -> Samples:
        """Take the next 20 ms: int16 [num_samples]. There are fewer samples if no more are queued, and none during a
        hold. Reports responses that begin or end in these 20 ms, except with `by_marks`.
        """
        parts: list[Samples] = []
        missing = self.frame_samples
        while self._queue and missing and not self._is_held:
            chunk = self._queue[0]
            part, chunk.pcm = chunk.pcm[:missing], chunk.pcm[missing:]
            ends = not len(chunk.pcm)
            if len(part) or chunk.last:
                self._passages.append(_Passage(chunk.at, len(part), chunk.last and ends))
            parts.append(part)
            missing -= len(part)
            if ends:
                self._queue.popleft()
        if not self._by_marks:
            self._count(self._passages)
            self._passages = []
            if self.is_idle:
                self.changed.notify()
        return np.concatenate(parts) if parts else np.zeros(0, np.int16)

    def mark(self) -> str:
        """Return the name of a mark after all samples that were taken so far. The peer gets it after these samples."""
        self._num_marks += 1
        name = f"m{self._num_marks}"
        self._marks[name], self._passages = self._passages, []
        return name

    def reached(self, name: str) -> None:
        """Count the samples before a mark as heard. Ignores a mark that is unknown, was reached before, or is void."""
        if name not in self._marks:
            return
        for known in list(self._marks):
            # A later mark was reached, so the earlier ones were too.
            self._count(self._marks.pop(known))
            if known == name:
                break
        self.changed.notify()

    def _count(self, passages: list[_Passage]) -> None:
        for passage in passages:
            at = passage.at
            if at is None:
                continue
            if passage.num_samples:
                if self._playing_response != at.response_id:
                    self._playing_response = at.response_id
                    self._report(PlaybackStarted(at.response_id))
                self._heard_samples[at.item_id] = self._heard_samples.get(at.item_id, 0) + passage.num_samples
            if passage.last:
                self._finish(at)

    def _finish(self, at: ContentPosition) -> None:
        self._unfinished.pop(at.item_id, None)
        self._heard_samples.pop(at.item_id, None)
        if self._playing_response == at.response_id:
            self._playing_response = None
            self._report(PlaybackStopped(at.response_id))


def padded(pcm: Samples, num_samples: int) -> Samples:
    """Return the samples with silence after them, so that they are `num_samples`. A longer input is returned as is."""
    return pcm if len(pcm) >= num_samples else np.concatenate((pcm, np.zeros(num_samples - len(pcm), np.int16)))


def _int16(pcm: npt.NDArray[np.float32]) -> Samples:
    return (np.clip(pcm, -1.0, 1.0) * 32767).astype(np.int16)
