"""The figures of the live sections of `antiphon bench turns`: onsets, delays, ducks, and intervals."""

from __future__ import annotations

import math
from statistics import median

import numpy as np
import pytest
from bench.turn_taking.figures import (
    Mark,
    active_level_db,
    at_level,
    bootstrap,
    delays,
    ducks_without_interruption,
    interrupted_at,
    rate_interval,
    share,
    silent_from,
    voice_onset_s,
    wilson,
)

from antiphon.audio import Pcm

RATE = 16_000


def tone(seconds: float, level_db: float) -> Pcm:
    at = np.arange(round(seconds * RATE)) / RATE
    return np.asarray(math.sqrt(2) * 10 ** (level_db / 20) * np.sin(2 * np.pi * 200 * at), np.float32)


def quiet(seconds: float) -> Pcm:
    return np.zeros(round(seconds * RATE), np.float32)


def test_a_voice_begins_behind_a_breath_and_a_click():
    breath, click = tone(0.3, -50), tone(0.03, -20)
    pcm = np.concatenate([quiet(0.2), breath, quiet(0.1), click, quiet(0.2), tone(1.0, -26)])
    assert voice_onset_s(pcm) == pytest.approx(0.83, abs=0.011)
    # The low threshold of the data's manifest would take the breath for speech.
    assert voice_onset_s(pcm, 35) == pytest.approx(0.2, abs=0.011)


def test_silence_has_no_onset():
    assert voice_onset_s(quiet(1.0)) == 0.0


def test_a_level_is_that_of_the_active_part():
    pcm = np.concatenate([quiet(2.0), tone(1.0, -20)])
    assert active_level_db(pcm) == pytest.approx(-20, abs=0.1)
    assert active_level_db(at_level(pcm, -34)) == pytest.approx(-34, abs=0.1)


def test_a_client_is_silent_at_the_first_event_that_says_so():
    assert silent_from([Mark(1.3, "ducked"), Mark(1.9, "interrupted")], 1.0) == 1.3
    assert silent_from([Mark(1.3, "interrupted")], 1.0) == 1.3
    assert silent_from([Mark(1.3, "unducked")], 1.0) is None
    assert silent_from([], 1.0) is None


def test_a_duck_by_a_breath_counts_only_where_it_lasts():
    assert silent_from([Mark(0.9, "ducked"), Mark(1.4, "interrupted")], 1.0) == 1.0
    assert silent_from([Mark(0.5, "ducked"), Mark(0.9, "unducked"), Mark(1.4, "ducked")], 1.0) == 1.4


def test_the_decision_is_the_interruption():
    marks = [Mark(1.1, "ducked"), Mark(1.5, "interrupted")]
    assert interrupted_at(marks, 1.0) == 1.5
    assert interrupted_at(marks, 1.6) is None
    assert interrupted_at(marks[:1], 1.0) is None


def test_ducks_that_end_in_an_interruption_are_not_counted():
    marks = [Mark(1, "ducked"), Mark(2, "unducked"), Mark(3, "ducked"), Mark(4, "interrupted"), Mark(5, "ducked")]
    assert ducks_without_interruption(marks) == 2
    assert ducks_without_interruption([Mark(1, "interrupted")]) == 0
    assert ducks_without_interruption([]) == 0


def test_intervals_of_shares_are_wilsons():
    # Table I of Newcombe 1998: the intervals of 81 of 263, and of 0 of 20.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)
    assert share(0, 20) == {"of": 20, "count": 0, "percent": 0.0, "interval": [0.0, 16.1]}


def test_intervals_of_rates_are_poissons():
    # The exact intervals are 4.80 to 18.39 for 10 events, and 0 to 3.69 for none.
    assert rate_interval(10, 1.0) == pytest.approx((4.80, 18.39), abs=0.03)
    assert rate_interval(0, 2.0) == pytest.approx((0.0, 3.69 / 2), abs=0.03)
    assert rate_interval(0, 0.0)[1] == math.inf


def test_a_bootstrap_holds_the_statistic_and_is_repeatable():
    values = [0.1 * k for k in range(30)]
    low, high = bootstrap(values, median)
    assert low < median(values) < high
    assert bootstrap(values, median) == (low, high)
    assert bootstrap([0.5] * 10, median) == (0.5, 0.5)


def test_delays_have_a_unit():
    assert delays([0.25] * 5) == {
        "p50_ms": 250,
        "p50_interval": [250, 250],
        "p95_ms": 250,
        "p95_interval": [250, 250],
    }
    assert delays([0.25] * 5, "s")["p95_s"] == 0.25
    assert math.isnan(delays([])["p50_ms"])
