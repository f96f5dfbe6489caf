"""JSON in a reply's text that calls a tool becomes a call, however the server splits it, and never appears as text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from antiphon.contracts import Message, Reply, ReplyDone, ReplyOptions, TextDelta, ToolCallDelta, ToolCallStarted
from antiphon.events.tools import Tool
from antiphon.remote.address import parse_address
from antiphon.remote.chat.language import RemoteLanguageModel
from antiphon.remote.chat.written_calls import WrittenCalls
from antiphon.settings import RemoteSettings
from antiphon.text.written_calls import MAX_HEAD_CHARS
from tests.remote.chat.scripted_server import says, scripted_server

NAMES = ("add", "get_weather")
PARIS = ("get_weather", {"city": "Paris"})


def read(replies: Iterator[Reply]) -> tuple[str, list[tuple[str, object]], str]:
    """Return the text, the calls with their arguments, and why the reply ended."""
    text, calls, reason = "", list[tuple[str, object]](), ""
    for reply in replies:
        match reply:
            case TextDelta(part):
                text += part
            case ToolCallStarted(_, name):
                calls.append((name, None))
            case ToolCallDelta(arguments):
                calls[-1] = (calls[-1][0], json.loads(arguments))
            case ReplyDone():
                reason = reply.reason
    return text, calls, reason


def written(text: str, size: int, *, parallel: bool = True) -> tuple[str, list[tuple[str, object]], str]:
    reader = WrittenCalls(NAMES, parallel=parallel)
    parts: list[Reply] = [TextDelta(text[at : at + size]) for at in range(0, len(text), size)]
    return read(r for part in (*parts, ReplyDone("stop", 1, 0, 1)) for r in reader.feed(part))


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "prose", "calls"),
    [
        ('{"name": "get_weather", "arguments": {"city": "Paris"}}', "", [PARIS]),
        ('Sure.\n```json\n{"name": "get_weather", "parameters": {"city": "Paris"}}\n```', "Sure.\n", [PARIS]),
        ('<tools>\n{"name": "add"}\n</tools> Done.', "", [("add", {})]),
        ('{"function": {"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}}', "", [PARIS]),
        ('[{"name": "add", "arguments": {"a": [1]}}, {"name": "add"}]', "", [("add", {"a": [1]}), ("add", {})]),
        ('{"name": "add"}\n{"name": "add", "args": {"a": 2}}', "", [("add", {}), ("add", {"a": 2})]),
        ('{"tool_calls": [{"type": "function", "function": {"name": "add"}}]}', "", [("add", {})]),
        # Cut off, or invalid arguments: neither text nor a call.
        ('{"name": "add", "arguments": {"a": 1', "", []),
        ('{"name": "add", "arguments": "one and two"}', "", []),
        ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        # A call of an unknown tool is not text either.
        ('Well. {"name": "books", "arguments": {"of": "wood"}}', "Well. ", []),
        ('Well: {"name": "add_books", "arguments": "{\\"add\\": 1}"}', "Well: ", []),
        ('It says {"name": "ad', 'It says {"name": "ad', []),
    ],
)
def test_json_that_calls_a_tool_is_a_call(text: str, prose: str, calls: list[tuple[str, object]], size: int) -> None:
    assert written(text, size) == (prose, calls, "tool_calls" if calls else "stop")


ADD = '{"name": "add", "arguments": {"a": 1}}'
BEFORE = 'Well. {"name": "add"} '


@pytest.mark.parametrize(
    ("text", "prose", "num_calls"),
    [
        # At most 128 calls are made. Invalid JSON is skipped.
        (f"[{', '.join([ADD] * 130)}]", "", 128),
        (f"[{', '.join([ADD] * 20_000)}]", "", 63),
        ('{"name": "add", "arguments": {}, "x": [' + "[1, 1, " * 50_000, "", 0),
        (BEFORE + "[" * 300_000, "Well. ", 1),
        (BEFORE + "[" + "1," * 100_000 + "1] " + ADD, "Well. ", 2),
        (BEFORE + ("[" + "1," * 4000) * 60, "Well. ", 1),
        (BEFORE + '{"a": ' * 900 + ADD + "}" * 900, "Well. ", 2),
        (BEFORE + '{"name": "add", "arguments": ' + "9" * 5000 + "} " + ADD, "Well. ", 2),
        # Text that does not become a call is prose, and is not held for long.
        ("{" + " " * 300_000, "{" + " " * 300_000, 0),
        ("[" * 300_000, "[" * 300_000, 0),
        ("`" * 300_000, "`" * 300_000, 0),
        ("```" + "a" * 300_000, "```" + "a" * 300_000, 0),
        ("<tools>" * 40_000, "<tools>" * 40_000, 0),
        ('{"id": "' + "x" * 300_000, '{"id": "' + "x" * 300_000, 0),
        ('{"id": "' * 40_000, '{"id": "' * 40_000, 0),
        ('{"name": "' + '\\"' * 150_000, '{"name": "' + '\\"' * 150_000, 0),
        ("{" + " " * 300 + ADD, "{" + " " * 300, 1),
        ('{"name": "' + "x" * 300 + '", "arguments": {}}', '{"name": "' + "x" * 300 + '", "arguments": {}}', 0),
    ],
    ids=range(18),
)
def test_whatever_looks_like_calls_is_read_in_no_time(text: str, prose: str, num_calls: int) -> None:
    """Searching the text from its beginning again and again would take minutes in each case."""
    reported, calls, reason = written(text, 1 << 20)
    assert (reported == prose, len(calls), reason) == (True, num_calls, "tool_calls" if num_calls else "stop")


@pytest.mark.parametrize("head", ["{", "```", '{"id": "', '{"name": "', '{"name": "x", "arguments"'])
def test_what_might_become_a_call_is_given_out_after_200_characters(head: str) -> None:
    reader, fill = WrittenCalls(NAMES), "a" if head[-1] in '"`' and not head.endswith('s"') else " "
    assert not [r for char in head + fill * (MAX_HEAD_CHARS - len(head)) for r in reader.feed(TextDelta(char))]
    reported = "".join(r.text for r in reader.feed(TextDelta(fill)) if isinstance(r, TextDelta))
    assert reported == (head + fill * (MAX_HEAD_CHARS - len(head) + 1))


def test_a_long_text_behind_a_call_is_put_together_once() -> None:
    """Copying the earlier text for each character would take minutes."""
    assert written(ADD + "x" * 100_000, 1) == ("", [("add", {"a": 1})], "tool_calls")


def test_of_several_only_the_first_counts_where_one_is_wanted() -> None:
    assert written('[{"name": "add"}, {"name": "get_weather"}]', 4, parallel=False) == ("", [("add", {})], "tool_calls")


def test_of_several_calls_of_the_server_only_the_first_counts_where_one_is_wanted() -> None:
    reader = WrittenCalls(NAMES, parallel=False)
    calls = [ToolCallStarted("1", "add"), ToolCallDelta("{}"), ToolCallStarted("2", "add"), ToolCallDelta("{}")]
    done = ReplyDone("tool_calls", 1, 0, 1)
    assert read(r for part in (*calls, done) for r in reader.feed(part)) == ("", [("add", {})], "tool_calls")


def test_json_behind_a_call_of_the_servers_own_is_neither_told_nor_called() -> None:
    reader = WrittenCalls(NAMES)
    parts = [ToolCallStarted("1", "add"), ToolCallDelta("{}"), TextDelta('{"name": "add"}')]
    done = ReplyDone("tool_calls", 1, 0, 1)
    assert read(r for part in (*parts, done) for r in reader.feed(part)) == ("", [("add", {})], "tool_calls")


def test_a_server_whose_model_calls_what_is_no_tool_is_asked_again_without_tools() -> None:
    async def main() -> tuple[list[Reply], list[bool]]:
        # Its second answer also contains such JSON, which is dropped.
        made_up = says('{"name": "add_books", ', '"input": {"add": "wood"}}')
        answers = made_up, says("Old ", 'books. {"name": "add", "arguments": {}}')
        async with scripted_server(*answers) as server:
            address = parse_address(f"{server.url}#clever", "--language-model")
            model = await asyncio.to_thread(RemoteLanguageModel, address, "", RemoteSettings())
            stream = await model.open()
            try:
                options = ReplyOptions(tools=(Tool("add"),))
                replies = [r async for r in stream.reply([Message("user", "?")], options)]
                return replies, ["tools" in asked.body for asked in server.asked]
            finally:
                stream.close()
                await model.pool.close()

    replies, offered = asyncio.run(main())
    assert read(iter(replies)) == ("Old books. ", [], "stop")
    assert offered == [True, False]
    # The tokens of the first answer count too.
    (done,) = [r for r in replies if isinstance(r, ReplyDone)]
    assert (done.prompt_tokens, done.completion_tokens) == (14, 4)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_server_that_writes_json_makes_a_call_where_it_may(choice: str) -> None:
    text = '{"name": "add", "arguments": {"a": 1}}'

    async def main() -> list[Reply]:
        async with scripted_server(says(text[:9], text[9:])) as server:
            address = parse_address(f"{server.url}#clever", "--language-model")
            model = await asyncio.to_thread(RemoteLanguageModel, address, "", RemoteSettings())
            stream = await model.open()
            options = ReplyOptions(tools=(Tool("add"),), tool_choice=choice)
            try:
                return [r async for r in stream.reply([Message("user", "?")], options)]
            finally:
                stream.close()
                await model.pool.close()

    reported, calls, reason = read(iter(asyncio.run(main())))
    expected = ("", [("add", {"a": 1})], "tool_calls") if choice == "auto" else (text, [], "stop")
    assert (reported, calls, reason) == expected
