"""A call of the browser's client, in Node, with a real server over scripted models: when its door or server is gone,
another call begins that knows what was said.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.server.scripted import serving
from tests.server.test_mcp import Caller

HERE = Path(__file__).parent
MODULE = HERE.parents[1] / "src" / "antiphon" / "web" / "client" / "conversation.js"
NODE = shutil.which("node")
# Timeout in case Node hangs, in seconds.
LIMIT_S = 60
ADD = 'call add {"a": 1, "b": 2}'
LISTENS = ("until", "state", {"state": "listening"})
RESUMED = ("until", "mark", {"text": "resumed"})
ENDED = ("until", "state", {"state": "ended"})

pytestmark = pytest.mark.skipif(not NODE, reason="Node is not on this machine")


def reported(*steps: Sequence[Any], pace_s: float = 0.0) -> tuple[list[tuple[str, ...]], list[tuple[str, Any]]]:
    """Hold a conversation with these steps. Return the messages that the model got for each answer, and the events."""
    assert NODE
    with serving(partner=Caller(pace_s)) as (url, _, echo):
        done = subprocess.run(
            [
                NODE,
                "--experimental-websocket",
                "--no-warnings",
                HERE / "calls.mjs",
                MODULE,
                url.replace("ws", "http", 1),
            ],
            input=json.dumps(steps),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return echo.asked, [tuple(json.loads(line)) for line in done.stdout.splitlines()]


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
    assert asked == [
        ("one",),
        ("one", "one", "add"),
        ("one", "one", "add", "", "3"),
        ("one", "one", "add", "", "3", "3", "two"),
    ]
    assert found[-1] == ("done", {"open": True, "calls": 4, "stopped": True})
    assert not [detail for kind, detail in found if kind == "error"]
    last = {line["id"]: line["text"] for kind, line in found if kind == "words"}
    assert list(last.values()) == ["one", "one", ADD, 'add({"a": 1, "b": 2}) → 3', "3", "two", "two"]


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
