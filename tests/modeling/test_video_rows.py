"""The order of a video's rows if frames are sparse, late, or waiting for sound."""

from __future__ import annotations

import numpy as np
import pytest

from antiphon.contracts import ImagePart, MediaPart, SoundTrack, SoundWindow, VideoPart
from antiphon.modeling.omni.media_encoder import VideoLayout
from antiphon.vision.images import EncodedImage

CHUNKS = VideoLayout(25, 50, 1, 2)
MERGED = VideoLayout(13, 0, 1, 2)
A, B, C = (ImagePart(EncodedImage(name), in_video=True) for name in (b"a", b"b", b"c"))
TRACK = SoundTrack()
FIRST, SECOND = (SoundWindow(np.zeros(1, np.float32), TRACK) for _ in range(2))
NAMES: dict[MediaPart, str] = {A: "a", B: "b", C: "c", FIRST: "1", SECOND: "2"}


def order(layout: VideoLayout, video: VideoPart, num_sound: int) -> str:
    """Return the order of a video's parts, with < and > for the tokens around them. Frames have two rows."""
    sizes: dict[MediaPart, int] = {A: 2, B: 2, C: 2, FIRST: num_sound, SECOND: num_sound}
    rows = layout.rows(video, sizes)
    names = ["<>"[row - 1] if isinstance(row, int) else NAMES[row[0]] for row in rows]
    return "".join(name for i, name in enumerate(names) if i == 0 or names[i - 1] != name)


@pytest.mark.parametrize(
    ("times", "sound_at_s", "expected"),
    [
        ((0.0, 1.0, 2.0), 0.0, "<ab1c2>"),
        # The second chunk has no frame. The frame of the third chunk follows the sound of the second.
        ((0.0, 1.0, 4.5), 0.0, "<ab12c>"),
        # Sound that begins within the first chunk continues into the third.
        ((0.0, 2.5, 4.0), 1.0, "<a1b12c2>"),
    ],
)
def test_frames_come_before_the_sound_of_their_chunk(
    times: tuple[float, ...], sound_at_s: float, expected: str
) -> None:
    video = VideoPart(tuple(zip(times, (A, B, C), strict=True)), (FIRST, SECOND), sound_at_s)
    assert order(CHUNKS, video, 50) == expected


def test_a_frame_comes_before_the_sound_that_begins_with_it() -> None:
    video = VideoPart(((0.0, A), (3.0, B), (8.0, C)), (FIRST, SECOND))
    assert order(MERGED, video, 104) == "<a1b1c2>"


@pytest.mark.parametrize(("layout", "num_sound", "later"), [(CHUNKS, 50, 2.1), (MERGED, 104, 8.1)])
def test_while_sound_goes_on_rows_are_the_beginning_of_those_to_come(
    layout: VideoLayout, num_sound: int, later: float
) -> None:
    sizes: dict[MediaPart, int] = {A: 2, B: 2, C: 2, FIRST: num_sound, SECOND: num_sound}
    frames = ((0.0, A), (later, B), (2 * later, C))
    whole = layout.rows(VideoPart(frames, (FIRST, SECOND)), sizes)
    lengths = []
    for count in range(3):
        rows = layout.rows(VideoPart(frames, (FIRST, SECOND)[:count], goes_on=True), sizes)
        assert rows == whole[: len(rows)]
        lengths.append(len(rows))
    assert lengths == sorted(set(lengths))
    # A video without sound has no tokens around it.
    assert layout.rows(VideoPart(frames[:1]), sizes) == [(A, 0, 0), (A, 1, 0)]
