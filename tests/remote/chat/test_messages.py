"""Histories that other servers accept: calls with their results, cut to the context."""

from __future__ import annotations

import json

import pytest

from antiphon.contracts import Message, ReplyOptions
from antiphon.errors import RemoteProtocolError
from antiphon.events.tools import Tool, ToolCall
from antiphon.remote.chat import chat_completions, responses
from antiphon.remote.chat.messages import (
    NO_RESULT,
    estimated_tokens,
    newest,
    refuse_if_cut,
    sent_parameters,
    sent_schema,
    with_results,
)

CALL, OTHER = ToolCall("a", "look", "{}"), ToolCall("b", "walk", "{}")


def test_results_follow_the_message_that_called() -> None:
    history = [
        Message("user", "Look."),
        Message("assistant", "", (CALL, OTHER)),
        Message("user", "Well?"),
        Message("tool", "a tree", tool_call_id="a"),
    ]
    out = with_results(history)
    assert [(m.role, m.text or m.tool_calls) for m in out] == [
        ("user", "Look."),
        ("assistant", (CALL, OTHER)),
        ("tool", "a tree"),
        ("tool", NO_RESULT),
        ("user", "Well?"),
    ]
    assert [m.tool_call_id for m in out if m.role == "tool"] == ["a", "b"]


def test_a_result_whose_call_has_left_is_left_out() -> None:
    assert with_results([Message("tool", "a tree", tool_call_id="a"), Message("user", "So?")]) == [
        Message("user", "So?")
    ]


def test_the_oldest_leave_and_the_first_that_stays_is_the_users() -> None:
    system = Message("system", "Be brief.")
    turns = [Message(role, str(n) + " word" * 60) for n in range(10) for role in ("user", "assistant")]
    kept = newest([system, *turns], (), 500)
    assert kept[0] == system
    assert kept[1].role == "user"
    assert kept[-1] == turns[-1]
    assert estimated_tokens(kept) <= 500 < estimated_tokens([system, *turns[-2 * len(kept) :]])


def test_the_last_question_stays_however_long_it_is() -> None:
    question = Message("user", "word " * 5000)
    assert newest([Message("user", "Hi"), Message("assistant", "Hello"), question], (), 100) == [question]


def test_where_nothing_may_be_left_out_a_long_conversation_is_refused() -> None:
    messages = [Message("user", "x" * 900), Message("assistant", "y"), Message("user", "z")]
    refuse_if_cut(messages, messages, 100)
    with pytest.raises(RemoteProtocolError, match="takes 100") as error:
        refuse_if_cut(messages, messages[2:], 100)
    assert error.value.code == "context_length_exceeded"


@pytest.mark.parametrize("arguments", ["", "null", '{"a": 1', "[1]", "nonsense", '"{}"'])
def test_arguments_that_are_no_object_are_sent_to_no_server(arguments: str) -> None:
    called = Message("assistant", "", (ToolCall("a", "f", arguments), ToolCall("b", "f", '{"a": 1}')))
    chat = json.loads(chat_completions.body("m", [called], ReplyOptions(), limit_field="max_tokens"))
    assert [c["function"]["arguments"] for c in chat["messages"][0]["tool_calls"]] == ["{}", '{"a": 1}']
    items = json.loads(responses.body("m", [called], ReplyOptions()))["input"]
    assert [item["arguments"] for item in items] == ["{}", '{"a": 1}']


def test_a_schema_is_sent_as_it_is() -> None:
    schema = {"type": "integer", "maximum": 10**30, "title": "für"}
    assert json.loads(bytes(sent_schema(schema))) == schema
    assert "für" in bytes(sent_schema(schema)).decode()
    assert json.loads(bytes(sent_parameters(Tool("f", "", {})))) == {"type": "object", "properties": {}}
