"""What a paused conversation listens to: nothing while it is quiet, and speech from before its beginning on."""

from __future__ import annotations

import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import Resampler, from_pcm16, to_pcm16
from antiphon.turns.wake_gate import KEPT_S, OPEN_S, WakeGate
from tests.conftest import Recording

PART = SAMPLE_RATE_HZ // 10
# Of English speech: sentences whose first word begins softly, and turns of one word.
SPOKEN = ("lj-LJ001-0008", "lj-LJ001-0013", "tau2-yes", "tau2-help-me")


def noise(seconds: float, power: float, rate_hz: int = SAMPLE_RATE_HZ) -> Pcm:
    """Return noise with samples of 16 bits."""
    random = np.random.default_rng(1)
    return from_pcm16(to_pcm16(random.normal(0, np.sqrt(power), int(seconds * rate_hz)).astype(np.float32)))


def passed(gate: WakeGate, pcm: Pcm, part: int = PART) -> Pcm:
    return np.concatenate([gate.feed(pcm[at : at + part]) for at in range(0, len(pcm), part)])


def gate_of_a_room(power: float) -> WakeGate:
    """Return a gate that has heard ten seconds of this noise."""
    gate = WakeGate(SAMPLE_RATE_HZ)
    passed(gate, noise(10, power))
    return gate


@pytest.mark.parametrize("power", [0.0, 1e-8, 1e-6, 1e-3])
@pytest.mark.parametrize("offset", [0.0, 0.02])
def test_a_quiet_room_is_not_listened_to(power: float, offset: float) -> None:
    assert not len(passed(WakeGate(SAMPLE_RATE_HZ), noise(30, power) + np.float32(offset)))


def test_speech_is_passed_on_with_the_audio_before_it() -> None:
    gate, quiet, loud = WakeGate(SAMPLE_RATE_HZ), noise(5, 1e-6), noise(1, 1e-2)
    passed(gate, quiet)
    heard = passed(gate, loud)
    assert np.array_equal(heard[-len(loud) :], loud)
    before = heard[: -len(loud)]
    assert KEPT_S * SAMPLE_RATE_HZ <= len(before) <= KEPT_S * SAMPLE_RATE_HZ + PART
    assert np.array_equal(before, quiet[-len(before) :])


@pytest.mark.parametrize("level_db", [0, -20, -40])
@pytest.mark.parametrize(("rate_hz", "part_s"), [(8_000, 0.01), (16_000, 0.032), (24_000, 0.005), (24_000, 0.1)])
def test_a_recording_is_passed_on_whole_at_any_level_and_in_parts_of_any_length(
    recordings: dict[str, Recording], level_db: float, rate_hz: int, part_s: float
) -> None:
    for name in SPOKEN:
        resampler = Resampler(SAMPLE_RATE_HZ, rate_hz)
        pcm = np.concatenate((resampler.feed(recordings[name].pcm), resampler.flush()))
        # The speech begins anywhere in a part, in a room that is 40 dB quieter.
        room = noise(2.347 + 10, float(np.square(pcm).mean()) * 1e-4, rate_hz)[: int(2.347 * rate_hz) + len(pcm)]
        speech = np.concatenate((np.zeros(len(room) - len(pcm), np.float32), pcm)) + room
        speech = from_pcm16(to_pcm16(speech * np.float32(10 ** (level_db / 20))))
        heard = passed(WakeGate(rate_hz), speech, int(part_s * rate_hz))
        assert len(heard) >= len(pcm) + 0.3 * rate_hz, name
        assert np.array_equal(heard, speech[-len(heard) :]), name


def test_a_word_in_a_loud_room_wakes() -> None:
    assert len(passed(gate_of_a_room(1e-4), noise(0.1, 1e-2)))


def test_quiet_speech_is_a_sound_in_spite_of_the_offset_of_a_microphone() -> None:
    gate, offset = WakeGate(SAMPLE_RATE_HZ), np.float32(0.02)
    passed(gate, noise(5, 1e-8) + offset)
    assert len(passed(gate, noise(0.1, 1e-6) + offset))


def test_a_noise_that_stays_becomes_the_background() -> None:
    gate = gate_of_a_room(1e-8)
    passed(gate, noise(10, 1e-3))
    assert not len(passed(gate, noise(10, 1e-3)))


def test_after_a_loud_noise_has_ended_quiet_speech_is_a_sound_again() -> None:
    gate = gate_of_a_room(1e-3)
    passed(gate, noise(10, 1e-7))
    assert len(passed(gate, noise(0.1, 1e-6)))


def test_the_gate_stays_open_for_a_while_after_the_last_sound() -> None:
    gate = gate_of_a_room(0.0)
    passed(gate, noise(0.1, 1e-2))
    rest = passed(gate, noise(5, 0.0))
    assert abs(len(rest) - OPEN_S * SAMPLE_RATE_HZ) <= PART


def test_an_opened_gate_passes_on_everything_and_first_what_it_kept() -> None:
    gate, quiet, more = WakeGate(SAMPLE_RATE_HZ), noise(0.5, 1e-8), noise(10, 1e-8)
    assert not len(passed(gate, quiet))
    gate.open()
    assert np.array_equal(passed(gate, more), np.concatenate((quiet, more)))
