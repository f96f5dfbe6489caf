"""The guarantees of deltas, whatever the model answers: decoders that return other words each time, or fail."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import Hypothesis, HypothesisWord, TranscriberProfile, Window
from antiphon.errors import ModelError, Refused
from antiphon.events.transcription import (
    AppendAudio,
    CommitAudio,
    ServerVad,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptionConfig,
    TranscriptionEvent,
    TurnCommitted,
)
from antiphon.events.words import Word
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.session import TranscriptionSession
from tests.scripted import ScriptedDetector, ScriptedTranscriber, speech

WORDS = ("a", "bee", "sea,", "Dee", "dee", "eat.", "F")


class RandomDecoder(ScriptedTranscriber):
    """Answers each window with words drawn at random, now and then with noise, another language or an error."""

    def __init__(self, seed: int, profile: TranscriberProfile) -> None:
        super().__init__()
        self._profile = profile
        self._draw = random.Random(seed)

    async def decode(self, window: Window) -> Hypothesis:
        draw = self._draw
        for _ in range(draw.randrange(3)):
            await anyio.lowlevel.checkpoint()
        if draw.random() < 0.05:
            raise ModelError("scripted failure")
        if draw.random() < 0.05:
            raise Refused("a full lane", 0.0)
        texts = draw.choices(WORDS, k=draw.randrange(8))
        pieces = tuple(HypothesisWord(f" {w}", (WORDS.index(w),), draw.random() ** 0.3) for w in texts)
        length_s = len(window.pcm) / SAMPLE_RATE_HZ
        edges = sorted(draw.uniform(0, length_s) for _ in range(2 * len(texts)))
        words = tuple(Word(w, *edges[2 * k : 2 * k + 2], 1.0) for k, w in enumerate(texts)) if window.word_times else ()
        return Hypothesis(pieces, "en", draw.random() ** 0.1, draw.random() < 0.9, 4, len(pieces), words)


@pytest.mark.slow
@pytest.mark.parametrize("first_probability", [None, 0.4])
@given(
    seed=st.integers(0, 2**32),
    turns=st.lists(st.tuples(st.integers(2, 15), st.floats(0.1, 1.5)), min_size=1, max_size=5),
    vad=st.booleans(),
    word_times=st.booleans(),
    context_pause_s=st.sampled_from([0.0, 1.5]),
)
@settings(deadline=None, max_examples=60)
def test_joined_deltas_are_what_is_said_to_be_streamed_and_none_comes_after_the_end(
    first_probability: float | None,
    seed: int,
    turns: list[tuple[int, float]],
    vad: bool,
    word_times: bool,
    context_pause_s: float,
) -> None:
    out: list[TranscriptionEvent] = []

    async def emit(event: TranscriptionEvent) -> None:
        out.append(event)

    async def main() -> None:
        profile = replace(
            ScriptedTranscriber().profile, first_probability=first_probability, context_pause_s=context_pause_s
        )
        config = TranscriptionConfig(vad=ServerVad(0.5, 96, 96) if vad else None, word_times=word_times)
        inbox = Inbox(3600)
        session = TranscriptionSession(config, RandomDecoder(seed, profile), ScriptedDetector(), inbox, emit)
        async with anyio.create_task_group() as group:
            group.start_soon(session.run)
            first = 1
            for num_words, gap_s in turns:
                pcm = np.concatenate((speech(first, num_words), np.zeros(int(gap_s * SAMPLE_RATE_HZ), np.float32)))
                first += num_words
                for start in range(0, len(pcm), 1600):
                    await inbox.put(AppendAudio(pcm[start : start + 1600]))
                    for _ in range(6):
                        await anyio.lowlevel.checkpoint()
                if not vad:
                    await inbox.put(CommitAudio())
            inbox.close()

    anyio.run(main)
    joined, over = defaultdict[int, str](str), set[int]()
    for event in out:
        match event:
            case TranscriptDelta(turn, delta):
                assert delta
                assert turn not in over
                joined[turn] += delta
            case TranscriptDone(turn):
                assert event.streamed == joined[turn]
                assert turn not in over
                over.add(turn)
            case TranscriptFailed(turn):
                assert turn not in over
                over.add(turn)
    assert over == {event.turn for event in out if isinstance(event, TurnCommitted)}
