"""One full-duplex conversation: a conversation, and what its client is told beyond it. Any partner that a ConversationSession can hold is one here.

Every input and output of the conversation goes through here. What ends an answer raises the epoch first, so that nothing of it can follow;
speech over an answer is ducked, decided and told; how much of each answer was heard is kept in a ledger, and the history with it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from antiphon.contracts.playback import PlaybackTracker
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ArgumentsDelta,
    CancelResponse,
    CommandRejected,
    ConfigureConversation,
    ContentPartDone,
    ConversationCommand,
    ConversationEvent,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
    TruncateItem,
    UserTurnCommitted,
)
from antiphon.events.duplex import (
    AcknowledgePlayback,
    BargeIn,
    CancelInput,
    DuplexConfig,
    EpochRaised,
    HoldFloor,
    ListenStepTaken,
    OverlapReported,
    SignalTurn,
    SpeakStepTaken,
    TurnState,
    TurnStateChanged,
)
from antiphon.events.transcription import (
    OverlapDecided,
    OverlapStarted,
    SpeechStarted,
    SpeechStopped,
    TranscriptDone,
    TranscriptFailed,
    TranscriptionEvent,
    TurnCleared,
)
from antiphon.sessions.conversation.history import ConversationHistory
from antiphon.sessions.conversation.response import EmitConversation
from antiphon.sessions.conversation.session import ConversationSession
from antiphon.sessions.duplex.playback_ledger import PlaybackLedger


class ConversationFactory(Protocol):
    """Make the conversation inside."""

    def __call__(
        self,
        *,
        emit: EmitConversation,
        playback: PlaybackTracker,
        aside: Callable[[ConversationCommand], Awaitable[None]],
        left_s: Callable[[], float],
    ) -> ConversationSession: ...


class DuplexSession:
    """As a ConversationSession is used. `config.duplex` of every configuration is set."""

    def __init__(
        self,
        duplex: DuplexConfig,
        make: ConversationFactory,
        emit: EmitConversation,
        *,
        epoch: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._duplex = duplex
        self._emit = emit
        self._ledger = PlaybackLedger(clock, acks_only=duplex.acks_only)
        self._talk = make(emit=self._say, playback=self._ledger, aside=self.handle, left_s=lambda: self._ledger.left_s)
        self.epoch = epoch
        self.state: TurnState = "idle"
        # The epoch each response of the conversation under way belongs to.
        self._epochs: dict[str, int] = {}
        self._begun: set[str] = set()
        self._ducked = False
        # Inputs that were cancelled and whose sound is still to be cleared.
        self._cancelled = 0

    @property
    def audio_s(self) -> float:
        """Seconds of sound heard."""
        return self._talk.audio_s

    @property
    def answering(self) -> bool:
        """An answer of the conversation is under way."""
        return self._talk.answering

    @property
    def talk(self) -> ConversationSession:
        """The conversation inside."""
        return self._talk

    @property
    def conversation(self) -> ConversationHistory:
        """Its items."""
        return self._talk.conversation

    async def run(self) -> None:
        """See ConversationSession.run."""
        await self._talk.run()

    # --- from the client --------------------------------------------------------------------------------------------------

    async def handle(self, item: ConversationCommand) -> None:
        """Do what the client asks. Never raises for what it asks: what cannot be is answered."""
        try:
            await self._do(item)
        except RemoteProtocolError as error:
            event_id = None if isinstance(item, ConfigureConversation) else item.event_id
            await self._emit(CommandRejected(error.code, error.message, error.param, event_id))

    async def _do(self, item: ConversationCommand) -> None:
        match item:
            case ConfigureConversation(config):
                assert config.duplex
                self._duplex = config.duplex
                self._ledger.acks_only = config.duplex.acks_only
                await self._talk.handle(item)
            case AcknowledgePlayback():
                known, again = self._ledger.acknowledge(item)
                await self._emit(known)
                if again:
                    await self._talk.heard_of([again])
                if self.state == "assistant_playing" and not self._sounds():
                    await self._become("playback_finished", "idle")
            case BargeIn(reason):
                before = self.epoch
                await self._talk.speech_over_answer(takes_floor=True, reason=reason)
                if self.epoch == before and self._sounds():
                    await self._barge_in(reason)
                    await self._talk.interrupt("turn_detected")
            case HoldFloor(reason):
                await self._talk.speech_over_answer(takes_floor=False, reason=reason)
            case CancelInput():
                self._cancelled += 1
                await self._raise_epoch()
                await self._talk.interrupt("client_cancelled")
                await self._become("input_cancelled", "idle")
            case CancelResponse(response_id):
                if response_id is None or response_id in self._epochs:
                    if not self._sounds():
                        await self._talk.handle(item)
                        return
                    await self._raise_epoch()
                    await self._talk.interrupt("client_cancelled")
                else:
                    await self._talk.handle(item)
            case TruncateItem(item_id, _, audio_end_ms):
                self._ledger.cut(item_id, audio_end_ms)
                await self._talk.handle(item)
            case SignalTurn(event, payload):
                await self._emit(TurnStateChanged(event, self.state, payload))
            case _:
                await self._talk.handle(item)

    # --- from the conversation --------------------------------------------------------------------------------------------

    async def _say(self, output: TranscriptionEvent | ConversationEvent) -> None:
        match output:
            case ResponseCreated(response):
                if response.stored:
                    self._epochs[response.id] = self.epoch
                await self._emit(output)
                if response.stored:
                    await self._become("response_created", "assistant_generating")
            case ResponseAudioDelta(at) | ResponseTextDelta(at) | ArgumentsDelta(at):
                if self._epochs.get(at.response_id, self.epoch) < self.epoch:
                    return
                if at.response_id not in self._begun:
                    self._begun.add(at.response_id)
                    await self._emit(SpeakStepTaken(at.response_id))
                if isinstance(output, ResponseAudioDelta):
                    self._ledger.take(output)
                await self._emit(output)
                if isinstance(output, ResponseAudioDelta) and self.state == "assistant_generating":
                    await self._become("playback_started", "assistant_playing")
            case ContentPartDone():
                self._ledger.take(output)
                await self._emit(output)
            case ResponseDone(response):
                self._begun.discard(response.id)
                await self._emit(output)
                if self._epochs.pop(response.id, None) is not None and self.state == "assistant_generating":
                    # Nothing of it sounds.
                    await self._become("response_done", "idle")
            case SpeechStarted():
                await self._speech_started(output)
            case SpeechStopped():
                await self._emit(output)
            case TranscriptFailed():
                await self._emit(output)
                await self._emit(ListenStepTaken("transcription_failed"))
                await self._become("nothing_said", "idle")
            case OverlapStarted():
                self._ducked = True
                self._ledger.hold(True)
                await self._emit(TurnStateChanged("duck", self.state))
            case OverlapDecided(_, takes_floor, reason):
                await self._overlap_decided(takes_floor, reason)
            case UserTurnCommitted():
                await self._talk.heard_of(self._ledger.settle())
                await self._emit(output)
                await self._become("user_turn_committed", "user_committed")
            case TranscriptDone(_, text):
                await self._emit(output)
                if not text.strip() and not self.answering:
                    await self._emit(ListenStepTaken("nothing_said"))
                    await self._become("nothing_said", "idle")
            case TurnCleared():
                if self._cancelled:
                    # The sound of an input that was cancelled; the rest was done at once.
                    self._cancelled -= 1
                    await self._emit(output)
                    return
                await self._raise_epoch()
                await self._talk.interrupt("client_cancelled")
                await self._emit(output)
                await self._become("input_cleared", "idle")
            case _:
                await self._emit(output)

    async def _speech_started(self, output: SpeechStarted) -> None:
        if self._sounds():
            if self._talk.interruptible:
                if self.state != "barge_in":
                    await self._barge_in("server_vad_speech_started")
            else:
                await self._emit(OverlapReported(self._duplex.policy, "listen", self._why_not()))
        await self._emit(output)
        await self._become("user_speech_started", "user_speaking")

    def _why_not(self) -> str:
        return "client_overlap_action" if self._talk.config.interrupt_response else "policy_listen_only"

    async def _overlap_decided(self, takes_floor: bool, reason: str) -> None:
        if takes_floor:
            await self._barge_in(reason)
            return
        await self._emit(OverlapReported(self._duplex.policy, "listen", reason))
        await self._unduck()

    async def _barge_in(self, reason: str) -> None:
        """The user takes the floor: from here on nothing of the answer is sent."""
        self._ducked = False
        await self._raise_epoch()
        await self._emit(OverlapReported(self._duplex.policy, "barge_in", reason))
        await self._become("barge_in", "barge_in")

    async def _unduck(self) -> None:
        if self._ducked:
            self._ducked = False
            self._ledger.hold(False)
            await self._emit(TurnStateChanged("unduck", self.state))

    async def _raise_epoch(self) -> None:
        self.epoch += 1
        await self._emit(EpochRaised(self.epoch))

    async def _become(self, event: str, state: TurnState) -> None:
        self.state = state
        await self._emit(TurnStateChanged(event, state))

    def _sounds(self) -> bool:
        return self.answering or self._ledger.sounding
