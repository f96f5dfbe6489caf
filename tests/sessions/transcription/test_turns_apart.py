"""No turn suffers from the previous one: consecutive turns get the words that each gets alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import Transcriber, VoiceActivityDetector
from antiphon.events.transcription import (
    AppendAudio,
    CommitAudio,
    ServerVad,
    TranscriptDone,
    TranscriptionCommand,
    TranscriptionConfig,
    TranscriptionEvent,
)
from antiphon.events.words import bare_word
from antiphon.loading.loaded import LoadedModels
from antiphon.loading.loader import load, store_of
from antiphon.loading.selection import TRANSCRIPTION_ROLES
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.settings import load as load_settings
from tests.conftest import Recording
from tests.scripted import ScriptedDetector, ScriptedTranscriber, speech, text

# Turns of one, two and four seconds, by three speakers.
CLIPS = ("ls-other-1688-142285-0003", "lj-LJ001-0008", "lj-LJ001-0004", "lj-LJ001-0002", "lj-LJ001-0013")
Heard = tuple[Transcriber, VoiceActivityDetector]


class Apart(ScriptedTranscriber):
    """A scripted transcriber without carried context."""

    def __init__(self) -> None:
        super().__init__()
        self._profile = replace(self._profile, context_pause_s=0.0, settle_s=0.0)


def transcripts(
    models: Heard, commands: list[TranscriptionCommand], config: TranscriptionConfig, *, live: bool = False
) -> list[TranscriptDone]:
    """Return the transcripts that a session of these commands gets. `live`: the session keeps up with them."""
    out: list[TranscriptDone] = []

    async def emit(event: TranscriptionEvent) -> None:
        if isinstance(event, TranscriptDone):
            out.append(event)

    async def main() -> None:
        inbox = Inbox(3600)
        session = TranscriptionSession(config, *models, inbox, emit)
        async with anyio.create_task_group() as group:
            group.start_soon(session.run)
            for command in commands:
                await inbox.put(command)
                for _ in range(12 if live else 0):
                    await anyio.lowlevel.checkpoint()
            inbox.close()

    anyio.run(main)
    # A session that ends while a final is being decoded commits once more: an empty turn.
    return [done for done in out if done.text or done.streamed]


def silence(seconds: float) -> Pcm:
    return np.zeros(int(seconds * SAMPLE_RATE_HZ), np.float32)


def chunks(pcm: Pcm, size: int) -> list[TranscriptionCommand]:
    return [AppendAudio(pcm[i : i + size]) for i in range(0, len(pcm), size)]


@pytest.mark.heavy
@pytest.mark.parametrize("transcriber", [ScriptedTranscriber, Apart], ids=["carried context", "none"])
@given(
    turns=st.lists(st.tuples(st.integers(3, 20), st.floats(0.1, 3.0)), min_size=2, max_size=6),
    size=st.integers(160, 20_000),
    live=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_when_turns_follow_each_other_then_each_word_comes_once_and_in_order(
    transcriber: type[ScriptedTranscriber], turns: list[tuple[int, float]], size: int, live: bool
) -> None:
    sound, want, first = [silence(1.0)], list[str](), 1
    for num_words, gap_s in turns:
        sound += [speech(first, num_words), silence(gap_s)]
        want.append(text(first, num_words))
        first += num_words
    config = TranscriptionConfig(vad=ServerVad(0.5, 96, 96))
    done = transcripts((transcriber(), ScriptedDetector()), chunks(np.concatenate(sound), size), config, live=live)
    assert " ".join(d.text for d in done) == " ".join(d.streamed.strip() for d in done) == " ".join(want)
    if all(gap_s > 0.2 for _, gap_s in turns):
        assert [d.text for d in done] == want


@pytest.mark.slow
@given(
    turns=st.lists(st.tuples(st.integers(3, 20), st.floats(0.0, 3.0)), min_size=2, max_size=6),
    live=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_when_the_client_commits_then_each_commit_has_the_words_said_before_it(
    turns: list[tuple[int, float]], live: bool
) -> None:
    commands, want, first = list[TranscriptionCommand](), list[str](), 1
    for num_words, gap_s in turns:
        commands += [*chunks(np.concatenate((silence(gap_s), speech(first, num_words))), 512), CommitAudio()]
        want.append(text(first, num_words))
        first += num_words
    done = transcripts((ScriptedTranscriber(), ScriptedDetector()), commands, TranscriptionConfig(), live=live)
    assert [d.text for d in done] == [d.streamed.strip() for d in done] == want


@pytest.fixture(scope="module")
def models() -> Iterator[LoadedModels]:
    loaded_settings = load_settings({}, os.environ)
    loaded = load(loaded_settings, store_of(loaded_settings.models), roles=TRANSCRIPTION_ROLES)
    yield loaded
    loaded.close()


@pytest.mark.heavy
@pytest.mark.parametrize("gap_s", [0.6, 0.9, 3.0])
def test_when_people_speak_one_after_another_then_whisper_hears_each_as_alone(
    models: LoadedModels, recordings: dict[str, Recording], gap_s: float
) -> None:
    assert models.transcriber is not None
    assert models.vad is not None
    heard = (models.transcriber, models.vad)
    config = TranscriptionConfig(vad=ServerVad(), language="en", partials=False)

    def words(*clips: Pcm) -> list[str]:
        pcm = np.concatenate([part for clip in clips for part in (silence(0.5), clip, silence(gap_s))])
        done = transcripts(heard, chunks(pcm, 512), config)
        return [bare_word(w) for d in done for w in d.text.split()]

    clips = [recordings[name].pcm for name in CLIPS]
    assert words(*clips) == [word for clip in clips for word in words(clip)]
