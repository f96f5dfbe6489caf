"""Encoded images to pixels, within bounds. Knows no model, and fetches nothing."""

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
# A picture of more is refused before it is decoded: 40 million pixels are 120 MB.
MAX_PIXELS = 40_000_000
# The same for a frame of video, of which many arrive: 3840 x 2160 is one.
MAX_FRAME_PIXELS = 8_300_000
# Pictures that are decoded at the same time in the whole process. A picture takes several times its size meanwhile, and
# its file may be a thousand times smaller than that, so it is this that bounds the memory. Whose turn it is, is decided
# before: what decodes for a client holds a place of IMAGE_THREADS (shares/threads.py).
MAX_CONCURRENT_DECODES = 2
_decode_slots = threading.BoundedSemaphore(MAX_CONCURRENT_DECODES)
# The longer side, in pixels, of the small picture that frame filters and scene facts are computed from.
OVERVIEW_SIDE = 256
# A picture decoded at full size is held for its next reader where its longer side has at most this: 10 MB.
MAX_HELD_SIDE = 1600
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


def decode(data: bytes, max_side: int | None = None, max_pixels: int = MAX_PIXELS) -> Pixels:
    """Decode an image to its pixels: uint8 [height, width, 3], RGB, turned upright by its EXIF orientation.

    Of an animation the first picture is taken. Transparent parts become white; images of more than 8 bits a channel are
    scaled to 8. With `max_side`, a larger image is scaled down so that its longer side fits, and a JPEG is decoded at a
    fraction of its size, which is much faster. Blocks for as long as the decoding takes, and while
    MAX_CONCURRENT_DECODES others are decoded. Raises MediaError for what is no image of a known format, is cut off, or
    has more than `max_pixels` by its header, before it is decoded.
    """
    with _decode_slots, _media_errors():
        upright, _ = _decoded(data, max_side, max_pixels)
        if max_side:
            upright.thumbnail((max_side, max_side))
        return _rgb(upright)


class EncodedImage:
    """An image file, decoded no more often than its readers need.

    A frame is wanted twice: small, by the frame filter and the observer, and at full size, by a reader of text or a
    model that sees. `overview` decodes it. Where that yields the full size, the picture is held and `pixels` hands it
    out. A JPEG whose shorter side is at least twice OVERVIEW_SIDE is decoded at a fraction of its size instead, which
    takes a quarter of the time at 1280 x 720 and is all that a frame costs that the filter drops; `pixels` then decodes
    it anew, as it does for pictures over MAX_HELD_SIDE and after `release`.

    `data` is the file as it was received; one of more than `max_pixels` is refused. Both methods that decode take 2 to
    100 ms of CPU, wait while MAX_CONCURRENT_DECODES others are decoded, and belong in a thread; they may be called from
    several threads.
    """

    __slots__ = ("_held", "_max_pixels", "_overview", "data")

    def __init__(self, data: bytes, max_pixels: int = MAX_PIXELS) -> None:
        self.data = data
        self._max_pixels = max_pixels
        self._overview: Pixels | None = None
        self._held: Image.Image | None = None

    @property
    def num_bytes(self) -> int:
        """The memory that it takes now: the file, and what of its picture is held."""
        held = self._held
        num_pixels = held.width * held.height if held else 0
        return len(self.data) + (0 if self._overview is None else self._overview.nbytes) + 3 * num_pixels

    def overview(self) -> Pixels:
        """Return the picture within OVERVIEW_SIDE: uint8 [height, width, 3], RGB, upright. Must not be written to.

        The first call decodes and is kept, about 0.1 MB, until `release`. The whole file is read, so it also tells
        whether the image is complete. Raises MediaError as `decode` does.
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
        """Return the picture, scaled down to `max_side` where it is larger: the same pixels that `decode` returns.

        A picture that `overview` left behind is handed out once: one model reads a frame at full size, so nothing of
        that size is kept afterwards. Raises MediaError as `decode` does.
        """
        held, self._held = self._held, None
        if held is None or max(held.size) > max_side:
            return decode(self.data, max_side, self._max_pixels)
        return _rgb(held)

    def release(self) -> None:
        """Drop all pixels and keep the file alone: for a picture that waits, or is done with."""
        self._overview = self._held = None


def _decoded(data: bytes, max_side: int | None, max_pixels: int) -> tuple[Image.Image, bool]:
    """Decode a file and turn it upright. Returns the picture, and whether it has its full size.

    A JPEG comes as small as its codec can make it for nothing, and no smaller than `max_side`.
    """
    with warnings.catch_warnings():
        # Pillow warns of what is too large; the check below is ours.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    width, height = image.size
    if width * height > max_pixels:
        raise MediaError(f"the image has {width} x {height} pixels, over {max_pixels / 1_000_000:g} million")
    if max_side and image.format == "JPEG":
        image.draft("RGB", (max_side, max_side))
    is_full_size = image.size == (width, height)
    # Decoded first, as a file that is still open would be decoded at another size later; in place, as a copy of a large
    # picture is another 160 MB.
    image.load()
    ImageOps.exif_transpose(image, in_place=True)
    return image, is_full_size


@contextmanager
def _media_errors() -> Iterator[None]:
    """Turn whatever a decoder raises into MediaError."""
    try:
        yield
    except MediaError:
        raise
    except UnidentifiedImageError:
        raise MediaError("the image is of no format that is known here, or broken") from None
    except Image.DecompressionBombError:
        raise MediaError(f"the image has over {MAX_PIXELS // 1_000_000} million pixels") from None
    except Exception as error:
        # Pillow's decoders raise whatever they meet: OSError, SyntaxError, struct.error, ValueError, EOFError ...
        raise MediaError(f"the image cannot be read: {str(error) or type(error).__name__}") from None


def _rgb(image: Image.Image) -> Pixels:
    if image.mode.startswith("I") or image.mode == "F":
        # 16 bit and more: Pillow would clip what is over 255.
        values = np.asarray(image, np.float32)
        top = 65535.0 if values.max(initial=0) > 255 else 255.0
        grey = np.clip(values / top * 255, 0, 255).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        over = image.convert("RGBA")
        white = Image.new("RGBA", over.size, "white")
        image = Image.alpha_composite(white, over)
    return np.asarray(image.convert("RGB"), np.uint8)
