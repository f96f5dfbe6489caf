"""A full-duplex session: a conversation, with epochs, reports about overlaps and turn states, and a playback ledger.
It works with every conversation model that a ConversationSession can hold.

Every command and event of the conversation passes through it. Before a response is cut off, the epoch is raised, so
that no further event of that response can be sent. When the user speaks during a response, the client is asked to duck
it, and then gets the decision. The ledger records how much of each response was heard, and the history is truncated to
that part.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import anyio
import anyio.abc

from antiphon.contracts.playback import PlaybackTracker
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ArgumentsDelta,
    CancelResponse,
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
    PlayoutEnded,
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
from antiphon.sessions.conversation.context import EmitConversation, rejected
from antiphon.sessions.conversation.session import ConversationSession
from antiphon.sessions.duplex.playback_ledger import PlaybackLedger
from antiphon.sessions.duplex.turn_states import TURN_STATES, TurnSignal
from antiphon.signals import become
from antiphon.state_machine import transition

# Polling interval, in seconds, for the end of a playout whose clock a hold has stopped.
POLL_S = 0.02


class ConversationFactory(Protocol):
    """Makes the conversation inside a DuplexSession, before it runs.

    - `emit`: awaited with every event of the conversation, which waits until it returns.
    - `playback`: the ledger, which records how much of a response was heard.
    - `handle_other`: gets all commands except audio, in order.
    - `left_s`: returns the playout, the seconds of sent audio that are still to be played.
    """

    def __call__(
        self,
        *,
        emit: EmitConversation,
        playback: PlaybackTracker,
        handle_other: Callable[[ConversationCommand], Awaitable[None]],
        left_s: Callable[[], float],
    ) -> ConversationSession: ...


class DuplexSession:
    """A conversation with full-duplex commands and events. Run `run()` as a task, as for a ConversationSession.

    The `config.duplex` of every ConfigureConversation must be set. `emit` is awaited for every event, and the session
    waits until it returns. `epoch` is the initial epoch, and `clock` returns monotonic seconds. Everything runs in one
    event loop. The attributes `epoch` and `state` are read-only, and the client gets each change of either. `history`
    and `progress` are those of the inner conversation.
    """

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
        self._group: anyio.abc.TaskGroup
        self._ledger = PlaybackLedger(clock, acks_only=duplex.acks_only)
        self._session = make(
            emit=self._handle_event, playback=self._ledger, handle_other=self.handle, left_s=lambda: self._ledger.left_s
        )
        self.history, self.progress = self._session.history, self._session.progress
        self.epoch = epoch
        self.state: TurnState = "idle"
        # The epoch of each stored response that is under way, by response id.
        self._epochs: dict[str, int] = {}
        self._begun_responses: set[str] = set()
        self._ducked = False
        # Number of cancelled inputs whose audio is not cleared yet. A ClearAudio follows for each.
        self._num_to_clear = 0

    def leave_open_turn(self) -> None:
        """Leave the open turn open when the inbox is closed, see `ConversationSession.leave_open_turn`."""
        self._session.leave_open_turn()

    async def interrupt(self, reason: str) -> None:
        """Cancel the response and truncate it to the part that was heard, see `ConversationSession.interrupt`."""
        await self._session.interrupt(reason)

    async def run(self) -> None:
        """Run the conversation until its inbox is closed and, for all speech, the response was sent or cancelled.
        Cancelling the task ends the conversation at once.
        """
        async with anyio.create_task_group() as self._group:
            await self._session.run()
            self._group.cancel_scope.cancel()

    # --- from the client ----------------------------------------------------------------------------------------------

    async def handle(self, command: ConversationCommand) -> None:
        """Handle one command of the client. Waits for `emit`, but not for a response that the command begins. If a
        command cannot be carried out, the client gets a CommandRejected, and nothing is raised.
        """
        try:
            await self._carry_out(command)
        except RemoteProtocolError as error:
            await self._emit(rejected(error, command))

    async def _carry_out(self, command: ConversationCommand) -> None:
        match command:
            case ConfigureConversation(config):
                assert config.duplex
                self._duplex = config.duplex
                self._ledger.acks_only = config.duplex.acks_only
                await self._session.handle(command)
            case AcknowledgePlayback():
                acknowledged, truncation = self._ledger.acknowledge(command)
                await self._emit(acknowledged)
                if truncation:
                    await self._session.truncate_to_heard([truncation])
                if self.state == "assistant_playing" and not self._is_heard():
                    await self._signal("playback_finished")
            case BargeIn(reason):
                before = self.epoch
                await self._session.decide_overlap(takes_floor=True, reason=reason)
                if self.epoch == before and self._is_heard():
                    await self._barge_in(reason)
                    await self._session.interrupt("turn_detected")
            case HoldFloor(reason):
                await self._session.decide_overlap(takes_floor=False, reason=reason)
            case CancelInput():
                self._num_to_clear += 1
                await self._raise_epoch()
                await self._session.interrupt("client_cancelled")
                await self._signal("input_cancelled")
            case CancelResponse(response_id):
                if response_id is None or response_id in self._epochs:
                    if not self._is_heard():
                        await self._session.handle(command)
                        return
                    await self._raise_epoch()
                    await self._session.interrupt("client_cancelled")
                else:
                    await self._session.handle(command)
            case TruncateItem(item_id, _, audio_end_ms):
                self._ledger.cut(item_id, audio_end_ms)
                await self._session.handle(command)
            case SignalTurn(event, payload):
                await self._emit(TurnStateChanged(event, self.state, payload))
            case _:
                await self._session.handle(command)

    # --- from the conversation ----------------------------------------------------------------------------------------

    async def _handle_event(self, event: TranscriptionEvent | ConversationEvent) -> None:
        match event:
            case ResponseCreated(response):
                if response.stored:
                    self._epochs[response.id] = self.epoch
                await self._emit(event)
                if response.stored:
                    await self._signal("response_created")
            case ResponseAudioDelta(at) | ResponseTextDelta(at) | ArgumentsDelta(at):
                if self._epochs.get(at.response_id, self.epoch) < self.epoch:
                    return
                if at.response_id not in self._begun_responses:
                    self._begun_responses.add(at.response_id)
                    await self._emit(SpeakStepTaken(at.response_id))
                if isinstance(event, ResponseAudioDelta):
                    self._ledger.follow(event)
                await self._emit(event)
                if isinstance(event, ResponseAudioDelta) and self.state == "assistant_generating":
                    await self._signal("playback_started")
            case ContentPartDone():
                self._ledger.follow(event)
                await self._emit(event)
            case ResponseDone(response):
                self._begun_responses.discard(response.id)
                await self._emit(event)
                if self._duplex.reports_playout and self._epochs.get(response.id) == self.epoch:
                    self._group.start_soon(self._report_playout, response.id)
                if self._epochs.pop(response.id, None) is not None and self.state == "assistant_generating":
                    # The response had no audio, so there is no playback to wait for.
                    await self._signal("response_done")
            case SpeechStarted():
                await self._speech_started(event)
            case SpeechStopped():
                await self._emit(event)
            case TranscriptFailed():
                await self._emit(event)
                await self._emit(ListenStepTaken("transcription_failed"))
                await self._signal_nothing_said()
            case OverlapStarted():
                self._ducked = True
                self._ledger.hold(True)
                await self._emit(TurnStateChanged("duck", self.state))
            case OverlapDecided(_, takes_floor, reason):
                await self._overlap_decided(takes_floor, reason)
            case UserTurnCommitted():
                await self._session.truncate_to_heard(self._ledger.settle())
                await self._emit(event)
                await self._signal("user_turn_committed")
            case TranscriptDone(_, text):
                await self._emit(event)
                if not text.strip() and not self.progress.is_responding:
                    await self._emit(ListenStepTaken("nothing_said"))
                    await self._signal_nothing_said()
            case TurnCleared():
                if self._num_to_clear:
                    # This clears the audio of a cancelled input. CancelInput has done everything else already.
                    self._num_to_clear -= 1
                    await self._emit(event)
                    return
                await self._raise_epoch()
                await self._session.interrupt("client_cancelled")
                await self._emit(event)
                await self._signal("input_cleared")
            case _:
                await self._emit(event)

    async def _speech_started(self, event: SpeechStarted) -> None:
        if self._is_heard():
            if self._session.interruptible:
                if self.state != "barge_in":
                    await self._barge_in("server_vad_speech_started")
            else:
                await self._emit(OverlapReported(self._duplex.policy, "listen", self._overlap_reason()))
        await self._emit(event)
        await self._signal("user_speech_started")

    def _overlap_reason(self) -> str:
        return "client_overlap_action" if self._session.may_interrupt else "policy_listen_only"

    async def _overlap_decided(self, takes_floor: bool, reason: str) -> None:
        if takes_floor:
            await self._barge_in(reason)
            return
        await self._emit(OverlapReported(self._duplex.policy, "listen", reason))
        await self._unduck()

    async def _barge_in(self, reason: str) -> None:
        """Give the user the floor. After this call, no event of the current response is sent."""
        self._ducked = False
        await self._raise_epoch()
        await self._emit(OverlapReported(self._duplex.policy, "barge_in", reason))
        await self._signal("barge_in")

    async def _report_playout(self, response_id: str) -> None:
        """Report the end of a response's playout, unless the response is cut off before."""
        epoch = self.epoch
        # Polls because no event reports the end of playback. Most of the time is known.
        await anyio.sleep(self._ledger.left_s)
        await become(lambda: self.epoch != epoch or self._ledger.left_s <= 0, POLL_S)
        if self.epoch == epoch:
            await self._emit(PlayoutEnded(response_id))

    async def _unduck(self) -> None:
        if self._ducked:
            self._ducked = False
            self._ledger.hold(False)
            await self._emit(TurnStateChanged("unduck", self.state))

    async def _raise_epoch(self) -> None:
        self.epoch += 1
        await self._emit(EpochRaised(self.epoch))

    async def _signal(self, signal: TurnSignal) -> None:
        """Report the turn state that a signal leads to."""
        self.state = transition(TURN_STATES, self.state, signal)
        await self._emit(TurnStateChanged(signal, self.state))

    async def _signal_nothing_said(self) -> None:
        """Report that a turn had no words, unless the state has changed since, for example because of new speech."""
        if "nothing_said" in TURN_STATES[self.state]:
            await self._signal("nothing_said")

    def _is_heard(self) -> bool:
        return self.progress.is_responding or self._ledger.is_playing
