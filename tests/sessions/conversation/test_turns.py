"""When a turn of the user is answered, and when it is not answered or not yet."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from antiphon.events.conversation import (
    CommandRejected,
    ConfigureConversation,
    ContentPart,
    CreateItem,
    CreateResponse,
    IdleTimeoutReached,
    Item,
    ResponseDone,
    UserTurnCommitted,
)
from antiphon.events.duplex import SkipResponse
from antiphon.events.transcription import (
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TurnCleared,
)
from tests.sessions.conversation.scripted import Scene, play, shown
from tests.sessions.conversation.test_items import Reader


def test_when_a_turn_ends_then_it_has_one_response_that_the_history_keeps() -> None:
    async def main() -> Scene:
        async with Scene(instructions="Be kind.", false_start_ms=0) as scene:
            scene.model.go.set()
            await scene.say("Hello.")
            await scene.say("Again.")
        return scene

    scene = play(main())
    assert scene.responses() == ["completed", "completed"]
    assert [m.text for m in scene.model.asked[1]] == ["Be kind.", "Hello.", "One two.", "Again."]


def test_when_a_turn_has_no_words_then_there_is_no_response() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            await scene.say("  ")
        return scene

    assert play(main()).num_created == 0


def test_when_the_user_speaks_on_before_the_transcript_then_both_turns_share_a_response() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            scene.model.go.set()
            await scene.start_turn()
            first = await scene.end_turn()
            # The user continues before the first part is transcribed.
            await scene.start_turn()
            await scene.transcribe(first, "I would like")
            assert scene.num_created == 0
            await scene.transcribe(await scene.end_turn(), "a cup of tea.")
        return scene

    scene = play(main())
    assert scene.num_created == 1
    assert [m.text for m in scene.model.asked[0]] == ["I would like a cup of tea."]


def test_when_two_turns_are_transcribed_together_then_there_is_one_response() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            scene.model.go.set()
            await scene.start_turn()
            first = await scene.end_turn()
            await scene.start_turn()
            second = await scene.end_turn()
            await scene.transcribe(first, "One.")
            await scene.transcribe(second, "Two.")
        return scene

    assert play(main()).num_created == 1


def test_when_the_open_turn_is_cleared_then_the_turn_before_it_is_answered() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            scene.model.go.set()
            await scene.start_turn()
            first = await scene.end_turn()
            # The user begins again, and the client clears its buffer: no stop follows.
            await scene.start_turn()
            await scene.transcribe(first, "One.")
            assert scene.num_created == 0
            await scene.transcription(TurnCleared())
        return scene

    assert play(main()).num_created == 1


def test_when_a_transcript_fails_then_the_other_turns_are_answered() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            scene.model.go.set()
            await scene.start_turn()
            first = await scene.end_turn()
            await scene.start_turn()
            second = await scene.end_turn()
            await scene.transcribe(first, "One.")
            await scene.transcription(TranscriptFailed(second, "no"))
        return scene

    assert play(main()).num_created == 1


def test_when_the_transcript_of_a_skipped_turn_fails_then_the_turn_before_it_is_answered() -> None:
    """One turn waits for its answer; another, to which the client wants none, cannot be transcribed."""

    async def main() -> Scene:
        async with Scene(accepts_media=True) as scene:
            scene.model.go.set()
            await scene.start_turn()
            first = await scene.end_turn()
            await scene.session.handle(SkipResponse())
            await scene.start_turn()
            second = await scene.end_turn()
            await scene.transcribe(first, "Hello.")
            await scene.transcription(TranscriptFailed(second, "no"))
        return scene

    assert play(main()).responses() == ["completed"]


def test_when_text_of_an_open_turn_arrives_then_the_model_is_prefilled_with_it() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            await scene.start_turn()
            await scene.transcription(TranscriptDelta(0, "I would"))
            await scene.transcription(TranscriptDelta(0, " like"))
        return scene

    assert [m[-1].text for m in play(main()).model.prefilled] == ["I would", "I would like"]


def test_when_nobody_speaks_for_the_idle_timeout_then_another_response_is_created() -> None:
    async def main() -> Scene:
        async with Scene(idle_timeout_ms=10, clock=lambda: math.inf) as scene:
            scene.model.go.set()
            await scene.say("Hello.")
            await scene.until(ResponseDone, 2)
            config = replace(scene.session.config, idle_timeout_ms=None)
            await scene.session.handle(ConfigureConversation(config))
        return scene

    scene = play(main())
    idle = next(o for o in scene.out if isinstance(o, IdleTimeoutReached))
    assert any(isinstance(o, UserTurnCommitted) and o.item.id == idle.item_id for o in scene.out)
    assert scene.responses()[:2] == ["completed", "completed"]


@pytest.mark.parametrize("end", ["no words", "failed", "cleared"])
def test_when_a_noise_is_no_turn_then_the_idle_timeout_still_comes(end: str) -> None:
    async def main() -> Scene:
        async with Scene(idle_timeout_ms=100, clock=lambda: math.inf) as scene:
            scene.model.go.set()
            await scene.say("Hello.")
            await scene.start_turn()
            assert scene.num_created == 1
            if end == "cleared":
                await scene.transcription(TurnCleared())
            else:
                turn = await scene.end_turn()
                noise = TranscriptDone(turn, "", "", (), "en", 1.0, 0, 0)
                await scene.transcription(TranscriptFailed(turn, "no") if end == "failed" else noise)
            await scene.until(IdleTimeoutReached)
            await scene.until(ResponseDone, 2)
            config = replace(scene.session.config, idle_timeout_ms=None)
            await scene.session.handle(ConfigureConversation(config))
        return scene

    assert play(main()).responses()[:2] == ["completed", "completed"]


def test_when_an_item_is_still_read_at_the_idle_timeout_then_it_comes_later() -> None:
    async def main() -> Scene:
        async with Scene(idle_timeout_ms=30, clock=lambda: math.inf, reader=(reader := Reader())) as scene:
            scene.model.go.set()
            await scene.say("Hello.")
            await scene.session.handle(shown("one", "YWJj"))
            await asyncio.sleep(0.1)
            assert not any(isinstance(o, IdleTimeoutReached) for o in scene.out)
            reader.go.set()
            await scene.until(IdleTimeoutReached)
            config = replace(scene.session.config, idle_timeout_ms=None)
            await scene.session.handle(ConfigureConversation(config))
        return scene

    play(main())


def test_when_a_client_asks_for_the_answer_that_a_turn_has_already_then_it_joins() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            await scene.start_turn()
            turn = await scene.end_turn()
            # Once while the turn is being transcribed, and again while it is answered.
            await scene.session.handle(CreateResponse())
            await scene.transcribe(turn, "Hello.")
            assert not [o for o in scene.out if isinstance(o, CommandRejected)]
            await scene.session.handle(CreateResponse())
            scene.model.go.set()
            await scene.settle()
        return scene

    scene = play(main())
    assert scene.num_created == 1
    # The second request is rejected.
    rejected = [o.code for o in scene.out if isinstance(o, CommandRejected)]
    assert rejected == ["conversation_already_has_active_response"]


def test_when_the_client_has_said_more_then_its_request_does_not_join_the_answer_before() -> None:
    async def main() -> Scene:
        async with Scene() as scene:
            await scene.say("Hello.")
            await scene.session.handle(CreateItem(Item("more", parts=[ContentPart("input_text", "And more.")])))
            await scene.session.handle(CreateResponse())
            scene.model.go.set()
            await scene.settle()
        return scene

    rejected = [o.code for o in play(main()).out if isinstance(o, CommandRejected)]
    assert rejected == ["conversation_already_has_active_response"]
