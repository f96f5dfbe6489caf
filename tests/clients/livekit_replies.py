"""Replies of LiveKit's realtime models: the common part of their drivers."""

import asyncio


async def take(generation):
    """Read a reply to its end. Return the number of samples, and the text."""
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
    return samples, text
