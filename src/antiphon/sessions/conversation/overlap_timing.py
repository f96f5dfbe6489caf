"""Decides an overlap as time passes: speech over a response that goes on takes the floor, a short sound does not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from antiphon.events.duplex import DuplexConfig
from antiphon.events.transcription import TranscriptionEvent
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.turns.overlap import DECISION_S, MAX_BACKCHANNEL_S, OverlapDecider

# How often an undecided overlap is looked at again: whether the user still speaks.
POLL_S = 0.05

# Seconds of audio for which a client's message that the speech takes no floor holds. It repeats it while that is so.
DISMISSAL_S = 0.6


async def decide_in_time(
    overlap: OverlapDecider,
    turn: int,
    listener: TranscriptionSession,
    duplex: DuplexConfig | None,
    apply: Callable[[list[TranscriptionEvent]], Awaitable[None]],
) -> None:
    """Wait until the overlap with this turn is decided, and decide it where its words do not.

    Speech longer than MAX_BACKCHANNEL_S takes the floor. With `duplex`, its `short_ack_ms` and `barge_in_ms` hold
    instead, and a first decision falls after DECISION_S. `apply` is awaited with the events that a decision releases.
    """
    if duplex:
        await anyio.sleep(DECISION_S)
        if overlap.undecided_turn == turn:
            speaking, is_short = listener.speaking, listener.spoken_ms <= duplex.short_ack_ms
            if speaking or is_short:
                await apply(overlap.decide(speaking=speaking))
        await anyio.sleep(max(0.0, duplex.barge_in_ms / 1000 - DECISION_S))
    else:
        await anyio.sleep(MAX_BACKCHANNEL_S)
    while overlap.undecided_turn == turn:
        if listener.speaking:
            await apply(overlap.take_floor())
        await anyio.sleep(POLL_S)
