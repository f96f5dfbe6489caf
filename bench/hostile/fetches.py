"""Attacks by URL: voices whose files never end, which hold the places of those who fetch."""

from __future__ import annotations

import asyncio

from bench.hostile.client import Target

SPEECH = "/v1/audio/speech"


async def fetches(target: Target) -> None:
    """Thirty-two voices at once, whose files come a byte at a time and do not end."""

    async def one(number: int) -> None:
        body = {
            "input": "Hello.",
            "ref_audio": f"{target.beside}/drip/{target.tried}-{number}",
            "ref_text": "Hello.",
            "response_format": "pcm",
        }
        await target.request(client, "POST", SPEECH, json=body)

    async with target.client() as client:
        await asyncio.gather(*(one(number) for number in range(4 if target.quick else 32)))
