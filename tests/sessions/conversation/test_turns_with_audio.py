"""The turns and items that a model gets which takes audio and images."""

from __future__ import annotations

import base64
import io

import anyio
import numpy as np
import pytest
from PIL import Image

from antiphon.contracts import (
    AudioPart,
    ImagePart,
    Window,
)
from antiphon.events.conversation import (
    CreateResponse,
    ResponseDone,
)
from antiphon.events.transcription import (
    AppendAudio,
    CommitAudio,
    ServerVad,
    TranscriptFailed,
    TurnCleared,
    TurnCommitted,
)
from tests.scripted import ScriptedTranscriber, heard, speech, text
from tests.sessions.conversation.scripted import Scene, play, shown


def test_when_the_model_accepts_media_then_it_is_given_the_audio_and_the_image() -> None:
    async def main() -> None:
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, "PNG")
        async with Scene(audio_output=False, accepts_media=True, false_start_ms=0) as scene:
            scene.model.go.set()
            await scene.session.handle(shown("a", base64.b64encode(file.getvalue()).decode()))
            await scene.append(np.zeros(3_200, np.float32))
            await scene.say("Hello.")
            # The image is decoded in a thread, and the response waits for it.
            await scene.until(ResponseDone)
            shows, says = scene.model.asked[0]
            assert [type(p) for p in shows.parts] == [str, ImagePart]
            assert isinstance(shows.parts[1], ImagePart)
            assert shows.parts[1].image.data == file.getvalue()
            # The turn lasted from 0 to 100 ms, and 100 ms more are included. Its transcript is for text models.
            (sound,) = says.parts
            assert isinstance(sound, AudioPart)
            assert (len(sound.pcm), says.text) == (3_200, "Hello.")
            await scene.say("Again.")
            assert scene.model.asked[1][1] is not says
            assert scene.model.asked[1][1] == says

    play(main())


def test_when_the_pause_ends_the_turn_then_the_preemptive_response_has_heard_its_audio() -> None:
    async def main() -> Scene:
        async with Scene(accepts_media=True) as scene:
            await scene.start_turn()
            await scene.append(np.zeros(3_200, np.float32))
            await scene.pause("Hello.")
            scene.model.go.set()
            await scene.transcribe(await scene.end_turn(), "Hello.")
            await scene.settle()
        return scene

    scene = play(main())
    assert len(scene.model.asked) == 1
    (sound,) = scene.model.asked[0][0].parts
    assert isinstance(sound, AudioPart)
    assert len(sound.pcm) == 3_200
    assert scene.responses() == ["completed"]


@pytest.mark.parametrize("vad", [ServerVad(0.5, 96, 192), ServerVad(0.5, 96, 640), None])
@pytest.mark.parametrize("chunk", [512, 4_000, 16_000])
@pytest.mark.parametrize("slow", [False, True])
def test_when_a_turn_is_answered_then_the_model_hears_its_words_and_no_others(
    vad: ServerVad | None, chunk: int, slow: bool
) -> None:
    """With a real listener, whose guesses arrive before or after a turn's end: no extra words, and none missing."""
    turns = [(1, 3), (11, 4), (21, 2)]
    gates: list[anyio.Event] = []

    def gate(_: Window) -> object:
        # A decode that takes until some more audio has arrived.
        if slow:
            gates.append(anyio.Event())
            return gates[-1]
        return None

    async def main() -> Scene:
        async with Scene(
            accepts_media=True, vad=vad, transcriber=ScriptedTranscriber(gate=gate), false_start_ms=0
        ) as scene:
            scene.model.go.set()
            for first, count in turns:
                # A breath inside the turn, shorter than what ends it.
                head, tail = speech(first, count - 1, 4), speech(first + count - 1, 1, 40)
                pcm = np.concatenate((head, tail))
                for at in range(0, len(pcm), chunk):
                    await scene.inbox.put(AppendAudio(pcm[at : at + chunk]))
                    await scene.settle()
                    for event in gates[:-1]:
                        event.set()
                if vad is None:
                    await scene.inbox.put(CommitAudio(final=True))
                    await scene.inbox.put(CreateResponse())
                for _ in range(20):
                    for event in gates:
                        event.set()
                    await scene.settle()
        return scene

    scene = play(main())
    assert scene.num_created == len(turns)
    answered = [asked for asked in scene.model.asked if asked[-1].role == "user"]
    last = {asked[-1].text: asked[-1] for asked in answered}
    for first, count in turns:
        (part,) = last[text(first, count)].parts
        assert isinstance(part, AudioPart)
        assert [word for word, a, b in heard(part.pcm) if b - a > 500] == list(range(first, first + count))
    if vad and not slow and chunk == 512:
        # The response begun at the pause was the answer, requested once. The one begun during the breath was not.
        asked = [messages[-1].text for messages in scene.model.asked]
        assert asked == [text(*part) for a, n in turns for part in ((a, n - 1), (a, n))]
    assert scene.session.progress.unread_items == []


