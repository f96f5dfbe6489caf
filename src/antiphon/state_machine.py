"""States that only a table of transitions changes. Pure: it knows no socket, no task and no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from antiphon.errors import LocalProtocolError

StateT = TypeVar("StateT", bound=Enum)
EventT = TypeVar("EventT", bound=Enum)


@dataclass(slots=True)
class StateMachine(Generic[StateT, EventT]):
    """A state and the table of its transitions: `(state, event)` to the next state.

    Several objects may share one machine. It wakes no task: the object that applies an event does that.
    """

    _transitions: Mapping[tuple[StateT, EventT], StateT]
    _state: StateT

    @property
    def state(self) -> StateT:
        """The present state; the one that the machine was made with until the first event is applied."""
        return self._state

    def apply(self, event: EventT) -> StateT:
        """Move to the state that the table has for this event, and return it.

        Raises LocalProtocolError, and changes nothing, where the present state has no such transition.
        """
        following = self._transitions.get((self._state, event))
        if following is None:
            kind = type(self._state).__name__
            raise LocalProtocolError(f"{event.name} has no transition from {kind}.{self._state.name}")
        self._state = following
        return following
