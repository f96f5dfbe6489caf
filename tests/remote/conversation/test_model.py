"""A conversation model on scripted servers: what they are sent, faults in every phase, and a second server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.server import ServerConnection

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import (
    AudioPart,
    ImagePart,
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
from antiphon.errors import ModelError, RemoteError
from antiphon.events.tools import Tool, ToolCall
from antiphon.remote.address import CONVERSATION_MODEL, parse_address
from antiphon.remote.conversation import session
from antiphon.remote.conversation.items import WIRE_HZ
from antiphon.remote.conversation.model import RemoteConversationModel, RemoteConversationStream
from antiphon.settings import RemoteSettings
from antiphon.vision.images import EncodedImage
from tests.remote.scripted_sockets import Script, Server, scripted_sockets, tell
from tests.remote.synthesizer.scripted_voice import SAMPLES, TONE, base64

KEY, LIMIT_S = "sk-not-to-be-seen", 30
VOICE = VoiceOptions("default")
HELLO = (Message("system", "Be brief."), Message("user", "Hello."))
LOOK = Tool("look", "Look at it.", {"type": "object", "properties": {"at": {"type": "string"}}})
Use = Callable[[RemoteConversationStream, Sequence[Server]], Awaitable[Any]]


def asked(*servers: tuple[Script, ...], use: Use, first_s: float = 20.0) -> Any:
    """Run `use` with a conversation at servers that follow these scripts."""

    async def main() -> Any:
        async with AsyncExitStack() as stack:
            found = [await stack.enter_async_context(scripted_sockets("response.create", *s)) for s in servers]
            for server in found:
                server.greeting = {"type": "session.created", "session": {}}
            address = parse_address(
                f"{','.join(server.url for server in found)}#clever", "--conversation-model", schemes=CONVERSATION_MODEL
            )
            remote = RemoteSettings(remote_first_token_s=first_s, remote_token_s=0.3)
            model = await asyncio.to_thread(RemoteConversationModel, address, KEY, remote)
            stream = await model.open()
            try:
                return await use(stream, found)
            finally:
                stream.close()

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))


async def answer(
    stream: RemoteConversationStream, messages: Sequence[Message] = HELLO, **options: Any
) -> list[ResponseChunk]:
    async with aclosing(stream.respond(messages, ReplyOptions(**options), VOICE)) as chunks:
        return [chunk async for chunk in chunks]


def words_of(chunks: Sequence[ResponseChunk]) -> str:
    return "".join(chunk.text for chunk in chunks if isinstance(chunk, TextDelta))


async def begins(socket: ServerConnection, item: str = "item_1") -> None:
    await tell(socket, "response.created", response={"id": "resp_1", "status": "in_progress"})
    await tell(socket, "response.output_item.added", item={"id": item, "type": "message", "role": "assistant"})


async def ends(socket: ServerConnection, status: str = "completed", **fields: Any) -> None:
    await tell(socket, "response.done", response={"id": "resp_1", "status": status, **fields})


def says(*words: str) -> Script:
    async def script(socket: ServerConnection) -> None:
        await begins(socket)
        for word in words:
            await tell(socket, "response.output_audio_transcript.delta", delta=word)
            await tell(socket, "response.output_audio.delta", delta=base64(SAMPLES))
        usage = {"input_tokens": 7, "output_tokens": 2, "input_token_details": {"cached_tokens": 5}}
        await ends(socket, usage=usage)

    return script


def sent(server: Server, kind: str) -> list[dict[str, Any]]:
    return [message for message in server.messages if message["type"] == kind]


def test_a_conversation_is_sent_once_and_what_was_not_heard_is_replaced() -> None:
    async def use(stream: RemoteConversationStream, servers: Sequence[Server]) -> None:
        (server,) = servers
        chunks = await answer(stream)
        assert words_of(chunks) == "Good morning."
        audio = [chunk.pcm for chunk in chunks if isinstance(chunk, ResponseAudio)]
        np.testing.assert_allclose(np.concatenate(audio), np.tile(TONE, 2), atol=1e-4)
        assert chunks[-1] == ReplyDone("stop", 7, 5, 2)
        (configured,) = sent(server, "session.update")
        assert configured["session"]["audio"]["input"]["turn_detection"] is None
        (created,) = sent(server, "conversation.item.create")
        assert created["item"]["content"] == [{"type": "input_text", "text": "Hello."}]
        assert sent(server, "response.create")[0]["response"] == {
            "output_modalities": ["audio"],
            "instructions": "Be brief.",
        }
        server.messages.clear()
        # The whole answer was heard: only the new message is sent.
        said = [*HELLO, Message("assistant", "Good morning."), Message("user", "And?")]
        await answer(stream, said)
        assert len(sent(server, "conversation.item.create")) == 1
        assert not sent(server, "conversation.item.delete")
        assert not sent(server, "session.update")
        server.messages.clear()
        # Only a part of the second answer was heard.
        said += [Message("assistant", "Good"), Message("user", "What?")]
        await answer(stream, said)
        assert [message["item_id"] for message in sent(server, "conversation.item.delete")] == ["item_1"]
        texts = [message["item"]["content"][0] for message in sent(server, "conversation.item.create")]
        assert texts == [{"type": "output_text", "text": "Good"}, {"type": "input_text", "text": "What?"}]

    asked((says("Good ", "morning."),), use=use)


def test_functions_are_called_and_their_results_are_sent() -> None:
    async def calls(socket: ServerConnection) -> None:
        await tell(socket, "response.created", response={"id": "resp_1"})
        for number in (1, 2):
            call = {"id": f"item_{number}", "type": "function_call", "name": "look", "call_id": f"call_{number}"}
            await tell(socket, "response.output_item.added", item=call)
            if number == 1:
                await tell(socket, "response.function_call_arguments.delta", item_id="item_1", delta='{"at": "it"}')
            # The second call's arguments come only with its end.
            await tell(socket, "response.output_item.done", item={**call, "arguments": "{}"})
        await ends(socket)

    async def use(stream: RemoteConversationStream, servers: Sequence[Server]) -> None:
        chunks = await answer(stream, tools=(LOOK,), tool_choice="look", max_tokens=50)
        assert chunks == [
            ToolCallStarted("call_1", "look"),
            ToolCallDelta('{"at": "it"}'),
            ToolCallStarted("call_2", "look"),
            ToolCallDelta("{}"),
            ReplyDone("tool_calls", 0, 0, 0),
        ]
        wanted = sent(servers[0], "response.create")[0]["response"]
        assert wanted["tools"][0]["name"] == "look"
        assert wanted["tool_choice"] == {"type": "function", "name": "look"}
        assert wanted["max_output_tokens"] == 50
        made = (ToolCall("call_1", "look", '{"at": "it"}'), ToolCall("call_2", "look", "{}"))
        results = [Message("tool", "red", tool_call_id=f"call_{k}", name="look") for k in (1, 2)]
        assert words_of(await answer(stream, [*HELLO, Message("assistant", "", tool_calls=made), *results])) == "Red."
        items = [message["item"] for message in sent(servers[0], "conversation.item.create")][1:]
        assert [(item["type"], item["call_id"], item["output"]) for item in items] == [
            ("function_call_output", "call_1", "red"),
            ("function_call_output", "call_2", "red"),
        ]
        assert not sent(servers[0], "conversation.item.delete")

    asked((calls, says("Red.")), use=use)


SPEECH = np.sin(np.arange(2 * SAMPLE_RATE_HZ) / 9).astype(np.float32) / 2


def spoken(turn: object, seconds: float, *, grows: bool = False) -> tuple[Message, ...]:
    """Return the beginning of a conversation, with a turn of which this much was spoken."""
    part = AudioPart(SPEECH[: int(seconds * SAMPLE_RATE_HZ)], turn, grows=grows)
    return (HELLO[0], Message("user", "" if grows else "Hello.", parts=(part,)))


def committed(item: str, then: Script) -> Script:
    async def script(socket: ServerConnection) -> None:
        await tell(socket, "input_audio_buffer.committed", item_id=item)
        await then(socket)

    return script


def audio_s(server: Server) -> float:
    appended = "".join(message["audio"] for message in sent(server, "input_audio_buffer.append"))
    return len(appended) * 3 / 4 / 2 / WIRE_HZ


def test_a_turn_is_sent_while_it_is_spoken_and_becomes_an_item_when_it_is_answered() -> None:
    async def use(stream: RemoteConversationStream, servers: Sequence[Server]) -> None:
        (server,), turn = servers, object()
        await stream.prefill(spoken(turn, 0.1, grows=True))
        await stream.prefill(spoken(turn, 0.9, grows=True))
        await stream.prefill(spoken(turn, 1.2, grows=True))
        while audio_s(server) < 1.1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        (configured,) = sent(server, "session.update")
        assert configured["session"]["audio"]["input"]["turn_detection"] is None
        server.messages.clear()
        said = spoken(turn, 1.5)
        await answer(stream, said)
        assert audio_s(server) == pytest.approx(0.3, abs=0.05)
        kinds = [message["type"] for message in server.messages]
        assert kinds[-3:] == ["input_audio_buffer.append", "input_audio_buffer.commit", "response.create"]
        assert not sent(server, "conversation.item.create")
        server.messages.clear()
        # The next turn follows an answer that was heard whole: the server has all but the turn.
        said = (*said, Message("assistant", "Good morning."))
        another = object()
        await stream.prefill((*said, *spoken(another, 0.9, grows=True)[1:]))
        await answer(stream, (*said, *spoken(another, 1.0)[1:]))
        assert not sent(server, "conversation.item.delete")
        assert not sent(server, "conversation.item.create")
        server.messages.clear()
        # What the user said is deleted by the id that the server gave it.
        await answer(stream, (Message("user", "Bye."),))
        deleted = [message["item_id"] for message in sent(server, "conversation.item.delete")]
        assert deleted == ["item_1", "turn_2", "item_1", "turn_1"]

    greets = says("Good ", "morning.")
    asked((committed("turn_1", greets), committed("turn_2", greets), greets), use=use)


def test_a_turn_that_is_dropped_or_comes_with_an_image_is_not_made_an_item_of_what_was_sent() -> None:
    async def use(stream: RemoteConversationStream, servers: Sequence[Server]) -> None:
        (server,) = servers
        await stream.prefill(spoken(object(), 0.9, grows=True))
        await stream.prefill(HELLO)
        turn = object()
        await stream.prefill(spoken(turn, 0.9, grows=True))
        image = ImagePart(EncodedImage(b"\x89PNG"))
        system, user = spoken(turn, 1.0)
        await answer(stream, (system, replace(user, parts=(*user.parts, image))))
        assert len(sent(server, "input_audio_buffer.clear")) == 2
        assert not sent(server, "input_audio_buffer.commit")
        (created,) = sent(server, "conversation.item.create")
        assert [part["type"] for part in created["item"]["content"]] == ["input_audio", "input_image"]

    asked((says("Good."),), use=use)


def test_a_server_that_makes_no_item_of_the_audio_gets_the_turn_as_an_item() -> None:
    async def refuses(socket: ServerConnection) -> None:
        await tell(socket, "error", error={"message": "buffer too small", "event_id": "commit_2"})

    async def use(stream: RemoteConversationStream, servers: Sequence[Server]) -> None:
        (server,) = servers
        for seconds in (1.0, 1.2):
            turn = object()
            await stream.prefill(spoken(turn, 0.9, grows=True))
            assert words_of(await answer(stream, spoken(turn, seconds))) == "Good."
        assert len(sent(server, "input_audio_buffer.commit")) == 1
        assert len(sent(server, "conversation.item.create")) == 2

    asked((refuses, says("Good.")), use=use)


async def hangs(socket: ServerConnection) -> None:
    await socket.wait_closed()


async def dies(socket: ServerConnection) -> None:
    socket.transport.abort()


async def fails(socket: ServerConnection) -> None:
    await begins(socket)
    await ends(socket, "failed", status_details={"type": "failed", "error": {"message": "out of memory"}})


async def errs(socket: ServerConnection) -> None:
    await tell(socket, "error", error={"message": "busy", "code": "server_error"})


async def garbage(socket: ServerConnection) -> None:
    await socket.send("{{{")


async def sends_bytes(socket: ServerConnection) -> None:
    await socket.send(b"RIFF")


async def no_audio(socket: ServerConnection) -> None:
    await tell(socket, "response.output_audio.delta", delta="?")


async def stops(socket: ServerConnection) -> None:
    await begins(socket)
    await tell(socket, "response.output_audio_transcript.delta", delta="Good ")
    await socket.wait_closed()


async def dies_later(socket: ServerConnection) -> None:
    await begins(socket)
    await tell(socket, "response.output_audio_transcript.delta", delta="Good ")
    await asyncio.sleep(0.05)
    socket.transport.abort()


BEFORE = {
    "hangs": (hangs, "gave no answer within"),
    "dies": (dies, "broke off"),
    "fails": (fails, "out of memory"),
    "errs": (errs, "busy"),
    "garbage": (garbage, "no valid event"),
    "sends bytes": (sends_bytes, "bytes instead of an event"),
    "no audio": (no_audio, "no valid audio"),
}
AFTER = {"stops": (stops, "was silent for"), "dies later": (dies_later, "broke off")}


@pytest.mark.parametrize("fault", BEFORE)
def test_a_fault_before_the_first_word_is_tried_again_at_another_server(fault: str) -> None:
    script, why = BEFORE[fault]

    async def use(stream: RemoteConversationStream, servers: Sequence[Server]) -> None:
        assert words_of(await answer(stream)) == "Here."
        servers[1].scripts = (script,)
        with pytest.raises(RemoteError, match=why) as error:
            await answer(stream)
        assert KEY not in str(error.value)

    asked((script,), (says("Here."),), use=use, first_s=0.6 if fault == "hangs" else 20.0)


@pytest.mark.parametrize("fault", AFTER)
def test_after_a_fault_in_an_answer_another_server_gets_the_conversation(fault: str) -> None:
    script, why = AFTER[fault]

    async def use(stream: RemoteConversationStream, servers: Sequence[Server]) -> None:
        with pytest.raises(RemoteError, match=why):
            await answer(stream)
        said = [*HELLO, Message("assistant", "Good"), Message("user", "Well?")]
        servers[0].scripts = (dies,)
        assert words_of(await answer(stream, said)) == "Here."
        contents = [m["item"]["content"][0]["text"] for m in sent(servers[1], "conversation.item.create")]
        assert contents == ["Hello.", "Good", "Well?"]

    asked((script,), (says("Here."),), use=use)


def test_a_request_that_a_server_does_not_accept_is_told_and_not_tried_again() -> None:
    async def refuses(socket: ServerConnection) -> None:
        await tell(socket, "error", error={"message": "no such voice", "event_id": "respond_2"})

    async def use(stream: RemoteConversationStream, servers: Sequence[Server]) -> None:
        with pytest.raises(ModelError, match="no such voice"):
            await answer(stream)
        assert sent(servers[0], "response.create")[0]["event_id"] == "respond_2"
        assert servers[0].num_asked == 1

    asked((refuses,), use=use)


def test_what_a_server_is_otherwise_is_said() -> None:
    async def use(stream: RemoteConversationStream, servers: Sequence[Server]) -> None:
        for greeting, kind, why in (
            ({"type": "error", "error": {"message": "there is no model clever"}}, ModelError, "no model clever"),
            ({"type": "info", "asr": []}, RemoteError, "began with 'info'"),
        ):
            servers[0].greeting = greeting
            with pytest.raises(kind, match=why):
                await answer(stream)

    asked((hangs,), use=use)


def test_a_server_that_takes_no_images_is_asked_without_them() -> None:
    async def use(stream: RemoteConversationStream, servers: Sequence[Server]) -> None:
        seen = Message("user", "", parts=(ImagePart(EncodedImage(b"\x89PNG")), "What is it?"))
        assert words_of(await answer(stream, [seen])) == "Here."
        kinds = [[p["type"] for p in m["item"]["content"]] for m in sent(servers[0], "conversation.item.create")]
        assert kinds == [["input_image", "input_text"], ["input_text"]]

    async def refuses(socket: ServerConnection) -> None:
        error = {"message": "Image input is not supported", "event_id": "create_1"}
        await tell(socket, "error", error=error)

    asked((refuses, says("Here.")), use=use)


def test_a_cancelled_answer_ends_at_the_server_and_its_items_are_replaced() -> None:
    async def endless(socket: ServerConnection) -> None:
        await begins(socket)
        for _ in range(3):
            await tell(socket, "response.output_audio_transcript.delta", delta="and ")
        message = json.loads(await socket.recv())
        assert message["type"] == "response.cancel"
        await ends(socket, "cancelled")

    async def use(stream: RemoteConversationStream, servers: Sequence[Server]) -> None:
        chunks = stream.respond(HELLO, ReplyOptions(), VOICE)
        await anext(chunks)
        await chunks.aclose()
        await asyncio.sleep(0)
        said = [*HELLO, Message("assistant", "and"), Message("user", "Stop.")]
        assert words_of(await answer(stream, said)) == "Here."
        assert servers[0].num_opened == 1
        assert [m["item_id"] for m in sent(servers[0], "conversation.item.delete")] == ["item_1"]

    asked((endless, says("Here.")), use=use)


def test_a_server_that_does_not_cancel_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "SETTLE_S", 0.1)

    async def use(stream: RemoteConversationStream, servers: Sequence[Server]) -> None:
        chunks = stream.respond(HELLO, ReplyOptions(), VOICE)
        await anext(chunks)
        await chunks.aclose()
        await asyncio.sleep(0)
        assert words_of(await answer(stream)) == "Here."
        assert servers[0].num_opened == 2

    asked((stops, says("Here.")), use=use)
