"""Function calls of a language model, counted: `python bench/calls.py [--url URL] [--model NAME] [SERVE FLAGS]`.

A hundred prompts as they are spoken, each with the same six tools and `tool_choice: auto`: for 60 of them one call is
right, for 40 none is wanted. Each is asked once, without randomness, over `/v1/chat/completions` of a server that is
started for it, or of the one at `--url`.

- right: one call of the right tool, whose arguments are what was said. wrong: another call. missed: no call.
- unwanted: a call where none was asked for.
- told: a reply in which JSON or a tag of a call is left in the text, which a voice would read out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import Server, machine, percentile, save, server, table

MAX_TOKENS = 96
INSTRUCTIONS = "You are a voice assistant at home. Answer briefly."
# Name, what it does, its parameters, and those that are required.
TOOLS: list[tuple[str, str, dict[str, Any], list[str]]] = [
    ("get_weather", "The weather in a city now.", {"city": {"type": "string"}}, ["city"]),
    ("set_timer", "Set a timer.", {"minutes": {"type": "integer"}, "label": {"type": "string"}}, ["minutes"]),
    ("play_music", "Play music of an artist.", {"artist": {"type": "string"}}, ["artist"]),
    (
        "switch_light",
        "Switch the light of a room on or off.",
        {"room": {"type": "string"}, "state": {"type": "string", "enum": ["on", "off"]}},
        ["room", "state"],
    ),
    (
        "send_message",
        "Send a text message to somebody.",
        {"to": {"type": "string"}, "text": {"type": "string"}},
        ["to", "text"],
    ),
    ("get_stock_price", "The price of a share by its ticker.", {"symbol": {"type": "string"}}, ["symbol"]),
]
# What is said, and the arguments that are right, each as a pattern for its text; an argument "-" may be anything.
WANTED: dict[str, list[tuple[str, dict[str, str]]]] = {
    "get_weather": [
        (said, {"city": city})
        for said, city in (
            ("What's the weather in Paris?", "Paris"),
            ("How is the weather in Berlin right now?", "Berlin"),
            ("Is it raining in London?", "London"),
            ("Do I need an umbrella in Oslo today?", "Oslo"),
            ("How warm is it in Rome?", "Rome"),
            ("Tell me the temperature in Madrid.", "Madrid"),
            ("Weather for Tokyo, please.", "Tokyo"),
            ("I'm flying to Chicago. What's it like there?", "Chicago"),
            ("Is it cold in Helsinki?", "Helsinki"),
            ("Can you check the weather in New York?", "New York"),
        )
    ],
    "set_timer": [
        (said, {"minutes": minutes})
        for said, minutes in (
            ("Set a timer for five minutes.", "5"),
            ("Timer, ten minutes, please.", "10"),
            ("Wake me in twenty minutes.", "20"),
            ("Remind me in 15 minutes to check the oven.", "15"),
            ("Give me three minutes for the tea.", "3"),
            ("Start a timer of half an hour.", "30"),
            ("Count down 8 minutes for the eggs.", "8"),
            ("Can you set a 45 minute timer?", "45"),
            ("I need a timer for an hour.", "60"),
            ("Set a timer for twelve minutes for the pasta.", "12"),
        )
    ],
    "play_music": [
        (said, {"artist": artist})
        for said, artist in (
            ("Play some music by Nina Simone.", "Nina Simone"),
            ("I want to hear the Beatles.", "Beatles"),
            ("Put on Miles Davis.", "Miles Davis"),
            ("Play Mozart.", "Mozart"),
            ("Can you play something by Queen?", "Queen"),
            ("Let's listen to Bob Dylan.", "Bob Dylan"),
            ("Play songs of Adele, please.", "Adele"),
            ("Put some Bach on.", "Bach"),
            ("I'd like some David Bowie.", "David Bowie"),
            ("Start playing Daft Punk.", "Daft Punk"),
        )
    ],
    "switch_light": [
        (said, {"room": room, "state": f"^{state}$"})
        for said, room, state in (
            ("Turn on the light in the kitchen.", "kitchen", "on"),
            ("Switch off the bedroom light.", "bedroom", "off"),
            ("Lights off in the living room, please.", "living", "off"),
            ("It's dark in the hall, switch the light on.", "hall", "on"),
            ("Turn the bathroom light off.", "bathroom", "off"),
            ("Can you turn on the lights in the garage?", "garage", "on"),
            ("Light on in the office.", "office", "on"),
            ("Please switch off the light in the cellar.", "cellar", "off"),
            ("Turn the garden light on.", "garden", "on"),
            ("Kill the light in the nursery.", "nursery", "off"),
        )
    ],
    "send_message": [
        (said, {"to": to, "text": text})
        for said, to, text in (
            ("Text Anna that I'm late.", "Anna", "late"),
            ("Send a message to Tom: dinner is ready.", "Tom", "dinner"),
            ("Tell my mother by text that I arrived.", "mother", "arrived"),
            ("Message Peter, see you at eight.", "Peter", "eight|8"),
            ("Write to Julia that the meeting is cancelled.", "Julia", "cancel"),
            ("Send Max a text saying happy birthday.", "Max", "birthday"),
            ("Text Dad, I'm on my way.", "Dad", "way"),
            ("Let Sarah know by message that the train is delayed.", "Sarah", "delay"),
            ("Send a message to Ben asking if he has the keys.", "Ben", "keys"),
            ("Text Clara that I love the photos.", "Clara", "photos"),
        )
    ],
    "get_stock_price": [
        (said, {"symbol": symbol})
        for said, symbol in (
            ("What is the share price of AAPL?", "AAPL"),
            ("How is MSFT doing?", "MSFT"),
            ("Get me the price of TSLA.", "TSLA"),
            ("What does a share with the ticker NVDA cost?", "NVDA"),
            ("Stock price for IBM, please.", "IBM"),
            ("Check the stock AMZN.", "AMZN"),
            ("What's the price of GOOG right now?", "GOOG"),
            ("How much is one share of INTC?", "INTC"),
            ("Tell me the price of the stock ORCL.", "ORCL"),
            ("Look up the share price of NFLX.", "NFLX"),
        )
    ],
}
UNWANTED = [
    "Hello, how are you?",
    "What is the capital of France?",
    "Tell me a joke.",
    "Who wrote Hamlet?",
    "What is two plus two?",
    "Thank you, that's all.",
    "What can you do for me?",
    "Good morning!",
    "Tell me something about cats.",
    "Why is the sky blue?",
    "How do you spell weather?",
    "Which is bigger, the moon or the earth?",
    "I had a long day.",
    "What's your name?",
    "Explain what a share is.",
    "How do I boil an egg?",
    "Who was Mozart?",
    "What is a timer good for?",
    "Say something nice.",
    "Do you like music?",
    "How many days has a week?",
    "Translate good night into Spanish.",
    "What does the word kitchen mean?",
    "I don't need the timer, thanks.",
    "Can you keep a secret?",
    "What is the largest ocean?",
    "How far is the moon?",
    "Give me a word that rhymes with light.",
    "Who invented the light bulb?",
    "My name is Bob.",
    "What language do people speak in Brazil?",
    "I'm bored.",
    "Name three fruits.",
    "Is a tomato a fruit?",
    "Never mind.",
    "Where is Berlin?",
    "What is the opposite of cold?",
    "Do you sleep?",
    "Tell me who Queen Victoria was.",
    "Good night.",
]
# What a reply that was meant as a call leaves in its text.
LEFT = re.compile(r'\{\s*"|tool_call|</?tools?>|function_call')


def offered() -> list[dict[str, Any]]:
    """The tools, as a request has them."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {"type": "object", "properties": properties, "required": required},
            },
        }
        for name, description, properties, required in TOOLS
    ]


