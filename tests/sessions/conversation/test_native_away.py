"""A native model whose server is away: another model answers meanwhile, and the native one returns in a pause."""

from __future__ import annotations

import asyncio

import pytest

from antiphon.events.conversation import (
    ContentPart,
    CreateItem,
    CreateResponse,
    Item,
    ResponseAudioDelta,
    ResponseDone,
)
from antiphon.events.duplex import EpochRaised
from antiphon.events.transcription import AppendAudio, TranscriptDone
from antiphon.pipelines.cascade import Cascade
from antiphon.text.said import BEGINS
from tests.pipelines.test_cascade import Voice, Writer
from tests.scripted import speech
from tests.sessions.conversation.test_native_turns import Native, Scene, run, says


def answered(scene: Scene) -> int:
    return len([o for o in scene.of(ResponseDone) if o.response.status == "completed"])


def test_while_the_model_is_away_another_one_answers_and_it_returns_in_a_pause() -> None:
    writer = Writer("It is noon.")

    async def act(scene: Scene) -> None:
        native.away = True
        await scene.hears_words(1, 2)
        await scene.until(lambda: answered(scene) == 1)
        await scene.inbox.put(CreateItem(Item("typed", parts=[ContentPart("input_text", "And now?")])))
        await scene.inbox.put(CreateResponse())
        await scene.until(lambda: answered(scene) == 2)
        # It comes back while the user speaks, and says something to the half that it has heard.
        await scene.inbox.put(AppendAudio(speech(3, 3)))
        await scene.until(lambda: len(native.units) > 40)
        native.away, native.steps = False, [says("Half.")]
        await scene.inbox.put(AppendAudio(speech(6, 1)))
        await scene.until(lambda: native.interrupts)
        await scene.hears_words(7, 1)
        await scene.until(lambda: answered(scene) == 3)
        while answered(scene) == 3:
            native.steps = [says("Back.", last=True)]
            await scene.hears_words(0, 0, silence_units=1)
            await asyncio.sleep(0.02)

    native = Native()
    scene = run(native, act, fallback=Cascade(writer, None))
    assert [messages[-1].text for messages in writer.seen] == ["w1 w2", "And now?", "w3 w4 w5 w6 w7"]
    assert scene.text.startswith("It is noon. It is noon. It is noon. Back.")
    assert "typed" in [i.id for i in scene.session.history.items]
    assert not any(unit.text for unit in native.units)


@pytest.mark.parametrize("is_asked", [True, False])
def test_what_the_model_left_unanswered_is_answered_by_the_other_model(is_asked: bool) -> None:
    writer = Writer("It is noon.")

    async def act(scene: Scene) -> None:
        if is_asked:
            native.away = True
            await scene.hears(1.5)
            await scene.inbox.put(CreateResponse(instructions="Be brief."))
        else:
            await scene.hears_words(1, 2)
            await scene.until(lambda: scene.of(TranscriptDone) and not scene.session.progress.unread_items)
            native.away = True
            await scene.hears(2)
        await scene.until(lambda: answered(scene) == 1)

    native = Native()
    scene = run(native, act, fallback=Cascade(writer, None))
    assert scene.text == "It is noon. "
    assert writer.seen[0][0].text == ("Be brief." if is_asked else "w1 w2")


def test_a_turn_that_the_model_chose_not_to_answer_stays_unanswered() -> None:
    async def act(scene: Scene) -> None:
        await scene.hears_words(1, 2)
        await scene.until(lambda: scene.of(TranscriptDone))
        await scene.hears_words(0, 0, silence_units=20)
        await scene.until(lambda: len(native.units) > 40)
        native.away = True
        await scene.hears(4)
        await scene.until(lambda: len(native.units) > 44)

    native, writer = Native(), Writer("It is noon.")
    run(native, act, fallback=Cascade(writer, None))
    assert not writer.seen


def test_speech_ends_an_answer_of_the_other_model() -> None:
    async def act(scene: Scene) -> None:
        native.away = True
        await scene.hears_words(1, 2)
        await scene.until(lambda: scene.of(ResponseAudioDelta))
        await scene.hears_words(3, 2, silence_units=0)
        await scene.until(lambda: scene.of(EpochRaised))

    native = Native()
    words = " ".join(["word"] * 100)
    run(native, act, None, fallback=Cascade(Writer(f"{words}."), Voice()), interrupt_response=True,
        native_decides_interruptions=True)  # fmt: skip


def test_a_model_can_recall_what_was_said_and_heard() -> None:
    async def act(scene: Scene) -> None:
        await scene.until(lambda: native.options)
        assert native.options
        assert native.options.recall() == ""
        await scene.hears_words(1, 2)
        await scene.until(lambda: scene.of(TranscriptDone))
        native.steps = [says(" Good morning.", last=True)]
        await scene.hears(1)
        await scene.until(lambda: answered(scene) == 1)
        assert native.options.recall() == f"{BEGINS}\nUser: w1 w2\nYou: Good morning."

    native = Native()
    run(native, act)
