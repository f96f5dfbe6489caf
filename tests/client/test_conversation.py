"""Conversations of our own client with a real server over scripted models: all events arrive once, whatever breaks."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import pytest

from antiphon.client import (
    AudioToPlay,
    Client,
    ClientConversation,
    ConversationEvent,
    Heard,
    Interrupted,
    Reconnected,
    ResponseBegins,
    ResponseEnds,
    ResponseWords,
    ServerError,
    SessionEnded,
    SyncClient,
    ToolCalled,
    UserSaid,
)
from antiphon.client.tools import FunctionTool
from antiphon.contracts import (
    Message,
    ReplyDone,
    ReplyOptions,
    ResponseChunk,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    VoiceOptions,
)
from antiphon.server.state import ServerState
from antiphon.settings import Settings
from tests.scripted import speech, text
from tests.server.scripted import RATE_HZ, WORD_S, Echo, serving

LIMIT_S = 60
# Turns end after 300 ms of silence, which is sent after each turn, so that no test waits for it.
VAD = {"type": "server_vad", "silence_duration_ms": 300}


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[str, ServerState, Echo]]:
    with serving() as (url, state, echo):
        yield url.replace("ws", "http", 1), state, echo


def talked(
    scripted: tuple[str, ServerState, Echo], use: Callable[[ClientConversation], Awaitable[Any]], **options: Any
) -> Any:
    """Run `use` with a conversation, and check that no session is left on the server."""

    async def main() -> Any:
        async with Client(scripted[0]) as client, client.conversation(**options) as talk:
            found = await use(talk)
        return found

    found = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    return found


async def until(talk: ClientConversation, kind: type[ConversationEvent]) -> list[ConversationEvent]:
    """Return the events up to the first one of a kind."""
    seen = list[ConversationEvent]()
    async for event in talk:
        seen.append(event)
        if isinstance(event, kind):
            return seen
    raise AssertionError(f"no {kind.__name__} in {seen}")


def words(events: Sequence[ConversationEvent]) -> str:
    return "".join(e.text for e in events if isinstance(e, ResponseWords))


def test_what_is_typed_is_answered_in_words_and_sound(scripted: tuple[str, ServerState, Echo]) -> None:
    async def use(talk: ClientConversation) -> list[ConversationEvent]:
        assert talk.id.startswith("sess")
        await talk.send_text("tell me more")
        return await until(talk, ResponseEnds)

    seen = talked(scripted, use)
    ends = seen[-1]
    assert isinstance(ends, ResponseEnds)
    assert (ends.status, ends.text, words(seen)) == ("completed", "tell me more", "tell me more")
    sounds = [e for e in seen if isinstance(e, AudioToPlay)]
    assert {s.rate_hz for s in sounds} == {RATE_HZ}
    assert [round(s.start_ms) for s in sounds] == [
        round(sum(len(s.pcm) for s in sounds[:k]) / 48) for k in range(len(sounds))
    ]
    assert round(sounds[-1].end_ms) == round(3 * WORD_S * 1000)


def test_what_is_said_is_told_and_answered(scripted: tuple[str, ServerState, Echo]) -> None:
    async def use(talk: ClientConversation) -> list[ConversationEvent]:
        await talk.send_audio(speech(1, 3, silence_frames=30))
        return await until(talk, ResponseEnds)

    seen = talked(scripted, use, turn_detection=VAD)
    assert [e.text for e in seen if isinstance(e, UserSaid)] == [text(1, 3)]
    assert words(seen) == text(1, 3)


def test_an_answer_in_text_has_no_sound(scripted: tuple[str, ServerState, Echo]) -> None:
    async def use(talk: ClientConversation) -> list[ConversationEvent]:
        await talk.send_text("quiet please")
        return await until(talk, ResponseEnds)

    seen = talked(scripted, use, speaks=False)
    assert words(seen) == "quiet please"
    assert not [e for e in seen if isinstance(e, AudioToPlay)]


def test_of_an_answer_that_is_cut_what_was_played_is_kept(scripted: tuple[str, ServerState, Echo]) -> None:
    async def use(talk: ClientConversation) -> list[ConversationEvent]:
        await talk.send_text("one two three four")
        seen = await until(talk, ResponseEnds)
        sounds = [e for e in seen if isinstance(e, AudioToPlay)]
        await talk.played(sounds[0])
        await talk.played(sounds[1], part=0.5)
        await talk.interrupt()
        return [*await until(talk, Interrupted), *await until(talk, Heard)]

    seen = talked(scripted, use, acknowledges=True)
    assert [e.until_ms for e in seen if isinstance(e, Heard)] == [450]


@pytest.mark.slow
def test_two_hundred_cuts_lose_and_double_nothing(scripted: tuple[str, ServerState, Echo]) -> None:
    chance = random.Random(1)
    cuts = 0

    async def use(talk: ClientConversation) -> None:
        nonlocal cuts
        turn = 0
        while cuts < 200:
            turn += 1
            # The words differ from the previous answer; otherwise they would be taken for its echo.
            first = 1 + 3 * turn
            pcm = speech(first, 3, silence_frames=30)
            # The connection breaks between two pieces of speech, and between two events of the answer.
            at_piece, at_event = chance.randrange(8), chance.randrange(12)
            for k in range(8):
                await talk.send_audio(pcm[k * len(pcm) // 8 : (k + 1) * len(pcm) // 8])
                if k == at_piece:
                    cuts += await cut(talk)
            seen = list[ConversationEvent]()
            async for event in talk:
                assert not isinstance(event, ServerError), event
                if not isinstance(event, Reconnected):
                    seen.append(event)
                if isinstance(event, AudioToPlay):
                    # All audio is played before the next turn begins, so that it is not speech over an answer.
                    await talk.played(event)
                if len(seen) == at_event:
                    at_event = -1
                    cuts += await cut(talk)
                if isinstance(event, ResponseEnds):
                    break
            assert [e.text for e in seen if isinstance(e, UserSaid)] == [text(first, 3)]
            assert words(seen) == text(first, 3)
            assert len([e for e in seen if isinstance(e, ResponseBegins)]) == 1
            assert round(sum(len(e.pcm) for e in seen if isinstance(e, AudioToPlay)) / 48) == round(900 * WORD_S / 0.3)
        assert talk.link.num_resumed > 0

    talked(scripted, use, turn_detection=VAD, acknowledges=True)
    assert cuts >= 200


async def cut(talk: ClientConversation) -> int:
    """Break the connection, if there is one at the moment."""
    return int(await talk.link.cut())


class Caller(Echo):
    """A scripted model that calls `add` with the user's JSON as arguments, and then says the result."""

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        if messages[-1].role == "tool" or options.tool_choice == "none":
            yield TextDelta(messages[-1].text)
            yield ReplyDone("stop", 1, 0, 1)
        else:
            yield ToolCallStarted("call_1", options.tools[0].name)
            yield ToolCallDelta(messages[-1].text)
            yield ReplyDone("tool_calls", 1, 0, 1)


