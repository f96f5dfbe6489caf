"""When a conversation is handed over: at the end of an answer, or when the drain's time is over."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from antiphon.server.live.moving.resume_point import MOVED
from antiphon.server.live.moving.stored_copy import wait_for_boundary


@dataclass
class Conversation:
    """A conversation in which only the model speaks. Its answer lasts for a given number of polls."""

    looks: float
    user_speaks: bool = False
    unread_items: bool = False
    owed_responses: int = 0
    out_of_band: tuple[str, ...] = ()
    is_heard: bool = False
    interrupted: list[str] = field(default_factory=list)

    @property
    def progress(self) -> Conversation:
        return self

    @property
    def is_responding(self) -> bool:
        self.looks -= 1
        return self.looks >= 0

    async def interrupt(self, reason: str) -> None:
        self.interrupted.append(reason)


def given_away(conversation: Any, within_s: float) -> list[str]:
    asyncio.run(wait_for_boundary(conversation, within_s))
    interrupted: list[str] = conversation.interrupted
    return interrupted


def test_an_answer_that_ends_within_the_drain_is_not_cut() -> None:
    assert given_away(Conversation(looks=3), 60.0) == []


def test_an_answer_that_does_not_is_cut_while_the_drain_still_lasts() -> None:
    assert given_away(Conversation(looks=float("inf")), 0.2) == [MOVED]


def test_without_any_time_it_is_cut_at_once() -> None:
    assert given_away(Conversation(looks=float("inf")), 0.0) == [MOVED]
