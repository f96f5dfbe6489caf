"""The frames that are kept, the frames that a question is answered from, and the description of a frame."""

from __future__ import annotations

import numpy as np
import pytest

from antiphon.vision.frame_filters import BlockFilter, EvsFilter, sample_frames, thumbnail
from antiphon.vision.scene import describe


def scene(ball: tuple[int, int] | None = None, *, light: int = 0, seed: int = 0) -> np.ndarray:
    """Return a textured scene of 360 x 480 pixels with camera noise. `ball`: the centre of a ball of radius 24."""
    y, x = np.mgrid[0:360, 0:480]
    base = 90 + 40 * np.sin(x / 37) + 30 * np.cos(y / 23)
    picture = np.stack([base, base * 0.9, base * 0.8], -1) + light
    picture += np.random.default_rng(seed).normal(0, 3, picture.shape)
    if ball:
        picture[(x - ball[0]) ** 2 + (y - ball[1]) ** 2 < 24**2] = (230, 40, 40)
    return np.clip(picture, 0, 255).astype(np.uint8)


@pytest.mark.parametrize("kind", [EvsFilter, BlockFilter])
def test_when_a_scene_is_static_then_only_the_first_frame_is_kept(kind: type[EvsFilter]) -> None:
    kept = kind(0.95)
    assert kept.keeps(scene(seed=1))
    assert not any(kept.keeps(scene(seed=s)) for s in range(2, 12))
    assert kept.keeps(255 - scene())


def test_when_a_small_object_moves_then_only_the_block_filter_keeps_the_frame() -> None:
    evs, blocks = EvsFilter(0.95), BlockFilter(0.95)
    places: list[tuple[int, int] | None] = [None, (100, 100), (300, 200), (300, 200), None]
    pictures = [scene(p, seed=i) for i, p in enumerate(places)]
    assert [evs.keeps(p) for p in pictures] == [True, False, False, False, False]
    assert [blocks.keeps(p) for p in pictures] == [True, True, True, False, True]


def test_when_only_the_exposure_changes_then_the_block_filter_drops_the_frame() -> None:
    blocks = BlockFilter(0.95)
    assert blocks.keeps(scene())
    assert not blocks.keeps(scene(light=60, seed=1))


def test_when_a_scene_drifts_then_frames_are_compared_with_the_last_that_was_kept() -> None:
    kept = EvsFilter(0.99)
    kept.keeps(np.full((64, 64, 3), 100, np.uint8))
    # Each frame is similar to its predecessor, but the last one is not similar to the first.
    assert [kept.keeps(np.full((64, 64, 3), 100 + 10 * k, np.uint8)) for k in (1, 2, 3)] == [False, False, True]


def test_when_the_likeness_is_at_the_threshold_then_the_frame_is_dropped() -> None:
    difference = 0.2 * 255
    kept = EvsFilter(0.96)
    kept.keeps(np.zeros((100, 80, 3), np.uint8))
    # The similarity is 1 - 0.2 ** 2 = 0.96, exactly the threshold.
    assert not kept.keeps(np.full((100, 80, 3), difference, np.uint8))
    assert kept.keeps(np.full((100, 80, 3), difference + 1, np.uint8))


@pytest.mark.parametrize(
    ("count", "most", "chosen"),
    [
        (3, 4, [0, 1, 2]),
        (4, 4, [0, 1, 2, 3]),
        (10, 4, [0, 2, 4, 9]),
        (50, 4, [0, 12, 24, 49]),
        (9, 1, [8]),
        (5, 4, [0, 1, 2, 4]),
    ],
)
def test_when_there_are_more_frames_than_wanted_then_an_even_sample_has_the_last(
    count: int, most: int, chosen: list[int]
) -> None:
    assert sample_frames(count, most) == chosen


def test_when_frames_are_described_then_light_motion_colours_and_scene_are_named() -> None:
    dark, thumb = describe(np.full((90, 120, 3), (20, 20, 30), np.uint8), None)
    assert (dark.light_level, dark.motion_level, dark.colours, dark.new_scene) == ("dark", "still", ("black",), False)
    half = np.full((90, 120, 3), (40, 70, 200), np.uint8)
    half[:, 60:] = (240, 240, 240)
    bright, _ = describe(half, thumb)
    assert set(bright.colours) == {"blue", "white"}
    assert bright.new_scene
    assert bright.motion_level == "much motion"
    assert describe(half, thumbnail(half))[0].motion_level == "still"


@pytest.mark.parametrize(
    ("rgb", "name"),
    [
        ((200, 200, 200), "white"),
        ((120, 120, 125), "grey"),
        ((15, 15, 20), "black"),
        ((200, 30, 30), "red"),
        ((230, 140, 30), "orange"),
        ((225, 205, 50), "yellow"),
        ((50, 150, 60), "green"),
        ((40, 70, 190), "blue"),
        ((120, 50, 160), "purple"),
        ((240, 160, 180), "pink"),
        ((110, 75, 45), "brown"),
    ],
)
def test_when_a_frame_has_one_colour_then_it_is_named(rgb: tuple[int, int, int], name: str) -> None:
    assert describe(np.full((30, 30, 3), rgb, np.uint8), None)[0].colours == (name,)
