"""Tests that each dialect and REST parser refuses texts and JSON that are too long, and names the field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import MAX_TEXT, decode
from antiphon.protocols.rest import chat
from antiphon.protocols.speech import rest as speech
from antiphon.protocols.video.stream import VideoDialect
from antiphon.protocols.wire import MAX_JSON_ESCAPES, MAX_JSON_VALUES, SMALL_JSON, decode_json
from tests.protocols.test_every_field import DIALECTS, errors
from tests.protocols.test_speech import catalog

LONG = "x" * (MAX_TEXT + 1)


def updated(**session: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": session}


def created(**item: Any) -> dict[str, Any]:
    return {"type": "conversation.item.create", "item": item}


def said(role: str, part: dict[str, Any]) -> dict[str, Any]:
    return created(type="message", role=role, content=[part])


def transcribing(**fields: Any) -> dict[str, Any]:
    return {"type": "transcription", "audio": {"input": {"transcription": fields}}}


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": "look", "parameters": {}} | fields


HALF = LONG[: MAX_TEXT // 2 + 1]
PROMPTED = {"input": {"transcription": {"prompt": LONG}}}
TOO_LONG: list[tuple[str, dict[str, Any], str]] = [
    ("openai", updated(instructions=LONG), "session.instructions"),
    ("openai", updated(audio=PROMPTED), "session.audio.input.transcription.prompt"),
    ("openai", updated(tools=[tool(description=LONG)]), "session.tools"),
    ("openai", updated(tools=[tool(name="a", description=HALF), tool(parameters={HALF: {}})]), "session.tools"),
    ("openai", {"type": "response.create", "response": {"instructions": LONG}}, "response.instructions"),
    ("openai", said("user", {"type": "input_text", "text": LONG}), "item.content[0].text"),
    ("openai", said("assistant", {"type": "output_text", "text": LONG}), "item.content[0].text"),
    ("openai", said("assistant", {"type": "output_audio", "transcript": LONG}), "item.content[0].transcript"),
    ("openai", created(type="function_call", name="look", arguments=LONG), "item.arguments"),
    ("openai", created(type="function_call_output", call_id="c", output=LONG), "item.output"),
    ("transcription", updated(**transcribing(prompt=LONG)), "session.audio.input.transcription.prompt"),
    ("transcription", updated(**transcribing(keywords=[HALF, HALF])), "session.audio.input.transcription.keywords"),
    ("duplex", updated(instructions=LONG), "session.instructions"),
    ("duplex", {"type": "push_text", "text": LONG}, "text"),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "message", "param"), TOO_LONG)
def test_when_a_text_is_too_long_then_the_error_names_its_field(
    dialect: str, message: dict[str, Any], param: str
) -> None:
    received = DIALECTS[dialect]().feed(json.dumps(message))
    assert not received.commands
    (error,) = errors(received)
    assert (error["code"], error["param"]) == ("string_above_max_length", param)
    # The error does not quote the text.
    assert len(error["message"]) < 200


@pytest.mark.parametrize(
    ("dialect", "message"),
    [
        ("vllm", {"type": "session.update", "model": "default", "prompt": LONG}),
        ("omni", {"type": "session.config", "instructions": LONG}),
        ("openbmb", {"type": "session.init", "payload": {"system_prompt": LONG}}),
        ("minicpmo", {"type": "prepare", "system_prompt": LONG}),
    ],
)
def test_when_a_text_is_too_long_in_a_small_dialect_then_it_is_an_error(dialect: str, message: dict[str, Any]) -> None:
    received = DIALECTS[dialect]().feed(json.dumps(message))
    assert not received.commands
    assert "string_above_max_length" in json.dumps([json.loads(f.encode()) for f in received.answers])


@pytest.mark.parametrize(
    "message", [{"type": "session.config", "system_prompt": LONG}, {"type": "video.query", "text": LONG}]
)
def test_when_a_text_of_a_video_stream_is_too_long_then_it_is_an_error(message: dict[str, Any]) -> None:
    dialect = VideoDialect(lambda: 0.0)
    if message["type"] != "session.config":
        dialect.feed('{"type": "session.config"}')
    received = dialect.feed(json.dumps(message))
    assert not received.commands
    assert f"at most {MAX_TEXT} characters" in str(received.answers[0].encode())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": LONG}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}, "messages[0].content[0].text"),
        ({"tools": [{"function": tool(description=LONG)}]}, "tools[0].function.description"),
    ],
)  # fmt: skip
def test_when_a_text_of_a_chat_request_is_too_long_then_the_error_names_its_field(
    fields: dict[str, Any], param: str
) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "hello"}]} | fields
    with pytest.raises(RemoteProtocolError) as caught:
        chat.parse(json.dumps(body).encode())
    assert (caught.value.code, caught.value.param) == ("string_above_max_length", param)


def test_when_instructions_for_a_voice_are_too_long_then_the_error_names_them() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        speech.parse(json.dumps({"input": "Hello.", "instructions": LONG}).encode(), catalog())
    assert (caught.value.code, caught.value.param) == ("string_above_max_length", "instructions")


def test_a_text_at_the_limit_is_taken() -> None:
    received = DIALECTS["openai"]().feed(json.dumps(updated(instructions=LONG[:-1])))
    assert not errors(received)
    assert received.commands


@pytest.mark.parametrize("fill", ["1,", "{},", "[],", '"a",', '{"a":1},'])
def test_when_json_has_too_many_values_then_it_is_refused_before_it_is_decoded(fill: str) -> None:
    body = f"[{fill * MAX_JSON_VALUES}1]"
    for data in (body, body.encode()):
        with pytest.raises(RemoteProtocolError) as caught:
            decode(data, list[object])
        assert caught.value.code == "json_too_complex"
        with pytest.raises(ValueError, match="100000 values"):
            decode_json(data)


def test_when_json_has_too_many_escapes_then_it_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode('"' + r"\n" * (MAX_JSON_ESCAPES + 1) + '"', str)
    assert caught.value.code == "json_too_complex"


@pytest.mark.parametrize("text", ["1,234,567\n", '{"rows": [[1, 2], [3]]}', "\\,", '\\",', ",\u00e9"])
@pytest.mark.parametrize("as_bytes", [True, False])
def test_commas_and_brackets_in_a_long_text_are_no_values(text: str, as_bytes: bool) -> None:
    given = {"output": text * (MAX_JSON_VALUES + 1)}
    data = msgspec.json.encode(given)
    assert decode(data if as_bytes else data.decode(), object) == given


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dialect", ["openai", "duplex", "transcription"])
def test_a_message_that_is_too_complex_is_answered_with_its_name(dialect: str, last: bool) -> None:
    name, values = {"event_id": "mine"}, {"values": [1] * (MAX_JSON_VALUES + 2)}
    message = {"type": "session.update", **(values if last else name), **(name if last else values)}
    (answer,) = DIALECTS[dialect]().feed(json.dumps(message)).answers
    assert json.loads(answer.encode())["error"]["event_id"] == "mine"


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_when_a_message_is_too_complex_then_a_dialect_answers_with_an_error(dialect: str) -> None:
    received = DIALECTS[dialect]().feed('{"type": "session.update", "session": [' + "1," * MAX_JSON_VALUES + "1]}")
    assert not received.commands
    assert "json_too_complex" in str(received.answers[0].encode())


def test_audio_of_any_size_and_small_messages_are_never_too_complex() -> None:
    assert decode('"' + r"AAA\/" * (4 << 20 >> 3) + '"', str)
    assert decode("[" + "1," * (SMALL_JSON // 2 - 10) + "1]", list[int])
