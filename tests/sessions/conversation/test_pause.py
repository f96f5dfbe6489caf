"""A paused conversation: its model's stream is closed, and speech or a command resumes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from antiphon.errors import Refused
from antiphon.events.conversation import ConfigureConversation, CreateResponse, RetrieveItem
from antiphon.events.duplex import ConversationPaused, ConversationResumed, PauseConversation
from antiphon.events.transcription import AppendAudio, SpeechStarted
from antiphon.server.live.session import refusal_in
from tests.scripted import speech
from tests.sessions.conversation.scripted import Scene, ScriptedModel, play, shown


class CountedModel(ScriptedModel):
    """A model that counts its open streams, and that may have no room for another one."""

    num_open, has_room = 0, True

    async def open(self, owner: object = None) -> ScriptedModel:
        if not self.has_room:
            raise Refused("no room", 1.0)
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


def test_speech_in_the_audio_resumes() -> None:
    async def act(scene: Scene) -> None:
        await scene.session.handle(PauseConversation())
        await scene.append(np.zeros(16_000, np.float32))
        assert scene.model.num_open == 0
        await scene.append(speech(30, 3))
        await scene.until(SpeechStarted)
        assert scene.model.num_open == 1

    assert reports(run(act)) == [ConversationPaused, ConversationResumed, SpeechStarted]


def test_audio_that_waits_prevents_no_pause_and_its_speech_resumes() -> None:
    async def act(scene: Scene) -> None:
        await scene.inbox.put(AppendAudio(np.zeros(16_000, np.float32)))
        await scene.inbox.put(AppendAudio(speech(30, 3)))
        await scene.session.handle(PauseConversation())
        await scene.until(SpeechStarted)

    assert reports(run(act)) == [ConversationPaused, ConversationResumed, SpeechStarted]


def test_a_wake_without_room_for_the_model_ends_the_session_with_the_refusal() -> None:
    async def act(scene: Scene) -> None:
        await scene.session.handle(PauseConversation())
        scene.model.has_room = False
        await scene.append(speech(30, 3))

    with pytest.raises(ExceptionGroup) as ended:
        run(act)
    assert isinstance(refusal_in(ended.value), Refused)


def test_the_history_stays() -> None:
    async def act(scene: Scene) -> None:
        await scene.session.handle(shown("item_9", "AAAA"))
        await scene.session.handle(PauseConversation())
        await scene.session.handle(RetrieveItem("item_9"))
        assert [item.id for item in scene.session.history.items] == ["item_9"]

    run(act)
