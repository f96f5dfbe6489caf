"""Encoded images to pixels, within bounds. Knows no model, and fetches nothing."""

from __future__ import annotations

import io
import warnings

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from antiphon.errors import MediaError

Pixels = npt.NDArray[np.uint8]
# A picture of more is refused before it is decoded: 40 million pixels are 120 MB.
MAX_PIXELS = 40_000_000
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


def decode(data: bytes, max_side: int | None = None) -> Pixels:
    """Pixels of an encoded image: uint8 [height, width, 3], RGB, upright; of an animation the first picture.

    What is transparent is white. `max_side`: larger pictures come scaled down to it. Raises MediaError for what is no image, is cut off or
    has over MAX_PIXELS.
    """
    try:
        with warnings.catch_warnings():
            # Pillow warns of what is too large; the check below is ours.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise MediaError(f"the image has {width} x {height} pixels, over {MAX_PIXELS // 1_000_000} million")
        if max_side and image.format == "JPEG":
            # As small as the codec can make it for nothing.
            image.draft("RGB", (max_side, max_side))
        upright = ImageOps.exif_transpose(image)
        if max_side:
            upright.thumbnail((max_side, max_side))
        return _rgb(upright)
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
