"""Voices beside the user's: their turns are items that are not answered, and they do not interrupt."""

from __future__ import annotations

import itertools

import anyio
import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import SpeakerProfile, VoiceThreshold
from antiphon.errors import ModelError
from antiphon.events.conversation import ResponseCreated, ResponseDone, UserTurnCommitted
from antiphon.events.playback import PlaybackCleared
from antiphon.events.transcription import ClearAudio, ServerVad, SpeechStarted, TranscriptDone
from tests.scripted import speech
from tests.sessions.conversation.scripted import Scene, play

VAD = ServerVad(0.5, 96, 192)
# Words below it are the user's voice, those from it on another's.
OTHERS = 200


class ScriptedVoices:
    """Hears by the words whose voice it is. `fails`: raises in place of that."""

    profile = SpeakerProfile("scripted", 2, 0.5, (VoiceThreshold(0.1, 0.4, 0.6),))

    def __init__(self) -> None:
        self.fails = False
        # Awaited before each vector, where there is one.
        self.gate: anyio.Event | None = None
        self.num_embedded = 0

    async def embed(self, pcm: Pcm) -> Pcm:
        self.num_embedded += 1
        if self.gate:
            await self.gate.wait()
        if self.fails:
            raise ModelError("broken")
        is_other = np.median(pcm[np.abs(pcm) > 1e-4]) >= OTHERS * 0.001 - 0.0005
        return np.asarray([0, 1] if is_other else [1, 0], np.float32)

    def close(self) -> None:
        pass


async def say(scene: Scene, first: int, count: int, *, answered: bool = True) -> None:
    """A turn of so many words, 320 ms each, in pieces as they come, and the silence that ends it. Waits for its answer
    where it has one: voices are learned with the help of a thread.
    """
    before = num_answers(scene)
    pcm = speech(first, count, 40)
    for at in range(0, len(pcm), SAMPLE_RATE_HZ // 10):
        await scene.append(pcm[at : at + SAMPLE_RATE_HZ // 10])
    if answered:
        await scene.until(ResponseDone, before + 1)


def num_answers(scene: Scene) -> int:
    return sum(isinstance(o, ResponseDone) for o in scene.out)


def test_a_turn_of_another_voice_is_marked_and_not_answered_and_the_model_is_not_told_of_it() -> None:
    async def main() -> Scene:
        # Whatever was sent has been heard when the clock is looked at again.
        hours = itertools.count(0, 3600)
        async with Scene(
            vad=VAD, speaker_model=ScriptedVoices(), reports_transcripts=True, clock=lambda: float(next(hours))
        ) as scene:
            scene.model.go.set()
            for first in (1, 11):
                await say(scene, first, 4)
            assert num_answers(scene) == 2
            await say(scene, OTHERS, 4, answered=False)
            assert num_answers(scene) == 2
            await say(scene, 21, 4)
            assert num_answers(scene) == 3
        return scene

    scene = play(main())
    assert [o.speaker for o in scene.out if isinstance(o, TranscriptDone)] == ["", "user", "other", "user"]
    assert [i.speaker for i in scene.session.conversation.items if i.role == "user"] == ["", "user", "other", "user"]
    assert sum(isinstance(o, UserTurnCommitted) for o in scene.out) == 4
    assert not any(f"w{OTHERS}" in message.text for asked in scene.model.asked for message in asked)


@pytest.mark.parametrize("first", [OTHERS, 21])
def test_only_the_user_interrupts(first: int) -> None:
    async def main() -> Scene:
        async with Scene(vad=VAD, speaker_model=ScriptedVoices()) as scene:
            scene.model.go.set()
            for number in (1, 11):
                await say(scene, number, 4)
            scene.model.end.clear()
            await say(scene, 16, 4, answered=False)
            scene.out.clear()
            await say(scene, first, 6, answered=False)
            scene.model.end.set()
            await scene.settle()
        return scene

    scene = play(main())
    is_user = first < OTHERS
    assert any(isinstance(o, SpeechStarted) for o in scene.out) == is_user
    first_done = next(o.response for o in scene.out if isinstance(o, ResponseDone))
    assert first_done.status == ("cancelled" if is_user else "completed")
    assert any(isinstance(o, ResponseCreated) for o in scene.out) == is_user
    assert not any(isinstance(o, PlaybackCleared) for o in scene.out)


def test_where_voices_cannot_be_judged_every_turn_is_answered() -> None:
    voices = ScriptedVoices()

    async def main() -> Scene:
        async with Scene(vad=VAD, speaker_model=voices) as scene:
            scene.model.go.set()
            for first in (1, 11):
                await say(scene, first, 4)
            voices.fails = True
            await say(scene, OTHERS, 4)
        return scene

    scene = play(main())
    assert num_answers(scene) == 3
    assert scene.session.conversation.items[-2].speaker == ""


def test_where_nobody_asked_for_it_no_voice_is_judged() -> None:
    voices = ScriptedVoices()

    async def main() -> Scene:
        async with Scene(vad=VAD) as scene:
            scene.model.go.set()
            await say(scene, OTHERS, 4)
        return scene

    assert num_answers(play(main())) == 1
    assert voices.num_embedded == 0


def test_while_a_voice_is_being_judged_nobody_takes_the_floor() -> None:
    voices = ScriptedVoices()

    async def main() -> Scene:
        async with Scene(vad=VAD, speaker_model=voices) as scene:
            scene.model.go.set()
            for number in (1, 11):
                await say(scene, number, 4)
            scene.model.end.clear()
            await say(scene, 16, 4, answered=False)
            scene.out.clear()
            # The lane is busy: no verdict comes while the speech goes on.
            voices.gate = anyio.Event()
            pcm = speech(OTHERS, 5)
            for at in range(0, len(pcm), SAMPLE_RATE_HZ // 10):
                await scene.append(pcm[at : at + SAMPLE_RATE_HZ // 10])
            assert not any(isinstance(o, SpeechStarted) for o in scene.out)
            voices.gate.set()
            await scene.settle()
            scene.model.end.set()
            await scene.settle()
        return scene

    scene = play(main())
    assert next(o.response for o in scene.out if isinstance(o, ResponseDone)).status == "completed"


def test_audio_that_is_cleared_says_nothing_of_the_next_turn() -> None:
    async def main() -> Scene:
        async with Scene(vad=VAD, speaker_model=ScriptedVoices()) as scene:
            scene.model.go.set()
            for number in (1, 11):
                await say(scene, number, 4)
            pcm = speech(OTHERS, 5)
            for at in range(0, len(pcm), SAMPLE_RATE_HZ // 10):
                await scene.append(pcm[at : at + SAMPLE_RATE_HZ // 10])
            await scene.inbox.put(ClearAudio())
            await scene.settle()
            before = num_answers(scene)
            await say(scene, 21, 4)
            assert num_answers(scene) == before + 1
        return scene

    scene = play(main())
    # The pause of the user's turn had its answer begun ahead, as ever.
    assert scene.counted["preemptive_used"] == 3
