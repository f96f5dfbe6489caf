"""A paused conversation: its model's stream is closed, it waits for sound, and speech or a command resumes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from antiphon.events.conversation import ConfigureConversation, CreateResponse, RetrieveItem
from antiphon.events.duplex import ConversationPaused, ConversationResumed, PauseConversation
from antiphon.events.transcription import SpeechStarted
from tests.scripted import speech
from tests.sessions.conversation.scripted import Scene, ScriptedModel, play, shown


class CountedModel(ScriptedModel):
    """A model that counts its open streams."""

    num_open = 0

    async def open(self, owner: object = None) -> ScriptedModel:
        self.num_open += 1
        return self

    def close(self) -> None:
        self.num_open -= 1


def reports(scene: Scene) -> list[type]:
    return [type(o) for o in scene.out if isinstance(o, ConversationPaused | ConversationResumed | SpeechStarted)]


def run(act: Any) -> Scene:
    async def main() -> Scene:
        async with Scene(model=CountedModel()) as scene:
            scene.model.go.set()
            await act(scene)
        return scene

    return play(main())


def test_a_pause_closes_the_models_stream_and_speech_opens_it_again() -> None:
    async def act(scene: Scene) -> None:
        await scene.session.handle(PauseConversation())
        assert scene.model.num_open == 0
        await scene.say("Hello.")
        assert scene.model.num_open == 1

    scene = run(act)
    assert reports(scene) == [ConversationPaused, ConversationResumed, SpeechStarted]
    assert scene.responses() == ["completed"]


@pytest.mark.parametrize("command", [CreateResponse(instructions="Speak."), RetrieveItem("item_1"), "configure"])
def test_any_other_command_resumes(command: Any) -> None:
    async def act(scene: Scene) -> None:
        await scene.session.handle(PauseConversation())
        await scene.session.handle(ConfigureConversation(scene.session.config) if command == "configure" else command)
        assert scene.model.num_open == 1

    assert reports(run(act)) == [ConversationPaused, ConversationResumed]


def test_nothing_is_paused_while_somebody_speaks_or_is_owed_an_answer() -> None:
    async def act(scene: Scene) -> None:
        await scene.start_turn()
        await scene.session.handle(PauseConversation())
        turn = await scene.end_turn()
        await scene.session.handle(PauseConversation())
        scene.model.end.clear()
        await scene.transcribe(turn, "Hello.")
        await scene.session.handle(PauseConversation())
        scene.model.end.set()

    assert ConversationPaused not in reports(run(act))


def test_a_response_that_is_still_played_is_not_paused_away() -> None:
    async def act(scene: Scene) -> None:
        await scene.say("Hello.")
        await scene.session.handle(PauseConversation())

    assert ConversationPaused not in reports(run(act))


def test_a_second_pause_changes_nothing() -> None:
    async def act(scene: Scene) -> None:
        await scene.session.handle(PauseConversation())
        await scene.session.handle(PauseConversation())
        assert scene.model.num_open == 0

    assert reports(run(act)) == [ConversationPaused]


@pytest.mark.parametrize(("wakes", "kinds"), [(True, [ConversationResumed, SpeechStarted]), (False, [])])
def test_loud_audio_is_listened_to_if_speech_may_wake(wakes: bool, kinds: list[type]) -> None:
    async def act(scene: Scene) -> None:
        await scene.session.handle(PauseConversation(wakes=wakes))
        await scene.append(np.zeros(16_000, np.float32))
        listened_s = scene.session.progress.audio_s
        await scene.append(speech(30, 3))
        await scene.until(SpeechStarted) if wakes else None
        # The quiet second before the speech is listened to with it.
        assert listened_s == 0
        assert (scene.session.progress.audio_s > 1.9) == wakes

    assert reports(run(act)) == [ConversationPaused, *kinds]


def test_the_history_stays() -> None:
    async def act(scene: Scene) -> None:
        await scene.session.handle(shown("item_9", "AAAA"))
        await scene.session.handle(PauseConversation())
        await scene.session.handle(RetrieveItem("item_9"))
        assert [item.id for item in scene.session.history.items] == ["item_9"]

    run(act)
