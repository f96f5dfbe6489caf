"""The state tables of a session's lifecycle and of its attachment, in the code and in docs/design/resume.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.errors import LocalProtocolError
from antiphon.state_machine import StateMachine
from antiphon.transports.lifecycle import (
    ATTACHMENT_TRANSITIONS,
    LIFECYCLE_TRANSITIONS,
    AttachmentEvent,
    AttachmentState,
    Lifecycle,
    LifecycleEvent,
    new_attachment,
    new_lifecycle,
)

PAGE = (Path(__file__).parents[2] / "docs" / "design" / "resume.md").read_text(encoding="utf-8")
TABLES: list[tuple[type[Enum], type[Enum], Mapping[Any, Any]]] = [
    (Lifecycle, LifecycleEvent, LIFECYCLE_TRANSITIONS),
    (AttachmentState, AttachmentEvent, ATTACHMENT_TRANSITIONS),
]
LACKING = [
    (table, state, event)
    for states, events, table in TABLES
    for state in states
    for event in events
    if event not in table.get(state, {})
]


def walk(machine: StateMachine[Any, Any], table: Mapping[Any, Any], events: Iterable[Enum]) -> list[tuple[Any, Any]]:
    """Apply the events one after another, without those that the table lacks. Return each with the resulting state."""
    steps = []
    for event in events:
        if event in table.get(machine.state, {}):
            machine.apply(event)
            steps.append((event, machine.state))
    return steps


@given(st.lists(st.sampled_from(LifecycleEvent)))
def test_when_anything_happens_to_a_session_then_its_lifecycle_only_goes_forward(events: list[LifecycleEvent]) -> None:
    machine = new_lifecycle()
    states = [machine.state, *(state for _, state in walk(machine, LIFECYCLE_TRANSITIONS, events))]
    order = list(Lifecycle)
    places = [order.index(state) for state in states]
    assert places == sorted(set(places))
    # After a state without production, no state has production. The same holds for resuming.
    for earlier, later in pairwise(states):
        assert earlier.is_running >= later.is_running
        assert earlier.resumable >= later.resumable


@given(st.lists(st.sampled_from(AttachmentEvent)))
def test_when_clients_come_and_go_in_any_order_then_one_transport_at_most_has_the_place(
    events: list[AttachmentEvent],
) -> None:
    machine = new_attachment()
    num_transports = 0
    for event, state in walk(machine, ATTACHMENT_TRANSITIONS, events):
        num_transports += event is AttachmentEvent.TRANSPORT_ATTACHED
        num_transports -= event is AttachmentEvent.TRANSPORT_GONE
        assert num_transports == state.has_transport
        # Frames are sent only while a transport is attached.
        assert state.has_transport >= state.takes_frames


@pytest.mark.parametrize(("table", "state", "event"), LACKING, ids=lambda value: getattr(value, "name", ""))
def test_when_the_table_lacks_a_pair_then_the_event_is_refused_and_changes_nothing(
    table: Mapping[Any, Any], state: Enum, event: Enum
) -> None:
    machine: StateMachine[Any, Any] = StateMachine(table, state)
    with pytest.raises(LocalProtocolError, match=rf"{event.name} .*\.{state.name}"):
        machine.apply(event)
    assert machine.state is state


@pytest.mark.parametrize("state", [s for s in Lifecycle if s is not Lifecycle.CLOSED])
def test_when_a_session_is_abandoned_then_it_is_closed_at_once(state: Lifecycle) -> None:
    machine = StateMachine(LIFECYCLE_TRANSITIONS, state)
    assert machine.apply(LifecycleEvent.ABANDONED) is Lifecycle.CLOSED
    assert [machine.state.reads_frames, machine.state.is_running, machine.state.resumable] == [False] * 3


# --- the page


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


@pytest.mark.parametrize(("states", "events", "table"), TABLES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_page_has_the_table_as_it_is(states: type[Enum], events: type[Enum], table: Mapping[Any, Any]) -> None:
    printed = row(["State", *(event.name for event in events)]) + row(["---"] * (1 + len(events)))
    for state in states:
        following = (table.get(state, {}).get(event) for event in events)
        printed += row([state.name, *(to.name if to else "" for to in following)])
    assert printed in PAGE, printed


@pytest.mark.parametrize(
    ("states", "properties"),
    [
        (Lifecycle, ("reads_frames", "is_running", "resumable")),
        (AttachmentState, ("takes_frames", "has_transport", "expects_client")),
    ],
)
def test_the_page_says_what_hangs_on_each_state(states: type[Enum], properties: tuple[str, ...]) -> None:
    printed = row(["State", *(f"`{name}`" for name in properties)]) + row(["---"] * (1 + len(properties)))
    for state in states:
        printed += row([state.name, *("yes" if getattr(state, name) else "no" for name in properties)])
    assert printed in PAGE, printed
