"""Conversations that outgrow the model's context, on a server with a small context."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from tests.conftest import SMALL, Process, Serve
from tests.server.clients import until_idle
from tests.server.conversations import TEXT_ONLY, talk

CONTEXT = 1024
BRIEF = TEXT_ONLY | {"max_output_tokens": 6}


@pytest.fixture(scope="module")
def small(serve: Serve) -> Process:
    return serve("--language-model", SMALL, "--context-tokens", str(CONTEXT))


def monologue(words: int) -> str:
    return " ".join(f"word{k % 97}" for k in range(words))


@pytest.mark.parametrize("truncation", ["auto", {"type": "retention_ratio", "retention_ratio": 0.5}])
def test_when_a_conversation_outgrows_the_context_then_it_is_cut_and_goes_on(small: Process, truncation: Any) -> None:
    async def main() -> list[dict[str, Any]]:
        responses = []
        async with talk(small, **BRIEF, truncation=truncation, instructions="You are brief.") as wire:
            for _ in range(8):
                await wire.text(monologue(60))
                await wire.say("response.create")
                responses.append((await wire.until("response.done"))["response"])
        return responses

    responses = asyncio.run(main())
    assert {r["status"] for r in responses} <= {"completed", "incomplete"}
    tokens = [r["usage"]["input_tokens"] for r in responses]
    if truncation != "auto":
        assert max(tokens) <= CONTEXT
        # A large part of the history is cut at once. After that, its prefix is cached again.
        assert any(b < a for a, b in pairwise(tokens))
        cached = [r["usage"]["input_token_details"]["cached_tokens"] for r in responses]
        cut = next(k for k in range(1, len(tokens)) if tokens[k] < tokens[k - 1])
        assert cut + 1 == len(tokens) or cached[cut + 1] > tokens[cut] * 0.8


def test_when_nothing_may_be_cut_then_the_response_fails_and_the_next_turn_works(small: Process) -> None:
    async def main() -> tuple[dict[str, Any], dict[str, Any]]:
        async with talk(small, **BRIEF, truncation="disabled") as wire:
            await wire.text(monologue(1500))
            await wire.say("response.create")
            failed = (await wire.until("response.done"))["response"]
            added = next(f for f in wire.seen if f["type"] == "conversation.item.added")
            await wire.say("conversation.item.delete", item_id=added["item"]["id"])
            await wire.text("Say hello.")
            await wire.say("response.create")
            return failed, (await wire.until("response.done"))["response"]

    failed, fine = asyncio.run(main())
    assert failed["status"] == "failed"
    assert failed["status_details"]["error"]["code"] == "context_length_exceeded"
    assert fine["status"] in ("completed", "incomplete")


def test_when_one_turn_is_longer_than_the_context_then_it_is_answered(small: Process) -> None:
    """A monologue of 15 minutes is one message of thousands of words."""

    async def main() -> str:
        async with talk(small, **BRIEF) as wire:
            await wire.text(monologue(2000))
            await wire.say("response.create")
            return str((await wire.until("response.done"))["response"]["status"])

    assert asyncio.run(main()) in ("completed", "incomplete")


@pytest.mark.parametrize(
    "truncation",
    [
        "sometimes",
        {"type": "half"},
        {"type": "retention_ratio"},
        {"type": "retention_ratio", "retention_ratio": 2},
        7,
    ],
)
def test_when_a_truncation_policy_is_wrong_then_it_is_refused(small: Process, truncation: Any) -> None:
    async def main() -> dict[str, Any]:
        async with talk(small) as wire:
            await wire.say("session.update", session={"type": "realtime", "truncation": truncation})
            error: dict[str, Any] = (await wire.until("error"))["error"]
            return error

    assert asyncio.run(main())["param"].startswith("session.truncation")


def test_when_a_conversation_has_two_thousand_items_then_it_is_answered(small: Process) -> None:
    async def main() -> tuple[int, str]:
        async with talk(small, **BRIEF) as wire:
            for k in range(2000):
                await wire.text(f"{k}")
                # Below the rate limit on events without audio.
                await asyncio.sleep(0.003)
            await wire.say("response.create")
            done = await wire.until("response.done")
            return sum(f["type"] == "conversation.item.done" for f in wire.seen), done["response"]["status"]

    items, status = asyncio.run(main())
    assert items >= 2000
    assert status in ("completed", "incomplete")
    asyncio.run(until_idle(small))