def add(a: int, b: Annotated[int, "What is added."] = 1) -> int:
    """Add two numbers.

    Only the first paragraph is sent to the model.
    """
    if a == 13:
        raise ValueError("thirteen is not added to")
    return a + b


async def slow_add(a: int, unit: Literal["m", "km"] = "m") -> dict[str, Any]:
    """Add, later."""
    await asyncio.sleep(0)
    return {"sum": a, "unit": unit}


@pytest.mark.parametrize(
    ("tool", "arguments", "output"),
    [
        (add, '{"a": 2, "b": 3}', "5"),
        (add, '{"a": 2}', "3"),
        (add, '{"a": 13}', '{"error":"ValueError: thirteen is not added to"}'),
        (slow_add, '{"a": 2, "unit": "km"}', '{"sum":2,"unit":"km"}'),
    ],
)
def test_a_function_is_called_and_its_result_is_answered(tool: Any, arguments: str, output: str) -> None:
    with serving(partner=Caller()) as (url, _, _):

        async def use(talk: ClientConversation) -> list[ConversationEvent]:
            await talk.send_text(arguments)
            seen = list[ConversationEvent]()
            while not words(seen):
                seen += await until(talk, ResponseEnds)
            return seen

        seen = talked((url.replace("ws", "http", 1), None, None), use, tools=[tool])  # type: ignore[arg-type]
    (called,) = [e for e in seen if isinstance(e, ToolCalled)]
    assert (called.name, json.loads(called.arguments), called.output) == (tool.__name__, json.loads(arguments), output)
    assert words(seen) == output


def test_a_functions_schema_is_that_of_its_signature() -> None:
    assert FunctionTool(add).definition() == {
        "type": "function",
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "b": {"type": "integer", "description": "What is added.", "default": 1},
            },
            "required": ["a"],
            "additionalProperties": False,
        },
    }
    unit = FunctionTool(slow_add).definition()["parameters"]["properties"]["unit"]
    assert unit == {"enum": ["km", "m"], "default": "m"}


@pytest.mark.parametrize("arguments", ['{"a": "two"}', "{}", '{"a": 1, "c": 2}', "no JSON"])
def test_arguments_that_do_not_fit_are_told_to_the_model(arguments: str) -> None:
    output = asyncio.run(FunctionTool(add).call(arguments))
    assert "error" in json.loads(output)


