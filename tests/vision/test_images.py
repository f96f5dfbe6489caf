"""Images of all kinds, valid and damaged."""

from __future__ import annotations

import io
import threading
from typing import Any

import numpy as np
import pytest
from PIL import Image

from antiphon.errors import MediaError
from antiphon.vision.images import (
    MAX_CONCURRENT_DECODES,
    MAX_FRAME_PIXELS,
    MAX_HELD_SIDE,
    MAX_PIXELS,
    OVERVIEW_SIDE,
    EncodedImage,
    decode,
)


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
def test_when_an_image_is_of_any_kind_then_it_becomes_rgb(
    image: Image.Image, form: str, options: Any, at: tuple[int, int, int]
) -> None:
    pixels = decode(encoded(image, form, **options))
    assert pixels.dtype == np.uint8
    assert pixels.shape == (image.size[1], image.size[0], 3)
    assert np.abs(pixels[0, 0].astype(int) - at).max() <= 6


def test_when_a_photo_was_taken_sideways_then_it_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(encoded(RED, "JPEG", exif=exif)).shape == (40, 20, 3)


def test_when_an_image_is_larger_than_asked_for_then_it_is_scaled_down() -> None:
    assert decode(encoded(Image.new("RGB", (3000, 1000)), "JPEG"), max_side=600).shape == (200, 600, 3)


def test_when_an_image_is_too_large_then_it_is_refused_by_its_header() -> None:
    # A bomb: 50 million pixels in 50 kB.
    with pytest.raises(MediaError, match="pixels"):
        decode(encoded(Image.new("1", (10_000, MAX_PIXELS // 10_000 + 1000))))
    with pytest.raises(MediaError, match="pixels"):
        decode(encoded(Image.new("1", (20_000, 20_000))))


def test_when_a_frame_of_video_is_larger_than_4k_then_it_is_refused_by_its_header() -> None:
    data = encoded(Image.new("1", (4000, MAX_FRAME_PIXELS // 4000 + 1)))
    assert len(decode(data, 100)) > 0
    for read in (EncodedImage(data, MAX_FRAME_PIXELS).overview, lambda: decode(data, 100, MAX_FRAME_PIXELS)):
        with pytest.raises(MediaError, match=r"over 8\.3 million"):
            read()
    with pytest.raises(MediaError, match=r"over 8\.3 million"):
        EncodedImage(data, MAX_FRAME_PIXELS).pixels(100)
    assert EncodedImage(encoded(Image.new("1", (3840, 2160))), MAX_FRAME_PIXELS).overview().shape == (144, 256, 3)


def test_when_many_images_come_at_once_then_two_are_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, release, real, data = threading.Semaphore(0), threading.Event(), Image.open, encoded(RED)

    def held(*args: Any, **options: Any) -> Any:
        entered.release()
        assert release.wait(10)
        return real(*args, **options)

    monkeypatch.setattr(Image, "open", held)
    shapes: list[tuple[int, ...]] = []
    reads = (lambda: decode(data), EncodedImage(data).overview, lambda: EncodedImage(data).pixels(1600))
    threads = [threading.Thread(target=lambda read=read: shapes.append(read().shape)) for read in (*reads, *reads)]
    for thread in threads:
        thread.start()
    for _ in range(MAX_CONCURRENT_DECODES):
        assert entered.acquire(timeout=10)
    assert not entered.acquire(timeout=0.2)
    release.set()
    for thread in threads:
        thread.join(10)
    assert shapes == [(20, 40, 3)] * 6


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_when_an_image_is_cut_off_or_damaged_then_it_is_refused(form: str) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (80, 80, 3), np.uint8))
    data = encoded(noise, form)
    for broken in (b"", b"GIF89a", b"no image", data[:20], data[: len(data) // 2]):
        with pytest.raises(MediaError):
            decode(broken)


# --- EncodedImage -----------------------------------------------------------------------------------------------------


def gradient(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Return a picture without two equal parts."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    pixels = np.stack((x, y, (x + y) % 256, 255 - x / 2), axis=-1).astype(np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode)


SIDEWAYS = Image.Exif()
SIDEWAYS[0x0112] = 6
FILES = {
    "jpeg": encoded(gradient(640, 360), "JPEG"),
    "sideways jpeg": encoded(gradient(640, 360), "JPEG", exif=SIDEWAYS),
    "grey jpeg": encoded(gradient(300, 200, "L"), "JPEG"),
    "png": encoded(gradient(640, 360)),
    "transparent png": encoded(gradient(640, 360, "RGBA")),
    "palette gif": encoded(gradient(640, 360, "P"), "GIF"),
    "small png": encoded(RED),
}
LARGE_JPEG = encoded(gradient(1280, 720), "JPEG")
LARGE_PNG = encoded(gradient(MAX_HELD_SIDE + 1, 200))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that grows by one with each file that Pillow opens, and so with each decode."""
    count: list[None] = []
    real = Image.open

    def counted(*args: Any, **options: Any) -> Any:
        count.append(None)
        return real(*args, **options)

    monkeypatch.setattr(Image, "open", counted)
    return count


@pytest.mark.parametrize("data", [*FILES.values(), LARGE_JPEG, LARGE_PNG], ids=[*FILES, "large jpeg", "large png"])
def test_both_sizes_have_the_pixels_that_decode_returns(data: bytes) -> None:
    image = EncodedImage(data)
    assert np.array_equal(image.overview(), decode(data, OVERVIEW_SIDE))
    for _ in range(2):
        assert np.array_equal(image.pixels(1600), decode(data, 1600))
    assert np.array_equal(EncodedImage(data).pixels(100), decode(data, 100))


@pytest.mark.parametrize("data", FILES.values(), ids=FILES)
def test_a_picture_that_is_read_in_both_sizes_is_decoded_once(data: bytes, opened: list[None]) -> None:
    image = EncodedImage(data)
    image.overview()
    image.overview()
    image.pixels(1600)
    assert len(opened) == 1


@pytest.mark.parametrize("data", [LARGE_JPEG, LARGE_PNG])
def test_a_picture_whose_full_size_is_not_held_is_decoded_once_for_each_size(data: bytes, opened: list[None]) -> None:
    image = EncodedImage(data)
    image.overview()
    image.overview()
    assert len(opened) == 1
    image.pixels(1600)
    assert len(opened) == 2


def test_after_release_a_picture_is_decoded_anew(opened: list[None]) -> None:
    image = EncodedImage(FILES["jpeg"])
    small = image.overview()
    image.release()
    assert np.array_equal(image.overview(), small)
    image.release()
    assert image.pixels(1600).shape == (360, 640, 3)
    assert len(opened) == 3


@pytest.mark.parametrize("data", [FILES["jpeg"], LARGE_JPEG, FILES["png"]])
def test_the_overview_tells_that_a_file_is_cut_off(data: bytes) -> None:
    with pytest.raises(MediaError):
        EncodedImage(data[: len(data) * 3 // 4]).overview()
