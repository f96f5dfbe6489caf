"""openai-agents: an agent with a tool that must be called, and with a tool server; results are answered in sound."""

import asyncio
import os
import sys
from collections import Counter

from agents import function_tool
from agents.realtime import RealtimeAgent, RealtimeRunner
from agents.realtime.model_inputs import RealtimeModelSendRawMessage

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


async def talk_with_server(url):
    """Name a tool server, by a raw event because the package has no field for it. Return the types of its events."""
    agent = RealtimeAgent(name="a", instructions="You are terse.")
    where = url.replace("http", "ws", 1) + "/v1/realtime?model=gpt-realtime"
    session = await RealtimeRunner(agent).run(model_config={"api_key": "none", "url": where})
    tool = {"type": "mcp", "server_label": "theirs", "server_url": os.environ["MCP_URL"]}
    tool |= {"allowed_tools": ["echo"], "require_approval": "never"}
    update = {"type": "realtime", "tools": [tool], "tool_choice": "required"}
    seen, sound = [], 0
    async with session:
        message = {"type": "session.update", "other_data": {"session": update}}
        await session.model.send_event(RealtimeModelSendRawMessage(message=message))
        async for event in session:
            if event.type == "error":
                raise RuntimeError(event.error)
            if event.type == "audio":
                sound += len(event.audio.data)
            data = getattr(event, "data", None)
            if getattr(data, "type", "") == "raw_server_event":
                seen.append(data.data["type"])
                if seen[-1] == "mcp_list_tools.completed":
                    await session.send_message("Echo the word hello.")
                if seen[-1] == "response.done" and "response.mcp_call.completed" in seen and sound:
                    return seen


async def main():
    url = sys.argv[1]
    kinds, sound = await asyncio.wait_for(talk(url, tool=False), 60)
    assert sound > 24_000, kinds
    kinds, _ = await asyncio.wait_for(talk(url, tool=True), 60)
    assert called, kinds
    seen = []
    if "MCP_URL" in os.environ:
        seen = await asyncio.wait_for(talk_with_server(url), 60)
    print(
        f"openai-agents: {sound / 48_000:.1f} s of sound, called with {called[0]!r}, {len(seen)} events with a server"
    )


asyncio.run(main())
