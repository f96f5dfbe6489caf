"""The clock of a microphone whose client may mute itself."""

from __future__ import annotations

import pytest

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.turns.echo import MicrophoneClock

CHUNK = SAMPLE_RATE_HZ // 50


def live(clock: MicrophoneClock, from_s: float, received: int, seconds: float) -> int:
    """Send audio in real time, from the clock's `from_s` on. Returns the number of samples received by the end."""
    for k in range(1, round(seconds * 50) + 1):
        received += CHUNK
        clock.now(from_s + k / 50, received)
    return received


def test_when_audio_comes_as_it_is_spoken_then_the_clock_counts_its_samples() -> None:
    clock = MicrophoneClock()
    received = live(clock, 100.0, 0, 10)
    assert clock.now(110.0, received) == pytest.approx(received, abs=2)


def test_when_a_client_is_muted_then_its_microphone_goes_on() -> None:
    clock = MicrophoneClock()
    received = live(clock, 0.0, 0, 2)
    # The clock also advances while the client is muted, because audio that the server sends then is heard then.
    assert clock.now(5.0, received) == pytest.approx(5 * SAMPLE_RATE_HZ, abs=200)
    received = live(clock, 6.0, received, 1)
    assert clock.now(7.0, received) == pytest.approx(7 * SAMPLE_RATE_HZ, abs=200)
    received = live(clock, 60.0, received, 1)
    assert clock.now(61.0, received) == pytest.approx(61 * SAMPLE_RATE_HZ, abs=200)


def test_when_a_network_stalls_then_the_clock_is_right_when_the_audio_has_come() -> None:
    clock = MicrophoneClock()
    received = live(clock, 0.0, 0, 2)
    for _ in range(100):
        received += CHUNK
        clock.now(4.0, received)
    received = live(clock, 4.0, received, 1)
    assert clock.now(5.0, received) == pytest.approx(received, abs=SAMPLE_RATE_HZ // 50)


def test_when_a_file_comes_at_once_then_its_samples_are_the_clock() -> None:
    clock, received = MicrophoneClock(), 0
    for k in range(1000):
        received += CHUNK
        assert clock.now(k / 1000, received) == received


def test_when_a_microphone_is_a_little_slow_then_the_clock_follows_without_a_leap() -> None:
    clock, at = MicrophoneClock(), list[int]()
    for k in range(1, 50 * 3600):
        at.append(clock.now(k / 50 * 1.0001, k * CHUNK) - k * CHUNK)
    assert max(map(abs, at)) < 100
