"""The real reader on a picture made here."""

from __future__ import annotations

import anyio
import pytest
from PIL import Image, ImageDraw, ImageFont

from antiphon.adapters.rapid_ocr.reader import RapidOcr
from antiphon.errors import MediaError
from tests.vision.test_images import RED, encoded


def page(*lines: str) -> bytes:
    """Black lines of text on white, as a PNG."""
    image = Image.new("RGB", (640, 60 + 60 * len(lines)), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(32)
    for at, line in enumerate(lines):
        draw.text((30, 30 + 60 * at), line, fill="black", font=font)
    return encoded(image)


def test_it_reads_lines_from_the_top() -> None:
    async def read() -> None:
        reader = RapidOcr()
        try:
            assert await reader.read(page("Platform 9 at 10:45", "Total: 42 EUR")) == (
                "Platform 9 at 10:45",
                "Total: 42 EUR",
            )
            assert await reader.read(encoded(RED)) == ()
            with pytest.raises(MediaError):
                await reader.read(b"no image")
        finally:
            reader.lane.close()

    anyio.run(read)
