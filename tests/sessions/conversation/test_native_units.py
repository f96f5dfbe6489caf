"""The clock of a native model's session: which units are late, silent and early, and a turn that is one unit long."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from antiphon.events.conversation import ConversationConfig, ResponseAudioDelta, ResponseDone
from antiphon.events.transcription import TranscriptionConfig
from antiphon.sessions.conversation.native_turns import NativeTurns
from antiphon.sessions.conversation.native_units import UnitClock, UnitDone
from tests.sessions.conversation.test_native_turns import UNIT, Native, Scene, run, says

UNIT_S = UNIT / 16_000


def measured(*units: tuple[float | None, float, float]) -> list[UnitDone]:
    """Return the measurements of units of a second, each given by its arrival, its beginning and its result."""
    clock, found = UnitClock(1.0), []
    for arrived_s, began_s, done_s in units:
        clock.begin(began_s, arrived_s)
        found.append(clock.done(done_s))
    return found


def names(units: list[UnitDone]) -> list[tuple[str, ...]]:
    return [unit.counts[1:] for unit in units]


def delays(units: list[UnitDone]) -> list[float]:
    return [round(unit.delay_s, 6) for unit in units]


def test_a_unit_is_late_if_its_result_comes_more_than_a_unit_after_its_audio() -> None:
    units = measured((1.0, 1.0, 1.9), (2.0, 2.0, 3.0), (3.0, 3.0, 4.1), (4.0, 4.1, 4.9), (5.0, 5.0, 5.2))
    assert delays(units) == [0.9, 1.0, 1.1, 0.9, 0.2]
    assert names(units) == [(), (), ("late",), (), ()]


def test_when_a_model_falls_behind_then_each_unit_that_waited_is_late() -> None:
    units = measured((1.0, 1.0, 2.5), (2.0, 2.5, 4.0), (3.0, 4.0, 5.5))
    assert delays(units) == [1.5, 2.0, 2.5]
    assert names(units) == [("late",)] * 3


def test_when_audio_comes_late_then_the_clock_goes_on_from_there_and_nothing_is_late() -> None:
    # The third unit comes after a gap of three seconds, and the fourth on its own time.
    units = measured((1.0, 1.0, 1.3), (2.0, 2.0, 2.3), (6.0, 6.0, 6.3), (7.0, 7.0, 7.3))
    assert delays(units) == [0.3] * 4
    assert names(units) == [()] * 4
    # A delay on the way does not give the model more time for good: the clock returns to the arrivals.
    jitter = measured((1.0, 1.0, 1.5), (2.4, 2.4, 2.9), *((float(n), float(n), n + 1.2) for n in range(3, 9)))
    assert [unit.is_late for unit in jitter[-2:]] == [True, True]


def test_when_a_unit_comes_twice_then_it_is_early_and_the_model_gets_the_time_for_both() -> None:
    units = measured((1.0, 1.0, 1.6), (1.0, 1.6, 2.2), (2.0, 2.2, 2.8))
    assert names(units) == [(), ("early",), ()]
    assert not any(unit.is_late for unit in units)


def test_when_a_file_is_sent_at_once_then_units_are_late_only_if_the_model_is_slower_than_speech() -> None:
    def sent(step_s: float) -> list[UnitDone]:
        return measured(*((0.0, n * step_s, (n + 1) * step_s) for n in range(30)))

    assert not any(unit.is_late for unit in sent(0.8))
    assert sent(0.8)[-1].is_early
    assert sent(1.5)[-1].is_late


def test_when_silence_takes_the_place_of_audio_then_the_unit_says_so() -> None:
    assert names(measured((1.0, 1.0, 1.2), (None, 2.5, 2.6), (None, 2.6, 4.0))) == [(), ("silent",), ("late", "silent")]


def test_when_a_session_falls_behind_then_it_tells_which_units_were_late_and_goes_on() -> None:
    native, found, now = Native(held=True), list[UnitDone](), [100.0]

    async def step(turns: NativeTurns, units: int, took_s: float) -> None:
        for _ in range(units):
            now[0] += took_s
            native.go.release()
            count = len(found)
            while len(found) == count:  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def main() -> None:
        turns = NativeTurns(native, ignored, ignored, found.append, lambda: now[0])
        await turns.open(ConversationConfig(TranscriptionConfig()))
        task = asyncio.create_task(turns.run())
        for took_s in (0.1, 3.0, 0.2):
            # Two units arrive a unit apart. The second waits while the model computes the first.
            for _ in range(2):
                now[0] += UNIT_S
                await turns.append_audio(np.zeros(UNIT, np.float32))
                await asyncio.sleep(0)
            await step(turns, 2, took_s * UNIT_S)
        turns.close()
        await task

    asyncio.run(main())
    assert len(native.units) == 6
    assert [unit.is_late for unit in found] == [True, False, True, True, True, False]
    assert found[2].delay_s == pytest.approx(4 * UNIT_S)


async def ignored(event: Any) -> None:
    """Ignore an event or a turn."""


def test_when_a_turn_ends_in_its_first_unit_then_the_next_unit_begins_another_response() -> None:
    async def act(scene: Scene) -> None:
        await scene.hears(3)
        await scene.until(lambda: len(scene.of(ResponseDone)) == 3)

    scene = run(Native(says("Yes.", last=True), says("", last=True, samples=0), says("No.", last=True)), act)
    assert [done.response.status for done in scene.of(ResponseDone)] == ["completed"] * 3
    assert [len(done.response.output) for done in scene.of(ResponseDone)] == [1, 0, 1]
    assert [len(delta.pcm) for delta in scene.of(ResponseAudioDelta)] == [400, 400]
    assert scene.text == "Yes.No."
