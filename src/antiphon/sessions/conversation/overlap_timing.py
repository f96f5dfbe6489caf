"""Holds back speech over a response until it is decided: by its words, by its voice, or as time passes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import anyio.abc

from antiphon.events.duplex import DuplexConfig
from antiphon.events.transcription import (
    TranscriptDone,
    TranscriptGuessed,
    TranscriptionEvent,
    TranscriptPartial,
)
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.turns.overlap import DECISION_S, MAX_BACKCHANNEL_S, OverlapDecider

# How often an undecided overlap is looked at again: whether the user still speaks.
POLL_S = 0.05

# Seconds of audio for which a client's message that the speech takes no floor holds. It repeats it while that is so.
DISMISSAL_S = 0.6

Apply = Callable[[list[TranscriptionEvent]], Awaitable[None]]


class OverlapHolder:
    """Passes the events of a conversation's transcription through an OverlapDecider, and keeps the time for it.

    `apply` is awaited with the events that may be reported, in order. `decider` takes the decisions of the client.
    """

    def __init__(self, apply: Apply) -> None:
        self.decider = OverlapDecider()
        self._apply = apply
        # Events are applied in the order in which they were decided, whichever task has decided them.
        self._order = anyio.Lock()
        self._timing: set[anyio.CancelScope] = set()

    async def feed(
        self,
        event: TranscriptionEvent,
        listener: TranscriptionSession,
        group: anyio.abc.TaskGroup,
        *,
        overlaps: bool,
        duplex: DuplexConfig | None,
    ) -> None:
        """Handle one event. `overlaps`: as OverlapDecider.feed has it. An overlap that begins is decided in `group`."""
        async with self._order:
            before = self.decider.undecided_turn
            if before is not None and isinstance(event, TranscriptPartial | TranscriptGuessed):
                if listener.speakers.is_looked_at(before):
                    # Whose words they are is not known yet; the next partial has them too.
                    return
            elif isinstance(event, TranscriptDone) and event.turn == before and event.speaker == "other":
                await self._apply(self.decider.dismiss("other_speaker"))
            await self._apply(self.decider.feed(event, overlaps=overlaps))
            turn = self.decider.undecided_turn
            if turn is not None and turn != before:
                group.start_soon(self._decide, turn, listener, duplex)

    async def decide(self, decision: Callable[[], list[TranscriptionEvent]]) -> None:
        """Make a decision of the decider's, and apply what it releases."""
        async with self._order:
            await self._apply(decision())

    async def other_voice(self, turn: int) -> None:
        """Speech over a response is another's voice than the user's, and takes no floor."""
        if self.decider.undecided_turn == turn:
            await self.decide(lambda: self.decider.dismiss("other_speaker"))

    def close(self) -> None:
        """Decide nothing more as time passes."""
        for scope in self._timing:
            scope.cancel()

    async def _decide(self, turn: int, listener: TranscriptionSession, duplex: DuplexConfig | None) -> None:
        """Wait until the overlap with this turn is decided, and decide it where its words do not.

        Speech longer than MAX_BACKCHANNEL_S takes the floor. With `duplex`, its `short_ack_ms` and `barge_in_ms` hold
        instead, and a first decision falls after DECISION_S.
        """
        overlap = self.decider
        with anyio.CancelScope() as scope:
            self._timing.add(scope)
            try:
                if duplex:
                    await anyio.sleep(DECISION_S)
                    if overlap.undecided_turn == turn:
                        speaking, is_short = listener.speaking, listener.spoken_ms <= duplex.short_ack_ms
                        if speaking or is_short:
                            await self.decide(lambda: overlap.decide(speaking=speaking))
                    await anyio.sleep(max(0.0, duplex.barge_in_ms / 1000 - DECISION_S))
                else:
                    await anyio.sleep(MAX_BACKCHANNEL_S)
                while overlap.undecided_turn == turn:
                    if listener.speaking and not listener.speakers.is_looked_at(turn):
                        await self.decide(overlap.take_floor)
                    await anyio.sleep(POLL_S)
            finally:
                self._timing.discard(scope)
