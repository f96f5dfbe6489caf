"""Log-mel spectrograms of sound that grows: only the frames of new samples are transformed.

A frame stands for 10 ms and reads 400 samples around its first one. The transform mirrors the sound at both of its
ends, so that the last frames change when more sound arrives. All frames have a floor, which is 8 decades below the
loudest frame. Louder sound therefore changes earlier frames too. So the frames are kept without their floor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from antiphon.audio import Pcm

# The distance of two frames and the length of a frame, in samples.
HOP, SPAN = 160, 400
# The number of frames at the end that change when more sound arrives, because the transform mirrors the sound there.
EDGE_FRAMES = 2
# The number of frames that are transformed in a row. Longer sound takes several rows, so that rows of other sounds do
# not have to be as long.
PIECE_FRAMES = 400
# The mel power below which all frames are equal.
LEAST_POWER = 1e-10
# The distance of the floor below the loudest frame, in decades.
FLOOR_DECADES = 8.0

Frames = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class NewSound:
    """The samples that the new frames of a sound read.

    `first`: the number of the first new frame. `count`: the number of new frames. `begin`: the first sample that they
    read, which is negative if the mirrored beginning is among them. `pcm`: the whole sound, float32 [num_samples].
    """

    first: int
    count: int
    begin: int
    pcm: Pcm

    def write(self, row: Pcm) -> None:
        """Write the samples that the frames read, mirrored at the ends of the sound, to the beginning of `row`."""
        size, end = len(self.pcm), self.begin + self.num_samples
        before, after = max(0, -self.begin), max(0, end - size)
        row[before : self.num_samples - after] = self.pcm[self.begin + before : end - after]
        row[:before] = self.pcm[before:0:-1]
        row[self.num_samples - after : self.num_samples] = self.pcm[size - 1 - after : size - 1][::-1]

    def pieces(self) -> Iterator[NewSound]:
        """Yield the parts of up to PIECE_FRAMES frames, which can be transformed separately."""
        for at in range(0, self.count, PIECE_FRAMES):
            count = min(PIECE_FRAMES, self.count - at)
            yield NewSound(self.first + at, count, self.begin + HOP * at, self.pcm)

    @property
    def num_samples(self) -> int:
        """The number of samples that the frames read."""
        return HOP * (self.count - 1) + SPAN


class MelTransform:
    """Transforms sounds to frames on a device.

    A frame has a value for each mel bin: its log10 power, plus 4, divided by 4, as Whisper's extractor scales it.
    """

    def __init__(self, filters: npt.NDArray[np.floating], device: torch.device) -> None:
        """`filters`: the mel filters of the checkpoint's extractor, float [201, bins]."""
        self.bins = filters.shape[1]
        self._filters = torch.from_numpy(filters).to(device, torch.float32).T
        self._window = torch.hann_window(SPAN, device=device)

    @torch.inference_mode()
    def __call__(self, sounds: Sequence[NewSound]) -> list[tuple[Frames, Frames]]:
        """Compute the frames of all sounds together. On a GPU, waits for it once.

        Returns:
            For each sound its frames without a floor, float32 [bins, count], and the log10 power of the loudest bin of
            each frame, float32 [count].
        """
        on_cpu = self._window.device.type == "cpu"
        pieces = [list(sound.pieces()) for sound in sounds]
        flat = list(chain.from_iterable(pieces))
        given = torch.zeros(len(flat), max(piece.num_samples for piece in flat), pin_memory=not on_cpu)
        for row, piece in zip(given.numpy(), flat, strict=True):
            piece.write(row)
        found = torch.stft(
            given.to(self._window.device, non_blocking=True),
            SPAN,
            HOP,
            window=self._window,
            center=False,
            return_complex=True,
        )
        power = self._filters @ found.abs().square_()
        log_power = power.clamp_(min=LEAST_POWER).log10_()
        peaks = log_power.amax(1, keepdim=True)
        made = torch.cat((log_power.add_(4.0).div_(4.0), peaks), 1).cpu().numpy()
        rows = iter(made)
        joined = [np.concatenate([next(rows)[:, : p.count] for p in own], 1) for own in pieces]
        return [(frames[:-1], frames[-1]) for frames in joined]


