"""The grammar of calls of tools whose schemas refer to themselves."""

from __future__ import annotations

from typing import Any

import pytest

from antiphon.events.tools import Tool
from antiphon.modeling.tool_grammar import CALL_CLOSING, call_grammar
from tests.engine.test_grammar import fits


def tool(name: str, kind: str, **more: Any) -> Tool:
    schema = {"type": "object", "properties": {"v": {"$ref": "#/$defs/V"}, "same": {"$ref": "#"}}, "required": ["v"]}
    return Tool(name, "", {**schema, "$defs": {"V": {"type": kind}}, **more})


@pytest.mark.parametrize(
    ("name", "arguments", "is_held"),
    [
        ("say", '{"v": "a"}', True),
        ("say", '{"v": 1}', False),
        ("add", '{"v": 1}', True),
        ("add", '{"v": 1, "same": {"v": 2}}', True),
        ("add", '{"v": 1, "same": {"v": "a"}}', False),
        ("add", '{"v": 1, "other": 2}', False),
        ('s"ay\\\\', '{"v": "a"}', False),
        ("null", '{"v": 1}', True),
    ],
)
def test_each_tool_is_held_to_a_schema_of_its_own(name: str, arguments: str, is_held: bool) -> None:
    tools = [tool("say", "string"), tool("add", "integer"), tool("null", "integer", required=None)]
    text = f'\n{{"name": "{name}", "arguments": {arguments}}}\n{CALL_CLOSING}'
    assert fits(call_grammar(tools, None, begun=True), text) is is_held
