"""Attacks by way of a language model's server that misbehaves: the attacker's chats have it answer."""

from __future__ import annotations

import asyncio

import httpx
from bench.hostile.bodies import CHAT, chat
from bench.hostile.client import NO_ANSWER, Target

AT_ONCE = 4
# A client leaves then, since some answers have no end.
LEFT_AFTER_S = 20.0


async def chats(target: Target) -> None:
    """Four chats at once, each with a tool, whose answers are streamed."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    body = chat(max_tokens=1000, tools=[tool], stream=True)

    async def one() -> None:
        try:
            async with asyncio.timeout(2.0 if target.quick else LEFT_AFTER_S):
                await target.request(client, "POST", CHAT, json=body)
        except TimeoutError:
            target.outcomes[NO_ANSWER] += 1

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=target.url, headers=target.headers, timeout=None, limits=limits) as client:
        await asyncio.gather(*(one() for _ in range(AT_ONCE)))
