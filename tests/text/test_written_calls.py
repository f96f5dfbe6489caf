"""Which calls relate to the conversation: those of small models are checked."""

from __future__ import annotations

import json

import pytest

from antiphon.events.tools import Tool
from antiphon.text.written_calls import has_what_was_said

TEXT = {"type": "string"}
WEATHER = Tool("get_weather", "The weather in a city now.", {"type": "object", "properties": {"city": TEXT}})
TIMER = Tool(
    "set_timer", "Set a timer.", {"type": "object", "properties": {"minutes": {"type": "integer"}, "label": TEXT}}
)
LIGHT = Tool(
    "switch_light",
    "Switch the light of a room.",
    {"type": "object", "properties": {"room": TEXT, "state": {"type": "string", "enum": ["on", "off"]}}},
)
SHARES = Tool("getSharePrice", "What a share costs.", {"type": "object", "properties": {"symbol": TEXT}})
LIST = Tool("add_items", "", {"type": "object", "properties": {"items": {"type": "array", "items": TEXT}}})
MONEY = Tool("moveMoney", "Eine Überweisung.", {"type": "object", "properties": {"to": TEXT}})
MODE = Tool("set_mode", "", {"type": "object", "properties": {"mode": {"$ref": "#/$defs/Mode"}, "note": TEXT}})
TOOLS = [WEATHER, TIMER, LIGHT, SHARES, LIST, MONEY, MODE]
# The system message is context, not a question.
SYSTEM = ("system", "You are a voice assistant at home. Answer briefly about the weather.")


@pytest.mark.parametrize(
    ("said", "name", "arguments", "meant"),
    [
        (["How is it in Rome?"], "get_weather", {"city": "Rome"}, True),
        (["Good morning!"], "get_weather", {"city": "London"}, False),
        (["I had a long day in the office."], "get_weather", {"city": "London"}, False),
        (["What is two plus two?"], "get_weather", {"city": "London"}, False),
        # The subject of the tool was mentioned, though not the arguments.
        (["What is the weather in the capital of France?"], "get_weather", {"city": "Paris"}, True),
        (["How much does a share of Apple cost?"], "getSharePrice", {"symbol": "AAPL"}, True),
        (["Set a timer for half an hour."], "set_timer", {"minutes": 30, "label": "Go to sleep"}, True),
        (["Put on Miles Davis."], "set_timer", {"minutes": 30, "label": "Go to sleep"}, False),
        # Numbers, and values from a list, cannot be judged.
        (["Wake me at some point."], "set_timer", {"minutes": 20}, True),
        (["It is dark."], "switch_light", {"state": "on"}, True),
        (["It is dark."], "switch_light", {"room": "garage", "state": "on"}, False),
        # It was said earlier, by either side.
        (["You live in Oslo.", "Do I need an umbrella?"], "get_weather", {"city": "Oslo"}, True),
        (["Shall I look at Bonn?", "Yes."], "get_weather", {"city": "Bonn"}, True),
        # The subject of a tool counts only in the last message.
        (["How is the weather in Bonn?", "Thank you."], "get_weather", {"city": "Paris"}, False),
        # Forms of a word, and of a name in another language.
        (["Wie ist es in Rom?"], "get_weather", {"city": "Rome"}, True),
        (["Put two lemons there."], "add_items", {"items": ["lemon"]}, True),
        (["Hello."], "add_items", {"items": ["milk", "eggs"]}, False),
        # Words in different scripts cannot be compared.
        (["東京は寒いですか"], "get_weather", {"city": "Tokyo"}, True),
        (["Какая погода в Москве?"], "get_weather", {"city": "Moscow"}, True),
        (["Quel temps fait-il à Londres ?"], "get_weather", {"city": "London"}, True),
        (["Wie ist es in München?"], "get_weather", {"city": "Munchen"}, True),
        # The description of the tool is in another language, and its name is one word.
        (["Mach eine Überweisung."], "moveMoney", {"to": "Anna"}, True),
        (["Move some money."], "moveMoney", {"to": "Anna"}, True),
        (["I am going to bed."], "set_mode", {"mode": "night"}, True),
        (["I am going to bed."], "set_mode", {"note": "Good night"}, False),
        ([], "get_weather", {"city": "London"}, True),
        (["Hello."], "get_weather", {}, True),
        (["Hello."], "nothing", {"city": "London"}, True),
    ],
)
def test_a_call_that_has_nothing_of_what_was_said_is_told(
    said: list[str], name: str, arguments: dict[str, object], meant: bool
) -> None:
    asked = [SYSTEM, *(("assistant" if text.startswith("Shall") else "user", text) for text in said)]
    assert has_what_was_said(TOOLS, asked, name, json.dumps(arguments)) is meant


@pytest.mark.parametrize("arguments", ['{"city": "Lon', "[1]", '"London"', ""])
def test_what_is_no_object_is_not_judged(arguments: str) -> None:
    assert has_what_was_said(TOOLS, [("user", "Good morning!")], "get_weather", arguments)
