"""Recordings of several channels: speech on any channel is in the mix, however the channels are related."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.audio import Pcm
from antiphon.audio.channels import ChannelMixer
from antiphon.audio.containers import decode_all
from tests.audio.sound_files import heard, pcm16, wav, written
from tests.conftest import Recording

RATE_HZ = 16_000
# How the channels are made from speech, `x`, and noise.
SAME_SPEECH = {
    "equal": lambda x, noise: [x, x],
    "opposite": lambda x, noise: [x, -x],
    "opposite, quieter": lambda x, noise: [x, -0.9 * x],
    "opposite, louder": lambda x, noise: [0.1 * x, -x],
    "opposite in noise": lambda x, noise: [x + noise, -x + noise[::-1]],
    "right alone": lambda x, noise: [0 * x, x],
    "right, noise on the left": lambda x, noise: [noise, x],
    "fourth of six": lambda x, noise: [noise, 0 * x, -noise, x, noise[::-1], 0 * x],
    "two of four are opposite": lambda x, noise: [x, noise, -x, noise[::-1]],
}


@pytest.fixture(scope="module")
def said(recordings: dict[str, Recording]) -> Pcm:
    return recordings["jfk"].pcm[: 4 * RATE_HZ]


@pytest.fixture(scope="module")
def said_too(recordings: dict[str, Recording]) -> Pcm:
    return recordings["lj-LJ001-0002"].pcm[RATE_HZ // 2 :][:RATE_HZ]


def mixed(channels: list[Pcm], piece: int = 1024) -> Pcm:
    samples = np.array(channels, np.float32)
    mixer = ChannelMixer(RATE_HZ, len(channels))
    return np.concatenate([mixer.feed(samples[:, at : at + piece]) for at in range(0, samples.shape[1], piece)])


def level(pcm: Pcm) -> float:
    return float(np.sqrt(np.mean(np.square(pcm, dtype=np.float64))))


@pytest.mark.parametrize("piece", [320, 8192])
@pytest.mark.parametrize("name", SAME_SPEECH)
def test_what_is_said_once_is_heard_as_loud_as_on_its_loudest_channel(name: str, piece: int, said: Pcm) -> None:
    noise = np.random.default_rng(0).normal(0, 0.001, len(said)).astype(np.float32)
    mix = mixed(SAME_SPEECH[name](said, noise), piece)
    assert len(mix) == len(said)
    assert all(heard(said, mix))
    assert level(mix) == pytest.approx(level(said), rel=0.05)
    assert abs(np.corrcoef(mix, said)[0, 1]) > 0.98


def test_two_sides_of_a_call_are_both_heard_whole_when_they_take_turns(said: Pcm, said_too: Pcm) -> None:
    quiet = 0.03 * said_too
    left = np.concatenate((said, 0 * quiet, said))
    right = np.concatenate((0 * said, quiet, 0 * said))
    mix = mixed([left, right])
    turn = mix[len(said) : len(said) + len(quiet)]
    assert all(heard(said_too, turn / 0.03))
    assert level(turn[3200:]) == pytest.approx(level(quiet[3200:]), rel=0.1)
    assert all(heard(said, mix[: len(said)]))
    assert all(heard(said, mix[-len(said) :]))


def test_hum_on_another_channel_does_not_take_the_place_of_speech(said: Pcm) -> None:
    hum = 0.3 * np.sin(np.arange(len(said)) * 2 * np.pi * 50 / RATE_HZ)
    weights = np.linalg.lstsq(np.stack([said, hum], 1), mixed([hum, said]), rcond=None)[0]
    assert weights[0] > 0.9


def test_two_who_talk_at_once_are_both_in_the_mix(said: Pcm, said_too: Pcm) -> None:
    other = np.resize(said_too, len(said))
    mix = mixed([said, other])
    weights = np.linalg.lstsq(np.stack([said, other], 1), mix, rcond=None)[0]
    assert np.abs(weights).min() > 0.5


def test_speech_that_cancels_beside_music_that_does_not_is_heard(said: Pcm, said_too: Pcm) -> None:
    music = np.resize(said_too, len(said))
    mix = mixed([music + said, music - said])
    weights = np.linalg.lstsq(np.stack([said, music], 1), mix, rcond=None)[0]
    assert np.abs(weights).min() > 0.4


@given(
    st.lists(st.sampled_from([0.0, 1e-3, -1e-3, 0.5, -0.5, 1.0, -1.0, 1e30]), min_size=1, max_size=9),
    st.lists(st.integers(0, 3000), min_size=1, max_size=5),
)
def test_whatever_the_gains_of_channels_are_the_loudest_one_is_heard(gains: list[float], sizes: list[int]) -> None:
    rng = np.random.default_rng(len(gains))
    mixer = ChannelMixer(RATE_HZ, len(gains))
    loudest = max(abs(g) for g in gains)
    for size in sizes:
        sound = rng.normal(0, 0.1, size).astype(np.float32)
        mix = mixer.feed(np.array(gains, np.float32)[:, None] * sound)
        assert mix.shape == (size,)
        assert np.isfinite(mix).all()
        if size > 200:
            assert level(mix) >= 0.9 * loudest * level(sound)


@pytest.mark.parametrize(
    ("container", "codec", "rate_hz"),
    [
        ("wav", "pcm_s16le", 16_000),
        ("wav", "pcm_u8", 16_000),
        ("wav", "pcm_f64le", 16_000),
        ("flac", "flac", 44_100),
        ("mp3", "libmp3lame", 44_100),
        ("ipod", "aac", 44_100),
        ("ogg", "libopus", 48_000),
    ],
)
def test_a_file_whose_channels_cancel_is_heard(container: str, codec: str, rate_hz: int, said: Pcm) -> None:
    data = written(np.stack([said, -0.9 * said]), container, codec, rate_hz, layout="stereo")
    found = decode_all(io.BytesIO(data))
    assert all(heard(said, found))
    assert level(found) == pytest.approx(level(said), rel=0.1)


@pytest.mark.parametrize("channel", range(6))
def test_six_channels_without_names_are_all_heard(channel: int, said: Pcm) -> None:
    samples = np.zeros((6, len(said)), np.float32)
    samples[channel] = said
    assert all(heard(said, decode_all(io.BytesIO(wav(pcm16(samples.T), channels=6)))))
