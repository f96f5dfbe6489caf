"""livekit's openai plugin: a reply to a chat context, its text and its sound."""

import asyncio
import logging
import sys

import aiohttp
from livekit.agents import llm
from livekit.plugins.openai.realtime import RealtimeModel

logging.basicConfig(level=logging.WARNING)


async def main():
    async with aiohttp.ClientSession() as http:
        model = RealtimeModel(base_url=f"{sys.argv[1]}/v1", api_key="none", model="gpt-realtime", http_session=http)
        session = model.session()
        await session.update_instructions("You are terse.")
        context = llm.ChatContext.empty()
        context.add_message(role="user", content="Say hello.")
        await session.update_chat_ctx(context)
        generation = await asyncio.wait_for(session.generate_reply(), 20)
        samples, text = 0, ""
        async for message in generation.message_stream:

            async def hear(message=message):
                nonlocal samples
                async for frame in message.audio_stream:
                    samples += frame.samples_per_channel

            async def read(message=message):
                nonlocal text
                async for part in message.text_stream:
                    text += str(part)

            await asyncio.gather(hear(), read())
        await session.aclose()
        await model.aclose()
    assert samples > 12_000, samples
    assert text.strip()
    print(f"livekit: {samples / 24_000:.1f} s of sound, {text.strip()!r}")


asyncio.run(asyncio.wait_for(main(), 90))
