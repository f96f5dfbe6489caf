"""Who has the floor in a conversation, as a table. Pure: inputs go in, commands come out, and nothing waits.

A conversation is in one of five phases, by who speaks: nobody, the user, a response, both at once; or it is closed.
`TRANSITIONS` has every input that a phase allows, and the phase that follows. An input that a phase does not allow is
a LocalProtocolError and never passed over. What has to be done for an input comes back as commands, which
the session carries out in their order.

Beside the phase, the floor knows the user's turns that have no transcript yet (`UserTurn`), and whether a turn waits
for its response (`response_due`). A response begins once nobody speaks and nothing is left to be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

from antiphon.events.conversation import Item
from antiphon.state_machine import transition


class Phase(Enum):
    """Who speaks. A response speaks from its beginning until its last event is out, heard or not."""

    SILENT = auto()
    USER = auto()
    RESPONSE = auto()
    BOTH = auto()
    CLOSED = auto()


class Input(Enum):
    """What may happen.

    - USER_STARTED, USER_STOPPED: the user's speech as it was reported; an overlap that is undecided was not.
    - INPUT_CLEARED: the turn that is open, if one is, ends and leaves nothing.
    - RESPONSE_BEGAN, RESPONSE_ENDED: the conversation's own response; those out of band have no floor.
    - CLOSED: no more audio comes. What is under way ends.
    """

    USER_STARTED = auto()
    USER_STOPPED = auto()
    INPUT_CLEARED = auto()
    RESPONSE_BEGAN = auto()
    RESPONSE_ENDED = auto()
    CLOSED = auto()


# What is not here is not allowed.
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
        # Responses that waited for the last transcripts still begin here, so that their end is told.
        Phase.CLOSED: {
            Input.RESPONSE_BEGAN: Phase.CLOSED,
            Input.RESPONSE_ENDED: Phase.CLOSED,
        },
    }
)


@dataclass(frozen=True, slots=True)
class CancelActive:
    """The response under way ends, with this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class SilenceOutput:
    """What was sent of responses and is still to be heard is stopped."""


@dataclass(frozen=True, slots=True)
class BeginResponse:
    """The response to the user's turns begins."""


@dataclass(frozen=True, slots=True)
class RespondInstead:
    """The response under way ends, because a turn that ended during it is responded to next."""


FloorCommand = CancelActive | SilenceOutput | BeginResponse | RespondInstead


class TurnStage(Enum):
    """How far a turn without a transcript has come: it is being said, or it has ended and is an item of the history.
    An item that the client has deleted is waited for no more.
    """

    OPEN = auto()
    COMMITTED = auto()
    DELETED = auto()


@dataclass(slots=True)
class UserTurn:
    """A turn of the user's until its transcript has come or failed.

    - `item`: what it becomes in the history.
    - `takes_floor`: its beginning ended a response, or would have; a turn without it waits for the response.
    - `is_skipped`: the client wants no response to it.
    """

    number: int
    item: Item
    stage: TurnStage = TurnStage.OPEN
    takes_floor: bool = True
    is_skipped: bool = False


class Floor:
    """The floor of one conversation. `phase` and `response_due` are public to read."""

    def __init__(self) -> None:
        self.phase = Phase.SILENT
        self.response_due = False
        # The response under way is being ended for the response that is due.
        self._is_cutting = False
        self.turns: dict[int, UserTurn] = {}
        # Turns whose events are held back as an overlap may be skipped before they have a record.
        self._skipped: set[int] = set()
        self._skips_next = False
        self._dismissed_until_s = 0.0

    @property
    def user_speaks(self) -> bool:
        """Whether the user speaks, as far as it was reported."""
        return self.phase in (Phase.USER, Phase.BOTH)

    @property
    def is_closed(self) -> bool:
        return self.phase is Phase.CLOSED

    # --- the user's turns ---------------------------------------------------------------------------------------------

    def open_turn(self, number: int, item: Item) -> UserTurn:
        """Keep a record of a turn, of which nothing was known."""
        turn = self.turns[number] = UserTurn(number, item, is_skipped=number in self._skipped)
        self._skipped.discard(number)
        return turn

    def user_started(self, number: int, *, takes_floor: bool, answers: bool, has_output: bool) -> list[FloorCommand]:
        """The user speaks, in this turn, which has a record.

        `takes_floor`: speech ends a response. `answers`: turns are answered when they end. `has_output`: the response
        under way has put something out. One that has not is still owed: the speech may turn out to be a noise.
        """
        self._move(Input.USER_STARTED)
        self.turns[number].takes_floor = takes_floor
        if not takes_floor:
            return []
        if self.phase is not Phase.BOTH:
            return [SilenceOutput()]
        self.response_due = answers and (self.response_due or not has_output)
        return [CancelActive("turn_detected"), SilenceOutput()]

    def user_stopped(self) -> None:
        """The user's turn has ended by silence."""
        self._move(Input.USER_STOPPED)

    def input_cleared(self) -> None:
        """The client has dropped what was said since the last turn."""
        self._move(Input.INPUT_CLEARED)

    def committed(self, number: int) -> None:
        """The turn is an item of the history."""
        self.turns[number].stage = TurnStage.COMMITTED

    def transcribed(self, number: int, *, owes_response: bool) -> UserTurn:
        """The turn has its transcript, or will have none, and its record ends. Returns it. `owes_response`: there is
        something to respond to.
        """
        turn = self.turns.pop(number)
        if owes_response and not turn.is_skipped:
            self.response_due = True
        return turn

    def item_deleted(self, item_id: str) -> None:
        """An item has left the history: a turn that it was is not waited for."""
        for turn in self.turns.values():
            if turn.item.id == item_id:
                turn.stage = TurnStage.DELETED

    def has_untranscribed(self, but: int | None = None) -> bool:
        """Whether an item of the history has no transcript yet, besides that of the turn `but`."""
        return any(t.stage is TurnStage.COMMITTED for t in self.turns.values() if t.number != but)

    # --- what the client says of turns --------------------------------------------------------------------------------

    def skip_next(self) -> None:
        """The client wants no response to the turn that ends next."""
        self._skips_next = True

    def take_skip(self) -> bool:
        """Whether the turn that ends now is to be skipped; the next one is not."""
        skips, self._skips_next = self._skips_next, False
        return skips

    def skip(self, number: int) -> None:
        """This turn is not answered, whether or not it has a record yet."""
        if number in self.turns:
            self.turns[number].is_skipped = True
        else:
            self._skipped.add(number)

    def dismiss(self, until_s: float) -> None:
        """Speech up to `until_s` seconds of audio takes no floor; 0: it does."""
        self._dismissed_until_s = until_s

    def is_dismissed(self, audio_s: float) -> bool:
        """Whether speech at `audio_s` seconds of audio takes no floor, because the client says so."""
        return audio_s < self._dismissed_until_s

    # --- responses ----------------------------------------------------------------------------------------------------

    def response_began(self) -> None:
        """A response of the conversation has begun."""
        self._move(Input.RESPONSE_BEGAN)
        self._is_cutting = False

    def response_ended(self) -> None:
        """Its last event is out."""
        self._move(Input.RESPONSE_ENDED)

    def go_on(self, *, is_resolved: bool, may_cut: bool) -> list[FloorCommand]:
        """What is due now that something has changed: the response, once nobody speaks and all is read (`is_resolved`).

        `may_cut`: a response under way, which is not ending already, may be ended for the response that is due.
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
        """No more audio comes."""
        self._move(Input.CLOSED)

    def _move(self, event: Input) -> None:
        self.phase = transition(TRANSITIONS, self.phase, event)
