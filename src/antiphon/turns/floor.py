"""Decides who has the floor in a conversation, by a table. Pure: each method takes one input and returns commands.

A conversation is in one of five phases: silent, the user speaks, a response speaks, both speak, or closed.
`TRANSITIONS` lists every input that a phase allows, and the phase that follows. An input that a phase does not allow
raises LocalProtocolError and is never ignored. The actions for an input are returned as commands, which the session
carries out in order.

In addition to the phase, the floor records the user's turns that have no transcript yet (`UserTurn`), and whether a
turn waits for its response (`response_due`). A response begins when nobody speaks and nothing waits for a transcript.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

from antiphon.events.conversation import Item
from antiphon.state_machine import transition


class Phase(Enum):
    """Who speaks. A response counts as speaking from its beginning until its last event is sent, heard or not."""

    SILENT = auto()
    USER = auto()
    RESPONSE = auto()
    BOTH = auto()
    CLOSED = auto()


class Input(Enum):
    """The inputs of the table.

    - USER_STARTED, USER_STOPPED: the user's speech was reported to begin or end. An undecided overlap is not reported.
    - INPUT_CLEARED: the open turn, if any, ends without an item.
    - RESPONSE_BEGAN, RESPONSE_ENDED: for the conversation's own response. Out-of-band responses do not take the floor.
    - CLOSED: no more audio arrives, and responses under way end.
    """

    USER_STARTED = auto()
    USER_STOPPED = auto()
    INPUT_CLEARED = auto()
    RESPONSE_BEGAN = auto()
    RESPONSE_ENDED = auto()
    CLOSED = auto()


# Any transition that is not listed is an error.
TRANSITIONS: Mapping[Phase, Mapping[Input, Phase]] = MappingProxyType(
    {
        Phase.SILENT: {
            Input.USER_STARTED: Phase.USER,
            Input.INPUT_CLEARED: Phase.SILENT,
            Input.RESPONSE_BEGAN: Phase.RESPONSE,
            Input.CLOSED: Phase.CLOSED,
        },
        Phase.USER: {
            Input.USER_STOPPED: Phase.SILENT,
            Input.INPUT_CLEARED: Phase.SILENT,
            Input.RESPONSE_BEGAN: Phase.BOTH,
            Input.CLOSED: Phase.CLOSED,
        },
        Phase.RESPONSE: {
            Input.USER_STARTED: Phase.BOTH,
            Input.INPUT_CLEARED: Phase.RESPONSE,
            Input.RESPONSE_ENDED: Phase.SILENT,
            Input.CLOSED: Phase.CLOSED,
        },
        Phase.BOTH: {
            Input.USER_STOPPED: Phase.RESPONSE,
            Input.INPUT_CLEARED: Phase.RESPONSE,
            Input.RESPONSE_ENDED: Phase.USER,
            Input.CLOSED: Phase.CLOSED,
        },
        # Responses that waited for the last transcripts still begin in this phase, so that their end is reported.
        Phase.CLOSED: {
            Input.RESPONSE_BEGAN: Phase.CLOSED,
            Input.RESPONSE_ENDED: Phase.CLOSED,
        },
    }
)


@dataclass(frozen=True, slots=True)
class CancelActive:
    """The command to end the response under way, with this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class SilenceOutput:
    """The command to stop playback, and to drop sent audio of responses that has not been heard yet."""


@dataclass(frozen=True, slots=True)
class BeginResponse:
    """The command to begin the response to the user's turns."""


@dataclass(frozen=True, slots=True)
class RespondInstead:
    """The command to end the response under way, because a turn that ended during it is answered next."""


FloorCommand = CancelActive | SilenceOutput | BeginResponse | RespondInstead


class TurnStage(Enum):
    """The stage of a turn without a transcript: the user still speaks it, or it has ended and is an item of the
    history, or the client has deleted its item. No response waits for a DELETED turn.
    """

    OPEN = auto()
    COMMITTED = auto()
    DELETED = auto()


@dataclass(slots=True)
class UserTurn:
    """A turn of the user until its transcript has arrived or failed.

    - `item`: its item in the history.
    - `takes_floor`: whether its beginning ended a response that was under way, if any. Otherwise the turn waits until
      the response ends.
    - `is_skipped`: whether the client wants no response to it.
    """

    number: int
    item: Item
    stage: TurnStage = TurnStage.OPEN
    takes_floor: bool = True
    is_skipped: bool = False


