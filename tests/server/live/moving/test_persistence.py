"""The parts of a conversation's items that are stored."""

from __future__ import annotations

import numpy as np

from antiphon.contracts import AudioPart, ImagePart
from antiphon.events.conversation import ContentPart, Item
from antiphon.server.live.moving.persistence import without_media
from antiphon.sessions.conversation.history import IMAGE_GONE
from antiphon.vision.images import EncodedImage


def test_when_an_item_is_stored_then_its_images_and_audio_become_text() -> None:
    seen = ContentPart("input_image", image="data:image/png;base64,AA", media=ImagePart(EncodedImage(b"image")))
    read = ContentPart("input_image", "[An image. The text on it: Gate 7]", "data:image/png;base64,AA")
    said = ContentPart("input_audio", "Hello.", media=AudioPart(np.zeros(3, np.float32)))
    kept = without_media(Item("mine", parts=[seen, read, said, ContentPart("input_text", "And?")]))
    assert [p.text for p in kept.parts] == [IMAGE_GONE, read.text, "Hello.", "And?"]
    assert not any(p.image or p.media for p in kept.parts)
    # The conversation's own item is unchanged.
    assert seen.image
    assert seen.media
    assert seen.text == ""
