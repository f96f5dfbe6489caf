"""openai-agents: an agent with a tool that must be called; its result is answered in sound."""

import asyncio
import sys
from collections import Counter

from agents import function_tool
from agents.realtime import RealtimeAgent, RealtimeRunner

called = []


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    called.append(city)
    return "sunny"


async def talk(url, *, tool):
    agent = RealtimeAgent(name="a", instructions="You are terse.", tools=[get_weather])
    turns = {"type": "semantic_vad", "interrupt_response": True}
    settings = {"model_name": "gpt-realtime", "modalities": ["audio"], "turn_detection": turns}
    if tool:
        settings["tool_choice"] = "required"
    where = url.replace("http", "ws", 1) + "/v1/realtime?model=gpt-realtime"
    session = await RealtimeRunner(agent).run(
        model_config={"api_key": "none", "url": where, "initial_model_settings": settings}
    )
    kinds, sound = Counter(), 0
    async with session:
        await session.send_message("What is the weather in Paris?")
        async for event in session:
            kinds[event.type] += 1
            if event.type == "error":
                raise RuntimeError(event.error)
            if event.type == "audio":
                sound += len(event.audio.data)
            if (event.type == "tool_end" and tool) or (event.type == "agent_end" and sound and not tool):
                return kinds, sound
    return kinds, sound


async def main():
    url = sys.argv[1]
    kinds, sound = await asyncio.wait_for(talk(url, tool=False), 60)
    assert sound > 24_000, kinds
    kinds, _ = await asyncio.wait_for(talk(url, tool=True), 60)
    assert called, kinds
    print(f"openai-agents: {sound / 48_000:.1f} s of sound, called with {called[0]!r}")


asyncio.run(main())
