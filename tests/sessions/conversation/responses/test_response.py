"""The stages of one response: guessed, requested, closed."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.contracts import Message, ReplyDone, ReplyOptions, TextDelta
from antiphon.errors import LocalProtocolError
from antiphon.events.conversation import Response, ResponseCreated, ResponseDone, ResponseTextDelta
from antiphon.sessions.conversation.context import ConversationContext
from antiphon.sessions.conversation.history import ConversationHistory
from antiphon.sessions.conversation.responses.generation import ResponseGeneration
from antiphon.sessions.conversation.responses.response import (
    TRANSITIONS,
    ResponseInput,
    ResponseStage,
    ResponseTask,
)

REQUEST = ((Message("user", "Well?"),), ReplyOptions(), None)
OTHER = ((Message("user", "Well, well?"),), ReplyOptions(), None)


class Words:
    """A model's stream that says two words."""

    async def respond(self, *request: Any) -> AsyncIterator[Any]:
        for word in ("Yes", " indeed."):
            yield TextDelta(word)
        yield ReplyDone("stop", prompt_tokens=3, cached_tokens=0, completion_tokens=2)


def response() -> Response:
    return Response("resp_1", False, None, None, None, True)


class One:
    """One response with its emitted events and its counters."""

    def __init__(self) -> None:
        self.out: list[Any] = []
        self.counted: Counter[str] = Counter()
        ids = iter(range(100))
        context = SimpleNamespace(
            new_id=lambda prefix: f"{prefix}{next(ids)}",
            measure=lambda name, seconds: None,
            count=lambda name, number: self.counted.update({name: number}),
            model=SimpleNamespace(profile=SimpleNamespace(sample_rate_hz=24_000)),
        )
        self.task = ResponseTask(cast(ConversationContext, context), ConversationHistory(), self.emit)

    async def emit(self, event: Any) -> None:
        self.out.append(event)

    async def never(self, _: Response) -> ResponseGeneration:
        raise AssertionError("a response that was begun is generated again")

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.out if isinstance(e, ResponseTextDelta))


def guess() -> ResponseGeneration:
    return ResponseGeneration(cast(Any, Words()), *REQUEST)


def test_when_a_guess_is_asked_for_then_what_was_generated_is_sent_and_nothing_is_generated_again() -> None:
    async def main() -> One:
        one = One()
        async with anyio.create_task_group() as group:
            one.task.begin_preemptive(guess(), group)
            await anyio.wait_all_tasks_blocked()
            # It is being generated, and none of it is reported.
            assert one.out == []
            assert one.task.answers(REQUEST)
            assert not one.task.answers(OTHER)
            one.task.ask(response(), one.never)
            await one.task.run()
        return one

    one = anyio.run(main)
    assert one.text == "Yes indeed."
    assert [type(e) for e in (one.out[0], one.out[-1])] == [ResponseCreated, ResponseDone]
    assert one.counted == {"preemptive_begun": 1, "preemptive_used": 1}
    assert one.task.stage is ResponseStage.CLOSED


def test_when_a_guess_is_dropped_then_nothing_is_told_and_its_tokens_are_counted_as_wasted() -> None:
    async def main() -> One:
        one = One()
        async with anyio.create_task_group() as group:
            one.task.begin_preemptive(guess(), group)
            await anyio.wait_all_tasks_blocked()
            await one.task.drop()
        return one

    one = anyio.run(main)
    assert one.out == []
    assert one.counted == {"preemptive_begun": 1, "preemptive_dropped": 1, "preemptive_dropped_tokens": 2}
    assert one.task.stage is ResponseStage.CLOSED


def test_when_a_guess_was_cancelled_then_it_answers_nothing() -> None:
    async def main() -> One:
        one = One()
        async with anyio.create_task_group() as group:
            one.task.begin_preemptive(guess(), group)
            one.task.cancel_preemptive()
            assert not one.task.answers(REQUEST)
            await one.task.drop()
        return one

    anyio.run(main)


@pytest.mark.parametrize("stage", ResponseStage)
def test_what_the_table_does_not_have_is_an_error(stage: ResponseStage) -> None:
    """Reach each stage, and try each input that it does not allow."""

    async def main() -> None:
        for happened in (ResponseInput.GUESSED, ResponseInput.ASKED, ResponseInput.DROPPED):
            if happened in TRANSITIONS[stage]:
                continue
            one = One()
            async with anyio.create_task_group() as group:
                await reach(one, stage, group)
                with pytest.raises(LocalProtocolError, match=stage.name):
                    await apply(one, happened, group)
                if stage is ResponseStage.PREEMPTIVE:
                    await one.task.drop()
                elif stage is ResponseStage.UNDER_WAY:
                    await one.task.run()

    anyio.run(main)


async def reach(one: One, stage: ResponseStage, group: Any) -> None:
    if stage is ResponseStage.PREEMPTIVE:
        one.task.begin_preemptive(guess(), group)
    elif stage is not ResponseStage.NEW:
        one.task.ask(response(), made(group))
        if stage is ResponseStage.CLOSED:
            await one.task.run()
    assert one.task.stage is stage


async def apply(one: One, happened: ResponseInput, group: Any) -> None:
    match happened:
        case ResponseInput.GUESSED:
            one.task.begin_preemptive(cast(Any, None), group)
        case ResponseInput.ASKED:
            one.task.ask(response(), made(group))
        case ResponseInput.DROPPED:
            await one.task.drop()


def made(group: Any) -> Any:
    async def make(_: Response) -> ResponseGeneration:
        generation = guess()
        group.start_soon(generation.run)
        return generation

    return make


@given(st.lists(st.sampled_from(ResponseInput), max_size=6))
def test_every_way_through_the_table_ends_at_most_once(inputs: list[ResponseInput]) -> None:
    stage, num_closed = ResponseStage.NEW, 0
    for happened in inputs:
        following = TRANSITIONS[stage].get(happened)
        if following is None:
            continue
        assert stage is not ResponseStage.CLOSED
        stage = following
        num_closed += stage is ResponseStage.CLOSED
    assert num_closed <= 1
