"""livekit's openai plugin: two replies to a chat context, their text and their sound."""

import asyncio
import logging
import sys

import aiohttp
from livekit.agents import llm
from livekit.plugins.openai.realtime import RealtimeModel
from livekit_replies import take

logging.basicConfig(level=logging.WARNING)


async def main():
    async with aiohttp.ClientSession() as http:
        model = RealtimeModel(base_url=f"{sys.argv[1]}/v1", api_key="none", model="gpt-realtime", http_session=http)
        session = model.session()
        await session.update_instructions("You are terse.")
        context = llm.ChatContext.empty()
        context.add_message(role="user", content="Say hello.")
        await session.update_chat_ctx(context)
        begun_anew, reconnected = [], []
        # The server begins an answer again by itself if it had to break it off.
        session.on("generation_created", lambda event: begun_anew.append(event) if not event.user_initiated else None)
        session.on("session_reconnected", reconnected.append)
        samples, text = 0, ""
        for _ in range(2):
            generation = await asyncio.wait_for(session.generate_reply(), 30)
            now_samples, now_text = await take(generation)
            while begun_anew:
                more_samples, more_text = await take(begun_anew.pop(0))
                now_samples, now_text = now_samples + more_samples, now_text + more_text
            assert now_samples > 12_000, now_samples
            samples, text = samples + now_samples, text + now_text
        assert not reconnected
        await session.aclose()
        await model.aclose()
    assert text.strip()
    print(f"livekit: {samples / 24_000:.1f} s of sound, {text.strip()!r}")


asyncio.run(asyncio.wait_for(main(), 90))
