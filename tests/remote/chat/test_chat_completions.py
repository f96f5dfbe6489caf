"""Chat Completions from the client's side: bodies that OpenAI's own types accept, and chunks as servers send them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletionChunk
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming
from pydantic import TypeAdapter

from antiphon.contracts import (
    AudioPart,
    ImagePart,
    Message,
    Reply,
    ReplyDone,
    ReplyOptions,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from antiphon.errors import RemoteError
from antiphon.events.tools import Tool, ToolCall
from antiphon.remote.chat.chat_completions import ChatReader, body
from antiphon.remote.chat.replies import MAX_REPLY_CHARS
from antiphon.vision.images import EncodedImage

PARAMS: TypeAdapter[Any] = TypeAdapter(CompletionCreateParamsStreaming)
LOOK = Tool("look", "Looks.", {"type": "object", "properties": {"where": {"type": "string"}}})
HISTORY = (
    Message("system", "Be brief."),
    Message("user", "Look.", parts=(AudioPart(np.zeros(160, np.float32)), ImagePart(EncodedImage(b"\xff\xd8\xff")))),
    Message("assistant", "", (ToolCall("a", "look", '{"where": "up"}'),)),
    Message("tool", "sky", tool_call_id="a", name="look"),
    Message("assistant", "The sky."),
)


def checked(options: ReplyOptions, history: Iterable[Message] = HISTORY) -> dict[str, Any]:
    out = json.loads(body("m", tuple(history), options, limit_field="max_tokens"))
    PARAMS.validate_python(out)
    return out


def test_a_conversation_is_spelled_as_openais_types_have_it() -> None:
    out = checked(ReplyOptions())
    assert (out["model"], out["stream"], out["stream_options"]) == ("m", True, {"include_usage": True})
    assert "tools" not in out
    assert "temperature" not in out
    system, user, called, result, said = out["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert [part["type"] for part in user["content"]] == ["input_audio", "image_url"]
    assert user["content"][1]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert called["content"] is None
    assert called["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"where": "up"}'}
    assert result == {"role": "tool", "tool_call_id": "a", "content": "sky"}
    assert said["content"] == "The sky."


def test_media_have_an_id_for_vllm_that_nobody_else_can_guess() -> None:
    def ids(salt: str) -> list[str | None]:
        user = json.loads(body("m", HISTORY, ReplyOptions(), limit_field="max_tokens", salt=salt))["messages"][1]
        return [part.get("uuid") for part in user["content"]]

    assert ids("") == [None, None]
    sound, picture = ids("a")
    assert sound
    assert picture
    assert sound != picture
    assert ids("a") == [sound, picture]
    assert not set(ids("b")) & {sound, picture}


def test_options_are_passed_on_where_they_were_chosen() -> None:
    out = checked(
        ReplyOptions(max_tokens=9, temperature=0.5, top_p=0.9, seed=3, stop=("\n",), bias={5: -1.0}, presence_penalty=1)
    )
    assert (out["max_tokens"], out["temperature"], out["top_p"], out["seed"]) == (9, 0.5, 0.9, 3)
    assert (out["stop"], out["logit_bias"], out["presence_penalty"]) == (["\n"], {"5": -1.0}, 1)
    assert "frequency_penalty" not in out
    newer = json.loads(body("m", (), ReplyOptions(max_tokens=9), limit_field="max_completion_tokens"))
    assert newer["max_completion_tokens"] == 9
    assert "max_tokens" not in newer


@pytest.mark.parametrize(
    ("choice", "sent"),
    [("auto", None), ("required", "required"), ("look", {"type": "function", "function": {"name": "look"}})],
)
def test_tools_and_the_choice_of_them_are_sent(choice: str, sent: object) -> None:
    out = checked(ReplyOptions(tools=(LOOK, Tool("wait", "", {})), tool_choice=choice))
    assert [t["function"]["name"] for t in out["tools"]] == ["look", "wait"]
    assert out["tools"][1]["function"]["parameters"]["type"] == "object"
    assert out.get("tool_choice") == sent


def test_one_call_at_a_time_is_asked_for_only_where_it_was_chosen() -> None:
    assert checked(ReplyOptions(tools=(LOOK,), parallel_tool_calls=False))["parallel_tool_calls"] is False
    assert "parallel_tool_calls" not in checked(ReplyOptions(tools=(LOOK,)))
    assert "parallel_tool_calls" not in checked(ReplyOptions(parallel_tool_calls=False))


def test_no_tools_are_sent_where_none_may_be_called() -> None:
    assert "tools" not in checked(ReplyOptions(tools=(LOOK,), tool_choice="none"))


def test_a_schema_is_asked_for() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert checked(ReplyOptions(schema=schema))["response_format"]["json_schema"]["schema"] == schema


def chunk(**delta: Any) -> bytes:
    """Return a chunk in the form of OpenAI's types."""
    reason = delta.pop("finish_reason", None)
    data = {
        "id": "1",
        "created": 1,
        "model": "m",
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": reason}],
    }
    return ChatCompletionChunk.model_validate(data).model_dump_json().encode()


