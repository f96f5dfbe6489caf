"""pipecat's OpenAILiveLLMService in a pipeline: an opening, then a spoken turn."""

import asyncio
import sys

from pipecat.services.openai.live.llm import OpenAILiveLLMService
from pipecat_pipeline import converse


async def main():
    url, recording = sys.argv[1:3]
    llm = OpenAILiveLLMService(
        api_key="none",
        base_url=url.replace("http", "ws", 1) + "/v1/live/sessions",
        settings=OpenAILiveLLMService.Settings(system_instruction="You are terse."),
    )
    opening = {"role": "developer", "content": "Say hello to the user."}
    sink, first, second = await converse(llm, opening, 24_000, recording)
    assert sink.said.strip()
    print(f"pipecat, OpenAI Live: {first:.1f} s of speech, then {second:.1f} s")


asyncio.run(asyncio.wait_for(main(), 160))
