"""Holds back speech over a response until it is decided: by its words, by its voice, or by a timeout."""

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

# Interval at which an undecided overlap is checked again for whether the user still speaks, in seconds.
POLL_S = 0.05

# Seconds of audio for which a client's dismissal of speech holds. A client repeats it while the speech lasts.
DISMISSAL_S = 0.6

Apply = Callable[[list[TranscriptionEvent]], Awaitable[None]]


class OverlapHolder:
    """Passes the events of a conversation's transcription through an OverlapDecider, and runs its timers.

    `apply` is awaited with the events that may be reported, in order. `decider` takes the client's decisions.
    """

    def __init__(self, apply: Apply) -> None:
        self.decider = OverlapDecider()
        self._apply = apply
        # Events are applied in the order of their decisions, whichever task decided.
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
        """Handle one event. `overlaps`: see `OverlapDecider.feed`. A task in `group` decides an overlap that begins."""
        async with self._order:
            before = self.decider.undecided_turn
            if before is not None and isinstance(event, TranscriptPartial | TranscriptGuessed):
                if listener.speakers.is_looked_at(before):
                    # The speaker of these words is still unknown. The next partial has the words too.
                    return
            elif isinstance(event, TranscriptDone) and event.turn == before and event.speaker == "other":
                await self._apply(self.decider.dismiss("other_speaker"))
            await self._apply(self.decider.feed(event, overlaps=overlaps))
            turn = self.decider.undecided_turn
            if turn is not None and turn != before:
                group.start_soon(self._decide, turn, listener, duplex)

    async def decide(self, decision: Callable[[], list[TranscriptionEvent]]) -> None:
        """Call `decision`, a method of `decider`, and apply the events that it releases."""
        async with self._order:
            await self._apply(decision())

    async def other_voice(self, turn: int) -> None:
        """Dismiss the overlap with this turn: the voice is not the user's, so the speech does not take the floor."""
        if self.decider.undecided_turn == turn:
            await self.decide(lambda: self.decider.dismiss("other_speaker"))

    def close(self) -> None:
        """Cancel all timers: no overlap is decided by a timeout any longer."""
        for scope in self._timing:
            scope.cancel()

    async def _decide(self, turn: int, listener: TranscriptionSession, duplex: DuplexConfig | None) -> None:
        """Wait until the overlap with this turn is decided, and decide it by time if its words do not.

        Speech longer than MAX_BACKCHANNEL_S takes the floor. With `duplex`, its `short_ack_ms` and `barge_in_ms` apply
        instead, with a first decision after DECISION_S.
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
