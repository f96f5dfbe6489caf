"""The turn states of full duplex: the table, its page, and that no other states are reported."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from antiphon.errors import LocalProtocolError
from antiphon.events.duplex import TurnState
from antiphon.sessions.duplex.turn_states import TURN_STATES, TurnSignal, as_markdown
from antiphon.state_machine import transition

PAGE = Path(__file__).parents[3] / "docs" / "wire" / "duplex.md"


def test_the_table_has_every_state_and_signal() -> None:
    assert set(TURN_STATES) == set(get_args(TurnState))
    assert {signal for row in TURN_STATES.values() for signal in row} == set(get_args(TurnSignal))
    reached = {state for row in TURN_STATES.values() for state in row.values()}
    assert reached == set(TURN_STATES)


def test_the_page_has_the_table_as_it_is() -> None:
    assert as_markdown() in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("state", "signal"),
    [("idle", "playback_started"), ("user_speaking", "playback_finished"), ("assistant_playing", "response_done")],
)
def test_what_the_table_does_not_have_is_an_error(state: TurnState, signal: TurnSignal) -> None:
    with pytest.raises(LocalProtocolError, match=f"{signal} .*{state}"):
        transition(TURN_STATES, state, signal)
