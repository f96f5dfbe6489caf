"""The user goes on after a response has begun: the turn continues, and the response leaves no trace for the model."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import (
    AudioPart,
    ResponseAudio,
    ResponseChunk,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from antiphon.events.conversation import ContentPart, CreateItem, Item, ResponseDone, TruncateItem
from antiphon.events.duplex import SkipResponse
from antiphon.events.transcription import ServerVad, SpeechStarted, SpeechStopped, TurnCommitted
from antiphon.events.words import Word
from tests.scripted import ScriptedTranscriber, speech
from tests.sessions.conversation.scripted import RATE_HZ, Scene, play

MEANING = ServerVad(0.5, 300, 4000, "medium")
WHOLE = ["I would like to book a table."]


# Four seconds of audio.
WORDS = tuple(Word(word, i, i + 1, 1.0) for i, word in enumerate(["What", "would", "you", "like?"]))
TALKS = (TextDelta("What would you like?"), ResponseAudio(np.zeros(4 * RATE_HZ, np.float32), WORDS))
CALLS = (ToolCallStarted("call_1", "book"), ToolCallDelta("{}"))


def scene(chunks: tuple[ResponseChunk, ...] = TALKS, **config: Any) -> Scene:
    """Return a scene whose responses have these chunks, and then go on until they are cancelled."""
    made = Scene(**config)
    made.model.chunks = chunks
    made.model.go.set()
    made.model.end.clear()
    return made


async def pass_s(room: Scene, seconds: float) -> None:
    """Let the user be silent for this time."""
    await room.append(np.zeros(int(seconds * SAMPLE_RATE_HZ), np.float32))


def texts(room: Scene, number: int = -1) -> list[str]:
    return [m.text for m in room.model.asked[number]]


def play_in(room_of: Callable[[], Scene], act: Callable[[Scene], Coroutine[Any, Any, None]]) -> Scene:
    async def main() -> Scene:
        async with room_of() as room:
            await act(room)
        return room

    return play(main())


@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.9])
@pytest.mark.parametrize("is_closed", [False, True])
def test_when_the_user_goes_on_soon_after_a_response_began_then_both_parts_are_one_turn(
    after_s: float, is_closed: bool
) -> None:
    async def act(room: Scene) -> None:
        if is_closed:
            # The response is generated faster than it is heard.
            room.model.end.set()
        await room.say("I would like")
        await pass_s(room, after_s)
        await room.say("to book a table.", int(after_s * 1000))
        assert texts(room) == WHOLE
        assert [i.continues for i in room.session.history.items if i.role == "user"] == ["", "item_0"]

    room = play_in(scene, act)
    assert room.responses()[0] == ("completed" if is_closed else "cancelled turn_detected")
    assert room.counted["false_starts"] == 1


def test_when_the_user_goes_on_later_then_it_is_another_turn_and_the_response_stays_in_the_history() -> None:
    async def act(room: Scene) -> None:
        await room.say("I would like")
        await pass_s(room, 2.1)
        await room.say("to book a table.", 2100)
        assert texts(room) == ["I would like", "What would you like?", "to book a table."]

    assert play_in(scene, act).counted["false_starts"] == 0


def test_when_the_user_goes_on_before_the_response_is_audible_then_both_parts_are_one_turn() -> None:
    async def act(room: Scene) -> None:
        room.model.go.clear()
        await room.say("I would like")
        await pass_s(room, 3)
        await room.start_turn(3000)
        room.model.go.set()
        await room.transcribe(await room.end_turn(3000), "to book a table.")
        assert texts(room) == WHOLE

    play_in(scene, act)


def test_when_the_user_goes_on_before_the_transcript_then_both_parts_are_one_turn() -> None:
    async def act(room: Scene) -> None:
        await room.start_turn()
        first = await room.end_turn()
        await room.start_turn(500)
        second = await room.end_turn(500)
        await room.transcribe(first, "I would like")
        await room.transcribe(second, "to book a table.")
        assert texts(room) == WHOLE

    assert play_in(scene, act).num_created == 1


def test_when_a_long_pause_precedes_then_it_is_another_turn_however_late_the_response_is() -> None:
    async def act(room: Scene) -> None:
        room.model.go.clear()
        await room.say("Hello.")
        await pass_s(room, 5)
        await room.start_turn(5000)
        room.model.go.set()
        await room.transcribe(await room.end_turn(5000), "Are you there?")
        assert texts(room) == ["Hello.", "Are you there?"]

    play_in(scene, act)


def test_when_the_user_pauses_twice_then_three_parts_are_one_turn() -> None:
    async def act(room: Scene) -> None:
        await room.say("I would like")
        await pass_s(room, 1)
        await room.say("to book", 1000)
        await pass_s(room, 1)
        await room.say("a table.", 2000)
        assert texts(room) == WHOLE

    assert play_in(scene, act).responses()[:2] == ["cancelled turn_detected"] * 2


def test_when_the_speech_has_no_words_then_the_turn_is_answered_again() -> None:
    async def act(room: Scene) -> None:
        await room.say("I would like to book a table.")
        await pass_s(room, 0.5)
        await room.say("", 500)
        assert [texts(room, 0), texts(room, 1)] == [WHOLE, WHOLE]

    assert play_in(scene, act).num_created == 2


def test_when_the_response_calls_a_function_then_it_stays_in_the_history() -> None:
    async def act(room: Scene) -> None:
        await room.say("Book a table.")
        await pass_s(room, 0.5)
        await room.say("For two.", 500)
        assert [m.role for m in room.model.asked[-1]] == ["user", "assistant", "user"]

    assert play_in(lambda: scene(CALLS), act).counted["false_starts"] == 0


def test_when_false_starts_are_not_forgiven_then_it_is_another_turn() -> None:
    async def act(room: Scene) -> None:
        await room.say("I would like")
        await room.say("to book a table.")
        assert texts(room) == ["I would like", "What would you like?", "to book a table."]

    play_in(lambda: scene(false_start_ms=0), act)


def test_when_the_client_has_ended_the_turn_then_speech_after_it_is_another_turn() -> None:
    async def act(room: Scene) -> None:
        await room.start_turn()
        await room.transcription(SpeechStopped(room.turn, 100))
        await room.transcription(TurnCommitted(room.turn, 0, 100, None))
        await room.transcribe(room.turn, "Hello.")
        await pass_s(room, 1)
        await room.say("And this?", 1000)
        assert [m.role for m in room.model.asked[-1]] == ["user", "assistant", "user"]

    play_in(scene, act)


def test_when_the_client_adds_something_in_between_then_the_messages_are_not_joined() -> None:
    async def act(room: Scene) -> None:
        await room.say("I would like")
        await pass_s(room, 0.5)
        await room.start_turn(500)
        await room.session.handle(CreateItem(Item("note", role="system", parts=[ContentPart("input_text", "Hurry.")])))
        await room.transcribe(await room.end_turn(500), "to book a table.")
        assert texts(room) == ["I would like", "Hurry.", "to book a table."]

    play_in(scene, act)


def test_when_the_client_writes_for_the_user_then_speech_after_it_is_another_turn() -> None:
    async def act(room: Scene) -> None:
        await room.say("I would like")
        await room.session.handle(CreateItem(Item("note", parts=[ContentPart("input_text", "Hurry.")])))
        await room.say("Now.", 500)

    assert play_in(scene, act).counted["false_starts"] == 0


def test_when_the_last_turn_had_no_words_then_speech_after_it_is_another_turn() -> None:
    async def act(room: Scene) -> None:
        await room.say("")
        await room.say("Hello.", 500)
        assert texts(room) == ["Hello."]

    assert play_in(scene, act).counted["false_starts"] == 0


def test_when_the_client_wants_no_response_to_the_last_turn_then_speech_after_it_is_another_turn() -> None:
    async def act(room: Scene) -> None:
        await room.start_turn()
        await room.session.handle(SkipResponse())
        await room.transcribe(await room.end_turn(), "Hello.")
        await room.say("Are you there?", 500)

    assert play_in(scene, act).counted["false_starts"] == 0


def test_when_the_response_has_been_heard_then_speech_after_it_is_another_turn() -> None:
    now_s = [0.0]

    async def act(room: Scene) -> None:
        room.model.end.set()
        await room.say("Hello.")
        await room.settle()
        now_s[0] = 5.0
        await room.say("And you?", 500)
        assert [m.role for m in room.model.asked[-1]] == ["user", "assistant", "user"]

    assert play_in(lambda: scene(clock=lambda: now_s[0]), act).counted["false_starts"] == 0


def test_when_an_earlier_turn_was_answered_then_only_the_response_to_the_last_one_counts() -> None:
    async def act(room: Scene) -> None:
        await room.say("Hello.")
        await pass_s(room, 5)
        await room.start_turn(5000)
        first = await room.end_turn(5000)
        await room.start_turn(5500)
        second = await room.end_turn(5500)
        await room.transcribe(first, "I would like")
        await room.transcribe(second, "to book a table.")
        assert texts(room) == ["Hello.", "What would you like?", *WHOLE]

    play_in(scene, act)


def test_a_host_that_takes_over_in_the_middle_owes_one_response() -> None:
    async def act(room: Scene) -> None:
        await room.say("I would like")
        await pass_s(room, 0.5)
        # The response is being cancelled, and its last events are not sent yet.
        room.turn += 1
        await room.session.handle_transcription(SpeechStarted(room.turn, 500))
        assert room.session.progress.is_responding
        assert len(room.session.progress.owed_responses) == 1

    play_in(scene, act)


def test_when_the_user_only_acknowledges_the_first_words_then_the_response_goes_on() -> None:
    async def act(room: Scene) -> None:
        await room.say("Tell me a story.")
        await pass_s(room, 0.5)
        before = len(room.out)
        await room.say("Mm-hm.", 500)
        assert room.out[before:] == []
        assert room.session.progress.is_responding
        room.model.end.set()
        await room.settle()

    room = play_in(lambda: scene(vad=MEANING), act)
    assert room.responses() == ["completed"]
    assert room.counted["false_starts"] == 0


def test_when_the_client_truncates_the_retracted_item_then_it_stays_hidden() -> None:
    async def act(room: Scene) -> None:
        await room.say("I would like")
        await pass_s(room, 1)
        await room.start_turn(1000)
        spoken = next(i for i in room.session.history.items if i.role == "assistant")
        await room.session.handle(TruncateItem(spoken.id, 0, 900))
        await room.transcribe(await room.end_turn(1000), "to book a table.")
        assert texts(room) == WHOLE
        assert spoken.parts[0].audio_s == 0.9

    play_in(scene, act)


def test_when_the_turn_goes_on_then_what_is_computed_ahead_is_the_whole_turn() -> None:
    async def act(room: Scene) -> None:
        await room.say("I would like")
        await pass_s(room, 1)
        await room.start_turn(1000)
        await room.pause("to book a table.")
        await room.settle()
        assert texts(room) == WHOLE
        await room.transcribe(await room.end_turn(1000), "to book a table.")
        await room.settle()

    room = play_in(scene, act)
    # The response that began in the pause is the one that the client gets.
    assert [len(room.model.asked), room.num_created] == [2, 2]


def test_when_the_model_hears_audio_then_one_message_has_both_parts() -> None:
    async def act(room: Scene) -> None:
        await pass_s(room, 0.2)
        await room.say("I would like")
        await pass_s(room, 1)
        await room.say("to book a table.", 1000)
        (message,) = room.model.asked[-1]
        assert [type(part) for part in message.parts] == [AudioPart, AudioPart]
        assert message.text == WHOLE[0]

    play_in(lambda: scene(accepts_media=True), act)


ACTIONS = ("say", "cough", "start", "end", "pause_1", "pause_3", "go", "finish")


@given(st.lists(st.sampled_from(ACTIONS), max_size=24))
@settings(max_examples=60, deadline=None)
def test_whatever_happens_the_model_gets_every_word_once_and_no_retracted_one(actions: list[str]) -> None:
    """Random walks: no action fails, and each request has the words of all ended turns once and in order."""
    said: list[str] = []

    async def act(room: Scene) -> None:
        now_s, is_open, number = 0.0, False, 0
        for action in actions:
            number += 1
            if action in ("say", "cough") and not is_open:
                word = f"word{number}" if action == "say" else ""
                await room.start_turn(int(now_s * 1000))
                turn = await room.end_turn(int(now_s * 1000))
                said.extend([word] if word else [])
                await room.transcribe(turn, word)
            elif action == "start" and not is_open:
                await room.start_turn(int(now_s * 1000))
                is_open = True
            elif action == "end" and is_open:
                turn, is_open = await room.end_turn(int(now_s * 1000)), False
                said.append(f"word{number}")
                await room.transcribe(turn, said[-1])
            elif action.startswith("pause"):
                await pass_s(room, float(action[-1]))
                now_s += float(action[-1])
            elif action == "go":
                room.model.go.set()
            elif action == "finish":
                room.model.end.set()
            await room.settle()
            if room.model.asked:
                words = [w for m in room.model.asked[-1] if m.role == "user" for w in m.text.split()]
                assert words == said[: len(words)]
        if is_open:
            await room.transcribe(await room.end_turn(int(now_s * 1000)), f"word{number}")
            said.append(f"word{number}")
        room.model.go.set()
        room.model.end.set()
        await room.settle()
        if said:
            # Every word has been answered, and the response to the last words was not cut.
            last = room.model.asked[-1]
            assert " ".join(m.text for m in last if m.role == "user").split() == said
        retracted = {i.id for i in room.session.history.items if i.retracted}
        kept = [o.response for o in room.out if isinstance(o, ResponseDone)]
        assert all(r.status == "cancelled" or r.status == "completed" for r in kept)
        assert len(retracted) <= room.counted["false_starts"]

    play_in(scene, act)


def test_an_overlap_in_the_first_moments_is_decided_before_its_words_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("antiphon.sessions.conversation.overlap_timing.DECISION_S", 0.0)
    monkeypatch.setattr("antiphon.sessions.conversation.overlap_timing.MAX_BACKCHANNEL_S", 60.0)
    known = anyio.Event()

    async def act(room: Scene) -> None:
        await room.say("I would like")
        # The listener hears speech, whose words are not known yet.
        await room.append(speech(1, 3))
        await room.until(ResponseDone)
        known.set()

    room = play_in(lambda: scene(vad=MEANING, transcriber=ScriptedTranscriber(gate=lambda _: known)), act)
    assert room.responses()[0] == "cancelled turn_detected"
