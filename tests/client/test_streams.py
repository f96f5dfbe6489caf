"""Captions, speech and video of our own client with real servers. Broken connections lose nothing."""

from __future__ import annotations

import asyncio
import io
import threading
import wave
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
import soxr
from PIL import Image

from antiphon.audio import Pcm
from antiphon.audio.pcm import to_pcm16
from antiphon.client import Client, SessionEnded, SyncClient
from tests.conftest import Process, Recording
from tests.scripted import speech, text
from tests.server.scripted import serving

LIMIT_S = 60
SENTENCES = ("The first sentence is short. ", "The second one is a little longer than that. ", "The third ends it.")


@pytest.fixture(scope="module")
def scripted() -> Iterator[str]:
    with serving() as (url, _, _):
        yield url.replace("ws", "http", 1)


def pieces(pcm: Pcm, size: int) -> list[Pcm]:
    return [pcm[at : at + size] for at in range(0, len(pcm), size)]


def test_captions_are_whole_and_come_once_for_each_transcript(scripted: str) -> None:
    async def main() -> list[tuple[list[str], str]]:
        found = []
        async with Client(scripted) as client, client.captions() as captions:
            for first in (1, 40):
                captions.feed(pieces(speech(first, 12, silence_frames=40), 1600))
                words = [w async for w in captions]
                found.append((words, captions.text))
        return found

    one, two = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert "".join(one[0]).split() == one[1].split() == text(1, 12).split()
    assert "".join(two[0]).split() == two[1].split() == text(40, 12).split()


def test_captions_outlive_a_cut_at_any_piece(scripted: str) -> None:
    async def main() -> list[str]:
        sound = pieces(speech(1, 10, silence_frames=30), 3200)
        texts = []
        async with Client(scripted) as client:
            for at in range(len(sound)):
                async with client.captions() as captions:
                    for number, piece in enumerate(sound):
                        if number == at:
                            assert await captions.link.cut()
                        await captions.send(piece)
                    await captions.finish()
                    texts.append("".join([w async for w in captions]))
        return texts

    assert {" ".join(t.split()) for t in asyncio.run(asyncio.wait_for(main(), LIMIT_S))} == {text(1, 10)}


