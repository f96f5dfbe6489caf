"""`session.tool_calls` over real sockets, and antiphon's own functions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from antiphon.events.tools import CallOptions
from antiphon.server.live.own_tools import OwnTools
from antiphon.server.live.realtime_session import call_options
from antiphon.settings import Settings, ToolSettings
from antiphon.store.voices import NoteStore
from tests.server.clients import Wire, connect
from tests.server.scripted import serving
from tests.server.test_mcp import Caller

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
# Saturday, 28 November 2026, 15:04:05 UTC.
NOW_S = 1_795_878_245


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = Settings()
    with serving(replace(settings, tools=replace(settings.tools, own=("time",))), partner=Caller()) as (found, _, _):
        yield found


async def update(wire: Wire, **session: Any) -> dict[str, Any]:
    """Change the session; return it, or the error."""
    await wire.say("session.update", session={"type": "realtime"} | session)
    frame = await wire.until(lambda f: f["type"] in ("session.updated", "error"))
    shown: dict[str, Any] = frame.get("session") or frame["error"]
    return shown


async def say(wire: Wire, text: str) -> None:
    part = {"type": "input_text", "text": text}
    await wire.say("conversation.item.create", item={"type": "message", "role": "user", "content": [part]})
    await wire.say("response.create")


def test_fillers_and_answers_without_a_request_are_settings_of_the_session(url: str) -> None:
    async def main() -> None:
        async with connect(url) as wire:
            await wire.until("session.created")
            calls = {"filler": ["One moment."], "filler_after_ms": 0, "auto_response": True}
            shown = await update(wire, tools=[WEATHER], tool_calls=calls)
            assert shown["tool_calls"] == calls | {"deadline_ms": None}
            await say(wire, "call weather {}")
            call = (await wire.until("response.function_call_arguments.done"))["call_id"]
            await wire.until("response.done")
            # The scripted model repeats what it is asked to say.
            filler = await wire.until("response.output_audio_transcript.done")
            assert "One moment." in filler["transcript"]
            added = next(
                f for f in wire.seen if f["type"] == "conversation.item.added" and f["item"]["id"] == filler["item_id"]
            )
            items = [f["item"] for f in wire.seen if f["type"] == "conversation.item.added"]
            assert added["previous_item_id"] == items[0]["id"]
            await wire.until("response.done")
            await wire.say(
                "conversation.item.create",
                item={"type": "function_call_output", "call_id": call, "output": "It rains."},
            )
            assert (await wire.until("response.output_audio_transcript.done"))["transcript"] == "It rains."

    asyncio.run(main())


def test_without_the_setting_a_session_is_as_openais(url: str) -> None:
    async def main() -> None:
        async with connect(url) as wire:
            assert "tool_calls" not in (await wire.until("session.created"))["session"]
            await update(wire, tools=[WEATHER], tool_calls={"filler": "generated"})
            assert "tool_calls" not in await update(wire, tool_calls=None)
            await say(wire, "call weather {}")
            call = (await wire.until("response.function_call_arguments.done"))["call_id"]
            await wire.say(
                "conversation.item.create",
                item={"type": "function_call_output", "call_id": call, "output": "It rains."},
            )
            # Whatever the server sends by itself comes before the answer to this update.
            await update(wire, instructions="Be kind.")
            assert sum(f["type"] == "response.created" for f in wire.seen) == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("given", "code", "param"),
    [
        ({"filler": ""}, "invalid_value", "session.tool_calls.filler"),
        ({"filler": ["a"] * 33}, "invalid_value", "session.tool_calls.filler"),
        ({"filler_after_ms": -1}, "invalid_value", "session.tool_calls.filler_after_ms"),
        ({"deadline_ms": 1}, "invalid_value", "session.tool_calls.deadline_ms"),
        ({"fillers": "a"}, "unknown_parameter", "session.tool_calls.fillers"),
    ],
)
def test_a_wrong_field_is_refused(url: str, given: dict[str, Any], code: str, param: str) -> None:
    async def main() -> None:
        async with connect(url) as wire:
            await wire.until("session.created")
            error = await update(wire, tool_calls=given)
            assert (error["code"], error["param"]) == (code, param)

    asyncio.run(main())


def test_the_operators_settings_make_the_default() -> None:
    assert call_options(ToolSettings()) == CallOptions()
    assert call_options(ToolSettings(filler=("One moment.",), filler_after_s=1.0)) == CallOptions(
        fillers=("One moment.",), filler_after_ms=1000.0
    )
    assert call_options(ToolSettings(filler=("generated",))).generates_fillers


def test_a_conversation_has_the_functions_of_the_setting(url: str) -> None:
    async def main() -> None:
        async with connect(url, "?model=default") as wire:
            await update(wire, output_modalities=["text"])
            await say(wire, 'call get_time {"timezone": "UTC"}')
            await wire.until("response.mcp_call.completed")
            await wire.until("response.done")
            assert "(UTC)" in wire.joined()

    asyncio.run(main())


class Home:
    """The functions of conversations of several keys. `now_s` is the time in Unix seconds."""

    def __init__(self, folder: Path, max_notes: int = 3, max_age_s: float = 0.0, now_s: float = NOW_S) -> None:
        self.folder, self.max_notes, self.max_age_s, self.now_s = folder, max_notes, max_age_s, now_s

    def ask(self, name: str, key: str = "one", **arguments: str) -> str:
        tools = OwnTools(
            ("time", "remember"), NoteStore(self.folder, key, self.max_notes, self.max_age_s), lambda: self.now_s
        )
        return asyncio.run(tools.call("antiphon", name, json.dumps(arguments))).text


def test_the_time_is_told_in_the_zone_that_is_asked_for(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert home.ask("get_time", timezone="UTC") == "Saturday, 28 November 2026, 15:04 (UTC)"
    assert home.ask("get_time", timezone="Asia/Tokyo") == "Sunday, 29 November 2026, 00:04 (JST)"
    assert home.ask("get_time", timezone="Nowhere/At all") == "There is no time zone Nowhere/At all."


def test_notes_are_kept_by_key_until_they_are_deleted(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert home.ask("recall") == "There are no notes."
    home.ask("remember", about="Tea", text="With milk.")
    home.ask("remember", about="tea", text="Without milk.")
    home.ask("remember", about="Dog", text="Its name is Rex.")
    assert home.ask("recall") == "Dog: Its name is Rex.\ntea: Without milk."
    assert home.ask("recall", key="two") == "There are no notes."
    assert home.ask("forget", key="two", about="tea") == "There is no such note."
    assert home.ask("forget", about="TEA") == "The note is deleted."
    assert home.ask("recall") == "Dog: Its name is Rex."


def test_notes_are_limited_in_number_size_and_age(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for number in range(3):
        home.ask("remember", about=str(number), text="A note.")
    assert home.ask("remember", about="4", text="One more.").startswith("Not done: the limit of 3 notes is reached")
    assert home.ask("remember", about="0", text="a" * 2001) == "'text' has 1 to 2000 characters."
    assert home.ask("remember", text="About nothing.") == "'about' has 1 to 100 characters."
    assert home.ask("no_such_function").startswith("There is no function")
    Home(tmp_path, now_s=1000.0).ask("remember", about="0", text="Written in 1970.")
    assert "1970" in home.ask("recall")
    assert "1970" not in Home(tmp_path, max_age_s=86400.0).ask("recall")
