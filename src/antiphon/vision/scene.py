"""What a frame shows without a model: its light, its main colours, and whether the scene changed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from antiphon.vision.frame_filters import THUMBNAIL_SIDE, thumbnail
from antiphon.vision.images import Pixels

# A picture is another scene when its thumbnail differs by so much of full scale on average.
NEW_SCENE_DIFFERENCE = 0.18
# Mean difference to the frame before: much motion from here on, some from there.
MUCH_MOTION, SOME_MOTION = 0.05, 0.012
# Hues by name, each up to so many degrees; what is less coloured than GREY is no hue.
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
# A colour is told if it covers this much.
MIN_COLOUR_SHARE = 0.12


@dataclass(frozen=True, slots=True)
class SceneFacts:
    """What can be said of a frame: `brightness` in [0, 1]; `colours`, the commonest first; `motion`: mean difference to the frame before, in [0, 1]."""

    brightness: float
    colours: tuple[str, ...]
    motion: float
    new_scene: bool

    @property
    def light_level(self) -> str:
        """In a word."""
        return "dark" if self.brightness < 0.25 else "bright" if self.brightness > 0.65 else "normally lit"

    @property
    def motion_level(self) -> str:
        """In a word."""
        return "much motion" if self.motion >= MUCH_MOTION else "some motion" if self.motion >= SOME_MOTION else "still"


def describe(pixels: Pixels, before: np.ndarray | None) -> tuple[SceneFacts, np.ndarray]:
    """Of a frame and the thumbnail of the one before; and its own thumbnail."""
    now = thumbnail(pixels)
    shares = np.bincount(_named(now), minlength=len(COLOUR_NAMES)) / THUMBNAIL_SIDE**2
    colours = tuple(COLOUR_NAMES[i] for i in np.argsort(-shares, kind="stable")[:3] if shares[i] >= MIN_COLOUR_SHARE)
    motion = float(np.abs(now - before).mean()) / 255 if before is not None else 0.0
    brightness = float((now @ np.array([0.299, 0.587, 0.114], np.float32)).mean()) / 255
    return SceneFacts(brightness, colours, motion, before is not None and motion >= NEW_SCENE_DIFFERENCE), now


def _named(picture: np.ndarray) -> np.ndarray:
    """The place in NAMES of each pixel's colour: int [pixels]."""
    flat = picture.reshape(-1, 3) / 255.0
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
