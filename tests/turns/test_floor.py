"""The table of the floor is complete, unlisted transitions are errors, and every turn is answered exactly once."""

from __future__ import annotations

import random

import pytest

from antiphon.errors import LocalProtocolError
from antiphon.events.conversation import Item
from antiphon.turns.floor import (
    TRANSITIONS,
    BeginResponse,
    CancelActive,
    Floor,
    FloorCommand,
    Input,
    Phase,
    RespondInstead,
    SilenceOutput,
)

NUM_WALKS = 10_000


def test_every_phase_can_be_reached_and_left_but_the_last() -> None:
    assert set(TRANSITIONS) == set(Phase)
    reached = {following for row in TRANSITIONS.values() for following in row.values()}
    assert reached == set(Phase)
    assert all(Phase.CLOSED in row.values() for row in TRANSITIONS.values())
    assert set(TRANSITIONS[Phase.CLOSED].values()) == {Phase.CLOSED}
    assert {event for row in TRANSITIONS.values() for event in row} == set(Input)


@pytest.mark.parametrize("act", ["user_stopped", "response_ended"])
def test_what_the_table_does_not_have_is_an_error(act: str) -> None:
    with pytest.raises(LocalProtocolError, match=r"Phase\.SILENT"):
        getattr(Floor(), act)()


def spoken(floor: Floor, number: int, *, takes_floor: bool = True, has_output: bool = True) -> list[FloorCommand]:
    """Let the user say a turn, up to its commit. Its transcript has not arrived yet."""
    floor.open_turn(number, Item(str(number)))
    commands = floor.user_started(number, takes_floor=takes_floor, answers=True, has_output=has_output)
    floor.user_stopped()
    floor.committed(number)
    return commands


def test_a_turn_is_answered_once_its_transcript_is_there_and_nobody_speaks() -> None:
    floor = Floor()
    assert spoken(floor, 0) == [SilenceOutput()]
    assert floor.has_untranscribed()
    assert not floor.has_untranscribed(but=0)
    floor.transcribed(0, owes_response=True)
    assert floor.go_on(is_resolved=False, may_cut=True) == []
    floor.open_turn(1, Item("1"))
    floor.user_started(1, takes_floor=True, answers=True, has_output=False)
    assert floor.go_on(is_resolved=True, may_cut=True) == []
    floor.input_cleared()
    assert floor.go_on(is_resolved=True, may_cut=True) == [BeginResponse()]
    assert floor.go_on(is_resolved=True, may_cut=True) == []


def test_speech_over_a_response_ends_it_and_one_that_had_not_begun_to_speak_is_still_owed() -> None:
    for has_output in (False, True):
        floor = Floor()
        floor.response_began()
        assert spoken(floor, 0, has_output=has_output) == [CancelActive("turn_detected"), SilenceOutput()]
        floor.response_ended()
        # The turn was a cough.
        floor.transcribed(0, owes_response=False)
        assert floor.go_on(is_resolved=True, may_cut=True) == ([] if has_output else [BeginResponse()])


def test_a_turn_without_the_floor_waits_for_the_response_or_is_answered_instead() -> None:
    for may_cut in (False, True):
        floor = Floor()
        floor.response_began()
        assert spoken(floor, 0, takes_floor=False) == []
        assert not floor.transcribed(0, owes_response=True).takes_floor
        assert floor.go_on(is_resolved=True, may_cut=may_cut) == ([RespondInstead()] if may_cut else [])
        floor.response_ended()
        assert floor.go_on(is_resolved=True, may_cut=may_cut) == [BeginResponse()]


def test_a_turn_that_is_skipped_is_not_answered() -> None:
    floor = Floor()
    floor.skip_next()
    assert floor.take_skip()
    assert not floor.take_skip()
    # The events of the turn were held back, so it had no record yet.
    floor.skip(0)
    spoken(floor, 0)
    floor.transcribed(0, owes_response=True)
    assert floor.go_on(is_resolved=True, may_cut=True) == []
    spoken(floor, 1)
    floor.skip(1)
    floor.transcribed(1, owes_response=True)
    assert floor.go_on(is_resolved=True, may_cut=True) == []


def test_a_response_that_began_too_early_is_due_again_even_if_it_has_ended() -> None:
    for ends in (False, True):
        floor = Floor()
        floor.response_began()
        if ends:
            floor.response_ended()
        floor.open_turn(0, Item("0"))
        floor.user_started(0, takes_floor=True, answers=True, has_output=True, false_start=True)
        assert floor.response_due
        floor.user_stopped()
        floor.committed(0)
        floor.transcribed(0, owes_response=False)
        assert floor.response_due