def test_a_function_that_cannot_be_a_tool_is_refused() -> None:
    def untyped(a):  # type: ignore[no-untyped-def]
        return a

    def variable(*a: int) -> int:
        return len(a)

    with pytest.raises(TypeError, match="the parameter a has no type"):
        FunctionTool(untyped)
    with pytest.raises(TypeError, match="parameters are passed by name"):
        FunctionTool(variable)


def test_what_the_server_refuses_is_an_event_and_the_session_goes_on(scripted: tuple[str, ServerState, Echo]) -> None:
    async def use(talk: ClientConversation) -> list[ConversationEvent]:
        await talk.send({"type": "conversation.item.delete", "item_id": "item_none"})
        errors = await until(talk, ServerError)
        await talk.send_text("still here")
        return [*errors, *await until(talk, ResponseEnds)]

    seen = talked(scripted, use)
    assert [e.code for e in seen if isinstance(e, ServerError)] == ["item_not_found"]
    assert words(seen) == "still here"


def test_half_a_sample_is_refused(scripted: tuple[str, ServerState, Echo]) -> None:
    async def use(talk: ClientConversation) -> None:
        with pytest.raises(ValueError, match="two bytes per sample"):
            await talk.send_audio(b"123")

    talked(scripted, use)


def test_a_session_that_the_server_refuses_says_why(scripted: tuple[str, ServerState, Echo]) -> None:
    async def use(talk: ClientConversation) -> None:
        raise AssertionError("it was entered")

    with pytest.raises(SessionEnded, match="voice_not_found") as refused:
        talked(scripted, use, voice="nobody")
    assert refused.value.code == "voice_not_found"


def test_a_server_that_is_not_there_is_told_at_once() -> None:
    with pytest.raises(SessionEnded, match="connection_lost"):
        talked(("http://127.0.0.1:9", None, None), lambda talk: until(talk, ResponseEnds))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="http:// or https"):
        Client("127.0.0.1:8000")


def test_a_wrong_key_is_told_by_its_code() -> None:
    settings = Settings()
    with serving(replace(settings, server=replace(settings.server, api_keys=("right",)))) as (url, _, _):
        http = url.replace("ws", "http", 1)

        async def enter(key: str | None) -> str:
            async with Client(http, key) as client, client.conversation() as talk:
                return talk.id

        assert asyncio.run(enter("right"))
        for key in ("wrong", None):
            with pytest.raises(SessionEnded) as refused:
                asyncio.run(enter(key))
            assert refused.value.code == "invalid_api_key"


def test_a_program_without_an_event_loop_has_the_same(scripted: tuple[str, ServerState, Echo]) -> None:
    with SyncClient(scripted[0]) as client, client.conversation(turn_detection=VAD) as talk:
        talk.send_audio(speech(5, 2, silence_frames=30))
        seen = list[ConversationEvent]()
        for event in talk:
            seen.append(event)
            if isinstance(event, ResponseEnds):
                break
        assert words(seen) == text(5, 2)
        talk.configure(turn_detection={"type": "other"})
        refused = next(event for event in talk if isinstance(event, ServerError))
        assert refused.code == "unsupported_turn_detection"
        talk.send_text("and again")
        for event in talk:
            if isinstance(event, ResponseEnds):
                assert event.text == "and again"
                break


def test_the_language_is_given_and_changed_in_mid_call(scripted: tuple[str, ServerState, Echo]) -> None:
    """The scripted model hears only English, so a refusal shows that the language was sent."""

    async def use(talk: ClientConversation) -> list[str]:
        reported = []
        for change in ({"language": "de"}, {"voice": "nobody"}):
            await talk.configure(**change)  # type: ignore[arg-type]
            reported.append(next(e.message for e in await until(talk, ServerError) if isinstance(e, ServerError)))
        await talk.configure(language="", instructions="Be brief.", voice="one", turn_detection=VAD)
        await talk.send_text("hello")
        ends = [e for e in await until(talk, ResponseEnds) if isinstance(e, ServerError | ResponseEnds)]
        assert [type(e) for e in ends] == [ResponseEnds]
        return reported

    language, voice = talked(scripted, use, language="en")
    assert "'de'" in language
    assert "nobody" in voice
    with pytest.raises(SessionEnded, match="'de'"):
        talked(scripted, use, language="de")


def test_what_the_server_does_not_read_is_kept_and_logged(
    scripted: tuple[str, ServerState, Echo], caplog: pytest.LogCaptureFixture
) -> None:
    async def use(talk: ClientConversation) -> list[str]:
        return [str(warning["param"]) for warning in talk.warnings]

    assert talked(scripted, use, session={"language": "en"}) == ["session.language"]
    assert "session.language" in caplog.text
    with SyncClient(scripted[0]) as client, client.conversation(session={"langage": "en"}) as talk:
        assert [warning["code"] for warning in talk.warnings] == ["unknown_parameter"]
