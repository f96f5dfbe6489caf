"""The speakers of files, with real voices, the real speaker encoder and the real detector; the words are scripted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import SpeakerModel, TranscriptSegment, VoiceActivityDetector
from antiphon.contracts.speaker import VoiceClustering
from antiphon.events.transcription import KnownVoice
from antiphon.events.words import Word
from antiphon.loading.loaded import LoadedModels
from antiphon.loading.loader import load, store_of
from antiphon.sessions.transcription.file_speakers import FileVoices, UnfitReference, known_voice
from antiphon.settings import load as load_settings
from antiphon.turns.voices.speakers import SpeakerHints
from tests.conftest import Recording

Recordings = dict[str, Recording]
WORD_S = 0.32


@pytest.fixture(scope="module")
def models() -> Iterator[LoadedModels]:
    settings = load_settings({"speaker_model": "resemblyzer"}, os.environ)
    models = load(settings, store_of(settings.models), roles=("vad", "speaker"))
    yield models
    models.close()


def encoder(models: LoadedModels) -> tuple[SpeakerModel, VoiceClustering]:
    assert models.speaker_model
    assert models.speaker_model.profile.clustering
    return models.speaker_model, models.speaker_model.profile.clustering


def detector(models: LoadedModels) -> VoiceActivityDetector:
    return models.required_vad


def segment(start_s: float, seconds: float) -> TranscriptSegment:
    """Return a segment of words of WORD_S."""
    times = np.arange(start_s, start_s + seconds - WORD_S / 2, WORD_S)
    words = tuple(Word(f"w{100 * at:.0f}", at, at + WORD_S, 1.0) for at in times)
    text = "".join(f" {word.text}" for word in words)
    return TranscriptSegment(0, 0, start_s, start_s + seconds, text, (), 0.0, 0.0, 1.0, 0.0, words)


def labelled(
    models: LoadedModels, turns: Sequence[Pcm], known: tuple[KnownVoice, ...] = ()
) -> list[tuple[str, float, float]]:
    """Return the speakers of turns that follow each other in one segment, each with its start and end."""

    async def main() -> list[TranscriptSegment]:
        voices = FileVoices(*encoder(models), SpeakerHints(known))
        at = 0
        for turn in turns:
            # Speech arrives in pieces of any length.
            for piece in np.array_split(turn, 3):
                await voices.hear(at, piece)
                at += len(piece)
        return await voices.labelled([segment(0.0, at / SAMPLE_RATE_HZ)])

    return [(s.speaker, s.start_s, s.end_s) for s in asyncio.run(main())]


def reference(models: LoadedModels, name: str, pcm: Pcm) -> KnownVoice:
    return asyncio.run(known_voice(name, pcm, *encoder(models), detector(models)))


def of(recordings: Recordings, *names: str) -> Pcm:
    return np.concatenate([recordings[name].pcm for name in names])


def test_a_segment_is_divided_where_the_voice_changes(models: LoadedModels, recordings: Recordings) -> None:
    jfk, lj = of(recordings, "jfk"), of(recordings, "lj-LJ001-0004", "lj-LJ001-0013")
    # A pause in the middle of a sentence of a speech does not change the speaker.
    found = labelled(models, [jfk[: 6 * SAMPLE_RATE_HZ], lj, jfk[6 * SAMPLE_RATE_HZ :]])
    assert [speaker for speaker, _, _ in found] == ["A", "B", "A"]
    assert found[0][2] == pytest.approx(6.0, abs=0.7)
    assert found[1][2] == pytest.approx(6.0 + len(lj) / SAMPLE_RATE_HZ, abs=0.7)


def test_a_reference_gives_a_voice_its_name(models: LoadedModels, recordings: Recordings) -> None:
    jfk, lj = of(recordings, "jfk"), of(recordings, "lj-LJ001-0004", "lj-LJ001-0013")
    known = (reference(models, "Linda", of(recordings, "lj-LJ001-0002", "lj-LJ001-0008")),)
    assert [speaker for speaker, _, _ in labelled(models, [jfk, lj], known)] == ["A", "Linda"]


def test_references_without_one_voice_are_refused(models: LoadedModels, recordings: Recordings) -> None:
    jfk, lj = of(recordings, "jfk")[: 5 * SAMPLE_RATE_HZ], of(recordings, "lj-LJ001-0004")
    with pytest.raises(UnfitReference, match="two voices"):
        reference(models, "a", np.concatenate((jfk, lj)))
    music = of(recordings, "librosa-trumpet")
    for pcm in (music, np.zeros(SAMPLE_RATE_HZ, np.float32), np.zeros(0, np.float32), lj[: SAMPLE_RATE_HZ // 5]):
        with pytest.raises(UnfitReference, match=r"1 s are needed|no clear speech"):
            reference(models, "a", pcm)


class Unsure:
    """A detector that takes everything for speech, but is never sure."""

    frame_samples = 512

    def open(self) -> Unsure:
        return self

    def reset(self) -> None:
        pass

    async def feed(self, pcm: Pcm) -> list[float]:
        return [0.8] * (len(pcm) // self.frame_samples)


def test_a_reference_that_may_be_noise_is_refused(models: LoadedModels, recordings: Recordings) -> None:
    with pytest.raises(UnfitReference, match="no clear speech"):
        asyncio.run(known_voice("a", of(recordings, "librosa-trumpet"), *encoder(models), Unsure()))


def test_a_fifth_of_a_second_of_speech_is_one_speaker(models: LoadedModels, recordings: Recordings) -> None:
    found = labelled(models, [of(recordings, "lj-LJ001-0004")[SAMPLE_RATE_HZ : SAMPLE_RATE_HZ * 6 // 5]])
    assert [speaker for speaker, _, _ in found] == ["A"]


def test_a_file_without_words_has_no_speakers(models: LoadedModels) -> None:
    voices = FileVoices(*encoder(models), SpeakerHints())
    assert asyncio.run(voices.labelled([])) == []