def test_an_item_that_was_deleted_is_not_waited_for() -> None:
    floor = Floor()
    spoken(floor, 0)
    floor.item_deleted("0")
    assert not floor.has_untranscribed()
    floor.transcribed(0, owes_response=True)
    assert floor.response_due


def test_speech_that_was_dismissed_takes_no_floor_for_a_while() -> None:
    floor = Floor()
    assert not floor.is_dismissed(0.0)
    floor.dismiss(2.0)
    assert floor.is_dismissed(1.9)
    assert not floor.is_dismissed(2.0)


def test_a_closed_floor_begins_nothing() -> None:
    floor = Floor()
    spoken(floor, 0)
    floor.transcribed(0, owes_response=True)
    floor.close()
    assert floor.go_on(is_resolved=True, may_cut=True) == []
    # The response to a request that had waited still begins, and ends.
    floor.response_began()
    floor.response_ended()


def walk(draw: random.Random) -> None:
    """Run one conversation of random speech, transcripts, responses and clears, then silence until nothing is due."""
    floor = Floor()
    number, is_open, responds, has_output, is_ending = 0, False, False, False, False
    untranscribed: list[int] = []
    num_owed = num_begun = 0

    def obey(commands: list[FloorCommand]) -> None:
        nonlocal responds, has_output, is_ending, num_begun
        for command in commands:
            match command:
                case BeginResponse():
                    assert not responds
                    assert not is_open
                    floor.response_began()
                    responds, has_output, is_ending = True, False, False
                    num_begun += 1
                case CancelActive() | RespondInstead():
                    assert responds
                    is_ending = True
                case SilenceOutput():
                    pass

    def go_on() -> None:
        resolved = not floor.has_untranscribed()
        may_cut = responds and not is_ending and draw.random() < 0.5
        obey(floor.go_on(is_resolved=resolved, may_cut=may_cut))

    for _ in range(draw.randrange(30)):
        match draw.randrange(7):
            case 0 if not is_open:
                floor.open_turn(number, Item(str(number)))
                is_open = True
                takes, was_ending = draw.random() < 0.7, is_ending
                owed, too_early = floor.response_due, draw.random() < 0.3
                obey(
                    floor.user_started(
                        number, takes_floor=takes, answers=True, has_output=has_output, false_start=too_early
                    )
                )
                if takes and not owed and (too_early or (responds and not has_output and not was_ending)):
                    num_owed += 1
            case 1 if is_open:
                floor.user_stopped()
                floor.committed(number)
                untranscribed.append(number)
                number, is_open = number + 1, False
            case 2 if untranscribed:
                owes, was_due = draw.random() < 0.7, floor.response_due
                floor.transcribed(untranscribed.pop(0), owes_response=owes)
                # Turns that end while a response is due are answered together.
                num_owed += owes and not was_due
                go_on()
            case 3 if responds:
                has_output = True
            case 4 if responds:
                floor.response_ended()
                responds = False
                go_on()
            case 5:
                floor.input_cleared()
                if is_open:
                    floor.turns.pop(number)
                    number, is_open = number + 1, False
                go_on()
            case 6 if not responds and not floor.response_due:
                # The client requests a response that is not due to a turn.
                floor.response_began()
                responds, has_output, is_ending = True, True, False
        assert floor.user_speaks == is_open
        assert (floor.phase in (Phase.RESPONSE, Phase.BOTH)) == responds
    if is_open:
        floor.user_stopped()
        floor.committed(number)
        untranscribed.append(number)
        is_open = False
    while untranscribed:
        floor.transcribed(untranscribed.pop(0), owes_response=False)
        go_on()
    for _ in range(2):
        if responds:
            floor.response_ended()
            responds = False
        go_on()
    # Every turn is answered exactly once.
    assert not floor.response_due
    assert num_begun <= num_owed + number
    assert (num_begun > 0) or (num_owed == 0)
    floor.close()


def test_whatever_happens_every_end_is_in_the_table_and_every_turn_that_is_owed_an_answer_gets_one() -> None:
    for seed in range(NUM_WALKS):
        walk(random.Random(seed))


def test_a_response_is_ended_once_for_the_answer_that_is_due() -> None:
    floor = Floor()
    floor.response_began()
    spoken(floor, 0, takes_floor=False)
    floor.transcribed(0, owes_response=True)
    assert floor.go_on(is_resolved=True, may_cut=True) == [RespondInstead()]
    # A second transcript arrives while the first cut is carried out.
    assert floor.go_on(is_resolved=True, may_cut=True) == []
    floor.response_ended()
    assert floor.go_on(is_resolved=True, may_cut=True) == [BeginResponse()]
