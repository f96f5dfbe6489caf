"""Answering machines: beeps and greetings that are made, and recordings that are neither."""

from __future__ import annotations

import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.line.answering import LISTEN_S, MONOLOGUE_S, AnsweringMachine
from antiphon.audio.line.g711 import from_ulaw, to_ulaw
from antiphon.audio.line.telephone import tones
from antiphon.audio.pcm import Resampler
from tests.conftest import Recording


def tone(hz: float, seconds: float, level: float = 0.2) -> Pcm:
    times_s = np.arange(int(seconds * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    return (level * np.sin(2 * np.pi * hz * times_s)).astype(np.float32)


def silence(seconds: float) -> Pcm:
    return np.random.default_rng(0).normal(0, 0.0005, int(seconds * SAMPLE_RATE_HZ)).astype(np.float32)


def on_the_line(pcm: Pcm) -> Pcm:
    """Return audio as a telephone line passes it on: through 8 kHz and µ-law, at 16 kHz."""
    return Resampler(8000, 16_000).feed(from_ulaw(to_ulaw(Resampler(16_000, 8000).feed(pcm))))


def signs(*parts: Pcm, chunk: int = 320) -> list[str]:
    machine, pcm = AnsweringMachine(), np.concatenate(parts)
    found = [machine.feed(pcm[at : at + chunk]) for at in range(0, len(pcm), chunk)]
    return [sign for sign in found if sign]


@pytest.mark.parametrize("hz", [440, 800, 1000, 1400, 2000])
@pytest.mark.parametrize("seconds", [0.2, 0.5, 1.0])
def test_a_beep_is_noticed_at_its_end_through_a_telephone_line(hz: float, seconds: float) -> None:
    assert signs(on_the_line(np.concatenate([silence(0.5), tone(hz, seconds, 0.1), silence(0.5)]))) == ["beep"]


def test_keys_hums_and_a_dial_tone_are_no_beep() -> None:
    for sound in (
        Resampler(8000, 16_000).feed(tones("123456789*0#", 8000)),
        tone(50, 0.5),
        tone(1000, 5.0),
        tone(1000, 0.08),
        tone(440, 0.5) + tone(620, 0.5),
        silence(3.0),
    ):
        assert signs(silence(0.5), sound, silence(0.5)) == []


def test_a_greeting_without_a_pause_is_a_machine_and_a_short_one_is_not(recordings: dict[str, Recording]) -> None:
    speech = [r.pcm for r in recordings.values() if len(r.pcm) > 3 * SAMPLE_RATE_HZ]
    long = np.concatenate([pcm[: 4 * SAMPLE_RATE_HZ] for pcm in speech[:4]])
    assert len(long) > 2 * MONOLOGUE_S * SAMPLE_RATE_HZ
    assert signs(silence(0.5), on_the_line(long)) == ["monologue"]
    assert signs(silence(0.5), on_the_line(long), silence(0.3), tone(1000, 0.5), silence(0.5)) == ["monologue", "beep"]
    # A person greets, waits for an answer, and may then speak as long as they like.
    assert signs(silence(0.5), speech[0][: 2 * SAMPLE_RATE_HZ], silence(1.5), on_the_line(long)) == []


def test_no_recording_of_speech_has_a_beep(recordings: dict[str, Recording]) -> None:
    for recording in recordings.values():
        for pcm in (recording.pcm, on_the_line(recording.pcm)):
            assert "beep" not in signs(pcm), recording.id


def test_chunks_of_any_size_give_the_same_and_a_late_beep_is_none() -> None:
    parts = silence(0.5), tone(1000, 0.4), silence(0.5)
    assert signs(*parts, chunk=37) == signs(*parts, chunk=5000) == ["beep"]
    assert signs(silence(LISTEN_S + 0.1), *parts, chunk=16_000) == []
