"""Unusual content of replies: thoughts, calls without an end, counts of any type."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from antiphon.contracts import Reply, ReplyDone, TextDelta, ToolCallDelta, ToolCallStarted
from antiphon.errors import RemoteError
from antiphon.remote.chat.chat_completions import ChatReader
from antiphon.remote.chat.replies import MAX_CALLS, MAX_REPLY_CHARS, CallBuffer, ReplyReader, ThoughtFilter
from antiphon.remote.chat.responses import ResponsesReader


def chat(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta}]}


def read(*found: dict[str, Any] | bytes, reader: ReplyReader | None = None) -> list[Reply]:
    reader = reader or ChatReader()
    out: list[Reply] = []
    for event in found:
        out += reader.feed(event if isinstance(event, bytes) else json.dumps(event).encode())
    return [*out, *reader.end()]


def unthought(*texts: str) -> str:
    thoughts = ThoughtFilter()
    parts = [part.text for text in texts for part in thoughts.feed(text)]
    return "".join([*parts, *(part.text for part in thoughts.end())])


@pytest.mark.parametrize("size", [1, 5, 1 << 20])
@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<think></think>" * 3000 + "Yes.", "Yes."),
        ("<think>a</think>\n <think>b</think> Yes <think>no</think>.", "Yes <think>no</think>."),
        ("<think>a</thin</think>b", "b"),
        ("<think>never closed </thin", ""),
        (" <thi", "<thi"),
        ("<thin air", "<thin air"),
        ("   ", ""),
        ("<think></think>   ", ""),
    ],
)
def test_thoughts_are_taken_off_the_head_however_many(text: str, left: str, size: int) -> None:
    assert unthought(*(text[at : at + size] for at in range(0, min(len(text), MAX_REPLY_CHARS), size))) == left


def test_an_event_of_thoughts_is_read_in_no_time() -> None:
    """Copying the rest of the text after each thought would take minutes."""
    assert unthought("<think></think>" * 60_000 + "Yes.") == "Yes."


def long_names(number: int) -> dict[str, Any]:
    return chat(tool_calls=[{"index": 0, "id": f"c{number}", "function": {"name": "x" * 9000}}])


def long_ids(number: int) -> dict[str, Any]:
    return chat(tool_calls=[{"index": 0, "id": f"{number}" + "i" * 9000, "function": {"name": "f"}}])


def same_call(number: int) -> dict[str, Any]:
    return chat(tool_calls=[{"index": 0, "id": "c", "function": {"name": "x" * 9000}}])


def arguments(number: int) -> dict[str, Any]:
    return chat(tool_calls=[{"index": 0, "id": "c", "function": {"name": "f", "arguments": " " * 9000}}])


def prose(number: int) -> dict[str, Any]:
    return chat(content="<think>" + "x" * 9000)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (long_names, "larger calls"),
        (long_ids, "larger calls"),
        (same_call, "larger calls"),
        (arguments, "larger calls"),
        (prose, "more text"),
    ],
)
def test_whatever_a_reply_is_made_of_it_is_counted(made: Callable[[int], dict[str, Any]], message: str) -> None:
    with pytest.raises(RemoteError, match=f"{message} than a reply may have"):
        read(*(made(number) for number in range(MAX_REPLY_CHARS // 9000 + 1)))


def test_a_reply_has_128_calls_at_most() -> None:
    calls = [chat(tool_calls=[{"index": n, "id": f"c{n}", "function": {"name": "f"}}]) for n in range(MAX_CALLS + 1)]
    assert sum(isinstance(reply, ToolCallStarted) for reply in read(*calls[:-1])) == 128
    with pytest.raises(RemoteError, match="more than 128 calls in one reply"):
        read(*calls)
    items = [
        {"type": "response.output_item.added", "output_index": n, "item": {"type": "function_call", "name": "f"}}
        for n in range(MAX_CALLS + 1)
    ]
    with pytest.raises(RemoteError, match="more than 128 calls in one reply"):
        read(*items, reader=ResponsesReader())


@pytest.mark.parametrize(
    ("pieces", "reported"),
    [
        (["x"] * 50_000, "x" * 50_000),
        ([" "] * 50_000, "{}"),
        ([" "] * 50_000 + ["{", "}"], "{}"),
        (["n", "u", "l", "l", *[" "] * 50_000], "{}"),
        (["n", "u", '"'], 'nu"'),
    ],
)
@pytest.mark.parametrize("number", [0, 1])
def test_arguments_that_come_by_the_character_are_put_together(pieces: list[str], reported: str, number: int) -> None:
    """Tests the open call and a call that waits. Copying the earlier text for each piece would take minutes."""
    calls = CallBuffer()
    replies = [*calls.add(0, "a", "f", ""), *calls.add(1, "b", "g", "")]
    replies += [reply for piece in pieces for reply in calls.add(number, "", "", piece)]
    replies += calls.end()
    written, name = {"f": "", "g": ""}, ""
    for reply in replies:
        if isinstance(reply, ToolCallStarted):
            name = reply.name
        elif isinstance(reply, ToolCallDelta):
            written[name] += reply.arguments
    assert {key: text.strip() for key, text in written.items()} == {"f": "{}", "g": "{}"} | {"fg"[number]: reported}


USAGES = [
    '"many"',
    "[]",
    "7",
    "true",
    '{"prompt_tokens": "x", "input_tokens": []}',
    '{"prompt_tokens": -1, "input_tokens": -1}',
    '{"prompt_tokens": 1e999, "input_tokens": 1e999}',
    '{"prompt_tokens": 1e30, "input_tokens": 1e30}',
    '{"prompt_tokens": ' + "9" * 5000 + ', "input_tokens": ' + "9" * 5000 + "}",
    '{"prompt_tokens": 7.5, "input_tokens": 7.5}',
    '{"prompt_tokens_details": 3, "input_tokens_details": 3}',
    '{"prompt_tokens_details": {"cached_tokens": "all"}, "input_tokens_details": {"cached_tokens": "all"}}',
    "null",
]


@pytest.mark.parametrize("usage", USAGES, ids=range(len(USAGES)))
def test_what_a_server_counts_may_have_any_type_and_fails_no_reply(usage: str) -> None:
    found = read(chat(content="Yes"), f'{{"choices": [], "usage": {usage}}}'.encode())
    assert found == [TextDelta("Yes"), ReplyDone("stop", 0, 0, 0)]
    completed = f'{{"type": "response.completed", "response": {{"usage": {usage}}}}}'.encode()
    assert read(completed, reader=ResponsesReader()) == [ReplyDone("stop", 0, 0, 0)]


@pytest.mark.parametrize("count", [7, 7.0, "7"])
def test_counts_that_are_whole_count(count: object) -> None:
    usage = {"prompt_tokens": count, "completion_tokens": None, "prompt_tokens_details": {"cached_tokens": None}}
    assert read({"choices": [], "usage": usage}) == [ReplyDone("stop", 7, 0, 0)]


@pytest.mark.parametrize(
    "data",
    [
        b'{"error": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"x": ' + b"[" * 100_000,
        b'{"error": "\xff\xfe"}',
        b'{"choices": [{"delta": {"content": "\xff"}}]}',
        b'{"choices": [{"delta": {"content": "\\ud800"}}]}',
        b'{"choices": [{"delta": {"content": ["a"]}}]}',
        b'{"choices": [{"delta": {"tool_calls": [{"index": 1e999}]}}]}',
        b'{"choices": [{"delta": {"tool_calls": [{"index": ' + b"9" * 5000 + b"}]}}]}",
        b'{"choices": [' + b"{}," * 300_000 + b"{}]}",
        b'{"choices": [{"delta": {"tool_calls": [' + b"{}," * 300_000 + b"{}]}}]}",
        b'{"choices": {}}',
        b'{"choices": [null]}',
        b"[]",
        b"",
        b"\x00",
    ],
    ids=range(15),
)
@pytest.mark.parametrize("make", [ChatReader, ResponsesReader])
def test_what_is_no_event_fails_by_name(make: Callable[[], ReplyReader], data: bytes) -> None:
    with pytest.raises(RemoteError, match=r"no valid (chunk|event) of an answer"):
        read(data, reader=make())