class FinishedWindow:
    """A window of frames that further sound leaves as they are, apart from their floor. `low`: its least value."""

    def __init__(self, low: float) -> None:
        self.low = low

    def is_same(self, floor: float, other_floor: float) -> bool:
        """Return whether the window's frames are equal with two floors."""
        return floor == other_floor or max(floor, other_floor) <= self.low


class GrowingMel:
    """The frames of one sound, which are kept while the sound grows. Used in one thread.

    `num_frames`: the number of frames of the sound. `chunks`: the frames without their floor, float32 [n, bins,
    chunk_frames]; what follows the frames is meaningless. `finished`: the finished windows at the beginning.
    """

    def __init__(self, bins: int, chunk_frames: int, window_frames: int, min_samples: int) -> None:
        """`min_samples`: shorter sound is followed by silence up to this length."""
        self._min_samples = min_samples
        self._window_frames = window_frames
        self.num_frames = 0
        self.chunks = np.empty((0, bins, chunk_frames), np.float32)
        self.finished: list[FinishedWindow] = []
        self._peaks = np.empty(0, np.float32)
        # The sound that the frames were computed from. Its last frames are not final.
        self._pcm = np.empty(0, np.float32)

    @property
    def floor(self) -> float:
        """The floor of all frames: FLOOR_DECADES below the loudest one. NaN if a frame is NaN."""
        loudest = self._peaks[: self.num_frames].max()
        return float((loudest - np.float32(FLOOR_DECADES) + np.float32(4.0)) / np.float32(4.0))

    def new_part(self, pcm: Pcm) -> NewSound:
        """Return the part of a sound that has to be transformed: all that follows the frames that are kept.

        `pcm`: the whole sound, float32 [num_samples]. It may be longer or shorter than the one before, or another one.
        It must not be changed later. Nothing is changed before `add`.
        """
        first = _num_final(_num_equal(self._pcm, pcm))
        padded = np.pad(pcm, (0, max(0, self._min_samples - len(pcm)))) if len(pcm) < self._min_samples else pcm
        return NewSound(first, len(padded) // HOP - first, HOP * first - SPAN // 2, padded)

    def add(self, pcm: Pcm, part: NewSound, frames: Frames, peaks: Frames) -> None:
        """Take the frames of the part that `new_part` returned for `pcm`: what MelTransform returned for it."""
        self.num_frames, self._pcm = part.first + part.count, pcm
        size = self.chunks.shape[2]
        # Another sound gets memory of its own size.
        kept = self.chunks if part.first else self.chunks[:0]
        if not part.first or self.num_frames > len(kept) * size:
            room = max(-(-self.num_frames // size), 2 * len(kept), self._window_frames // size)
            self.chunks = np.empty((room, *kept.shape[1:]), np.float32)
            self.chunks[: len(kept)] = kept
            self._peaks = np.resize(self._peaks, room * size)
        self._peaks[part.first : self.num_frames] = peaks
        at = part.first
        while at < self.num_frames:
            chunk, start = divmod(at, size)
            stop = min(size, start + self.num_frames - at)
            self.chunks[chunk, :, start:stop] = frames[:, at - part.first : at - part.first + stop - start]
            at += stop - start
        del self.finished[part.first // self._window_frames :]
        for number in range(len(self.finished), _num_final(len(pcm)) // self._window_frames):
            begin, length = number * self._window_frames // size, self._window_frames // size
            self.finished.append(FinishedWindow(float(self.chunks[begin : begin + length].min())))


def _num_final(num_samples: int) -> int:
    """Return the number of frames that do not change when more sound follows."""
    return max(0, num_samples // HOP - EDGE_FRAMES)


def _num_equal(one: Pcm, other: Pcm) -> int:
    """Return the number of samples at the beginning of two sounds that are the same, NaN included."""
    length = min(len(one), len(other))
    differ = np.ascontiguousarray(one[:length]).view(np.int32) != np.ascontiguousarray(other[:length]).view(np.int32)
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length
