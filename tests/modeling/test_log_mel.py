"""Frames of growing sound equal those that the published extractor computes from the whole sound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

from antiphon.audio import Pcm
from antiphon.modeling.sound.log_mel import EDGE_FRAMES, GrowingMel, MelTransform

EXTRACTOR: Any = Qwen3ASRFeatureExtractor(feature_size=32)
MEL = MelTransform(EXTRACTOR.mel_filters, torch.device("cpu"))
CHUNK, WINDOW, MIN_SAMPLES = 20, 60, 8000
# Sound that becomes louder, so that its floor rises.
SOUND = (np.random.default_rng(2).standard_normal(80_000) * np.geomspace(1e-6, 1, 80_000)).astype(np.float32)
SOUND[20_000:21_000] = 0


def sound() -> GrowingMel:
    return GrowingMel(MEL.bins, CHUNK, WINDOW, MIN_SAMPLES)


def take(mels: list[GrowingMel], sounds: list[Pcm]) -> list[int]:
    """Give each of `mels` its sound, all in one transform. Returns the number of frames computed for each."""
    parts = [mel.new_part(pcm) for mel, pcm in zip(mels, sounds, strict=True)]
    for mel, pcm, part, (frames, peaks) in zip(mels, sounds, parts, MEL(parts), strict=True):
        mel.add(pcm, part, frames, peaks)
    return [part.count for part in parts]


def frames_of(mel: GrowingMel) -> np.ndarray:
    return np.maximum(np.concatenate(list(mel.chunks), 1)[:, : mel.num_frames], np.float32(mel.floor))


def published(pcm: Pcm) -> np.ndarray:
    made = EXTRACTOR(pcm, sampling_rate=16_000, padding="longest", n_window=0, return_tensors="np")
    found: np.ndarray = made["input_features"][0]
    return found


LENGTHS = st.lists(
    st.integers(0, len(SOUND)) | st.integers(0, 30).map(lambda n: 160 * n + 8000), min_size=1, max_size=6
)


@given(lengths=st.lists(LENGTHS, min_size=1, max_size=3), changed=st.integers(0, len(SOUND) - 1), starts=st.booleans())
@settings(max_examples=60, deadline=None)
def test_whatever_a_sound_was_before_its_frames_are_those_of_the_published_extractor(
    lengths: list[list[int]], changed: int, starts: bool
) -> None:
    mels = [sound() for _ in lengths]
    for step in range(max(map(len, lengths))):
        active = [n for n, own in enumerate(lengths) if step < len(own)]
        sounds = [SOUND[: lengths[n][step]].copy() for n in active]
        if step == 2 and changed < len(sounds[0]):
            sounds[0][changed] += 0.5
        if starts and step == 3:
            sounds[-1] = sounds[-1][500:]
        take([mels[n] for n in active], sounds)
        for n, pcm in zip(active, sounds, strict=True):
            expected = published(pcm)
            assert frames_of(mels[n]).shape == expected.shape
            np.testing.assert_allclose(frames_of(mels[n]), expected, rtol=0, atol=2e-6)


def test_only_frames_of_new_samples_are_computed() -> None:
    mel = sound()
    assert take([mel], [SOUND[:16_000]]) == [100]
    assert take([mel], [SOUND[:32_000]]) == [100 + EDGE_FRAMES]
    assert take([mel], [SOUND[:32_000]]) == [EDGE_FRAMES]
    # A shorter sound keeps the frames of what is left of it, and a changed one those before the change.
    assert take([mel], [SOUND[:24_000]]) == [EDGE_FRAMES]
    changed = SOUND[:24_000].copy()
    changed[20_800] += 1
    assert take([mel], [changed]) == [150 - (130 - EDGE_FRAMES)]


def test_a_finished_window_is_the_same_while_its_frames_are() -> None:
    mel, before = sound(), dict[int, tuple[object, float, np.ndarray]]()
    outcomes = set()
    for end in range(8000, len(SOUND) + 1, 6400):
        take([mel], [SOUND[:end]])
        assert len(mel.finished) == max(0, mel.num_frames - EDGE_FRAMES) // WINDOW
        frames, floor = frames_of(mel), mel.floor
        for number, window in enumerate(mel.finished):
            own = frames[:, number * WINDOW :][:, :WINDOW]
            if number in before:
                known, known_floor, known_frames = before[number]
                assert known is window
                same = window.is_same(known_floor, floor)
                assert same == np.array_equal(known_frames, own)
                outcomes.add(same)
            before[number] = window, floor, own.copy()
    assert outcomes == {True, False}
    take([mel], [SOUND[100:]])
    assert all(window is not before[number][0] for number, window in enumerate(mel.finished))


def test_when_a_sample_is_no_number_then_only_that_sound_is_none() -> None:
    mels, broken = [sound(), sound()], SOUND[:16_000].copy()
    broken[9000] = np.nan
    take(mels, [broken, SOUND[:16_000]])
    assert np.isnan(frames_of(mels[0])).all()
    np.testing.assert_allclose(frames_of(mels[1]), published(SOUND[:16_000]), rtol=0, atol=2e-6)
    take(mels, [SOUND[:16_000], SOUND[:16_000]])
    np.testing.assert_array_equal(*(frames_of(mel) for mel in mels))


@pytest.mark.parametrize("pieces", [160, 4000])
def test_memory_grows_by_doubling(pieces: int) -> None:
    mel, sizes = sound(), set()
    for end in range(8000, len(SOUND) + 1, pieces):
        take([mel], [SOUND[:end]])
        sizes.add(len(mel.chunks))
    assert len(sizes) <= 5
    take([mel], [SOUND[1000:9000]])
    assert len(mel.chunks) == WINDOW // CHUNK