class Floor:
    """The floor of one conversation. The attributes `phase` and `response_due` are read-only."""

    def __init__(self) -> None:
        self.phase = Phase.SILENT
        self.response_due = False
        # Whether the response under way is being ended to make way for the response that is due.
        self._is_cutting = False
        self.turns: dict[int, UserTurn] = {}
        # Numbers of turns to skip that have no record yet, because their events are held back as an overlap.
        self._skipped: set[int] = set()
        self._skips_next = False
        self._dismissed_until_s = 0.0

    @property
    def user_speaks(self) -> bool:
        """Whether the user speaks, according to the events reported so far."""
        return self.phase in (Phase.USER, Phase.BOTH)

    @property
    def is_closed(self) -> bool:
        return self.phase is Phase.CLOSED

    # --- the user's turns ---------------------------------------------------------------------------------------------

    def open_turn(self, number: int, item: Item) -> UserTurn:
        """Add and return the record of a new turn."""
        turn = self.turns[number] = UserTurn(number, item, is_skipped=number in self._skipped)
        self._skipped.discard(number)
        return turn

    def user_started(
        self, number: int, *, takes_floor: bool, answers: bool, has_output: bool, false_start: bool = False
    ) -> list[FloorCommand]:
        """Record that the user has begun to speak the turn `number`, which has a record.

        `takes_floor`: whether speech ends a response. `answers`: whether turns are answered when they end.
        `has_output`: whether the response under way has emitted output. If it has not, it stays due, because the speech
        may turn out to be a noise. `false_start`: whether the last response began too early. It is then due again, also
        if it has ended.
        """
        self._move(Input.USER_STARTED)
        self.turns[number].takes_floor = takes_floor
        if not takes_floor:
            return []
        if false_start or self.phase is Phase.BOTH:
            self.response_due = answers and (self.response_due or false_start or not has_output)
        if self.phase is not Phase.BOTH:
            return [SilenceOutput()]
        return [CancelActive("turn_detected"), SilenceOutput()]

    def user_stopped(self) -> None:
        """Record that silence has ended the user's turn."""
        self._move(Input.USER_STOPPED)

    def input_cleared(self) -> None:
        """Record that the client has dropped the audio since the last turn."""
        self._move(Input.INPUT_CLEARED)

    def committed(self, number: int) -> None:
        """Record that the turn is now an item of the history."""
        self.turns[number].stage = TurnStage.COMMITTED

    def transcribed(self, number: int, *, owes_response: bool) -> UserTurn:
        """Remove and return the record of a turn after its transcript has arrived or failed. `owes_response`: whether
        the turn has content that needs a response.
        """
        turn = self.turns.pop(number)
        if owes_response and not turn.is_skipped:
            self.response_due = True
        return turn

    def owe_response(self) -> None:
        """Record that the user's turns wait for a response after all, because no model has answered them."""
        self.response_due = True

    def item_deleted(self, item_id: str) -> None:
        """Record that an item was deleted from the history. If it was the item of a turn, no response waits for that
        turn any more.
        """
        for turn in self.turns.values():
            if turn.item.id == item_id:
                turn.stage = TurnStage.DELETED

    def has_untranscribed(self, but: int | None = None) -> bool:
        """Whether an item of the history has no transcript yet. The item of the turn `but` does not count."""
        return any(t.stage is TurnStage.COMMITTED for t in self.turns.values() if t.number != but)

    # --- the client's decisions about turns ---------------------------------------------------------------------------

    def skip_next(self) -> None:
        """Skip the turn that ends next: the client wants no response to it."""
        self._skips_next = True

    def take_skip(self) -> bool:
        """Return whether the turn that ends now is to be skipped, and reset the request of `skip_next`."""
        skips, self._skips_next = self._skips_next, False
        return skips

    def skip(self, number: int) -> None:
        """Do not answer this turn, whether or not it has a record yet."""
        if number in self.turns:
            self.turns[number].is_skipped = True
        else:
            self._skipped.add(number)

    def dismiss(self, until_s: float) -> None:
        """Record that speech before `until_s` seconds of audio does not take the floor. 0 ends this."""
        self._dismissed_until_s = until_s

    def is_dismissed(self, audio_s: float) -> bool:
        """Whether the client has decided that speech at `audio_s` seconds of audio does not take the floor."""
        return audio_s < self._dismissed_until_s

    # --- responses ----------------------------------------------------------------------------------------------------

    def response_began(self) -> None:
        """Record that a response of the conversation has begun."""
        self._move(Input.RESPONSE_BEGAN)
        self._is_cutting = False

    def response_ended(self) -> None:
        """Record that the response's last event was sent."""
        self._move(Input.RESPONSE_ENDED)

    def go_on(self, *, is_resolved: bool, may_cut: bool) -> list[FloorCommand]:
        """Return the commands that are due after a change. The response that is due may begin if nobody speaks and all
        transcripts and media are known (`is_resolved`).

        `may_cut`: whether a response under way, unless it is ending already, may be ended for the response that is due.
        """
        if not self.response_due or not is_resolved or self.user_speaks or self.is_closed:
            return []
        if self.phase is Phase.SILENT:
            self.response_due = False
            return [BeginResponse()]
        if not may_cut or self._is_cutting:
            return []
        self._is_cutting = True
        return [RespondInstead()]

    def close(self) -> None:
        """Enter the closed phase, because no more audio arrives."""
        self._move(Input.CLOSED)

    def _move(self, event: Input) -> None:
        self.phase = transition(TRANSITIONS, self.phase, event)
