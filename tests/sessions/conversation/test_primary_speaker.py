"""Voices next to the user's: their turns are items that are not answered, and they do not interrupt."""

from __future__ import annotations

import itertools

import anyio
import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.events.conversation import (
    ConfigureConversation,
    ConversationConfig,
    ResponseCreated,
    ResponseDone,
    UserTurnCommitted,
)
from antiphon.events.playback import PlaybackCleared
from antiphon.events.transcription import (
    ClearAudio,
    EnrolledVoice,
    PrimarySpeakerMode,
    ServerVad,
    SpeechStarted,
    TranscriptDone,
    TranscriptionConfig,
)
from tests.scripted import OTHERS, ScriptedVoices, speech
from tests.sessions.conversation.scripted import Scene, play

VAD = ServerVad(0.5, 96, 192)


async def say(scene: Scene, first: int, count: int, *, answered: bool = True) -> None:
    """Say a turn of `count` words, 320 ms each, in pieces as a client sends them, and the silence that ends it. Waits
    for its answer if it has one: voices are learned in a thread.
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
        # All audio that was sent has been heard by the next reading of the clock.
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
    assert [i.speaker for i in scene.session.history.items if i.role == "user"] == ["", "user", "other", "user"]
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
    assert scene.session.history.items[-2].speaker == ""


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
            # The lane is busy: no verdict arrives while the speech continues.
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
    # The pause of the user's turn began a preemptive response, as usual.
    assert scene.counted["preemptive_used"] == 3


ENROLLED = (EnrolledVoice(np.asarray([1, 0], np.float32), 5.0),)


def test_with_an_enrolled_voice_other_turns_are_ignored_from_the_first_on() -> None:
    async def main() -> Scene:
        async with Scene(vad=VAD, speaker_model=ScriptedVoices(), enrolled=ENROLLED, reports_transcripts=True) as scene:
            scene.model.go.set()
            await say(scene, OTHERS, 4, answered=False)
            await scene.settle()
            assert num_answers(scene) == 0
            await say(scene, 11, 4)
            scene.model.end.clear()
            await say(scene, 16, 4, answered=False)
            scene.out.clear()
            # Over the answer: another voice does not interrupt it.
            await say(scene, OTHERS + 10, 6, answered=False)
            assert not any(isinstance(o, SpeechStarted) for o in scene.out)
            scene.model.end.set()
            await scene.settle()
        return scene

    scene = play(main())
    assert [i.speaker for i in scene.session.history.items if i.role == "user"][:3] == ["other", "user", "user"]
    assert next(o.response for o in scene.out if isinstance(o, ResponseDone)).status == "completed"
    assert not any(f"w{OTHERS}" in message.text for asked in scene.model.asked for message in asked)


def test_with_an_enrolled_voice_the_user_interrupts_from_the_first_turn_on() -> None:
    async def main() -> Scene:
        async with Scene(vad=VAD, speaker_model=ScriptedVoices(), enrolled=ENROLLED) as scene:
            scene.model.go.set()
            scene.model.end.clear()
            await say(scene, 1, 4, answered=False)
            await say(scene, 11, 6, answered=False)
            scene.model.end.set()
            await scene.settle()
        return scene

    scene = play(main())
    assert next(o.response for o in scene.out if isinstance(o, ResponseDone)).status == "cancelled"


def test_a_voice_may_be_enrolled_and_dropped_while_the_session_goes_on() -> None:
    def configured(*enrolled: EnrolledVoice) -> ConfigureConversation:
        mode: PrimarySpeakerMode = "enrolled" if enrolled else "off"
        turns = TranscriptionConfig(vad=VAD, preflight=True, primary_speaker=mode, enrolled_voices=enrolled)
        return ConfigureConversation(ConversationConfig(turns))

    async def main() -> Scene:
        async with Scene(vad=VAD, speaker_model=ScriptedVoices()) as scene:
            scene.model.go.set()
            await say(scene, OTHERS, 4)
            await scene.inbox.put(configured(*ENROLLED))
            await say(scene, OTHERS + 10, 4, answered=False)
            await scene.settle()
            assert num_answers(scene) == 1
            await say(scene, 1, 4)
            await scene.inbox.put(configured())
            await say(scene, OTHERS + 20, 4)
        return scene

    assert num_answers(play(main())) == 3
