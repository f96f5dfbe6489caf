"""States that only a table of transitions changes. Pure: it knows no socket, no task and no clock."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from antiphon.errors import LocalProtocolError

StateT = TypeVar("StateT", bound=Hashable)
EventT = TypeVar("EventT", bound=Hashable)
Following = TypeVar("Following")


def transition(table: Mapping[StateT, Mapping[EventT, Following]], state: StateT, event: EventT) -> Following:
    """Return what a table has for an event in a state. Raises LocalProtocolError where it has nothing."""
    following = table[state].get(event) if state in table else None
    if following is None:
        raise LocalProtocolError(f"{_name(event)} has no transition from {type(state).__name__}.{_name(state)}")
    return following


def _name(value: Hashable) -> str:
    return value.name if isinstance(value, Enum) else str(value)


@dataclass(slots=True)
class StateMachine(Generic[StateT, EventT]):
    """A state and the table of its transitions: for each state, each event that it allows and the next state.

    Several objects may share one machine. It wakes no task: the object that applies an event does that.
    """

    _transitions: Mapping[StateT, Mapping[EventT, StateT]]
    _state: StateT

    @property
    def state(self) -> StateT:
        """The present state; the one that the machine was made with until the first event is applied."""
        return self._state

    def apply(self, event: EventT) -> StateT:
        """Move to the state that the table has for this event, and return it.

        Raises LocalProtocolError, and changes nothing, where the present state has no such transition.
        """
        self._state = transition(self._transitions, self._state, event)
        return self._state
