"""Describes a frame without a model: its brightness, main colours and motion, and whether the scene changed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from antiphon.vision.frame_filters import THUMBNAIL_SIDE, thumbnail
from antiphon.vision.images import Pixels

# A frame shows a new scene if the mean difference between its thumbnail and the previous one reaches this share of full
# scale.
NEW_SCENE_DIFFERENCE = 0.18
# The mean differences from the previous frame, as shares of full scale, from which on a frame has "much" or "some"
# motion.
MUCH_MOTION, SOME_MOTION = 0.05, 0.012
# The upper limits of the hues, in degrees. A pixel with a saturation below GREY_SATURATION has no hue.
HUES = (
    (15, "red"),
    (40, "orange"),
    (68, "yellow"),
    (165, "green"),
    (200, "turquoise"),
    (260, "blue"),
    (300, "purple"),
    (340, "pink"),
    (361, "red"),
)
COLOUR_NAMES = ("black", "grey", "white", "brown", *dict.fromkeys(name for _, name in HUES))
GREY_SATURATION, DARK_VALUE, LIGHT_VALUE = 0.18, 0.18, 0.78
# A colour is listed if it covers at least this share of the frame.
MIN_COLOUR_SHARE = 0.12


@dataclass(frozen=True, slots=True)
class SceneFacts:
    """The description of one frame.

    - `brightness`: mean luma, from 0 (black) to 1 (white).
    - `colours`: up to three of COLOUR_NAMES, most common first.
    - `motion`: mean difference from the previous frame, from 0 to 1; 0 for the first frame.
    - `new_scene`: `motion` reaches NEW_SCENE_DIFFERENCE.
    """

    brightness: float
    colours: tuple[str, ...]
    motion: float
    new_scene: bool

    @property
    def light_level(self) -> str:
        """The brightness in words, for a prompt: "dark" below 0.25, "bright" above 0.65, otherwise "normally lit"."""
        return "dark" if self.brightness < 0.25 else "bright" if self.brightness > 0.65 else "normally lit"

    @property
    def motion_level(self) -> str:
        """The motion in words, for a prompt: "much motion", "some motion" (see MUCH_MOTION, SOME_MOTION) or "still"."""
        return "much motion" if self.motion >= MUCH_MOTION else "some motion" if self.motion >= SOME_MOTION else "still"


def describe(pixels: Pixels, before: np.ndarray | None) -> tuple[SceneFacts, np.ndarray]:
    """Return the description of a frame, and its thumbnail, which is needed to measure the next frame's motion.

    `pixels`: uint8 [height, width, 3], RGB. `before`: the thumbnail of the previous frame; None for the first. Takes
    about a millisecond for a frame of 256 pixels.
    """
    now = thumbnail(pixels)
    shares = np.bincount(_colour_indices(now), minlength=len(COLOUR_NAMES)) / THUMBNAIL_SIDE**2
    colours = tuple(COLOUR_NAMES[i] for i in np.argsort(-shares, kind="stable")[:3] if shares[i] >= MIN_COLOUR_SHARE)
    motion = float(np.abs(now - before).mean()) / 255 if before is not None else 0.0
    brightness = float((now @ np.array([0.299, 0.587, 0.114], np.float32)).mean()) / 255
    return SceneFacts(brightness, colours, motion, before is not None and motion >= NEW_SCENE_DIFFERENCE), now


def _colour_indices(image: np.ndarray) -> np.ndarray:
    """Return each pixel's index in COLOUR_NAMES: int [num_pixels]. `image`: float32 [height, width, 3]."""
    flat = image.reshape(-1, 3) / 255.0
    high, low = flat.max(1), flat.min(1)
    spread = high - low
    red, green, blue = flat.T
    safe = np.where(spread > 0, spread, 1.0)
    hue = np.where(
        high == red,
        (green - blue) / safe % 6,
        np.where(high == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    degrees = hue * 60
    out = np.full(len(flat), COLOUR_NAMES.index("grey"))
    for upto, name in reversed(HUES):
        out[degrees < upto] = COLOUR_NAMES.index(name)
    warm = (degrees >= 10) & (degrees < 45)
    out[warm & (high < 0.6)] = COLOUR_NAMES.index("brown")
    saturation = spread / np.where(high > 0, high, 1.0)
    out[(saturation < 0.45) & (high > 0.75) & ((degrees < 15) | (degrees >= 300))] = COLOUR_NAMES.index("pink")
    grey = saturation < GREY_SATURATION
    out[grey] = COLOUR_NAMES.index("grey")
    out[grey & (high > LIGHT_VALUE)] = COLOUR_NAMES.index("white")
    out[high < DARK_VALUE] = COLOUR_NAMES.index("black")
    return out
