"""What `bench/calls.py` asks: tools, prompts with the call that is right, and prompts that are none's.

`HOME` was looked at while calls were made to work. `ERRANDS` was written when that was done, and was not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Tools = list[tuple[str, str, dict[str, Any], list[str]]]
Wanted = dict[str, list[tuple[str, dict[str, str]]]]


@dataclass(frozen=True, slots=True)
class Prompts:
    """`tools`: the name of each, what it does, its parameters, and those that are required. `wanted`: by the name of a
    tool, what is said, and the arguments that are right, each as a pattern for its text. `unwanted`: what is said that
    asks for no call.
    """

    instructions: str
    tools: Tools
    wanted: Wanted
    unwanted: list[str]


_INSTRUCTIONS = "You are a voice assistant at home. Answer briefly."
_TOOLS: Tools = [
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
_WANTED: Wanted = {
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
_UNWANTED = [
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
HOME = Prompts(_INSTRUCTIONS, _TOOLS, _WANTED, _UNWANTED)
_TEXT = {"type": "string"}
ERRANDS = Prompts(
    "You are an assistant on a phone. Answer briefly.",
    [
        ("add_event", "Add an event to the calendar.", {"title": _TEXT, "day": _TEXT}, ["title", "day"]),
        ("add_to_shopping_list", "Put a thing on the shopping list.", {"item": _TEXT}, ["item"]),
        ("navigate", "Show the way to a place.", {"destination": _TEXT}, ["destination"]),
        ("call_contact", "Call somebody on the phone.", {"name": _TEXT}, ["name"]),
        ("set_volume", "Set how loud the phone is, in percent.", {"percent": {"type": "integer"}}, ["percent"]),
        ("search_news", "Look for news about a topic.", {"topic": _TEXT}, ["topic"]),
    ],
    {
        "add_event": [
            (said, {"title": title, "day": day})
            for said, title, day in (
                ("Put the dentist into my calendar for Monday.", "dentist", "Monday"),
                ("Add lunch with Eva on Friday.", "lunch", "Friday"),
                ("I have a concert on Saturday, note that down.", "concert", "Saturday"),
                ("Schedule a haircut tomorrow.", "haircut", "tomorrow"),
                ("New event: football training, every one knows it's on Tuesday.", "football|training", "Tuesday"),
            )
        ],
        "add_to_shopping_list": [
            (said, {"item": item})
            for said, item in (
                ("Put milk on the shopping list.", "milk"),
                ("We need eggs.", "egg"),
                ("Add two loaves of bread to my list.", "bread"),
                ("I have to buy soap.", "soap"),
                ("Write down coffee for the supermarket.", "coffee"),
            )
        ],
        "navigate": [
            (said, {"destination": place})
            for said, place in (
                ("Take me to the airport.", "airport"),
                ("How do I get to Baker Street?", "Baker"),
                ("Show me the way home.", "home"),
                ("Drive to the nearest hospital.", "hospital"),
                ("Directions to Hyde Park, please.", "Hyde"),
            )
        ],
        "call_contact": [
            (said, {"name": name})
            for said, name in (
                ("Call Grandma.", "Grandma"),
                ("Ring Paul, please.", "Paul"),
                ("Can you phone my boss?", "boss"),
                ("I want to speak with Laura.", "Laura"),
                ("Dial the office.", "office"),
            )
        ],
        "set_volume": [
            (said, {"percent": percent})
            for said, percent in (
                ("Set the volume to 30 percent.", "30"),
                ("Volume fifty.", "50"),
                ("Make it as loud as it gets.", "100"),
                ("Turn it down to ten percent.", "10"),
                ("Mute the phone.", "^0"),
            )
        ],
        "search_news": [
            (said, {"topic": topic})
            for said, topic in (
                ("What's new about the elections?", "election"),
                ("Any news from NASA?", "NASA"),
                ("Find me the latest on electric cars.", "electric|car"),
                ("News about climate change, please.", "climate"),
                ("What happened at Wimbledon?", "Wimbledon"),
            )
        ],
    },
    [
        "Good evening!",
        "How old is the universe?",
        "You are very helpful.",
        "What is seven times eight?",
        "Tell me a story.",
        "Who painted the Mona Lisa?",
        "I slept badly.",
        "How are you today?",
        "What does photosynthesis mean?",
        "Why do cats purr?",
        "Stop it.",
        "Is milk good for you?",
        "Who is the president of France?",
        "Say that again, please.",
        "I like coffee.",
        "How many legs has a spider?",
        "What do you think of football?",
        "Are airports noisy?",
        "My brother is called Paul.",
        "See you tomorrow.",
    ],
)
SETS = {"home": HOME, "errands": ERRANDS}
