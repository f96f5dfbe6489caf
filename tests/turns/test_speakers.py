"""Who says each word of a recording, from vectors whose voices are known."""

from __future__ import annotations

import numpy as np
import pytest

from antiphon.audio import Pcm
from antiphon.contracts.speaker import VoiceClustering
from antiphon.events.transcription import KnownVoice
from antiphon.turns.voices.speakers import SpeakerHints, WhoSpeaks, linked, without_channel

SIZE = 64
CHANNEL = np.eye(1, SIZE, SIZE - 1, dtype=np.float32)
CLUSTERING = VoiceClustering(1.6, 0.4, 0.26, 0.57, 0.45, 4.0, 0.5, 1.0, 0.5, CHANNEL)


def voice(number: int) -> Pcm:
    return np.eye(1, SIZE, number, dtype=np.float32)[0]


class Recording:
    """A recording in which voices speak one after the other. A window has the voices in it, and noise.

    `turns`: the voice and the seconds of each turn. Words last 0.3 s, and turns are `pause_s` apart.
    """

    def __init__(self, *turns: tuple[int, float], pause_s: float = 0.1, noise: float = 0.1, line: float = 0.0) -> None:
        chance = np.random.default_rng(0)
        words, self.spoken, at = list[tuple[float, float]](), list[int](), 0.0
        for number, seconds in turns:
            for k in range(round(seconds / 0.3)):
                words.append((at + 0.3 * k, at + 0.3 * k + 0.3))
                self.spoken.append(number)
            at = words[-1][1] + pause_s
        self.words = np.array(words)
        starts = np.arange(0, max(0.1, at - 1.2), 0.4)
        self.windows = np.stack((starts, starts + 1.6), axis=1)
        vectors = []
        for start, end in self.windows:
            near = range(np.searchsorted(self.words[:, 1], start), np.searchsorted(self.words[:, 0], end))
            vector = np.zeros(SIZE)
            for k in near:
                vector += (min(self.words[k, 1], end) - max(self.words[k, 0], start)) * voice(self.spoken[k])
            vector = vector / max(float(np.linalg.norm(vector)), 1e-6) + noise * chance.normal(size=SIZE)
            vectors.append(vector / np.linalg.norm(vector) + line * CHANNEL[0])
        self.vectors = np.array(vectors, np.float32)
        self.vectors /= np.linalg.norm(self.vectors, axis=1, keepdims=True)

    def labels(self, **hints: object) -> list[int | str]:
        who = WhoSpeaks(self.windows, self.vectors, self.words, CLUSTERING)
        return who.labels(SpeakerHints(**hints))  # type: ignore[arg-type]

    def wrong(self, labels: list[int | str]) -> float:
        """Return the share of words with another label than most words of their voice have."""
        usual = {n: max(set(labels), key=[x for x, m in zip(labels, self.spoken, strict=True) if m == n].count)
                 for n in set(self.spoken)}  # fmt: skip
        return float(np.mean([usual[n] != x for x, n in zip(labels, self.spoken, strict=True)]))


TABLE = [(k % 4 * 3 % 5, 1.5 + k % 3) for k in range(16)]


def test_each_word_has_its_voice_and_numbers_are_in_the_order_of_speaking() -> None:
    recording = Recording((7, 3.0), (2, 2.4), (7, 1.8), (5, 6.0), (2, 3.0), (7, 1.5))
    labels = recording.labels()
    assert recording.wrong(labels) < 0.05
    assert list(dict.fromkeys(labels)) == [0, 1, 2]


def test_a_word_that_sounds_like_another_voice_stays_in_its_turn() -> None:
    recording = Recording((0, 9.0), (1, 9.0), (0, 9.0), (1, 9.0), noise=0.3)
    assert np.count_nonzero(np.diff([int(label) for label in recording.labels()])) == 3


@pytest.mark.parametrize("pause_s", [0.0, 0.1, 0.6])
def test_a_change_inside_a_stretch_of_speech_is_at_the_right_word(pause_s: float) -> None:
    recording = Recording((0, 6.0), (1, 6.0), pause_s=pause_s)
    changes = np.flatnonzero(np.diff([int(label) for label in recording.labels()]))
    assert len(changes) == 1
    assert abs(int(changes[0]) - 19) <= 1


def test_one_voice_is_one_speaker_however_long_it_speaks() -> None:
    recording = Recording(*[(0, 9.0)] * 150, noise=0.15)
    assert set(recording.labels()) == {0}


def test_forty_voices_are_forty_speakers() -> None:
    recording = Recording(*[(k % 40, 5.1) for k in range(120)])
    assert len(set(recording.labels())) == 40
    assert recording.wrong(recording.labels()) < 0.05


def test_a_voice_with_too_little_speech_gets_anothers_label() -> None:
    recording = Recording((0, 9.0), (1, 3.0), (0, 9.0), (2, 9.0))
    assert len(set(recording.labels())) == 2
    # Unless the number of speakers is given.
    assert len(set(recording.labels(speakers=3))) == 3


def test_hints_limit_the_number_of_speakers() -> None:
    recording = Recording(*TABLE)
    assert len(set(recording.labels())) == 4
    assert len(set(recording.labels(max_speakers=3))) == 3
    assert len(set(recording.labels(max_speakers=9))) == 4
    assert len(set(recording.labels(speakers=2))) == 2


def test_a_line_that_all_voices_share_does_not_make_them_one() -> None:
    recording = Recording((0, 6.0), (1, 6.0), (0, 6.0), line=3.0)
    assert recording.wrong(recording.labels()) < 0.05
    assert np.allclose(without_channel(recording.vectors, CLUSTERING) @ CHANNEL.T, 0, atol=1e-6)


def test_known_speakers_have_their_names() -> None:
    recording = Recording((3, 6.0), (4, 6.0), (3, 3.0))
    known = (KnownVoice("Ann", voice(4), 5.0), KnownVoice("Bob", voice(9), 5.0))
    labels = recording.labels(known=known)
    assert set(labels) == {0, "Ann"}
    assert labels[0] == 0
    # A name has one voice at most, the most similar one.
    both = (KnownVoice("Ann", (voice(3) + 2 * voice(4)) / np.float32(5**0.5), 5.0),)
    assert set(recording.labels(known=both)) == {0, "Ann"}


def test_a_few_words_are_one_speaker() -> None:
    who = WhoSpeaks(np.array([[0.0, 0.2]]), voice(1)[None], np.array([[0.0, 0.2]]), CLUSTERING)
    assert who.labels(SpeakerHints()) == [0]
    # Words without a window of their own.
    words = np.array([[50.0, 50.2], [90.0, 90.1]])
    assert WhoSpeaks(np.array([[0.0, 0.2]]), voice(1)[None], words, CLUSTERING).labels(SpeakerHints()) == [0, 0]


def test_groups_are_joined_as_their_vectors_would_be() -> None:
    vectors = np.array([[1.0, 0], [0.9, 0.1], [0, 1], [0.1, 0.9], [-1, 0]])
    apart = linked(vectors, np.ones(5), 0.5)
    assert apart.tolist() == [1, 1, 2, 2, 0] or len(set(apart)) == 3
    assert apart[0] == apart[1] != apart[2] == apart[3]
    # The same in two groups.
    sums = np.array([vectors[0] + vectors[1], vectors[2], vectors[3], vectors[4]])
    assert len(set(linked(sums, np.array([2, 1, 1, 1]), 0.5))) == 3
    assert len(set(linked(vectors, np.ones(5), -2.0, 2))) == 2
