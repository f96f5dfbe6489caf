import asyncio

from livekit.agents import Agent, AgentSession, function_tool, utils
from livekit.plugins import openai


@function_tool
async def get_weather(city: str) -> str:
    """Tell the weather in a city now."""
    return f"It rains in {city}, 17 degrees."


async def main():
    async with utils.http_context.open():
        llm = openai.LLM(model="default", base_url="http://127.0.0.1:8000/v1", api_key="none")
        async with AgentSession(llm=llm) as session:
            await session.start(Agent(instructions="Answer briefly.", tools=[get_weather]))
            result = await session.run(user_input="What is the weather in Paris?")
            print(result.events[-1].item.text_content)


asyncio.run(main())
