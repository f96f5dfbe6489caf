"""What happens until the results of calls are known: fillers, cut turns, deadlines, and results of the client."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.contracts import (
    Message,
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    VoiceOptions,
)
from antiphon.events.conversation import (
    CancelResponse,
    CommandRejected,
    CreateItem,
    CreateResponse,
    Item,
    ItemAdded,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
    UserTurnCommitted,
)
from antiphon.events.tools import CallOptions, Tool, ToolCallEnded, ToolResult
from antiphon.sessions.conversation.history import RESULT_TO_COME
from antiphon.sessions.conversation.responses.generation import FILLER_HINT, FILLER_TEXT
from antiphon.sessions.conversation.responses.server_calls import CUT_OFF, HOST_LOST
from tests.sessions.conversation.responses.test_server_calls import LOOK_UP, SAYS, Calling, ScriptedServers, brief
from tests.sessions.conversation.scripted import RATE_HZ, ScriptedModel, play

FIND = Tool("find", "Finds a page.", {"type": "object"}, "files", read_only=True)
OWN = Tool("own", "The client's.", {"type": "object"})
CALLS_OWN = (ToolCallStarted("own_1", "own"), ToolCallDelta("{}"))
# Fillers are said at once.
MOMENT = CallOptions(fillers=("One moment.",), filler_after_ms=0)
AUTO = CallOptions(answers_results=True)


class Line(ScriptedModel):
    """Says a text, with half a second of audio."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        yield TextDelta(self.text)
        yield ResponseAudio(np.zeros(RATE_HZ // 2, np.float32))
        yield ReplyDone("stop", 0, 0, 0)


class CallsOnce(ScriptedModel):
    """Says what `chunks` has once, and then speaks."""

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        reply = super().respond(messages, options, voice)
        async for chunk in reply:
            yield chunk
            self.chunks = SAYS


class Servers(ScriptedServers):
    """Forgets the calls that are cancelled. `num_cancelled` counts them."""

    num_cancelled = 0

    async def call(self, server: str, name: str, arguments: str) -> ToolResult:
        try:
            return await super().call(server, name, arguments)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            self.calls = [call for call in self.calls if not call.cancelled()]
            raise


class Room(Calling):
    """A conversation with a tool server whose time is set by the test, so that what is heard does not end by itself."""

    def __init__(self, *tools: Tool, **config: Any) -> None:
        self.now_s = 0.0
        config.setdefault("say", Line)
        super().__init__(*tools, clock=lambda: self.now_s, model=CallsOnce(), **config)
        servers = Servers(*tools)
        self.servers.call, self.servers = servers.call, servers  # type: ignore[method-assign]

    async def later(self, seconds: float) -> None:
        self.now_s += seconds
        await self.settle()

    @property
    def said(self) -> list[str]:
        """The texts of all responses so far, in order."""
        return [o.text for o in self.out if isinstance(o, ResponseTextDelta)]

    async def returns(self, output: str, call_id: str = "own_1") -> None:
        """Return the result of the client's function."""
        item = Item(f"out_{call_id}", "function_call_output", call_id=call_id, output=output)
        await self.session.handle(CreateItem(item))
        await self.settle()


# --- fillers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["calls", "operator_calls"])
def test_a_filler_is_said_while_a_call_runs_and_stands_before_the_call_in_the_history(where: str) -> None:
    async def main() -> None:
        async with Room(**{where: MOMENT}) as room:
            await room.ask("What is an antiphon?")
            assert room.said == ["One moment."]
            await room.answer("A short chant.")
            assert room.said == ["One moment.", "One two."]
            # The model reads the call where it was, as if it had said the filler itself.
            assert brief(room.model.asked[-1]) == [
                "user: What is an antiphon?",
                "assistant: One moment. look_up#call_1",
                "tool: A short chant.",
            ]
            # The model was not asked for the filler.
            assert len(room.model.asked) == 2
            added = [o for o in room.out if isinstance(o, ItemAdded) and o.item.role == "assistant"]
            assert [(o.item.kind, o.previous_id == added[0].previous_id) for o in added[:2]] == [
                ("function_call", True),
                ("message", True),
            ]

    play(main())


def test_fillers_are_said_in_turn() -> None:
    options = CallOptions(fillers=("First.", "Second."), filler_after_ms=0)

    async def main() -> None:
        async with Room(calls=options) as room:
            for number in range(3):
                room.model.chunks = (ToolCallStarted(f"call_{number}", "look_up"), ToolCallDelta("{}"))
                await room.ask(f"Word {number}?")
                await room.answer("A chant.")
                await room.later(5)
            assert [text for text in room.said if text != "One two."] == ["First.", "Second.", "First."]

    play(main())


@pytest.mark.parametrize(("server", "says"), [("telephone", []), ("files", ["One moment."])])
def test_no_filler_is_said_while_a_function_of_the_telephone_waits_for_the_last_words(
    server: str, says: list[str]
) -> None:
    async def main() -> None:
        tool = Tool("look_up", "Ends the call.", {"type": "object"}, server)
        async with Room(tool, calls=MOMENT) as room:
            await room.ask("Goodbye.")
            assert room.said == says
            await room.answer("not hung up: the caller went on")

    play(main())


def test_a_model_that_is_to_word_the_filler_reads_so_in_place_of_the_result() -> None:
    async def main() -> None:
        async with Room(calls=CallOptions(generates_fillers=True, filler_after_ms=0)) as room:
            await room.ask("What is an antiphon?")
            assert brief(room.model.asked[-1])[-1] == f"tool: {FILLER_HINT}"
            assert room.model.options[-1].tool_choice == "none"
            await room.answer("A short chant.")
            assert brief(room.model.asked[-1])[1:] == ["assistant: One two. look_up#call_1", "tool: A short chant."]

    play(main())


def test_a_model_that_speaks_by_itself_is_asked_to_say_the_filler() -> None:
    async def main() -> None:
        async with Room(calls=MOMENT, say=None) as room:
            await room.ask("What is an antiphon?")
            assert brief(room.model.asked[-1])[-1] == "tool: " + FILLER_TEXT.format("One moment.")

    play(main())


@pytest.mark.parametrize("because", ["words", "text", "speech", "none"])
def test_no_filler_is_said(because: str) -> None:
    """If the model has said something before its call, in a conversation in text, while the user speaks, and by
    default.
    """
    config: dict[str, Any] = {"calls": None if because == "none" else MOMENT, "audio_output": because != "text"}

    async def main() -> None:
        async with Room(**config) as room:
            if because == "words":
                room.model.chunks = (TextDelta("Let me see."), *room.model.chunks)
            room.model.end.clear()
            await room.ask("What is an antiphon?")
            if because == "speech":
                # The response has called, but has not ended when the user speaks; it goes on.
                await room.session.decide_overlap(takes_floor=False, reason="client")
                await room.start_turn()
            room.model.end.set()
            await room.settle()
            assert room.said == (["Let me see."] if because == "words" else [])
            assert len(room.servers.asked) == 1

    play(main())


def test_when_the_user_speaks_over_a_filler_then_it_is_no_false_start() -> None:
    """The turn that called is answered already: the next one is a turn of its own."""

    async def main() -> None:
        async with Room(calls=MOMENT, false_start_ms=2000.0) as room:
            await room.ask("What is an antiphon?")
            await room.say("And a psalm?", 600)
            assert [text for text in brief(room.model.asked[-1]) if text.startswith("user")] == [
                "user: What is an antiphon?",
                "user: And a psalm?",
            ]
            assert room.counted["false_starts"] == 0

    play(main())


def test_when_the_client_requests_a_response_while_a_filler_is_said_then_it_waits_for_the_filler() -> None:
    async def main() -> None:
        async with Room(calls=CallOptions(generates_fillers=True, filler_after_ms=0), tools=(OWN,)) as room:
            room.model.chunks = CALLS_OWN
            await room.ask("What is an antiphon?")
            room.model.end.clear()
            await room.settle()
            await room.returns("A chant.")
            await room.session.handle(CreateResponse())
            room.model.end.set()
            await room.settle()
            assert not [o for o in room.out if isinstance(o, CommandRejected)]
            assert room.responses() == ["completed"] * 3

    play(main())


# --- cut turns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", [LOOK_UP, FIND])
def test_when_the_user_interrupts_the_turn_that_called_then_nothing_is_said_of_the_result(tool: Tool) -> None:
    """A call that only reads is cancelled. Any other runs to its end, and the model reads its result later."""

    async def main() -> None:
        async with Room(LOOK_UP, FIND, calls=MOMENT) as room:
            room.model.chunks = (ToolCallStarted("call_1", tool.name), ToolCallDelta("{}"))
            await room.ask("What is an antiphon?")
            # The user speaks over the filler.
            await room.say("Never mind.", 5000)
            assert room.servers.num_cancelled == tool.read_only
            assert brief(room.model.asked[-1])[-2:] == [
                f"tool: {CUT_OFF.text if tool.read_only else RESULT_TO_COME}",
                "user: Never mind.",
            ]
            num_created = room.num_created
            if not tool.read_only:
                await room.answer("A short chant.")
            assert room.num_created == num_created
            assert room.session.progress.owed_responses == []
            await room.later(5)
            await room.say("What was it?", 20_000)
            assert ("tool: A short chant." in brief(room.model.asked[-1])) is not tool.read_only

    play(main())


def test_when_the_user_interrupts_another_answer_then_the_call_is_still_wanted() -> None:
    async def main() -> None:
        async with Room(FIND) as room:
            room.model.chunks = (ToolCallStarted("call_1", "find"), ToolCallDelta("{}"))
            await room.ask("What is an antiphon?")
            await room.say("How are you?", 5000)
            # The answer is heard for a second.
            await room.say("And your family?", 5500)
            await room.later(5)
            await room.answer("A short chant.")
            assert brief(room.model.asked[-1])[-1] == "tool: A short chant."

    play(main())


def test_when_the_client_cancels_while_a_call_runs_then_the_call_is_not_wanted_any_more() -> None:
    async def main() -> None:
        async with Room() as room:
            await room.ask("What is an antiphon?")
            await room.session.handle(CancelResponse())
            await room.answer("A short chant.")
            assert (room.num_created, [o for o in room.out if isinstance(o, CommandRejected)]) == (1, [])
            await room.session.handle(CancelResponse())
            assert [o.code for o in room.out if isinstance(o, CommandRejected)] == ["response_cancel_not_active"]

    play(main())


# --- deadlines, and the client's functions ----------------------------------------------------------------------------


def test_a_call_without_a_result_has_failed_at_the_deadline_and_the_model_speaks_of_that() -> None:
    async def main() -> None:
        async with Room(calls=CallOptions(deadline_ms=1)) as room:
            await room.ask("What is an antiphon?")
            await room.until(ToolCallEnded)
            await room.settle()
            assert room.servers.num_cancelled == 1
            assert brief(room.model.asked[-1])[-1] == "tool: The function did not answer within 0.001 s."

    play(main())


def test_at_the_deadline_a_clients_function_has_failed_too_and_its_late_result_is_kept() -> None:
    async def main() -> None:
        async with Room(calls=CallOptions(deadline_ms=1), tools=(OWN,)) as room:
            room.model.chunks = CALLS_OWN
            await room.ask("What is an antiphon?")
            await room.until(ItemAdded, 2)
            await room.settle()
            assert brief(room.model.asked[-1])[-1] == "tool: The function did not answer within 0.001 s."
            await room.returns("A chant.")
            assert room.num_created == 2
            assert room.session.history.items[-1].output == "A chant."

    play(main())


@pytest.mark.parametrize("options", [None, AUTO])
def test_the_result_of_a_clients_function_is_answered_without_a_request_if_the_session_asks_for_it(
    options: CallOptions | None,
) -> None:
    async def main() -> None:
        async with Room(calls=options, tools=(OWN,)) as room:
            room.model.chunks = CALLS_OWN
            await room.ask("What is an antiphon?")
            # The user speaks and is answered meanwhile.
            await room.say("Are you there?", 5000)
            assert room.num_created == 2
            await room.returns("A chant.")
            assert room.num_created == (3 if options else 2)
            if options:
                assert brief(room.model.asked[-1])[-1] == "tool: A chant."
            await room.session.handle(CreateResponse())
            await room.settle()
            assert room.num_created == (4 if options else 3)

    play(main())


def test_one_response_has_the_results_of_the_client_and_of_the_servers() -> None:
    async def main() -> None:
        async with Room(calls=AUTO, tools=(OWN,)) as room:
            room.model.chunks = (*CALLS_OWN, ToolCallStarted("call_1", "look_up"), ToolCallDelta("{}"))
            await room.ask("What is an antiphon?")
            await room.answer("A short chant.")
            assert room.num_created == 1
            await room.returns("A chant.")
            assert room.num_created == 2

    play(main())


# --- random orders ----------------------------------------------------------------------------------------------------

ACTS = ["ask", "find", "own", "say", "answer", "return", "start", "end", "cough", "cut", "cancel", "host"]
CALLED = {"ask": "look_up", "find": "find", "own": "own"}
SPOKEN_CALLS = CallOptions(fillers=("One moment.",), filler_after_ms=0, answers_results=True)


class Schedule:
    """Plays acts of the user, of the client and of the servers, at one host after another."""

    def __init__(self) -> None:
        self.num_hosts = 0
        self.room = self.new_room()
        self.speaks = False
        self.num_calls = self.num_asked = 0
        # The ids of the calls whose turn was cut, and the messages of all responses, at all hosts.
        self.cut: set[str] = set()
        self.asked: list[tuple[Message, ...]] = []

    def new_room(self) -> Room:
        self.num_hosts += 1
        first_id = 1000 * self.num_hosts
        return Room(LOOK_UP, FIND, chunks=SAYS, calls=SPOKEN_CALLS, tools=(OWN,), first_id=first_id)

    @property
    def calls(self) -> list[Item]:
        return [item for item in self.room.session.history.items if item.kind == "function_call"]

    def output(self, call: Item) -> str:
        """Return the result of a call; "" if there is none."""
        if call.server:
            return call.output
        found = (i for i in self.room.session.history.items if i.kind.endswith("output") and i.call_id == call.call_id)
        return next((item.output for item in found), "")

    @property
    def open(self) -> list[Item]:
        return [call for call in self.calls if not self.output(call) and call.status != "incomplete"]

    def newest(self) -> set[str]:
        """The ids of the items of the newest response since the last turn of the user, without fillers."""
        newest, items = "", dict[str, set[str]]()
        for event in self.room.out:
            if isinstance(event, UserTurnCommitted):
                newest = ""
            elif isinstance(event, ResponseCreated) and event.response.request.tool_choice != "none":
                newest = event.response.id
            elif isinstance(event, ResponseDone):
                items[event.response.id] = {item.id for item in event.response.output}
        return items.get(newest, set())

    def note_cut(self) -> None:
        """Note the calls that an interruption by the user cuts: those of the response that is heard."""
        now = self.room.session.progress
        if now.is_responding or now.is_heard:
            self.cut |= {call.id for call in self.open} & self.newest()

    def note(self) -> None:
        self.asked += self.room.model.asked
        self.num_asked += len(self.room.servers.asked)

    async def move(self) -> None:
        """Go on at another host, as a session does that is stored there."""
        self.note()
        items = [item.snapshot() for item in self.room.session.history.items]
        owed = self.room.session.progress.owed_responses
        await self.room.__aexit__()
        self.room = self.new_room()
        self.room.session.history.restore(items)
        await self.room.__aenter__()
        for request in owed:
            await self.room.session.handle(request)

    async def act(self, act: str, number: int) -> None:
        room, at_ms = self.room, 10_000 * number
        match act:
            case "ask" | "find" | "own" | "say" if not self.speaks:
                await room.later(10)
                if name := CALLED.get(act):
                    self.num_calls += 1
                    room.model.chunks = (ToolCallStarted(f"call_{self.num_calls}", name), ToolCallDelta("{}"))
                await room.say(f"Turn {number}.", at_ms)
                room.model.chunks = SAYS
            case "answer" if room.servers.calls:
                await room.answer(f"Result {number}.")
            case "return" if own := [call for call in self.open if not call.server]:
                await room.returns(f"Result {number}.", own[0].call_id)
            case "start" if not self.speaks:
                self.speaks = True
                self.note_cut()
                await room.start_turn(at_ms)
            case "end" | "cough" if self.speaks:
                self.speaks = False
                await room.transcribe(await room.end_turn(at_ms), f"Turn {number}." if act == "end" else "")
            case "cut":
                self.note_cut()
                await room.session.interrupt("turn_detected")
            case "cancel" if not room.session.progress.is_responding:
                self.cut |= {call.id for call in self.open}
                await room.session.handle(CancelResponse())
            case "host" if not self.speaks:
                await self.move()
        await self.room.settle()

    def rest(self) -> Iterator[str]:
        """Yield the acts that end a schedule: each call gets its result, and the user says something more."""
        yield "end"
        for _ in range(14):
            if self.open:
                yield from ("answer", "return")
        yield "say"

    def spoken(self) -> list[set[str]]:
        """The results because of which each response began: those after the last words of either side."""
        found = []
        for messages in self.asked:
            newest = itertools.takewhile(lambda m: m.role == "tool" or not m.text, reversed(messages))
            results = {message.text for message in newest if message.role == "tool"}
            if messages and messages[-1].role == "tool":
                found.append(results)
        return found


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(ACTS), min_size=1, max_size=14))
def test_in_200_random_orders_each_call_is_answered_once_and_no_result_is_spoken_twice(acts: list[str]) -> None:
    async def main() -> None:
        played = Schedule()
        await played.room.__aenter__()
        try:
            for number, act in enumerate(itertools.chain(acts, played.rest())):
                await played.act(act, number)
            played.note()
            owed, calls = played.room.session.progress.owed_responses, played.calls
            outputs = {call.id: played.output(call) for call in calls}
        finally:
            await played.room.__aexit__()
        # Each call was made once, and has one result.
        assert played.num_asked == sum(bool(call.server) and call.status != "incomplete" for call in calls)
        assert all(outputs[call.id] for call in calls if call.status != "incomplete")
        assert owed == []
        # The model reads each result at its end once.
        read = "\n".join(brief(played.asked[-1]))
        assert all(read.count(text) == 1 for text in outputs.values() if text.startswith("Result"))
        # No result is spoken twice, and none only because of calls that were cut.
        spoken = [{text for text in results if text.startswith("Result")} for results in played.spoken()]
        counted = Counter(itertools.chain.from_iterable(spoken))
        assert max(counted.values(), default=0) <= 1
        cut = {outputs[id] for id in played.cut if id in outputs} - {HOST_LOST.text}
        assert not [results for results in played.spoken() if results <= cut]

    play(main())
