"""Images and audio in the items that a client creates, for models that read, see or hear."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from antiphon.contracts import (
    AudioPart,
)
from antiphon.errors import MediaError
from antiphon.events.conversation import (
    CommandRejected,
    ContentPart,
    CreateItem,
    CreateResponse,
    Item,
    ResponseDone,
)
from antiphon.vision.images import EncodedImage
from tests.scripted import ScriptedTranscriber, heard, speech
from tests.sessions.conversation.scripted import Scene, play, shown


class Reader:
    """Reads when the test allows it; fails on data that is not an image."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def read(self, image: EncodedImage) -> tuple[str, ...]:
        await self.go.wait()
        if image.data != b"abc":
            raise MediaError("the image cannot be read")
        return ("Gate 7", "11:20")


def test_when_an_image_is_still_being_read_then_the_response_waits() -> None:
    async def main() -> None:
        reader = Reader()
        async with Scene(audio_output=False, reader=reader) as scene:
            scene.model.go.set()
            await scene.session.handle(shown("a", "YWJj"))
            await scene.session.handle(CreateResponse())
            await scene.settle()
            assert not scene.model.asked
            reader.go.set()
            await scene.settle()
            assert "Gate 7\n11:20" in scene.model.asked[0][0].text
            assert scene.model.asked[0][0].text.startswith("When?")
            assert not [o for o in scene.out if isinstance(o, CommandRejected)]

    play(main())


def test_when_an_image_cannot_be_read_then_the_client_is_told_and_the_response_follows() -> None:
    async def main() -> None:
        reader = Reader()
        async with Scene(audio_output=False, reader=reader) as scene:
            reader.go.set()
            scene.model.go.set()
            # The same for an out-of-band response.
            await scene.session.handle(CreateResponse(stored=False, items=(shown("b", "AAAA").item,)))
            await scene.settle()
            assert "could not be read" in scene.model.asked[0][0].text
            await scene.session.handle(shown("a", "AAAA"))
            await scene.settle()
            reported = [o for o in scene.out if isinstance(o, CommandRejected)]
            assert [(o.code, o.event_id) for o in reported] == [("invalid_image", None), ("invalid_image", "mine")]

    play(main())


def test_when_a_model_that_sees_is_shown_no_image_then_client_and_model_are_told() -> None:
    async def main() -> Scene:
        async with Scene(audio_output=False, accepts_media=True) as scene:
            scene.model.go.set()
            await scene.session.handle(shown("a", "YWJj"))
            await scene.session.handle(CreateResponse())
            await scene.until(ResponseDone)
        return scene

    scene = play(main())
    assert [o.code for o in scene.out if isinstance(o, CommandRejected)] == ["invalid_image"]
    assert scene.model.asked[0][0].parts == ()
    assert "could not be read" in scene.model.asked[0][0].text


def test_when_the_images_of_a_conversation_exceed_the_limit_then_the_item_is_rejected() -> None:
    async def main() -> list[str]:
        async with Scene(audio_output=False) as scene:
            for name in "abc":
                await scene.session.handle(shown(name, "A" * (25 << 20)))
            return [o.code for o in scene.out if isinstance(o, CommandRejected)]

    assert play(main()) == ["image_limit_exceeded"]


@pytest.mark.parametrize("accepts_media", [False, True])
def test_when_an_item_has_audio_then_the_model_hears_it_or_reads_its_transcript(accepts_media: bool) -> None:
    async def main() -> Scene:
        async with Scene(
            audio_output=False, accepts_media=accepts_media, transcriber=ScriptedTranscriber(fail=99)
        ) as scene:
            scene.model.go.set()
            for name, first, known in (("a", 1, ""), ("b", 5, "As the client knows."), ("c", 99, "")):
                part = ContentPart("input_audio", known, media=AudioPart(speech(first, 2)))
                await scene.session.handle(CreateItem(Item(name, parts=[part])))
            if not accepts_media:
                silence = ContentPart("input_audio", media=AudioPart(np.zeros(1600, np.float32)))
                await scene.session.handle(CreateItem(Item("d", parts=[silence])))
            await scene.session.handle(CreateResponse())
            await scene.settle()
        return scene

    scene = play(main())
    (asked,) = scene.model.asked
    if accepts_media:
        sounds = [part for m in asked for part in m.parts]
        assert [[n for n, *_ in heard(s.pcm)] for s in sounds if isinstance(s, AudioPart)] == [
            [1, 2],
            [5, 6],
            [99, 100],
        ]
        assert not [o for o in scene.out if isinstance(o, CommandRejected)]
    else:
        said = ["w1 w2", "As the client knows.", "[Sound that could not be heard.]", "[Sound without words.]"]
        assert [(m.text, m.parts) for m in asked] == [(text, ()) for text in said]
        assert [o.code for o in scene.out if isinstance(o, CommandRejected)] == ["invalid_audio"]
