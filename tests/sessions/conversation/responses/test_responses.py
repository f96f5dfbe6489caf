"""Responses that a client requests, that fail, and that begin during a pause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from antiphon.events.conversation import (
    CancelResponse,
    CommandRejected,
    ConfigureConversation,
    ContentPart,
    ContentPartAdded,
    ConversationCommand,
    CreateItem,
    CreateResponse,
    Item,
    ItemAdded,
    ResponseCreated,
    ResponseDone,
)
from antiphon.events.transcription import TurnCommitted
from antiphon.sessions.conversation.responses.waiting_requests import MAX_WAITING
from tests.sessions.conversation.scripted import Scene, play, shown
from tests.sessions.conversation.test_items import Reader


def test_when_a_response_is_asked_for_before_the_transcript_then_it_waits_for_it() -> None:
    async def main() -> Scene:
        async with Scene(create_response=False) as scene:
            scene.model.go.set()
            await scene.start_turn()
            turn = await scene.end_turn()
            await scene.session.handle(CreateResponse())
            await scene.settle()
            assert scene.num_created == 0
            await scene.transcribe(turn, "Well?")
        return scene

    scene = play(main())
    assert [m.text for m in scene.model.asked[0]] == ["Well?"]


def test_when_a_response_that_waits_for_its_transcript_is_cancelled_then_it_ends_and_says_nothing() -> None:
    async def main() -> Scene:
        async with Scene(create_response=False) as scene:
            scene.model.go.set()
            await scene.start_turn()
            turn = await scene.end_turn()
            await scene.session.handle(CreateResponse())
            await scene.session.handle(CancelResponse())
            await scene.transcribe(turn, "Well?")
            assert scene.responses() == ["cancelled client_cancelled"]
            # A request after the cancellation is a new one.
            await scene.session.handle(CreateResponse())
            await scene.until(ResponseDone, 2)
        return scene

    scene = play(main())
    assert scene.responses() == ["cancelled client_cancelled", "completed"]
    assert not any(isinstance(o, CommandRejected) for o in scene.out)


def test_when_the_session_ends_then_a_response_that_waits_for_another_is_cancelled_too() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            scene.model.go.set()
            scene.model.end.clear()
            await scene.session.handle(CreateResponse())
            await scene.settle()
            await scene.session.handle(CreateResponse(when_busy="wait"))
            await scene.session.handle(CreateResponse(when_busy="wait"))
        return scene

    assert play(main()).responses() == ["cancelled session_ended"] * 3


def test_when_the_session_ends_while_an_image_is_read_then_the_response_that_waits_for_it_is_cancelled() -> None:
    async def main() -> Scene:
        scene = Scene(audio_output=False, reader=(reader := Reader()))
        async with scene:
            scene.model.end.clear()
            scene.model.go.set()
            await scene.session.handle(shown("a", "YWJj"))
            await scene.session.handle(CreateResponse())
            await scene.session.handle(CreateResponse(stored=False, metadata={"mine": "1"}))
            scene.inbox.close()
            await scene.settle()
            reader.go.set()
        return scene

    assert play(main()).responses() == ["cancelled session_ended"] * 2


def test_when_sixteen_responses_wait_then_more_are_refused() -> None:
    async def main() -> Scene:
        async with Scene(create_response=False) as scene:
            await scene.start_turn()
            turn = await scene.end_turn()
            for _ in range(MAX_WAITING + 1):
                await scene.session.handle(CreateResponse(when_busy="wait"))
            assert [o.code for o in scene.out if isinstance(o, CommandRejected)] == ["too_many_responses"]
            scene.model.go.set()
            await scene.transcribe(turn, "Well?")
            await scene.until(ResponseDone, MAX_WAITING)
        return scene

    assert play(main()).responses() == ["completed"] * MAX_WAITING


def test_when_a_request_cuts_what_was_asked_before_then_it_does_not_wait_for_it() -> None:
    async def main() -> Scene:
        async with Scene(vad=None) as scene:
            scene.model.go.set()
            scene.turn = 0
            await scene.transcription(TurnCommitted(0, 0, 100, 100))
            await scene.session.handle(CreateResponse(when_busy="cut"))
            await scene.session.handle(CreateResponse(when_busy="cut"))
            await scene.transcribe(0, "Well?")
            await scene.until(ResponseDone, 2)
        return scene

    assert play(main()).responses() == ["cancelled client_cancelled", "completed"]


def test_when_a_cancellation_meets_a_response_and_one_that_waits_for_it_then_both_are_cancelled() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            scene.model.go.set()
            scene.model.end.clear()
            await scene.session.handle(CreateResponse())
            await scene.settle()
            await scene.session.handle(CreateResponse(when_busy="wait"))
            await scene.session.handle(CancelResponse())
            await scene.until(ResponseDone, 2)
        return scene

    assert play(main()).responses() == ["cancelled client_cancelled"] * 2


@pytest.mark.parametrize(
    ("then", "ends", "codes"),
    [
        ([CreateResponse()], ["cancelled client_cancelled", "completed"], []),
        # Whatever is requested, and however: the response to the turn does not count as the new one.
        ([CreateResponse(instructions="Again.")], ["cancelled client_cancelled", "completed"], []),
        ([CreateResponse(), CancelResponse()], ["cancelled client_cancelled"] * 2, []),
        (
            [CreateResponse(), CreateResponse()],
            ["cancelled client_cancelled", "completed"],
            ["conversation_already_has_active_response"],
        ),
        ([CancelResponse(), CreateResponse()], ["cancelled client_cancelled", "completed"], []),
        (
            [CreateResponse(), CancelResponse(), CreateResponse()],
            ["cancelled client_cancelled"] * 2 + ["completed"],
            [],
        ),
        # An out-of-band response waits for nothing.
        ([CreateResponse(stored=False)], ["cancelled client_cancelled", "completed"], []),
    ],
)
@pytest.mark.parametrize("unasked", [False, True])
def test_when_a_response_is_asked_for_right_after_a_cancellation_then_it_begins_at_the_others_end(
    then: list[ConversationCommand], ends: list[str], codes: list[str], unasked: bool
) -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            scene.model.go.set()
            scene.model.end.clear()
            if unasked:
                await scene.say("Well?")
            else:
                await scene.session.handle(CreateResponse())
            await scene.settle()
            scene.model.end.set()
            for command in [CancelResponse(), *then]:
                await scene.session.handle(command)
            await scene.until(ResponseDone, len(ends))
            await scene.settle()
        return scene

    scene = play(main())
    assert scene.responses() == ends
    assert [o.code for o in scene.out if isinstance(o, CommandRejected)] == codes


def test_when_four_responses_are_under_way_out_of_band_then_more_are_refused_and_the_conversation_goes_on() -> None:
    async def main() -> Scene:
        async with Scene(audio_output=False) as scene:
            for _ in range(400):
                await scene.session.handle(CreateResponse(stored=False))
            await scene.settle()
            assert scene.num_created == 4
            refused = [o.code for o in scene.out if isinstance(o, CommandRejected)]
            assert refused == ["too_many_responses"] * 396
            await scene.session.handle(CreateResponse())
            await scene.settle()
            scene.model.go.set()
            await scene.until(ResponseDone, 5)
            await scene.session.handle(CreateResponse(stored=False))
            await scene.until(ResponseDone, 6)
        return scene

    assert play(main()).responses() == ["completed"] * 6


def test_when_a_response_fails_then_the_next_turn_is_still_answered() -> None:
    async def main() -> Scene:
        async with Scene(fails=True) as scene:
            scene.model.go.set()
            await scene.say("One?")
            scene.model.fails = False
            await scene.say("Two?")
        return scene

    scene = play(main())
    assert scene.responses() == ["failed", "completed"]


def test_when_a_response_is_cancelled_before_its_audio_then_the_history_has_no_word_of_it() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            scene.model.go.set()
            scene.model.end.clear()
            await scene.session.handle(CreateResponse())
            await scene.settle()
            await scene.session.handle(CancelResponse())
            await scene.settle()
            assert scene.responses() == ["cancelled client_cancelled"]
            scene.model.end.set()
            await scene.say("Go on.")
        return scene

    scene = play(main())
    # It had text, but no word of it had a time in the audio.
    assert [m.text for m in scene.model.asked[-1]] == ["Go on."]


def test_when_the_pause_ends_the_turn_then_the_preemptive_response_is_the_response() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            scene.model.go.set()
            await scene.start_turn()
            await scene.pause("Hello.")
            assert [m.text for m in scene.model.asked[0]] == ["Hello."]
            assert scene.num_created == 0
            assert not scene.session.history.items
            await scene.transcribe(await scene.end_turn(), "Hello.")
        return scene

    scene = play(main())
    assert scene.responses() == ["completed"]
    assert len(scene.model.asked) == 1
    assert scene.counted == {"preemptive_begun": 1, "preemptive_used": 1}


def test_when_the_user_goes_on_after_a_pause_then_the_preemptive_response_is_dropped() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            scene.model.go.set()
            scene.model.end.clear()
            await scene.start_turn()
            await scene.pause("I would like")
            await scene.resume()
            assert scene.model.left == 1
            scene.model.end.set()
            await scene.pause("I would like a cup of tea.")
            await scene.transcribe(await scene.end_turn(), "I would like a cup of tea.")
        return scene

    scene = play(main())
    assert scene.responses() == ["completed"]
    assert [m.text for m in scene.model.asked[-1]] == ["I would like a cup of tea."]
    assert len(scene.model.asked) == 2
    # The dropped response had generated one word.
    assert scene.counted == {
        "preemptive_begun": 2,
        "preemptive_dropped": 1,
        "preemptive_dropped_tokens": 1,
        "preemptive_used": 1,
    }


def test_when_the_transcript_differs_from_its_guess_then_it_is_answered_anew() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            scene.model.go.set()
            scene.model.end.clear()
            await scene.start_turn()
            await scene.pause("Hello the")
            turn = await scene.end_turn()
            scene.model.end.set()
            await scene.transcribe(turn, "Hello there.")
        return scene

    scene = play(main())
    assert scene.responses() == ["completed"]
    assert [m[-1].text for m in scene.model.asked] == ["Hello the", "Hello there."]


def test_when_a_response_is_under_way_or_turns_are_not_answered_then_nothing_is_begun_at_a_pause() -> None:
    async def main() -> tuple[Scene, Scene]:
        async with Scene(interrupt_response=False) as spoken:
            await spoken.say("One?")
            await spoken.start_turn()
            await spoken.pause("Two?")
            assert len(spoken.model.asked) == 1
            spoken.model.go.set()
        async with Scene(create_response=False) as silent:
            await silent.start_turn()
            await silent.pause("Two?")
        return spoken, silent

    assert play(main())[1].model.asked == []


def test_when_a_preemptive_response_fails_then_the_failure_is_reported_as_that_of_the_response() -> None:
    async def main() -> Scene:
        async with Scene(fails=True) as scene:
            scene.model.go.set()
            await scene.start_turn()
            await scene.pause("One?")
            turn = await scene.end_turn()
            await scene.transcribe(turn, "One?")
            scene.model.fails = False
            await scene.say("Two?")
        return scene

    assert play(main()).responses() == ["failed", "completed"]


def test_an_event_says_how_things_were_when_it_was_emitted() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            scene.model.go.set()
            await scene.say("Hello.")
        return scene

    out = play(main()).out
    (created,) = (event.response for event in out if isinstance(event, ResponseCreated))
    (done,) = (event.response for event in out if isinstance(event, ResponseDone))
    assert (created.status, created.output) == ("in_progress", [])
    (answer,) = done.output
    began, *_ = (event.item for event in out if isinstance(event, ItemAdded) and event.item.id == answer.id)
    assert (began.status, began.text) == ("in_progress", "")
    assert (answer.status, bool(answer.text)) == ("completed", True)
    (part,) = (event.part for event in out if isinstance(event, ContentPartAdded))
    assert part.text == ""


@pytest.mark.parametrize(
    ("when_busy", "ends"), [("wait", ["completed"] * 2), ("cut", ["cancelled client_cancelled", "completed"])]
)
def test_when_a_response_is_asked_for_during_another_then_it_waits_or_cuts(when_busy: Any, ends: list[str]) -> None:
    async def main() -> tuple[Scene, int]:
        async with Scene(audio_output=False, vad=None) as scene:
            await scene.session.handle(CreateItem(Item("a", parts=[ContentPart("input_text", "Hello.")])))
            scene.model.go.set()
            scene.model.end.clear()
            await scene.session.handle(CreateResponse())
            await scene.settle()
            await scene.session.handle(CreateItem(Item("b", parts=[ContentPart("input_text", "And?")])))
            await scene.session.handle(CreateResponse(when_busy=when_busy))
            await scene.settle()
            begun = len(scene.model.asked)
            scene.model.end.set()
            await scene.settle()
        return scene, begun

    scene, begun = play(main())
    assert begun == (1 if when_busy == "wait" else 2)
    assert scene.responses() == ends
    # The part of the first that was sent is in the history of the second.
    assert [m.text for m in scene.model.asked[1]][-1] == "And?"
    assert not any(isinstance(o, CommandRejected) for o in scene.out)


def test_what_is_configured_or_created_behind_a_request_is_for_the_next_response() -> None:
    async def main() -> Scene:
        async with Scene(audio_output=False, vad=None, instructions="Be short.") as scene:
            scene.model.go.set()
            await scene.session.handle(CreateItem(Item("a", parts=[ContentPart("input_text", "Hello.")])))
            await scene.session.handle(CreateResponse())
            await scene.session.handle(ConfigureConversation(replace(scene.session.config, instructions="Be long.")))
            await scene.session.handle(CreateItem(Item("b", parts=[ContentPart("input_text", "And?")])))
            await scene.until(ResponseDone)
            await scene.session.handle(CreateResponse())
            await scene.until(ResponseDone, 2)
        return scene

    asked = [[m.text for m in messages if m.role != "assistant"] for messages in play(main()).model.asked]
    assert asked == [["Be short.", "Hello."], ["Be long.", "Hello.", "And?"]]
