"""Resemblyzer's voice encoder: its vectors equal those of the published package, and distinguish voices."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from antiphon.adapters.resemblyzer.encoder import ResemblyzerEncoder, windows_of
from antiphon.adapters.spec import LaneModelOptions
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.errors import ModelError
from antiphon.events.transcription import EnrolledVoice
from antiphon.loading.loader import load, prepare, store_of
from antiphon.loading.selection import SPEAKER_ROLES, selected_models
from antiphon.modeling.sound.voice_weights import MAGIC_NUMBER, PROTOCOL_VERSION, read_weights
from antiphon.settings import Settings
from antiphon.settings import load as load_settings
from antiphon.turns.voices.enrolment import enrolment_takes
from antiphon.turns.voices.primary_speaker import PrimarySpeaker, TurnSpeaker
from tests.conftest import Recording

# Vectors of Resemblyzer 0.1.4 (`embed_utterance` of the recording at its own level, or raised to -30 dBFS).
GOLDEN = Path(__file__).parent / "golden" / "resemblyzer.json"


def settings() -> Settings:
    return load_settings({"speaker_model": "resemblyzer"}, os.environ)


@pytest.fixture(scope="module")
def encoder() -> Iterator[ResemblyzerEncoder]:
    chosen = settings()
    (source,) = selected_models(chosen, SPEAKER_ROLES)
    encoder = ResemblyzerEncoder(prepare(chosen, store_of(chosen.models), source), source.id, LaneModelOptions())
    yield encoder
    encoder.close()


def test_vectors_are_those_of_the_published_package(
    encoder: ResemblyzerEncoder, recordings: dict[str, Recording]
) -> None:
    golden = json.loads(GOLDEN.read_text())
    assert len(golden) == 4
    for name, vector in golden.items():
        found = encoder.encode(recordings[name].pcm)
        assert found @ np.array(vector) > 0.9999
        assert np.abs(found - vector).max() < 2e-3


@pytest.mark.parametrize("num_samples", [0, 1, 160, 400, 9600, 25600, 25601, 64000])
def test_a_vector_has_the_length_one_however_short_the_speech(encoder: ResemblyzerEncoder, num_samples: int) -> None:
    speech = np.random.default_rng(1).normal(0, 0.1, num_samples).astype(np.float32)
    for pcm in (speech, np.zeros(num_samples, np.float32)):
        vector = asyncio.run(encoder.embed(pcm))
        assert vector.shape == (encoder.profile.size,)
        assert vector.dtype == np.float32
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


def test_windows_overlap_by_half_and_the_last_one_is_mostly_speech() -> None:
    assert windows_of(0) == windows_of(25_600) == [0]
    assert windows_of(64_000) == [0, 77, 154, 231]
    for num_samples in range(26_000, 90_000, 1000):
        assert num_samples - windows_of(num_samples)[-1] * 160 >= 0.75 * 25_600


def test_voices_are_told_apart_in_a_conversation(encoder: ResemblyzerEncoder, recordings: dict[str, Recording]) -> None:
    def turns(name: str) -> list[Pcm]:
        pcm = recordings[name].pcm
        return [pcm[at : at + 2 * SAMPLE_RATE_HZ] for at in range(0, len(pcm) - SAMPLE_RATE_HZ, 2 * SAMPLE_RATE_HZ)]

    async def main() -> None:
        speaker = PrimarySpeaker("auto", encoder.profile)
        user = [await encoder.embed(pcm) for pcm in turns("ls-other-3331-159605-0000")]
        others = [await encoder.embed(pcm) for name in ("jfk", "fleurs-es-000") for pcm in turns(name)]
        assert len(user) >= 6
        for vector in user[:2]:
            speaker.heard(vector, 2.0)
        found = [speaker.heard(vector, 2.0).speaker for vector in others]
        assert found.count(TurnSpeaker.OTHER) >= 0.9 * len(found)
        assert TurnSpeaker.OTHER not in [speaker.heard(vector, 2.0).speaker for vector in user[2:]]

    asyncio.run(main())


@pytest.mark.slow
def test_an_enrolled_voice_is_told_from_others_from_the_first_turn_on(
    encoder: ResemblyzerEncoder, recordings: dict[str, Recording]
) -> None:
    enrolled_s = 6

    async def main() -> None:
        whole = recordings["ls-other-3331-159605-0000"].pcm
        takes = enrolment_takes(whole[: enrolled_s * SAMPLE_RATE_HZ])
        voices = [EnrolledVoice(await encoder.embed(take), enrolled_s) for take in takes]
        speaker = PrimarySpeaker("enrolled", encoder.profile, voices)

        async def judged(pcm: Pcm, seconds: float) -> list[TurnSpeaker]:
            size = int(seconds * SAMPLE_RATE_HZ)
            turns = [pcm[at : at + size] for at in range(0, len(pcm) - size, size)]
            return [speaker.judge(await encoder.embed(turn), seconds).speaker for turn in turns]

        for seconds in (1.0, 2.0):
            own = await judged(whole[enrolled_s * SAMPLE_RATE_HZ :], seconds)
            assert own.count(TurnSpeaker.USER) >= 3
            assert TurnSpeaker.OTHER not in own
            others = [
                verdict for name in ("jfk", "fleurs-es-000") for verdict in await judged(recordings[name].pcm, seconds)
            ]
            assert others.count(TurnSpeaker.OTHER) >= 0.9 * len(others)

    asyncio.run(main())


def test_when_the_setting_names_it_then_it_is_loaded() -> None:
    chosen = settings()
    models = load(chosen, store_of(chosen.models), roles=SPEAKER_ROLES)
    try:
        assert models.speaker_model is not None
        assert models.speaker_model.profile.id == "resemblyzer"
        assert list(models.workers) == ["speaker"]
        # Clients cannot name it.
        assert models.names == ()
        asyncio.run(models.warm())
    finally:
        models.close()
    assert selected_models(load_settings({}, os.environ), SPEAKER_ROLES) == ()


def checkpoint(path: Path, *parts: object, rest: bytes = b"") -> Path:
    path.write_bytes(b"".join(pickle.dumps(part, 2) for part in parts) + rest)
    return path


def test_when_a_file_is_no_checkpoint_then_it_does_not_load(tmp_path: Path) -> None:
    file = tmp_path / "pretrained.pt"
    file.write_bytes(b"no")
    with pytest.raises(ModelError, match="does not load"):
        ResemblyzerEncoder(tmp_path, "x", LaneModelOptions())
    with pytest.raises(ValueError, match="old format"):
        read_weights(checkpoint(file, 1, 2, {}, {}, []))


def test_when_a_checkpoint_names_code_then_none_of_it_runs(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "harm"),)

    file = checkpoint(tmp_path / "pretrained.pt", MAGIC_NUMBER, PROTOCOL_VERSION, {}, {"model_state": Harm()}, [])
    with pytest.raises(ValueError, match="not allowed"):
        read_weights(file)
    assert not (tmp_path / "harm").exists()
