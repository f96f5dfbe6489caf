"""A client that mutes itself while it is answered, and asks its next question after the answer, or over it."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.events.transcription import (
    AppendAudio,
    ServerVad,
    SpeechStarted,
    TranscriptDone,
    TranscriptionConfig,
    TranscriptionEvent,
)
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.session import TranscriptionSession
from tests.scripted import ScriptedDetector, ScriptedTranscriber, speech, text

CHUNK = SAMPLE_RATE_HZ // 50
# Loud enough that the echo guard does not take it for the residual of an echo canceller.
FIRST_WORD = 3
ANSWER_S = 5.0


def answer() -> Pcm:
    """Return five seconds of noise bursts, with levels like those of a voice."""
    chance = np.random.default_rng(1)
    sound = chance.normal(size=int(ANSWER_S * SAMPLE_RATE_HZ)) * 0.05
    return (sound * np.repeat(chance.random(50) > 0.3, len(sound) // 50)).astype(np.float32)


def asked(muted_s: float, num_words: int) -> list[TranscriptionEvent]:
    """Return the events of a question asked `muted_s` after the last audio, where an answer was sent in between."""
    out, now_s = list[TranscriptionEvent](), [100.0]

    async def emit(event: TranscriptionEvent) -> None:
        out.append(event)

    async def main() -> None:
        inbox = Inbox(3600)
        config = TranscriptionConfig(vad=ServerVad(0.5, 96, 192))
        session = TranscriptionSession(
            config, ScriptedTranscriber(), ScriptedDetector(), inbox, emit, guards_echo=True, clock=lambda: now_s[0]
        )

        async def say(pcm: Pcm) -> None:
            for at in range(0, len(pcm), CHUNK):
                now_s[0] += 0.02
                await inbox.put(AppendAudio(pcm[at : at + CHUNK]))
                for _ in range(12):
                    await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(session.run)
            await say(np.zeros(SAMPLE_RATE_HZ, np.float32))
            session.expect_echo(answer())
            now_s[0] += muted_s
            await say(np.concatenate((speech(FIRST_WORD, num_words), np.zeros(SAMPLE_RATE_HZ, np.float32))))
            inbox.close()

    anyio.run(main)
    return out


@pytest.mark.parametrize("muted_s", [ANSWER_S + 2.0, 1.0], ids=["after the answer", "over it"])
def test_when_a_muted_client_goes_on_then_its_first_words_are_heard(muted_s: float) -> None:
    out = asked(muted_s, 6)
    assert [e.text for e in out if isinstance(e, TranscriptDone)] == [text(FIRST_WORD, 6)]
    (started,) = [e for e in out if isinstance(e, SpeechStarted)]
    # The first sample of its audio, or a little of the silence before.
    assert 850 <= started.at_ms <= 1000
