"""Decodes images to pixels, with limits on size and memory. Independent of models, and does no I/O."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from antiphon.errors import MediaError

Pixels = npt.NDArray[np.uint8]
# A picture with more pixels is refused before it is decoded: 40 million pixels are 120 MB.
MAX_PIXELS = 40_000_000
# The limit for a video frame. It is lower, because many frames arrive. A frame of 3840 x 2160 fits.
MAX_FRAME_PIXELS = 8_300_000
# Limit of concurrent decodes in the process, which bounds their memory: decoding takes several times the size of the
# picture, which may be a thousand times the size of its file. Clients get their turn earlier, when their decode gets a
# place of IMAGE_THREADS (shares/threads.py).
MAX_CONCURRENT_DECODES = 2
_decode_slots = threading.BoundedSemaphore(MAX_CONCURRENT_DECODES)
# The longer side, in pixels, of the small picture for frame filters and scene facts.
OVERVIEW_SIDE = 256
# A picture that was decoded at full size is cached for `pixels` if its longer side has at most this number of pixels.
# It then takes up to 10 MB.
MAX_HELD_SIDE = 1600
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


def decode(data: bytes, max_side: int | None = None, max_pixels: int = MAX_PIXELS) -> Pixels:
    """Decode an image to its pixels: uint8 [height, width, 3], RGB, turned upright by its EXIF orientation.

    Returns the first picture of an animation. Transparent parts become white. Images of more than 8 bits per channel
    are scaled to 8 bits. With `max_side`, a larger image is scaled down so that its longer side fits, and a JPEG is
    decoded at a fraction of its size, which is much faster. Blocks while it decodes, and before that while
    MAX_CONCURRENT_DECODES others are decoded. Raises MediaError if the format is unknown, if the file is truncated, or
    if its header states more than `max_pixels` pixels.
    """
    with _decode_slots, _media_errors():
        upright, _ = _decoded(data, max_side, max_pixels)
        if max_side:
            upright.thumbnail((max_side, max_side))
        return _rgb(upright)


class EncodedImage:
    """An image file, which is decoded as rarely as possible.

    A frame is used twice: small, by the frame filter and the observer, and at full size, by an image reader or a vision
    model. `overview` decodes it. If that yields the full size, the picture is kept, and `pixels` returns it. A JPEG
    whose shorter side is at least twice OVERVIEW_SIDE is decoded at a fraction of its size instead. At 1280 x 720 this
    takes a quarter of the time, and if the filter drops the frame, there is no other cost. `pixels` then decodes the
    file again. It also does so for pictures over MAX_HELD_SIDE, and after `release`.

    `data` is the received file. An image of more than `max_pixels` is refused. Both methods that decode take 2 to
    100 ms of CPU time, and wait while MAX_CONCURRENT_DECODES others are decoded. Call them in a thread pool; they are
    thread-safe.
    """

    __slots__ = ("_held", "_max_pixels", "_overview", "data")

    def __init__(self, data: bytes, max_pixels: int = MAX_PIXELS) -> None:
        self.data = data
        self._max_pixels = max_pixels
        self._overview: Pixels | None = None
        self._held: Image.Image | None = None

    @property
    def num_bytes(self) -> int:
        """The current memory size: the file and the cached pictures."""
        held = self._held
        num_pixels = held.width * held.height if held else 0
        return len(self.data) + (0 if self._overview is None else self._overview.nbytes) + 3 * num_pixels

    def overview(self) -> Pixels:
        """Return the picture within OVERVIEW_SIDE: uint8 [height, width, 3], RGB, upright. Must not be modified.

        The result of the first call is cached, about 0.1 MB, until `release`. The whole file is read, so a truncated
        image is detected. Raises MediaError like `decode`.
        """
        found = self._overview
        if found is None:
            with _decode_slots, _media_errors():
                picture, is_full_size = _decoded(self.data, OVERVIEW_SIDE, self._max_pixels)
                if is_full_size and max(picture.size) <= MAX_HELD_SIDE:
                    self._held, picture = picture, picture.copy()
                picture.thumbnail((OVERVIEW_SIDE, OVERVIEW_SIDE))
                found = self._overview = _rgb(picture)
        return found

    def pixels(self, max_side: int) -> Pixels:
        """Return the same pixels as `decode`: a picture larger than `max_side` is scaled down.

        A picture that `overview` cached is returned only once and then dropped, because only one model reads a frame at
        full size. Raises MediaError like `decode`.
        """
        held, self._held = self._held, None
        if held is None or max(held.size) > max_side:
            return decode(self.data, max_side, self._max_pixels)
        return _rgb(held)

    def release(self) -> None:
        """Drop all cached pixels, and keep only the file. Called for a picture that waits, or is no longer needed."""
        self._overview = self._held = None


def _decoded(data: bytes, max_side: int | None, max_pixels: int) -> tuple[Image.Image, bool]:
    """Decode a file and turn it upright. Returns the picture, and whether it has its full size.

    A JPEG is reduced as far as its codec can do so at no cost, but not below `max_side`.
    """
    with warnings.catch_warnings():
        # Pillow warns about large images; the check below replaces its warning.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    width, height = image.size
    if width * height > max_pixels:
        raise MediaError(f"the image has {width} x {height} pixels, over {max_pixels / 1_000_000:g} million")
    if max_side and image.format == "JPEG":
        image.draft("RGB", (max_side, max_side))
    is_full_size = image.size == (width, height)
    # Load the image now, because otherwise it would be decoded later, at another size. Transpose it in place, because a
    # copy of a large picture takes another 160 MB.
    image.load()
    ImageOps.exif_transpose(image, in_place=True)
    return image, is_full_size


@contextmanager
def _media_errors() -> Iterator[None]:
    """Convert all errors of decoders to MediaError."""
    try:
        yield
    except MediaError:
        raise
    except UnidentifiedImageError:
        raise MediaError("the image has an unknown format, or is damaged") from None
    except Image.DecompressionBombError:
        raise MediaError(f"the image has over {MAX_PIXELS // 1_000_000} million pixels") from None
    except Exception as error:
        # Pillow's decoders raise many types: OSError, SyntaxError, struct.error, ValueError, EOFError ...
        raise MediaError(f"the image cannot be read: {str(error) or type(error).__name__}") from None


def _rgb(image: Image.Image) -> Pixels:
    if image.mode.startswith("I") or image.mode == "F":
        # 16 bits and more: Pillow would clip values over 255.
        values = np.asarray(image, np.float32)
        top = 65535.0 if values.max(initial=0) > 255 else 255.0
        grey = np.clip(values / top * 255, 0, 255).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        over = image.convert("RGBA")
        white = Image.new("RGBA", over.size, "white")
        image = Image.alpha_composite(white, over)
    return np.asarray(image.convert("RGB"), np.uint8)
