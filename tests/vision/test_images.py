"""Images of all kinds, whole and broken."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from antiphon.errors import MediaError
from antiphon.vision.images import MAX_PIXELS, decode


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


RED = Image.new("RGB", (40, 20), (200, 0, 0))


@pytest.mark.parametrize(
    ("image", "form", "options", "at"),
    [
        (RED, "PNG", {}, (200, 0, 0)),
        (RED, "JPEG", {"quality": 95}, (200, 0, 0)),
        (RED, "WEBP", {"lossless": True}, (200, 0, 0)),
        (Image.new("CMYK", (40, 20), (0, 255, 255, 0)), "JPEG", {"quality": 95}, (255, 0, 0)),
        (Image.new("LA", (40, 20), (0, 0)), "PNG", {}, (255, 255, 255)),
        (Image.new("RGBA", (40, 20), (0, 0, 0, 0)), "PNG", {}, (255, 255, 255)),
        (Image.new("RGBA", (40, 20), (0, 0, 255, 255)), "PNG", {}, (0, 0, 255)),
        (RED.convert("P"), "GIF", {"save_all": True, "append_images": [Image.new("P", (40, 20))]}, (200, 0, 0)),
        (Image.fromarray(np.full((20, 40), 65535, np.uint16)), "PNG", {}, (255, 255, 255)),
        (Image.fromarray(np.full((20, 40), 32768, np.uint16)), "PNG", {}, (127, 127, 127)),
        (Image.new("1", (40, 20), 1), "PNG", {}, (255, 255, 255)),
        (Image.new("L", (1, 1), 9), "BMP", {}, (9, 9, 9)),
    ],
)
def test_every_kind_becomes_rgb(image: Image.Image, form: str, options: Any, at: tuple[int, int, int]) -> None:
    pixels = decode(encoded(image, form, **options))
    assert pixels.dtype == np.uint8
    assert pixels.shape == (image.size[1], image.size[0], 3)
    assert np.abs(pixels[0, 0].astype(int) - at).max() <= 6


def test_a_photo_taken_sideways_is_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(encoded(RED, "JPEG", exif=exif)).shape == (40, 20, 3)


def test_large_pictures_come_scaled_down() -> None:
    assert decode(encoded(Image.new("RGB", (3000, 1000)), "JPEG"), max_side=600).shape == (200, 600, 3)


def test_what_is_too_large_is_refused_by_its_header() -> None:
    # A bomb: 50 million pixels in 50 kB.
    with pytest.raises(MediaError, match="pixels"):
        decode(encoded(Image.new("1", (10_000, MAX_PIXELS // 10_000 + 1000))))
    with pytest.raises(MediaError, match="pixels"):
        decode(encoded(Image.new("1", (20_000, 20_000))))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_what_is_cut_off_or_damaged_is_refused(form: str) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (80, 80, 3), np.uint8))
    data = encoded(noise, form)
    for broken in (b"", b"GIF89a", b"no image", data[:20], data[: len(data) // 2]):
        with pytest.raises(MediaError):
            decode(broken)
