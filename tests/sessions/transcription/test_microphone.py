"""When audio is live, when its absence counts as silence, and which frames the echo guard gets."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from antiphon.sessions.transcription.microphone import (
    LIVE_PERIOD_S,
    MUTED_S,
    STALLED_S,
    USUAL_S,
    Arrivals,
    EchoFilter,
)
from antiphon.turns.echo import EchoGuard

SECOND = 16_000


@pytest.mark.parametrize(
    ("piece_s", "gap_s", "limit_s"),
    [
        (0.02, 0.02, STALLED_S),
        (1.0, 0.1, 1.5),
        (0.5, 0.5, 0.75),
        (0.5, 0.9, 1.35),
        (1.8, 1.8, MUTED_S),
        (0.02, 2.5, STALLED_S),
    ],
)
def test_a_client_that_sends_seldom_is_given_longer(piece_s: float, gap_s: float, limit_s: float) -> None:
    arrivals = Arrivals()
    for number in range(3):
        arrivals.came(100 + number * gap_s, int(piece_s * SECOND))
    assert arrivals.stall_limit_s == pytest.approx(limit_s)


def test_a_gap_is_forgotten_and_audio_ends_a_stall() -> None:
    arrivals = Arrivals()
    arrivals.came(100.0, 320)
    arrivals.came(101.0, 320)
    arrivals.stalled_s = 0.36
    assert arrivals.stall_limit_s == pytest.approx(1.5)
    for number in range(int(USUAL_S * 10) + 1):
        arrivals.came(101.1 + number / 10, 320)
    assert arrivals.stalled_s == 0
    assert arrivals.stall_limit_s == STALLED_S


def test_a_client_is_muted_from_a_while_after_its_last_audio() -> None:
    arrivals = Arrivals()
    assert arrivals.is_muted(0.0)
    arrivals.heard(100.0)
    assert not arrivals.is_muted(100.0 + MUTED_S - 0.01)
    assert arrivals.is_muted(100.0 + MUTED_S)


@pytest.mark.parametrize(
    ("speed", "burst_s", "is_live"), [(1, 0.0, True), (1.5, 0.45, True), (1.5, 0.55, False), (2, 0.0, False)]
)
def test_audio_that_comes_faster_than_it_is_spoken_is_not_live(speed: float, burst_s: float, is_live: bool) -> None:
    arrivals = Arrivals()
    for number in range(int(LIVE_PERIOD_S * 10) + 1):
        heard_s = number / 10 * speed + (burst_s if number else 0.0)
        found = arrivals.is_live(100 + number / 10, int(heard_s * SECOND))
    assert found is is_live


def test_what_came_before_the_last_seconds_does_not_count() -> None:
    arrivals = Arrivals()
    arrivals.is_live(100.0, 0)
    assert not arrivals.is_live(100.1, 60 * SECOND)
    for number in range(1, 40):
        found = arrivals.is_live(100.1 + number / 10, 60 * SECOND + number * SECOND // 10)
    assert found


class Guard:
    """Records its arguments. Takes all speech for an echo, from the first sample on."""

    held_since: int | None = 0

    def __init__(self) -> None:
        self.judged: list[tuple[Any, ...]] = []
        self.expected: list[tuple[int, int]] = []

    def judge(self, frames: Any, probabilities: list[float], begin: int) -> list[float]:
        self.judged.append((frames.shape, begin))
        return [0.0] * len(probabilities)

    def add_reference(self, pcm: Any, at: int) -> None:
        self.expected.append((len(pcm), at))

    def cut_reference(self, at: int) -> None:
        self.expected.append((0, at))


def test_whole_frames_are_judged_where_the_microphone_was_and_the_rest_with_the_next() -> None:
    guard = Guard()
    echo = EchoFilter(cast(EchoGuard, guard), 512)
    assert echo.judge(np.zeros(600, np.float32), [0.9], 0, 100.0, 600, is_live=True) == ([0.0], 0)
    assert echo.judge(np.zeros(500, np.float32), [0.9], 600, 100.03125, 1100, is_live=True) == ([0.0], 0)
    assert guard.judged == [((1, 512), 0), ((1, 512), 512)]
    # The client was muted for a second: later audio was heard a second later.
    _, since = echo.judge(np.zeros(512, np.float32), [0.9], 1100, 101.0625, 1612, is_live=True)
    assert guard.judged[2][1] > 1024 + 15_000
    assert since is not None
    assert since < -15_000
    echo.clear()
    echo.judge(np.zeros(512, np.float32), [0.9], 1612, 101.0945, 2124, is_live=True)
    assert guard.judged[3][1] - guard.judged[2][1] == 512 + 76


def test_audio_that_is_not_live_has_no_echo_and_its_rest_still_counts() -> None:
    guard = Guard()
    echo = EchoFilter(cast(EchoGuard, guard), 512)
    assert echo.judge(np.zeros(600, np.float32), [0.9], 0, 100.0, 600, is_live=False) == ([0.9], None)
    echo.judge(np.zeros(424, np.float32), [0.9], 600, 100.03, 1024, is_live=True)
    assert guard.judged == [((1, 512), 512)]


def test_what_is_sent_is_expected_at_the_microphones_clock() -> None:
    guard = Guard()
    echo = EchoFilter(cast(EchoGuard, guard), 512)
    echo.expect(np.zeros(300, np.float32), 100.0, 1600)
    echo.expect_silence(101.0, 1600)
    assert guard.expected == [(300, 1600), (0, 1600 + SECOND)]
    nothing = EchoFilter(None, 512)
    nothing.expect(np.zeros(300, np.float32), 100.0, 1600)
    nothing.expect_silence(100.0, 1600)
    assert nothing.judge(np.zeros(512, np.float32), [0.9], 0, 100.0, 512, is_live=True) == ([0.9], None)
