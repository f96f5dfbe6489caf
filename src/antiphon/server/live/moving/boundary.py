"""Where a conversation can be given to another host: where nobody speaks."""

from __future__ import annotations

import random

import anyio

from antiphon.server.live.moving.continuation import MOVED
from antiphon.server.live.realtime_session import RealtimeConversation
from antiphon.signals import become

# How long the user may go on speaking, in seconds: the turn is heard again by the next host.
MAX_TURN_S = 3.0
# What is left of a drain, in seconds, for the session to be worked off and written; of a short one, half.
HAND_OVER_S = 5.0
# Sessions that are given away at once do not all resume at once: each waits up to this long before it looks.
MAX_JITTER_S = 0.5
# What is heard ends by the clock, which wakes nobody.
POLL_S = 0.05


async def wait_for_boundary(conversation: RealtimeConversation, within_s: float) -> None:
    """Wait until neither side of a conversation speaks. `within_s`: how long the drain lasts. A response that is longer
    is interrupted and cut to what was heard; a turn that goes on for too long is heard again by the next host.
    """
    now = conversation.progress
    with anyio.move_on_after(within_s - min(HAND_OVER_S, within_s / 2)):
        await anyio.sleep(random.uniform(0, MAX_JITTER_S))
        with anyio.move_on_after(MAX_TURN_S):
            await become(lambda: not (now.user_speaks or now.unread_items), POLL_S)
        await become(lambda: not (now.owed_responses or now.is_responding or now.is_heard), POLL_S)
    if now.is_responding or now.is_heard:
        await conversation.interrupt(MOVED)