def test_sound_of_another_rate_is_transcribed(server: Process, recordings: dict[str, Recording]) -> None:
    given = recordings["lj-LJ001-0008"].pcm
    sound = np.asarray(soxr.resample(given, 16_000, 44_100), np.float32)
    heard = []
    with SyncClient(server.url) as client:
        for rate_hz, pcm in ((16_000, given), (44_100, sound)):
            with client.captions(rate_hz=rate_hz, language="en") as captions:
                captions.feed(to_pcm16(p) for p in pieces(pcm, rate_hz // 5))
                heard.append("".join(captions).split())
        with io.BytesIO() as file:
            with wave.open(file, "wb") as wav:
                wav.setparams((1, 2, 16_000, 0, "NONE", ""))
                wav.writeframes(to_pcm16(given))
            whole = client.transcribe(file.getvalue()).split()
    assert len(heard[0]) >= 4
    for words in (heard[1], whole):
        assert len(set(words) & set(heard[0])) >= 0.7 * len(set(heard[0]))


def test_when_feeding_fails_then_the_iteration_says_so(scripted: str) -> None:
    async def broken() -> AsyncIterator[Pcm]:
        yield speech(1, 3)
        raise OSError("the microphone is gone")

    async def main() -> None:
        async with Client(scripted) as client, client.captions() as captions:
            captions.feed(broken())
            async for _ in captions:
                pass

    with pytest.raises(OSError, match="microphone is gone"):
        asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_speech_is_the_same_with_and_without_cuts(speaker: Process) -> None:
    async def spoken(*, cuts: bool) -> tuple[bytes, set[str]]:
        pcm, sentences = b"", set()
        async with Client(speaker.url) as client, client.speech(config={"seed": 1}) as narrator:
            for sentence in SENTENCES:
                await narrator.say(sentence)
                if cuts:
                    await narrator.link.cut()
            await narrator.finish()
            number = 0
            async for part in narrator:
                pcm += part.pcm
                sentences.add(part.text)
                number += 1
                if cuts and number % 3 == 0:
                    await narrator.link.cut()
            assert part.rate_hz == 24_000
            assert bool(narrator.link.num_resumed) == cuts
        return pcm, sentences

    whole, sentences = asyncio.run(asyncio.wait_for(spoken(cuts=False), LIMIT_S))
    assert len(sentences) == 3
    assert len(whole) > 2 * 24_000 * 3
    assert asyncio.run(asyncio.wait_for(spoken(cuts=True), LIMIT_S)) == (whole, sentences)


def test_what_a_speech_stream_refuses_is_raised(speaker: Process) -> None:
    with SyncClient(speaker.url) as client:
        with client.speech(voice="nobody") as narrator, pytest.raises(SessionEnded, match="nobody"):
            narrator.say("Hello.")
            narrator.finish()
            list(narrator)
        with pytest.raises(SessionEnded, match="voice_not_found"):
            client.speak("Hello.", voice="nobody")
        assert client.speak("Hello.")[:4] == b"RIFF"


def test_a_picture_is_asked_about_also_after_a_cut(talker: Process) -> None:
    with io.BytesIO() as file:
        Image.new("RGB", (320, 240), (250, 250, 250)).save(file, "JPEG")
        picture = file.getvalue()

    async def main() -> tuple[str, str]:
        async with Client(talker.url) as client, client.video() as camera:
            await camera.show(picture)
            first = await camera.ask("Is the picture bright or dark?")
            assert await camera.link.cut()
            await camera.show(picture)
            return first, await camera.ask("What is written on it?")

    first, second = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert first.strip()
    assert second.strip()


@pytest.mark.timeout(120)
def test_an_answer_is_that_to_its_question_whatever_came_before(talker: Process) -> None:
    with io.BytesIO() as file:
        Image.new("RGB", (320, 240), (250, 250, 250)).save(file, "JPEG")
        picture = file.getvalue()
    with SyncClient(talker.url) as client, client.video() as camera:
        camera.show(b"no picture")
        with pytest.raises(SessionEnded, match="frames"):
            camera.ask("Is the picture bright?")
        camera.show(picture)
        reported = camera.ask("Is the picture bright?")
        for _ in camera.stream("Is the picture bright?"):
            break
        camera.show(b"no picture")
        assert reported.strip()
        # The rest of the abandoned answer does not become part of the next one.
        words = list(camera.stream("Is the picture bright?"))
        # The next answer may have other words, but begins like the first one.
        assert words[0].split()[:1] == reported.split()[:1]
        assert camera.ask("Is the picture bright?").strip()


def test_a_sentence_that_cannot_be_spoken_is_raised_behind_the_others(speaker: Process) -> None:
    with SyncClient(speaker.url) as client, client.speech() as narrator:
        sounds = list[str]()
        narrator.say("One. Привет мир. Two.")
        narrator.finish()
        with pytest.raises(SessionEnded, match="Generation failed"):
            for sound in narrator:
                sounds.append(sound.text.strip())
        assert {"One.", "Two."} <= set(sounds)
        narrator.say("Three.")
        narrator.finish()
        assert {sound.text.strip() for sound in narrator} == {"Three."}


def test_a_generator_that_waits_does_not_hold_up_the_event_loop(scripted: str) -> None:
    sent, gate = list[int](), threading.Event()

    def sounds() -> Iterator[Pcm]:
        yield speech(1, 5)
        # The first piece is transcribed while the client waits for the second one.
        assert gate.wait(LIMIT_S)
        yield speech(6, 5, silence_frames=30)

    async def main() -> str:
        async with Client(scripted) as client, client.captions() as captions:
            captions.feed(sounds())
            with pytest.raises(RuntimeError, match="still running"):
                captions.feed([])
            async for _ in captions:
                sent.append(1)
                gate.set()
            return captions.text

    assert " ".join(asyncio.run(asyncio.wait_for(main(), LIMIT_S)).split()) == text(1, 10)
    assert sent


def test_a_session_that_nobody_can_serve_says_why(server: Process) -> None:
    async def main() -> None:
        async with Client(server.url) as client, client.speech():
            pass

    with pytest.raises(SessionEnded) as refused:
        asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert refused.value.code == "model_not_found"
