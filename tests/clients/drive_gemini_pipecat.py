"""pipecat's GeminiLiveLLMService in a pipeline: a context answered in sound, then a spoken turn."""

import asyncio
import sys

from google.genai.types import HttpOptions
from pipecat.services.google.gemini_live.llm import GeminiLiveLLMService
from pipecat_pipeline import converse


async def main():
    url, recording = sys.argv[1:3]
    llm = GeminiLiveLLMService(
        api_key="none", http_options=HttpOptions(base_url=url), system_instruction="You are terse."
    )
    _, first, second = await converse(llm, {"role": "user", "content": "Say hello."}, 16_000, recording)
    print(f"pipecat, Gemini Live: {first:.1f} s of sound, then {second:.1f} s")


asyncio.run(asyncio.wait_for(main(), 160))
