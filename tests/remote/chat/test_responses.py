"""The Responses API from the client's side: bodies that OpenAI's own types accept, and its events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from pydantic import TypeAdapter

from antiphon.contracts import Reply, ReplyDone, ReplyOptions, TextDelta, ToolCallDelta, ToolCallStarted
from antiphon.errors import RemoteError
from antiphon.remote.chat.responses import ResponsesReader, body
from tests.remote.chat.test_chat_completions import HISTORY, LOOK

PARAMS: TypeAdapter[Any] = TypeAdapter(ResponseCreateParamsStreaming)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def checked(options: ReplyOptions) -> dict[str, Any]:
    out = json.loads(body("m", HISTORY, options))
    # OpenAI's types have no audio input for this endpoint. Servers that hear accept the form of Chat Completions.
    typed = json.loads(json.dumps(out))
    typed["input"][0]["content"] = [p for p in typed["input"][0]["content"] if p["type"] != "input_audio"]
    PARAMS.validate_python(typed)
    return out


def test_a_conversation_is_spelled_as_openais_types_have_it() -> None:
    out = checked(ReplyOptions(max_tokens=20, temperature=0.2))
    assert (out["instructions"], out["store"], out["max_output_tokens"]) == ("Be brief.", False, 20)
    user, called, result, said = out["input"]
    assert [p["type"] for p in user["content"]] == ["input_audio", "input_image"]
    assert called == {"type": "function_call", "call_id": "a", "name": "look", "arguments": '{"where": "up"}'}
    assert result == {"type": "function_call_output", "call_id": "a", "output": "sky"}
    # The long form of an answer, because some servers do not accept the shorter ones.
    assert (said["type"], said["role"], said["id"]) == ("message", "assistant", "msg_4")
    assert said["content"] == [{"type": "output_text", "text": "The sky.", "annotations": []}]


@pytest.mark.parametrize(
    ("choice", "sent"), [("auto", "auto"), ("required", "required"), ("look", {"type": "function", "name": "look"})]
)
def test_tools_and_a_schema_are_sent(choice: str, sent: object) -> None:
    out = checked(ReplyOptions(tools=(LOOK,), tool_choice=choice, schema={"type": "object"}, parallel_tool_calls=False))
    assert out["tools"][0]["name"] == "look"
    assert out["tool_choice"] == sent
    assert out["parallel_tool_calls"] is False
    assert out["text"]["format"]["schema"] == {"type": "object"}


def events(*found: dict[str, Any]) -> list[Reply]:
    reader = ResponsesReader()
    out: list[Reply] = []
    for number, event in enumerate(found):
        event = event | {"sequence_number": number}
        EVENT.validate_python(event)
        out += reader.feed(json.dumps(event).encode())
    assert reader.done
    return out + list(reader.end())


def text(delta: str) -> dict[str, Any]:
    place = {"content_index": 0, "item_id": "m", "output_index": 0, "logprobs": []}
    return {"type": "response.output_text.delta", "delta": delta} | place


def ended(kind: str, **fields: Any) -> dict[str, Any]:
    usage = {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 11,
    }
    response = {
        "id": "r",
        "created_at": 1,
        "model": "m",
        "object": "response",
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage,
    }
    return {"type": kind, "response": response | fields}


def test_text_calls_and_usage_are_read() -> None:
    item = {
        "type": "function_call",
        "call_id": "a",
        "name": "look",
        "arguments": "",
        "id": "f",
        "status": "in_progress",
    }
    out = events(
        ended("response.created"),
        text("Hel"),
        text("lo"),
        {"type": "response.output_item.added", "output_index": 1, "item": item},
        {"type": "response.function_call_arguments.delta", "delta": "{}", "item_id": "f", "output_index": 1},
        ended("response.completed"),
    )
    call = [ToolCallStarted("a", "look"), ToolCallDelta("{}")]
    assert out == [TextDelta("Hel"), TextDelta("lo"), *call, ReplyDone("tool_calls", 9, 4, 2)]


def test_a_reply_at_its_limit_is_told_from_a_whole_one() -> None:
    cut = ended("response.incomplete", incomplete_details={"reason": "max_output_tokens"})
    assert events(text("x"), cut)[-1] == ReplyDone("length", 9, 4, 2)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (b"no json", "no valid event"),
        (b'{"type": "response.output_text.delta", "delta": 5}', "no valid event"),
        (b'{"type": "error", "message": "no memory"}', "no memory"),
        (b'{"type": "response.failed", "response": {"error": {"message": "no memory"}}}', "no memory"),
    ],
)
def test_what_is_no_answer_is_an_error_by_name(event: bytes, message: str) -> None:
    with pytest.raises(RemoteError, match=message):
        list(ResponsesReader().feed(event))