def fits(call: dict[str, Any], name: str, expected: dict[str, str]) -> bool:
    """Whether a call is the one that was asked for."""
    if call["function"]["name"] != name:
        return False
    try:
        arguments = json.loads(call["function"]["arguments"])
    except ValueError:
        # It was longer than a reply may be.
        return False
    return all(re.search(p, str(arguments.get(key, "")), re.IGNORECASE) for key, p in expected.items())


async def ask(client: httpx.AsyncClient, model: str, said: str, instructions: str) -> tuple[dict[str, Any], float]:
    """The reply's message, and the seconds that it took."""
    messages = [{"role": "system", "content": instructions}, {"role": "user", "content": said}]
    body = {"model": model, "messages": messages, "tools": offered(), "temperature": 0, "max_tokens": MAX_TOKENS}
    began = time.perf_counter()
    response = await client.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message, time.perf_counter() - began


async def run(url: str, model: str, instructions: str) -> dict[str, Any]:
    """Ask everything, one after another, and count."""
    counts: dict[str, int] = dict.fromkeys(("right", "wrong", "missed", "unwanted", "told"), 0)
    took: list[float] = []
    replies: list[dict[str, Any]] = []
    prompts = [(name, said, expected) for name, all_of in WANTED.items() for said, expected in all_of]
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        for name, said, expected in [*prompts, *(("", said, dict[str, str]()) for said in UNWANTED)]:
            message, seconds = await ask(client, model, said, instructions)
            calls, text = message.get("tool_calls") or [], message.get("content") or ""
            took.append(seconds)
            if not name:
                verdict = "unwanted" if calls else ""
            elif not calls:
                verdict = "missed"
            else:
                verdict = "right" if len(calls) == 1 and fits(calls[0], name, expected) else "wrong"
            counts["told"] += bool(LEFT.search(text))
            if verdict:
                counts[verdict] += 1
            heard = [c["function"] for c in calls]
            replies.append({"said": said, "wanted": name, "verdict": verdict, "calls": heard, "text": text})
    return {"counts": counts, "p50_s": percentile(took, 50), "p95_s": percentile(took, 95), "replies": replies}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that runs; none: one is started with the further flags")
    parser.add_argument("--model", default="default")
    parser.add_argument("--instructions", default=INSTRUCTIONS, help="the system message")
    parser.add_argument(
        "--name", default="", help="what the figures are called in the results; none: they are not kept"
    )
    parser.add_argument("--show", action="store_true", help="print each reply that is not right")
    args, flags = parser.parse_known_args()
    with nullcontext(Server(args.url, None)) if args.url else server(*flags) as asked:  # type: ignore[arg-type]
        found = asyncio.run(run(asked.url, args.model, args.instructions))
    counts = found["counts"]
    if args.show:
        for reply in found["replies"]:
            if reply["verdict"] not in ("", "right") or LEFT.search(reply["text"]):
                print(reply["verdict"] or "told", "|", reply["said"], "|", reply["calls"], "|", reply["text"][:200])
    head = ["calls right of 60", "wrong", "missed", "unwanted of 40", "left in the text of 100", "p50 s", "p95 s"]
    row = [counts[k] for k in ("right", "wrong", "missed", "unwanted", "told")]
    table("Function calls", head, [[*row, round(found["p50_s"], 2), round(found["p95_s"], 2)]])
    if args.name:
        path = Path(__file__).parent / "results" / "calls.json"
        kept = json.loads(path.read_text()) if path.exists() else {"runs": {}}
        kept["runs"][args.name] = {"flags": flags, "instructions": args.instructions, **found}
        save("calls", kept | {"machine": machine()})


if __name__ == "__main__":
    main()
