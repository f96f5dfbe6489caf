"""State machines that are defined by a table of transitions. Pure: no sockets, tasks or clock."""

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
    """Return the table's entry for an event in a state. Raises LocalProtocolError if it has none."""
    following = table[state].get(event) if state in table else None
    if following is None:
        raise LocalProtocolError(f"{_name(event)} has no transition from {type(state).__name__}.{_name(state)}")
    return following


def _name(value: Hashable) -> str:
    return value.name if isinstance(value, Enum) else str(value)


@dataclass(slots=True)
class StateMachine(Generic[StateT, EventT]):
    """A state and its table of transitions: for each state, the allowed events and their next states.

    Several objects may share one machine. It wakes no tasks; the object that applies an event does.
    """

    _transitions: Mapping[StateT, Mapping[EventT, StateT]]
    _state: StateT

    @property
    def state(self) -> StateT:
        """The current state; at first, the one the machine was created with."""
        return self._state

    def apply(self, event: EventT) -> StateT:
        """Move to the table's next state for this event, and return it.

        Raises LocalProtocolError, and changes nothing, if the current state does not allow the event.
        """
        self._state = transition(self._transitions, self._state, event)
        return self._state
