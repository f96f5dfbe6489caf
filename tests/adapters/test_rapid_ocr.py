"""RapidOCR's models on generated pictures."""

from __future__ import annotations

import anyio
import pytest
from PIL import Image, ImageDraw, ImageFont

from antiphon.adapters.rapid_ocr.reader import RapidOcr
from antiphon.adapters.spec import LaneModelOptions
from antiphon.errors import MediaError
from antiphon.vision.images import EncodedImage
from tests.vision.test_images import RED, encoded


def page(*lines: str) -> bytes:
    """Return a PNG with black lines of text on white."""
    image = Image.new("RGB", (640, 60 + 60 * len(lines)), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(32)
    for at, line in enumerate(lines):
        draw.text((30, 30 + 60 * at), line, fill="black", font=font)
    return encoded(image)


@pytest.mark.slow
def test_lines_are_read_from_the_top_and_a_wrong_image_is_refused() -> None:
    async def read() -> None:
        reader = RapidOcr(LaneModelOptions())
        try:
            signs = EncodedImage(page("Platform 9 at 10:45", "Total: 42 EUR"))
            assert await reader.read(signs) == ("Platform 9 at 10:45", "Total: 42 EUR")
            assert await reader.read(EncodedImage(encoded(RED))) == ()
            with pytest.raises(MediaError):
                await reader.read(EncodedImage(b"no image"))
        finally:
            reader.lane.close()

    anyio.run(read)
