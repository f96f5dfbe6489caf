"""Sessions of Qwen3-ASR with tiny random weights: the context that they keep across pauses, and its bounds.

The transcripts are noise. The tests check the audio and the text of each decoded window. They also check that the
hypothesis equals that of the same window in a new stream.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from antiphon.adapters.qwen3_asr import transcriber
from antiphon.adapters.qwen3_asr.transcriber import Qwen3Asr, Qwen3AsrStream
from antiphon.adapters.spec import EngineModelOptions
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import Hypothesis, Window
from antiphon.engine.api import EngineSettings
from antiphon.events.transcription import (
    AppendAudio,
    CommitAudio,
    StreamTuning,
    TranscriptDone,
    TranscriptionConfig,
    TranscriptionEvent,
)
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.session import TranscriptionSession
from tests.adapters import tiny_qwen3_asr as tiny
from tests.scripted import ScriptedDetector

AUDIO = tiny.sound(27)
KEPT = StreamTuning(keep_context=True, max_audio_s=60, max_prefix_tokens=1024)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("qwen3_asr"))


def said(*starts_s: float, length_s: float = 3.0, pause_s: float = 2.0) -> Pcm:
    """Return utterances, each cut from AUDIO at one of the given seconds, with silence between them."""
    parts = []
    for start_s in starts_s:
        parts.append(AUDIO[int(start_s * SAMPLE_RATE_HZ) : int((start_s + length_s) * SAMPLE_RATE_HZ)])
        parts.append(np.zeros(int(pause_s * SAMPLE_RATE_HZ), np.float32))
    return np.concatenate(parts)


@dataclass
class Recorded(Qwen3Asr):
    """A model that records the windows that its sessions decode."""

    folder: Path
    asked: list[Window] = field(default_factory=list)
    found: list[Hypothesis] = field(default_factory=list)
    kv_bytes: list[int] = field(default_factory=list)
    done: list[TranscriptDone] = field(default_factory=list)
    kv_mb: int = 64

    def __post_init__(self) -> None:
        settings = EngineSettings(kv_bytes=self.kv_mb << 20)
        super().__init__(self.folder, "tiny", EngineModelOptions(threads=1, weights="fp32", settings=settings))

    def open(self) -> Qwen3AsrStream:
        model = self

        class Stream(Qwen3AsrStream):
            async def decode(self, window: Window, temperature: float = 0.0) -> Hypothesis:
                model.asked.append(window)
                model.found.append(await super().decode(window, temperature))
                model.kv_bytes.append((await model.engine.state()).kv_bytes)
                return model.found[-1]

        return Stream(self)

    async def hear(self, pcm: Pcm, tuning: StreamTuning) -> None:
        """Play a session of one turn, which the client commits at its end. Only finals are decoded."""

        async def emit(event: TranscriptionEvent) -> None:
            if isinstance(event, TranscriptDone):
                self.done.append(event)

        inbox = Inbox(3600)
        config = TranscriptionConfig(language="en", tuning=tuning, partials=False)
        session = TranscriptionSession(config, self, ScriptedDetector(), inbox, emit)
        await inbox.put(AppendAudio(pcm))
        await inbox.put(CommitAudio())
        inbox.close()
        await session.run()

    async def fresh(self, window: Window) -> tuple[int, ...]:
        """Return the tokens of a window in a new stream."""
        stream = Qwen3AsrStream(self)
        try:
            return tokens_of(await stream.decode(window))
        finally:
            stream.close()


def tokens_of(found: Hypothesis) -> tuple[int, ...]:
    return tuple(t for p in found.pieces for t in p.tokens)


def play(folder: Path, pcm: Pcm, tuning: StreamTuning, *, compare: bool = True) -> Recorded:
    """Return a session's recorded windows, after comparing each with a decode in a new stream."""

    async def main() -> Recorded:
        model = Recorded(folder)
        try:
            await asyncio.wait_for(model.hear(pcm, tuning), 300)
            for window, found in zip(model.asked, model.found, strict=True):
                assert not compare or await model.fresh(window) == tokens_of(found)
        finally:
            model.close()
        return model

    return asyncio.run(main())


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the guard against loops, because random weights repeat themselves."""
    monkeypatch.setattr(transcriber, "LOOP_REPEATS", 10_000)


def test_audio_and_words_go_on_over_pauses_and_nothing_finished_is_computed_again(
    folder: Path, unguarded: None
) -> None:
    heard = play(folder, said(0, 3, 6, 9), KEPT, compare=False)
    assert len(heard.asked) == 4
    assert {w.start_sample for w in heard.asked} == {heard.asked[0].start_sample}
    assert [len(w.pcm) // SAMPLE_RATE_HZ for w in heard.asked] == [3, 8, 13, 18]
    given: tuple[int, ...] = ()
    for window, found in zip(heard.asked, heard.found, strict=True):
        assert (window.prefix, window.context) == (given, "")
        given += tokens_of(found)
    # In 18 s, two encoder windows of 8 s are finished. The first window was computed twice, because louder audio after
    # it raised the floor of its features.
    assert (heard.counts.finished, heard.counts.recomputed) == (3, 1)
    assert heard.done[0].text == "".join(p.text for f in heard.found for p in f.pieces).strip()


def test_what_is_carried_gives_the_hypotheses_of_fresh_decodes(folder: Path, unguarded: None) -> None:
    play(folder, said(0, 3, 6), KEPT)


@pytest.mark.parametrize("tuning", [StreamTuning(), StreamTuning(keep_context=False)])
def test_without_it_each_window_after_a_pause_is_heard_by_itself(
    folder: Path, unguarded: None, tuning: StreamTuning
) -> None:
    heard = play(folder, said(0, 3), tuning)
    assert [(len(w.pcm) // SAMPLE_RATE_HZ, w.prefix, w.context) for w in heard.asked] == [(3, (), "")] * 2


@pytest.mark.slow
def test_when_the_audio_is_as_long_as_it_may_be_then_its_text_goes_on(folder: Path, unguarded: None) -> None:
    tuning = replace(KEPT, max_audio_s=12.0, max_prefix_tokens=400)
    heard = play(folder, said(0, 3, 6, 9), tuning)
    assert max(len(w.pcm) for w in heard.asked) <= 16 * SAMPLE_RATE_HZ
    starts = [w.start_sample for w in heard.asked]
    assert 1 < len(set(starts)) < len(starts)
    assert heard.asked[0].context == ""
    for window in heard.asked:
        text = "".join(p.text for w, f in zip(heard.asked, heard.found, strict=True) for p in f.pieces
                       if w.start_sample < window.start_sample)  # fmt: skip
        assert text.endswith(window.context)
        assert len(window.context.encode()) <= 400
        assert len(window.prefix) <= 200


def test_when_an_utterance_is_said_again_then_all_of_it_is_decoded_again(folder: Path) -> None:
    """With the guard against loops enabled, audio is not removed just because the same was said before."""
    heard = play(folder, said(0, 0, 0), KEPT)
    assert [len(w.pcm) // SAMPLE_RATE_HZ for w in heard.asked] == [3, 8, 13]
    assert [w.prefix for w in heard.asked[1:]] == [
        tokens_of(heard.found[0]),
        tokens_of(heard.found[0]) + tokens_of(heard.found[1]),
    ]


@pytest.mark.slow
def test_after_many_pauses_audio_text_and_kv_are_no_more_than_at_first(folder: Path) -> None:
    """The model loops in every window. Neither its context nor its output grows because of this."""
    tuning = replace(KEPT, max_audio_s=12.0, max_prefix_tokens=64)
    heard = play(folder, said(*(k % 24 for k in range(24)), length_s=2.0), tuning, compare=False)
    assert len(heard.asked) == 24
    assert any(w.context for w in heard.asked)
    # A window that is too long is cut at most 4 s later.
    assert max(len(w.pcm) for w in heard.asked) <= 16 * SAMPLE_RATE_HZ
    assert max(len(w.context) for w in heard.asked) <= 64
    assert max(heard.kv_bytes[8:]) <= max(heard.kv_bytes[:8])
    assert max(f.completion_tokens for f in heard.found) <= 16 * transcriber.TOKENS_PER_S + transcriber.EXTRA_TOKENS
