"""Holds back the events of speech over a response until its sound, its words, its voice, or a timeout decide whether it
takes the floor.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import anyio.abc

from antiphon.contracts import BackchannelDetector
from antiphon.events.duplex import DuplexConfig
from antiphon.events.transcription import (
    TranscriptDone,
    TranscriptGuessed,
    TranscriptionEvent,
    TranscriptPartial,
)
from antiphon.sessions.conversation.overlap_sound import hear_overlap
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.turns.overlap import BY_SOUND, DECISION_S, MAX_BACKCHANNEL_S, OverlapDecider, OverlapState

# Interval in seconds at which an undecided overlap is checked for whether the user still speaks.
POLL_S = 0.05

# Seconds of audio for which a client's dismissal of speech is valid. A client repeats it while the speech lasts.
DISMISSAL_S = 0.6

Apply = Callable[[list[TranscriptionEvent]], Awaitable[None]]
# Pauses the response, and returns whether that was possible.
Pause = Callable[[], Awaitable[bool]]


class OverlapHolder:
    """Passes the events of a conversation's transcription through an OverlapDecider, and runs the decider's timers.

    `apply` is awaited with the events that may be reported, in order. `pause` is awaited when the speech probably takes
    the floor. `detector` judges the sound of an overlap, if it is loaded. The client's decisions go to `decider`.
    """

    def __init__(self, apply: Apply, pause: Pause, detector: BackchannelDetector | None = None) -> None:
        self.decider = OverlapDecider()
        self._apply = apply
        self._pause = pause
        self._detector = detector
        # The lock keeps events in the order of the decisions, whichever task decided.
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
        may_continue: bool = False,
    ) -> None:
        """Handle one event. If it begins an overlap, a task in `group` will decide it. `overlaps`: see
        `OverlapDecider.feed`. `may_continue`: whether the speech that begins may continue the user's last turn.
        """
        async with self._order:
            before = self.decider.undecided_turn
            if before is not None and isinstance(event, TranscriptPartial | TranscriptGuessed):
                if listener.speakers.is_looked_at(before):
                    # It is still unknown who said these words. The next partial has them too.
                    return
            elif isinstance(event, TranscriptDone) and event.turn == before and event.speaker == "other":
                await self._apply(self.decider.dismiss("other_speaker"))
            await self._apply(self.decider.feed(event, overlaps=overlaps))
            turn = self.decider.undecided_turn
            if turn is not None and turn != before:
                group.start_soon(self._decide, turn, listener, duplex, may_continue)
                if self._detector:
                    group.start_soon(self._hear, self._detector, turn, listener)

    async def heard(self, listener: TranscriptionSession) -> None:
        """Decide the overlap by its sound, if that claims the floor: pause the response until there are words, or let
        the speech take the floor if the response cannot be paused. Call it when audio was analysed.
        """
        overlap = self.decider
        turn = overlap.undecided_turn
        if turn is None or overlap.state is not OverlapState.UNDECIDED or overlap.sounds_backchannel:
            return
        is_known = not listener.speakers.is_looked_at(turn)
        if listener.claims_floor and is_known and not await self._pause():
            await self.decide(lambda: overlap.take_floor(BY_SOUND) if overlap.undecided_turn == turn else [])

    async def decide(self, decision: Callable[[], list[TranscriptionEvent]]) -> None:
        """Call `decision`, a method of `decider`, and apply the events that it releases."""
        async with self._order:
            await self._apply(decision())

    async def other_voice(self, turn: int) -> None:
        """Dismiss the overlap with this turn, because its voice is not the user's."""
        if self.decider.undecided_turn == turn:
            await self.decide(lambda: self.decider.dismiss("other_speaker"))

    def close(self) -> None:
        """Cancel all timers, after which no timeout decides an overlap."""
        for scope in self._timing:
            scope.cancel()

    async def _hear(self, detector: BackchannelDetector, turn: int, listener: TranscriptionSession) -> None:
        with anyio.CancelScope() as scope:
            self._timing.add(scope)
            try:
                await hear_overlap(detector, self.decider, self.decide, turn, listener)
            finally:
                self._timing.discard(scope)

    async def _decide(
        self, turn: int, listener: TranscriptionSession, duplex: DuplexConfig | None, may_continue: bool
    ) -> None:
        """Wait until the overlap with this turn is decided. If its words do not decide it, decide it by its length.

        Speech longer than MAX_BACKCHANNEL_S takes the floor. With `duplex`, `short_ack_ms` and `barge_in_ms` of that
        configuration apply instead, and a first decision is made after DECISION_S. With `may_continue`, speech that is
        longer than DECISION_S takes the floor, because few users acknowledge the first word of a response.
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
                elif may_continue:
                    await anyio.sleep(DECISION_S)
                    if overlap.undecided_turn == turn and listener.speaking:
                        await self.decide(lambda: overlap.decide(speaking=True))
                    await anyio.sleep(MAX_BACKCHANNEL_S - DECISION_S)
                else:
                    await anyio.sleep(DECISION_S)
                    is_open = overlap.undecided_turn == turn and overlap.state is OverlapState.UNDECIDED
                    if is_open and listener.speaking:
                        await self._pause()
                    await anyio.sleep(MAX_BACKCHANNEL_S - DECISION_S)
                while overlap.undecided_turn == turn:
                    if listener.speaking and not listener.speakers.is_looked_at(turn):
                        await self.decide(overlap.take_floor)
                    await anyio.sleep(POLL_S)
            finally:
                self._timing.discard(scope)
