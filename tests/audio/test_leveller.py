"""The gain that raises quiet sound, and the high-pass filter."""

from __future__ import annotations

import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.leveller import (
    HIGH_PASS_HZ,
    MAX_GAIN_DB,
    MAX_RAISED_DB,
    RISE_DB_PER_S,
    TARGET_DB,
    HighPass,
    Leveller,
    raised,
)

FRAME = 512


def tone(peak_db: float, seconds: float = 1.0, hz: float = 250.0) -> Pcm:
    size = int(seconds * SAMPLE_RATE_HZ) // FRAME * FRAME
    wave = np.sin(2 * np.pi * hz * np.arange(size) / SAMPLE_RATE_HZ)
    return (10 ** (peak_db / 20) * wave).astype(np.float32)


def levelled(pcm: Pcm) -> Pcm:
    leveller = Leveller()
    return np.concatenate([leveller.level(frame) for frame in pcm.reshape(-1, FRAME)])


def peak_db(pcm: Pcm) -> float:
    return 20 * float(np.log10(np.abs(pcm).max()))


@pytest.mark.parametrize(
    ("level_db", "raised_db"),
    [(0.0, 0.0), (-6.0, -6.0), (-12.0, -12.0), (-20.0, TARGET_DB), (-32.0, TARGET_DB), (-60.0, -60.0 + MAX_GAIN_DB)],
)
def test_sound_is_raised_from_its_first_sample_and_never_lowered(level_db: float, raised_db: float) -> None:
    out = levelled(tone(level_db))
    assert peak_db(out[:FRAME]) == pytest.approx(raised_db, abs=0.1)
    assert peak_db(out) == pytest.approx(raised_db, abs=0.1)


def test_digital_silence_stays_silent() -> None:
    assert not levelled(np.zeros(10 * FRAME, np.float32)).any()


def test_the_gain_falls_at_once_and_rises_slowly() -> None:
    out = levelled(np.concatenate((tone(-30.0), tone(-3.0), tone(-30.0, 4.0))))
    second = SAMPLE_RATE_HZ // FRAME * FRAME
    assert peak_db(out[second : second + FRAME]) == pytest.approx(-3.0, abs=0.1)
    after = out[2 * second :]
    assert peak_db(after[:FRAME]) == pytest.approx(-30.0, abs=1.0)
    assert peak_db(after[second : second + FRAME]) == pytest.approx(-30.0 + RISE_DB_PER_S, abs=1.0)
    assert peak_db(after[-FRAME:]) == pytest.approx(TARGET_DB, abs=1.0)
    # The gain rises linearly, without steps between frames.
    gains = after.reshape(-1, FRAME)[:40].std(axis=1)
    assert np.all(gains[1:] / gains[:-1] < 1.1)


@pytest.mark.parametrize(("num_frames", "falls"), [(1, False), (2, False), (3, True)])
def test_a_click_is_not_raised_and_leaves_the_gain_to_what_follows(num_frames: int, falls: bool) -> None:
    loud = tone(-3.0)[: num_frames * FRAME]
    out = levelled(np.concatenate((tone(-32.0), loud, tone(-32.0))))
    start = len(tone(-32.0))
    assert peak_db(out[start : start + len(loud)]) == pytest.approx(-3.0, abs=0.1)
    after = out[start + len(loud) + FRAME :][:FRAME]
    assert peak_db(after) == pytest.approx(-32.0 if falls else TARGET_DB, abs=1.0)


def filtered(pcm: Pcm, size: int = FRAME) -> Pcm:
    high_pass = HighPass()
    return np.concatenate([high_pass.filter(pcm[at : at + size]) for at in range(0, len(pcm), size)])


@pytest.mark.parametrize("offset", [0.5, -0.2, 0.01])
def test_an_offset_is_gone_from_the_first_sample(offset: float) -> None:
    voice = tone(-42.0)
    np.testing.assert_allclose(filtered(voice + np.float32(offset)), filtered(voice), atol=1e-4)
    assert np.abs(filtered(voice + np.float32(offset)).reshape(-1, FRAME).mean(axis=1)).max() < 1e-3


@pytest.mark.parametrize(
    ("hz", "passes_db"), [(20.0, -48.2), (50.0, -16.5), (HIGH_PASS_HZ, -3.0), (120.0, -0.2), (1000.0, 0.0)]
)
def test_what_lies_below_voices_is_taken_out(hz: float, passes_db: float) -> None:
    settled = filtered(tone(0.0, 2.0, hz))[SAMPLE_RATE_HZ:]
    assert peak_db(settled) == pytest.approx(passes_db, abs=0.3)


def test_the_filter_does_not_depend_on_how_audio_is_cut() -> None:
    pcm = tone(-6.0, hz=90.0) + tone(-6.0, hz=900.0)
    # By then, the estimated offset of the first frame has no effect.
    settled = slice(SAMPLE_RATE_HZ // 2, None)
    np.testing.assert_allclose(filtered(pcm, FRAME)[settled], filtered(pcm, 700)[settled], atol=1e-3)


def test_a_fresh_start_has_the_highest_gain() -> None:
    leveller = Leveller()
    leveller.level(tone(0.0)[:FRAME])
    leveller.reset()
    assert peak_db(leveller.level(tone(-60.0)[:FRAME])) == pytest.approx(-60.0 + MAX_GAIN_DB, abs=0.1)


@pytest.mark.parametrize(("level_db", "raised_db"), [(-3.0, -3.0), (-20.0, TARGET_DB), (-60.0, -60.0 + MAX_RAISED_DB)])
def test_what_is_held_whole_has_one_gain(level_db: float, raised_db: float) -> None:
    pcm = np.concatenate((tone(level_db), tone(level_db - 20.0)))
    out = raised(pcm)
    assert peak_db(out) == pytest.approx(raised_db, abs=0.1)
    np.testing.assert_allclose(out, pcm * 10 ** ((raised_db - level_db) / 20), rtol=0.02)
    np.testing.assert_allclose(raised(pcm + np.float32(0.3)), out, atol=0.01)
    assert not raised(np.zeros(4, np.float32)).any()
    assert len(raised(np.zeros(0, np.float32))) == 0
