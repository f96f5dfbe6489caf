"""Recordings with a person on each channel: which channels are transcribed, and what is heard on each."""

from __future__ import annotations

import io

import numpy as np
import pytest

from antiphon.audio import Pcm
from antiphon.audio.channel_survey import ChannelFacts, ChannelPicker, ChannelSurvey
from antiphon.audio.containers import OneChannel, decode, survey_channels
from tests.audio.sound_files import heard, pcm16, wav, written
from tests.conftest import Recording

RATE_HZ = 16_000


@pytest.fixture(scope="module")
def one(recordings: dict[str, Recording]) -> Pcm:
    return recordings["jfk"].pcm[: 5 * RATE_HZ]


@pytest.fixture(scope="module")
def other(recordings: dict[str, Recording]) -> Pcm:
    return recordings["lj-LJ001-0004"].pcm[: 4 * RATE_HZ]


@pytest.fixture(scope="module")
def call(one: Pcm, other: Pcm) -> Pcm:
    """A call: one person, then the other, each on a channel with noise 60 dB below the speech."""
    rest = np.zeros_like(other)
    noise = np.random.default_rng(0).normal(0, 1e-4, (2, len(one) + len(other))).astype(np.float32)
    return np.stack([np.concatenate((one, rest)), np.concatenate((np.zeros_like(one), other))]) + noise


def surveyed(channels: Pcm, piece: int = 1000) -> ChannelFacts:
    survey = ChannelSurvey()
    for start in range(0, channels.shape[1], piece):
        survey.feed(channels[:, start : start + piece], RATE_HZ)
    return survey.facts()


def delayed(pcm: Pcm, samples: int) -> Pcm:
    return np.roll(pcm, samples)


def test_each_side_of_a_call_has_a_sound_of_its_own(call: Pcm) -> None:
    facts = surveyed(call)
    assert facts.own == (0, 1)
    assert facts.apart
    # The length of the pieces does not matter.
    assert surveyed(call, 77) == facts


@pytest.mark.parametrize(
    "channels",
    [
        lambda x, noise: [x],
        lambda x, noise: [x, x],
        lambda x, noise: [x, -x],
        lambda x, noise: [x, 0.1 * x],
        lambda x, noise: [x, 0 * x],
        lambda x, noise: [x, noise],
        lambda x, noise: [x + 0.3, x + noise + 0.3],
        lambda x, noise: [x, delayed(x, 13) * 0.7],
        lambda x, noise: [(0.5 + k / 16) * delayed(x, 5 * k) + noise[:: (-1) ** k] for k in range(8)],
    ],
    ids=["mono", "equal", "inverted", "softer", "silent", "hiss", "offset", "late", "array of 8"],
)
def test_one_voice_is_transcribed_once_on_however_many_channels(one: Pcm, channels: object) -> None:
    noise = np.random.default_rng(1).normal(0, 3e-5, len(one)).astype(np.float32)
    facts = surveyed(np.stack(channels(one, noise)).astype(np.float32))  # type: ignore[operator]
    assert facts.own == (0,)
    assert not facts.apart


def test_channels_that_share_only_an_offset_are_two(call: Pcm) -> None:
    assert surveyed(call + np.float32(0.2)).own == (0, 1)


def test_two_who_always_speak_at_once_have_channels_of_their_own(one: Pcm, other: Pcm) -> None:
    facts = surveyed(np.stack([one[: len(other)], other]))
    assert facts.own == (0, 1)
    assert facts.apart


def test_two_microphones_in_one_room_are_no_call(call: Pcm) -> None:
    left, right = call
    facts = surveyed(np.stack([left + 0.5 * delayed(right, 40), right + 0.5 * delayed(left, 40)]))
    assert not facts.apart


def test_a_fifth_of_a_second_and_a_tone_are_one_channel(one: Pcm) -> None:
    short = one[RATE_HZ : RATE_HZ * 6 // 5]
    assert surveyed(np.stack([short, -short]), 400).own == (0,)
    tone = np.sin(np.arange(RATE_HZ) * 2 * np.pi * 440 / RATE_HZ).astype(np.float32)
    assert surveyed(np.stack([tone, 0.5 * tone])).own == (0,)


def test_silence_is_one_channel() -> None:
    assert surveyed(np.zeros((3, RATE_HZ), np.float32)).own == (0,)
    assert ChannelSurvey().facts().own == (0,)


def test_a_channel_is_decoded_without_the_crosstalk_of_the_other(call: Pcm, one: Pcm, other: Pcm) -> None:
    left, right = call
    mixed = np.stack([left + 0.03 * right, right + 0.03 * left])
    facts = surveyed(mixed)
    assert facts.own == (0, 1)
    data = wav(pcm16(mixed.T), channels=2)
    for channel, speech in enumerate((left, right)):
        pcm = np.concatenate(list(decode(io.BytesIO(data), channel=OneChannel(channel, facts))))
        assert len(pcm) == pytest.approx(len(left), abs=200)
        assert np.mean(heard(speech, pcm)) > 0.95
    # The side that listens is silent.
    end = np.concatenate(list(decode(io.BytesIO(data), channel=OneChannel(0, facts))))[len(one) + 1600 :]
    assert np.sqrt(np.mean(end**2)) < 0.1 * np.sqrt(np.mean((0.03 * other) ** 2))


def test_channels_are_found_in_compressed_files_too(call: Pcm) -> None:
    data = io.BytesIO(written(call, "ogg", "libopus", 48_000, layout="stereo"))
    survey = survey_channels(data)
    with pytest.raises(StopIteration) as end:
        while True:
            next(survey)
    assert end.value.value.own == (0, 1)
    assert data.tell() == 0


def test_a_channel_that_a_later_recording_of_the_file_does_not_have_is_silent_there(call: Pcm, one: Pcm) -> None:
    data = wav(pcm16(call.T), channels=2) + wav(pcm16(one))
    for channel, length in ((0, len(one)), (1, 0)):
        pcm = np.concatenate(list(decode(io.BytesIO(data), channel=OneChannel(channel, surveyed(call)))))
        assert np.count_nonzero(np.abs(pcm[call.shape[1] + 100 :]) > 0.01) > 0.2 * length - 1
        assert pcm[call.shape[1] + 100 :].any() == bool(length)


def test_a_channel_that_a_piece_does_not_have_is_silent(one: Pcm) -> None:
    picker = ChannelPicker(RATE_HZ, 1, (0.1, 0.1))
    assert not picker.feed(one[None]).any()
