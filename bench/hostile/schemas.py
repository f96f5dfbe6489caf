"""Attacks with schemas of structured output: small texts whose grammars take gigabytes and minutes to make."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from bench.hostile.bodies import CHAT, chat
from bench.hostile.client import Target, hold

LEFT_AFTER_S = 3.0
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def intersection(letters: str) -> dict[str, Any]:
    """A schema of text that has all these letters: the intersection of its patterns is exponential in their number."""
    return {"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in letters]}


def hidden(schema: dict[str, Any]) -> dict[str, Any]:
    """The same intersection, whose patterns stand behind references: they are counted by nothing but the library."""
    patterns = {f"p{i}": inner for i, inner in enumerate(schema["allOf"])}
    return {"$defs": patterns, "allOf": [{"$ref": f"#/$defs/{name}"} for name in patterns]}


def as_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


async def schemas(target: Target) -> None:
    """Six requests with different intersections of patterns, whose clients leave after 3 s; once.

    One shows its patterns, and five have them behind references.
    """
    draw = random.Random(target.tried)
    number = 14 if target.quick else 20
    async with target.client() as client:
        drawn = [intersection("".join(draw.sample(LETTERS, number))) for _ in range(6)]
        wanted = [as_format(each) for each in (drawn[0], *map(hidden, drawn[1:]))]
        asked = (
            target.request(client, "POST", CHAT, json=chat(response_format=each), timeout=LEFT_AFTER_S)
            for each in wanted
        )
        await asyncio.gather(*asked)
    # What they leave behind is what is measured.
    await hold()
