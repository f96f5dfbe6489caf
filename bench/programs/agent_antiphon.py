from antiphon.client import ResponseEnds, SyncClient


def get_weather(city: str) -> str:
    """Tell the weather in a city now."""
    return f"It rains in {city}, 17 degrees."


with SyncClient("http://127.0.0.1:8000") as client, client.conversation(tools=[get_weather]) as talk:
    talk.send_text("What is the weather in Paris?")
    print(next(event.text for event in talk if isinstance(event, ResponseEnds) and event.text))