def test_when_a_turn_has_no_words_then_the_model_is_not_given_its_audio() -> None:
    async def main() -> Scene:
        async with Scene(accepts_media=True) as scene:
            scene.model.go.set()
            await scene.append(np.zeros(3_200, np.float32))
            await scene.say("  ")
            await scene.say("Hello.")
        return scene

    scene = play(main())
    assert [m.text for m in scene.model.asked[0]] == ["Hello."]
    assert [type(part) for part in scene.model.asked[0][0].parts] == [AudioPart]


def test_when_the_client_commits_audio_without_words_then_the_model_hears_it() -> None:
    async def main() -> Scene:
        async with Scene(accepts_media=True, vad=None) as scene:
            scene.model.go.set()
            await scene.append(np.zeros(3_200, np.float32))
            scene.turn = 0
            await scene.transcription(TurnCommitted(0, 0, 200))
            await scene.session.handle(CreateResponse())
            await scene.transcribe(0, "")
        return scene

    scene = play(main())
    (asked,) = scene.model.asked
    (sound,) = asked[0].parts
    assert isinstance(sound, AudioPart)
    assert len(sound.pcm) == 3_200


def test_when_the_transcript_fails_then_only_a_model_that_heard_the_turn_answers() -> None:
    async def main(hears: bool) -> Scene:
        async with Scene(accepts_media=hears) as scene:
            scene.model.go.set()
            await scene.append(np.zeros(3_200, np.float32))
            await scene.start_turn()
            turn = await scene.end_turn()
            await scene.transcription(TranscriptFailed(turn, "no"))
        return scene

    assert play(main(True)).responses() == ["completed"]
    assert play(main(False)).responses() == []


def growing(scene: Scene) -> list[tuple[str, float]]:
    """Return the last message of each prefill, with the seconds of growing audio in it."""
    out = []
    for messages in scene.model.prefilled:
        parts = messages[-1].parts if messages else ()
        audio = [len(p.pcm) / 16_000 for p in parts if isinstance(p, AudioPart) and p.grows]
        out.append((messages[-1].role if messages else "", sum(audio)))
    return out


@pytest.mark.parametrize("vad", [ServerVad(), None])
def test_while_a_turn_goes_on_then_the_model_is_given_each_window_of_its_audio(vad: ServerVad | None) -> None:
    async def main() -> Scene:
        async with Scene(accepts_media=True, audio_window_ms=1_000, vad=vad) as scene:
            scene.model.go.set()
            if vad:
                # The user does not speak yet.
                await scene.append(np.zeros(32_000, np.float32))
                assert not scene.model.prefilled
                await scene.start_turn()
            for _ in range(32):
                await scene.append(np.zeros(1_600, np.float32))
            if vad is None:
                scene.turn = 0
                await scene.transcription(TurnCommitted(0, 0, 3_200))
                await scene.session.handle(CreateResponse())
                await scene.transcribe(0, "Hello.")
            else:
                await scene.transcribe(await scene.end_turn(), "Hello.")
            await scene.settle()
        return scene

    scene = play(main())
    # In the scene, speech begins with the session's audio: two windows had passed when it was detected.
    expected = [1.1, 2.1, 3.1] if vad is None else [2.1, 3.1, 4.1, 5.1]
    parts = [p for m in scene.model.prefilled for p in m[-1].parts if isinstance(p, AudioPart)]
    assert [round(len(part.pcm) / 16_000, 1) for part in parts] == expected
    (answered,) = scene.model.asked[0][-1].parts
    assert isinstance(answered, AudioPart)
    # The answered turn is recognized as the prefilled one.
    assert {part.turn for part in parts} == {answered.turn}
    assert all(part.grows for part in parts)
    assert not answered.grows
    for part in parts:
        shorter = min(len(part.pcm), len(answered.pcm))
        assert np.array_equal(part.pcm[:shorter], answered.pcm[:shorter])


@pytest.mark.parametrize("how", ["cleared", "no words"])
def test_when_a_turn_is_dropped_then_the_model_gives_its_audio_back(how: str) -> None:
    async def main() -> Scene:
        async with Scene(accepts_media=True, audio_window_ms=1_000) as scene:
            await scene.start_turn()
            await scene.append(np.zeros(20_000, np.float32))
            assert [role for role, _ in growing(scene)] == ["user"]
            if how == "cleared":
                await scene.transcription(TurnCleared())
            else:
                await scene.transcribe(await scene.end_turn(), " ")
        return scene

    scene = play(main())
    assert [seconds for _, seconds in growing(scene)] == [1.25, 0]
    assert not any(p for m in scene.model.prefilled[-1] for p in m.parts if isinstance(p, AudioPart) and p.grows)


def test_while_a_response_is_under_way_then_nothing_is_taken_in_until_it_has_ended() -> None:
    async def main() -> None:
        async with Scene(accepts_media=True, audio_window_ms=1_000, interrupt_response=False) as scene:
            await scene.say("Hello.")
            await scene.start_turn()
            await scene.append(np.zeros(20_000, np.float32))
            assert not scene.model.prefilled
            scene.model.go.set()
            await scene.settle()
            await scene.append(np.zeros(1_600, np.float32))
            assert [seconds for _, seconds in growing(scene)] == [1.35]

    play(main())
