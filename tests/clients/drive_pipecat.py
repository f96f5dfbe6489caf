"""pipecat's OpenAIRealtimeLLMService in a pipeline: a context answered in sound, then a spoken turn."""

import asyncio
import sys

from pipecat.services.openai.realtime.events import SessionProperties
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat_pipeline import converse


async def main():
    url, recording = sys.argv[1:3]
    llm = OpenAIRealtimeLLMService(
        api_key="none",
        base_url=url.replace("http", "ws", 1) + "/v1/realtime",
        session_properties=SessionProperties(instructions="You are terse."),
    )
    _, first, second = await converse(llm, {"role": "user", "content": "Say hello."}, 24_000, recording)
    print(f"pipecat: {first:.1f} s of sound, then {second:.1f} s for a spoken turn")


asyncio.run(asyncio.wait_for(main(), 160))
