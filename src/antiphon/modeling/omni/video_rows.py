"""The order of a video's rows: frames and sound by their times, as the makers' processors interleave them.

A row's place in time is counted in positions since the video began, of which a second has 25 (Qwen2.5-Omni) or 13
(Qwen3-Omni): one for each row of sound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from antiphon.contracts import MediaPart, VideoPart
from antiphon.modeling.media_rows import ChatRow


@dataclass(frozen=True, slots=True)
class VideoLayout:
    """How a model orders the rows of a video with sound.

    `positions_per_s`: positions a second. `chunk`: the positions of a chunk, in which all frames come before the sound;
    0: each frame comes right before the sound that begins with it. `sound_start`, `sound_end`: the tokens around both,
    where there is sound.
    """

    positions_per_s: float
    chunk: int
    sound_start: int
    sound_end: int

    def rows(self, video: VideoPart, sizes: Mapping[MediaPart, int]) -> list[ChatRow]:
        """Return the rows of a video. `sizes`: how many rows each frame and window of sound has.

        Where the sound goes on, rows end before the first that would come behind sound which is not there yet.
        """
        # Each with its key in the order, and its rows.
        placed: list[tuple[tuple[int, ...], list[ChatRow]]] = []
        for at_s, image in video.frames:
            at = self._position(at_s)
            placed.append((self._key(at, 0), [(image, i, at) for i in range(sizes[image])]))
        at = self._position(video.sound_at_s)
        for window in video.sound:
            placed += [(self._key(at + i, 1), [(window, i, at)]) for i in range(sizes[window])]
            at += sizes[window]
        if video.goes_on:
            end = self._key(at, 1)
            placed = [(key, rows) for key, rows in placed if key < end]
        ordered = [row for _, rows in sorted(placed, key=lambda item: item[0]) for row in rows]
        if not video.sound and not video.goes_on:
            return ordered
        return [self.sound_start, *ordered, *(() if video.goes_on else (self.sound_end,))]

    def _position(self, at_s: float) -> int:
        # Qwen2.5-Omni's code cuts the fraction off; Qwen3-Omni's keeps it, and the engine has whole positions.
        return int(at_s * self.positions_per_s + (0.0 if self.chunk else 0.5))

    def _key(self, at: int, kind: int) -> tuple[int, ...]:
        return (at // self.chunk, kind, at) if self.chunk else (at, kind)