def call(index: int, id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    return {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def replies(*events: bytes) -> list[Reply]:
    reader = ChatReader()
    out = [reply for event in events for reply in reader.feed(event)]
    assert reader.done
    return out + list(reader.end())


def test_text_and_usage_are_read() -> None:
    usage = b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, '
    usage += b'"prompt_tokens_details": {"cached_tokens": 4}}}'
    out = replies(
        chunk(role="assistant"),
        chunk(content="Hel"),
        chunk(content="lo"),
        chunk(finish_reason="stop"),
        usage,
        b"[DONE]",
    )
    assert out == [TextDelta("Hel"), TextDelta("lo"), ReplyDone("stop", 9, 4, 2)]


def test_usage_without_details_and_a_cut_reply_are_read() -> None:
    usage = b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": null}}'
    assert replies(chunk(content="x"), chunk(finish_reason="length"), usage)[-1] == ReplyDone("length", 9, 0, 2)


def test_calls_written_side_by_side_come_one_after_the_other() -> None:
    out = replies(
        chunk(tool_calls=[call(0, "a", "look", "")]),
        chunk(tool_calls=[call(1, "b", "walk", '{"to"')]),
        chunk(tool_calls=[call(0, None, None, "{}"), call(1, None, None, ": 1}")]),
        chunk(finish_reason="tool_calls"),
        b"[DONE]",
    )
    assert out == [
        ToolCallStarted("a", "look"),
        ToolCallDelta("{}"),
        ToolCallStarted("b", "walk"),
        ToolCallDelta('{"to": 1}'),
        ReplyDone("tool_calls", 0, 0, 0),
    ]


def test_ollamas_calls_are_told_apart_by_their_ids_and_its_reasoning_is_not_spoken() -> None:
    thought = json.loads(chunk(role="assistant", content=""))
    thought["choices"][0]["delta"]["reasoning"] = "The user wants both."
    out = replies(
        json.dumps(thought).encode(),
        chunk(role="assistant", content="", tool_calls=[call(0, "call_1", "look", '{"where": "up"}')]),
        chunk(role="assistant", content="", tool_calls=[call(0, "call_2", "look", '{"where": "down"}')]),
        chunk(role="assistant", content="", finish_reason="tool_calls"),
        b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}}',
        b"[DONE]",
    )
    assert out == [
        ToolCallStarted("call_1", "look"),
        ToolCallDelta('{"where": "up"}'),
        ToolCallStarted("call_2", "look"),
        ToolCallDelta('{"where": "down"}'),
        ReplyDone("tool_calls", 9, 0, 2),
    ]


@pytest.mark.parametrize(
    ("pieces", "reported"),
    [
        ((), ["{}"]),
        (("",), ["{}"]),
        (("nu", "ll"), ["{}"]),
        ((" ", "null\n"), ["{}"]),
        (("", '{"a"', ": 1}"), ['{"a"', ": 1}"]),
        (("n", '"'), ['n"']),
        (("nul",), ["nul"]),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_arguments_that_are_nothing_are_an_empty_object(
    pieces: tuple[str, ...], reported: list[str], first: bool
) -> None:
    index = 0 if first else 1
    other = call(1 - index, "other", "look", "{}")
    mine = [call(index, "mine", "look", ""), *(call(index, None, None, piece) for piece in pieces)]
    calls = [*mine, other] if first else [other, *mine]
    parts = replies(*(chunk(tool_calls=[one]) for one in calls), b"[DONE]")
    names = [ToolCallStarted("mine", "look"), *(ToolCallDelta(one) for one in reported)]
    others: list[Reply] = [ToolCallStarted("other", "look"), ToolCallDelta("{}")]
    joined = names if first else [names[0], ToolCallDelta("".join(reported))]
    assert parts[:-1] == ([*joined, *others] if first else [*others, *joined])


def test_a_call_without_an_id_is_given_one() -> None:
    started = replies(chunk(tool_calls=[call(0, None, "look", "{}")]), chunk(finish_reason="stop"))[0]
    assert isinstance(started, ToolCallStarted)
    assert started.id.startswith("call_")


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (("<think>", "hm</th", "ink>\n\nYes", "."), "Yes."),
        (("<th", "ink>hm</think>Yes."), "Yes."),
        (("<", "b>"), "<b>"),
        (("<thi",), "<thi"),
        (("I <think>",), "I <think>"),
    ],
)
def test_thoughts_at_the_head_are_left_out(pieces: tuple[str, ...], text: str) -> None:
    out = replies(*(chunk(content=piece) for piece in pieces), b"[DONE]")
    assert "".join(r.text for r in out if isinstance(r, TextDelta)) == text


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (b"no json", "no valid chunk"),
        (b'{"choices": 5}', "no valid chunk"),
        (b'{"error": {"message": "out of memory", "code": 500}}', "out of memory"),
        (b'{"error": "out of memory"}', "out of memory"),
        (chunk(tool_calls=[call(0, "a", None, "{}")]), "no name"),
        (chunk(content="x" * (MAX_REPLY_CHARS + 1)), "more text"),
    ],
)
def test_what_is_no_answer_is_an_error_by_name(event: bytes, message: str) -> None:
    with pytest.raises(RemoteError, match=message):
        replies(event)


def test_a_reply_that_is_cut_off_is_not_done() -> None:
    reader = ChatReader()
    list(reader.feed(chunk(content="x")))
    assert not reader.done
