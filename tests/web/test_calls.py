"""A call of the browser's client, in Node, with a real server over scripted models: when its door or server is gone,
another call begins that knows what was said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.server.scripted import serving
from tests.server.test_mcp import Caller
from tests.web import node
from tests.web.node import Reported

ADD = 'call add {"a": 1, "b": 2}'
RESUMED = ("until", "mark", {"text": "resumed"})
ENDED = ("until", "state", {"state": "ended"})

pytestmark = node.needs_node


def reported(*steps: Sequence[Any], pace_s: float = 0.0) -> tuple[list[tuple[str, ...]], Reported]:
    """Hold a conversation with these steps. Return the messages that the model got for each answer, and the events."""
    with serving(partner=Caller(pace_s)) as (url, _, echo):
        found = node.reported("calls.mjs", "conversation.js", url.replace("ws", "http", 1), steps)
    return echo.asked, found


def answers(word: str) -> tuple[Any, ...]:
    """Return the step that waits until this answer is complete."""
    return "until", "words", {"who": "assistant", "text": word, "final": True}


@pytest.mark.parametrize("state", ["failed", "disconnected"])
def test_when_its_door_is_gone_then_another_call_knows_what_was_said_and_what_tools_returned(state: str) -> None:
    asked, found = reported(
        ("start",),
        *(("write", "one"), answers("one"), ("write", ADD), answers("3")),
        # No door answers at first.
        ("refuse", 2, 0),
        *(("die", state), ("until", "mark", {"text": "lost"})),
        # What is written meanwhile waits for the next call.
        *(("writes", "two"), RESUMED, answers("two")),
    )
    before = ("one", "one", ADD, "", "3")
    assert asked == [("one",), before, (*before, "3", "two")]
    assert found[-1] == ("done", {"open": True, "calls": 4, "stopped": True})
    assert not [detail for kind, detail in found if kind == "error"]
    last = {line["id"]: line["text"] for kind, line in found if kind == "words"}
    assert list(last.values()) == ["one", "one", ADD, 'add({"a": 1, "b": 2}) → 3', "3", "two", "two"]


def test_what_was_written_before_the_browser_noticed_the_end_is_answered_by_the_next_server() -> None:
    asked, found = reported(
        *(("start",), ("write", "one"), answers("one")),
        *(("vanish",), ("write", "two"), ("die", "failed"), RESUMED, answers("two")),
        # The third message is confirmed, so it is not sent again.
        *(("write", "three"), answers("three"), ("die", "failed"), RESUMED, ("write", "four"), answers("four")),
    )
    said = ("one", "one", "two", "two", "three", "three", "four")
    assert asked == [said[:n] for n in (1, 3, 5, 7)]
    assert not [detail for kind, detail in found if kind == "error"]


def test_an_answer_that_was_under_way_is_asked_for_again() -> None:
    asked, found = reported(
        *(("start",), ("write", "one two three"), ("until", "words", {"who": "assistant", "text": "one two"})),
        *(("die", "failed"), RESUMED, answers("one two three")),
        pace_s=0.1,
    )
    assert asked == [("one two three",)] * 2
    assert found[-1][1]["calls"] == 2


def test_a_call_that_comes_back_goes_on_and_one_that_is_hung_up_or_refused_ends() -> None:
    _, found = reported(("start",), ("become", "disconnected"), ("become", "connected"), ("wait", 1300))
    assert found[-1][1] == {"open": True, "calls": 1, "stopped": True}
    _, found = reported(("start",), ("hangUp",), ENDED)
    assert found[-1][1] == {"open": False, "calls": 1, "stopped": True}
    _, found = reported(("start",), ("refuse", 9, 401), ("die", "failed"), ENDED)
    assert found[-1][1] == {"open": False, "calls": 2, "stopped": True}


def test_a_conversation_that_is_stopped_while_its_call_is_lost_ends() -> None:
    _, found = reported(("start",), ("refuse", 9, 0), ("die", "failed"), ("wait", 400), ("stop",), ("wait", 800))
    assert found[-1][1] == {"open": False, "calls": 2, "stopped": True}
