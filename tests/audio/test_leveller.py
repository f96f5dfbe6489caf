"""The gain that brings quiet sound up."""

from __future__ import annotations

import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.leveller import MAX_GAIN_DB, RISE_DB_PER_S, TARGET_DB, Leveller, raised

FRAME = 512


def tone(peak_db: float, seconds: float = 1.0) -> Pcm:
    size = int(seconds * SAMPLE_RATE_HZ) // FRAME * FRAME
    wave = np.sin(2 * np.pi * 250 * np.arange(size) / SAMPLE_RATE_HZ)
    return (10 ** (peak_db / 20) * wave).astype(np.float32)


def levelled(pcm: Pcm) -> Pcm:
    leveller = Leveller()
    return np.concatenate([leveller.level(frame) for frame in pcm.reshape(-1, FRAME)])


def peak_db(pcm: Pcm) -> float:
    return 20 * float(np.log10(np.abs(pcm).max()))


@pytest.mark.parametrize(
    ("level_db", "raised_db"),
    [(0.0, 0.0), (-6.0, -6.0), (-12.0, -12.0), (-20.0, TARGET_DB), (-42.0, TARGET_DB), (-60.0, -60.0 + MAX_GAIN_DB)],
)
def test_sound_is_raised_from_its_first_sample_and_never_lowered(level_db: float, raised_db: float) -> None:
    out = levelled(tone(level_db))
    assert peak_db(out[:FRAME]) == pytest.approx(raised_db, abs=0.1)
    assert peak_db(out) == pytest.approx(raised_db, abs=0.1)


def test_digital_silence_stays_silent() -> None:
    assert not levelled(np.zeros(10 * FRAME, np.float32)).any()


def test_the_gain_falls_at_once_and_rises_slowly() -> None:
    out = levelled(np.concatenate((tone(-40.0), tone(-3.0), tone(-40.0, 4.0))))
    second = SAMPLE_RATE_HZ // FRAME * FRAME
    assert peak_db(out[second : second + FRAME]) == pytest.approx(-3.0, abs=0.1)
    after = out[2 * second :]
    assert peak_db(after[:FRAME]) == pytest.approx(-40.0, abs=1.0)
    assert peak_db(after[second : second + FRAME]) == pytest.approx(-40.0 + RISE_DB_PER_S, abs=1.0)
    assert peak_db(after[-FRAME:]) == pytest.approx(TARGET_DB, abs=1.0)
    # In a line: no step between two frames.
    gains = after.reshape(-1, FRAME)[:40].std(axis=1)
    assert np.all(gains[1:] / gains[:-1] < 1.1)


def test_a_fresh_start_has_the_highest_gain() -> None:
    leveller = Leveller()
    leveller.level(tone(0.0)[:FRAME])
    leveller.reset()
    assert peak_db(leveller.level(tone(-60.0)[:FRAME])) == pytest.approx(-60.0 + MAX_GAIN_DB, abs=0.1)


@pytest.mark.parametrize(("level_db", "raised_db"), [(-3.0, -3.0), (-20.0, TARGET_DB), (-60.0, -60.0 + MAX_GAIN_DB)])
def test_what_is_held_whole_has_one_gain(level_db: float, raised_db: float) -> None:
    pcm = np.concatenate((tone(level_db), tone(level_db - 20.0)))
    out = raised(pcm)
    assert peak_db(out) == pytest.approx(raised_db, abs=0.1)
    np.testing.assert_allclose(out, pcm * 10 ** ((raised_db - level_db) / 20), rtol=0.02)
    assert not raised(np.zeros(4, np.float32)).any()
    assert len(raised(np.zeros(0, np.float32))) == 0
