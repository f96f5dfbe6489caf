"""What a frame shows without a model: its light, its main colours, and whether the scene changed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from antiphon.vision.frame_filters import SIDE, thumbnail
from antiphon.vision.images import Pixels

# A picture is another scene when its thumbnail differs by so much of full scale on average.
SCENE = 0.18
# Mean difference to the frame before: much motion from here on, some from there.
MUCH, SOME = 0.05, 0.012
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
NAMES = ("black", "grey", "white", "brown", *dict.fromkeys(name for _, name in HUES))
GREY, DARK, LIGHT = 0.18, 0.18, 0.78
# A colour is told if it covers this much.
SHARE = 0.12


@dataclass(frozen=True, slots=True)
class SceneFacts:
    """What can be said of a frame: `brightness` in [0, 1]; `colours`, the commonest first; `motion`: mean difference to the frame before, in [0, 1]."""

    brightness: float
    colours: tuple[str, ...]
    motion: float
    new_scene: bool

    @property
    def light(self) -> str:
        """In a word."""
        return "dark" if self.brightness < 0.25 else "bright" if self.brightness > 0.65 else "normally lit"

    @property
    def moves(self) -> str:
        """In a word."""
        return "much motion" if self.motion >= MUCH else "some motion" if self.motion >= SOME else "still"


def look(pixels: Pixels, before: np.ndarray | None) -> tuple[SceneFacts, np.ndarray]:
    """Of a frame and the thumbnail of the one before; and its own thumbnail."""
    now = thumbnail(pixels)
    shares = np.bincount(_named(now), minlength=len(NAMES)) / SIDE**2
    colours = tuple(NAMES[i] for i in np.argsort(-shares, kind="stable")[:3] if shares[i] >= SHARE)
    motion = float(np.abs(now - before).mean()) / 255 if before is not None else 0.0
    brightness = float((now @ np.array([0.299, 0.587, 0.114], np.float32)).mean()) / 255
    return SceneFacts(brightness, colours, motion, before is not None and motion >= SCENE), now


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
    out = np.full(len(flat), NAMES.index("grey"))
    for upto, name in reversed(HUES):
        out[degrees < upto] = NAMES.index(name)
    warm = (degrees >= 10) & (degrees < 45)
    out[warm & (high < 0.6)] = NAMES.index("brown")
    saturation = spread / np.where(high > 0, high, 1.0)
    out[(saturation < 0.45) & (high > 0.75) & ((degrees < 15) | (degrees >= 300))] = NAMES.index("pink")
    grey = saturation < GREY
    out[grey] = NAMES.index("grey")
    out[grey & (high > LIGHT)] = NAMES.index("white")
    out[high < DARK] = NAMES.index("black")
    return out
