"""What a paused conversation listens to: nothing while it is quiet, and speech from before its beginning on."""

from __future__ import annotations

import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.turns.wake_gate import KEPT_S, OPEN_S, WakeGate

PART = SAMPLE_RATE_HZ // 10


def noise(seconds: float, power: float) -> Pcm:
    random = np.random.default_rng(1)
    return random.normal(0, np.sqrt(power), int(seconds * SAMPLE_RATE_HZ)).astype(np.float32)


def passed(gate: WakeGate, pcm: Pcm) -> Pcm:
    parts = [gate.feed(pcm[at : at + PART]) for at in range(0, len(pcm), PART)]
    return np.concatenate(parts)


@pytest.mark.parametrize("power", [0.0, 1e-8, 1e-6])
def test_a_quiet_room_is_not_listened_to(power: float) -> None:
    assert not len(passed(WakeGate(), noise(30, power)))


def test_speech_is_passed_on_with_the_audio_before_it() -> None:
    gate, quiet, loud = WakeGate(), noise(5, 1e-6), noise(1, 1e-2)
    passed(gate, quiet)
    heard = passed(gate, loud)
    assert np.array_equal(heard[-len(loud) :], loud)
    before = heard[: -len(loud)]
    assert KEPT_S * SAMPLE_RATE_HZ <= len(before) <= KEPT_S * SAMPLE_RATE_HZ + PART
    assert np.array_equal(before, quiet[-len(before) :])


def test_quiet_speech_in_a_quiet_room_and_loud_speech_in_a_loud_room_wake() -> None:
    for background, speech in ((1e-8, 3e-5), (1e-4, 1e-2)):
        gate = WakeGate()
        passed(gate, noise(5, background))
        assert len(passed(gate, noise(0.1, speech)))


def test_a_noise_that_stays_becomes_the_background() -> None:
    gate = WakeGate()
    passed(gate, noise(5, 1e-8))
    passed(gate, noise(10, 1e-3))
    assert not len(passed(gate, noise(10, 1e-3)))


def test_the_gate_stays_open_for_a_while_after_the_last_sound() -> None:
    gate = WakeGate()
    passed(gate, noise(1, 0.0))
    passed(gate, noise(0.1, 1e-2))
    rest = passed(gate, noise(5, 0.0))
    assert abs(len(rest) - OPEN_S * SAMPLE_RATE_HZ) <= PART


def test_a_gate_that_does_not_open_keeps_a_second_of_audio() -> None:
    gate = WakeGate(opens=False)
    assert not len(passed(gate, noise(20, 1e-2)))
