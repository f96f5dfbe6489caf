"""livekit's google plugin: two replies to a chat context, their text and their sound."""

import asyncio
import logging
import sys

from google.genai.types import HttpOptions
from livekit.agents import llm
from livekit.plugins.google.realtime import RealtimeModel
from livekit_replies import take

logging.basicConfig(level=logging.WARNING)


async def main():
    model = RealtimeModel(
        api_key="none",
        model="gemini-2.5-flash-native-audio-preview-12-2025",
        instructions="You are terse.",
        http_options=HttpOptions(base_url=sys.argv[1]),
    )
    session = model.session()
    context = llm.ChatContext.empty()
    context.add_message(role="user", content="Say hello.")
    await session.update_chat_ctx(context)
    samples, text = 0, ""
    for _ in range(2):
        generation = await asyncio.wait_for(session.generate_reply(), 60)
        now_samples, now_text = await asyncio.wait_for(take(generation), 60)
        assert now_samples > 2_000, now_samples
        samples, text = samples + now_samples, text + now_text
    await session.aclose()
    await model.aclose()
    assert text.strip()
    print(f"livekit, Gemini Live: {samples / 24_000:.1f} s of sound, {text.strip()!r}")


asyncio.run(main())
