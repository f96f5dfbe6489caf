"""A session that another host continues: a turn open when the inbox closes is neither ended nor settled."""

from __future__ import annotations

import anyio
import pytest

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.events.transcription import (
    AppendAudio,
    CommitAudio,
    ServerVad,
    SpeechStarted,
    TranscriptDone,
    TranscriptionCommand,
    TranscriptionConfig,
    TranscriptionEvent,
    TurnCommitted,
)
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.microphone import MUTED_S
from antiphon.sessions.transcription.session import ONSET_MS, TranscriptionSession
from tests.scripted import FRAME, WORD_SAMPLES, ScriptedDetector, ScriptedTranscriber, speech, text

PREFIX_MS, SILENCE_MS = 96, 192
VAD = ServerVad(0.5, PREFIX_MS, SILENCE_MS)
WORD_MS = WORD_SAMPLES * 1000 // SAMPLE_RATE_HZ
# Two words and the silence that ends their turn, and their length in milliseconds.
TURN = speech(1, 2, 40)
TURN_MS = len(TURN) * 1000 // SAMPLE_RATE_HZ


async def left(
    inputs: list[TranscriptionCommand], vad: ServerVad | None, muted_s: float = 0.0
) -> tuple[list[TranscriptionEvent], float]:
    """Return the events of a session that was left after these inputs and `muted_s`, and its settled milliseconds."""
    out: list[TranscriptionEvent] = []

    async def emit(event: TranscriptionEvent) -> None:
        out.append(event)

    inbox = Inbox(3600)
    config = TranscriptionConfig(vad=vad)
    now_s = [0.0]
    parts = (config, ScriptedTranscriber(), ScriptedDetector(), inbox, emit)
    session = TranscriptionSession(*parts, clock=lambda: now_s[0])
    async with anyio.create_task_group() as group:
        group.start_soon(session.run)
        for command in inputs:
            await inbox.put(command)
            await anyio.wait_all_tasks_blocked()
        now_s[0] += muted_s
        session.leave_open_turn()
        inbox.close()
    return out, session.settled_ms


def transcripts(events: list[TranscriptionEvent]) -> list[str]:
    return [event.text for event in events if isinstance(event, TranscriptDone)]


@pytest.mark.anyio
async def test_a_turn_that_was_just_committed_still_gets_its_transcript_and_is_settled() -> None:
    # Its window waits for the silence that settles it.
    events, settled_ms = await left([AppendAudio(speech(1, 2, 8))], VAD)
    assert transcripts(events) == [text(1, 2)]
    assert settled_ms == 2 * WORD_MS + SILENCE_MS


@pytest.mark.anyio
async def test_speech_that_was_reported_ends_no_turn_and_is_heard_again_from_its_beginning() -> None:
    events, settled_ms = await left([AppendAudio(TURN), AppendAudio(speech(3, 3))], VAD)
    assert transcripts(events) == [text(1, 2)]
    assert sum(isinstance(event, TurnCommitted) for event in events) == 1
    started = [event for event in events if isinstance(event, SpeechStarted)]
    assert settled_ms == started[-1].at_ms == TURN_MS - PREFIX_MS


@pytest.mark.anyio
async def test_speech_that_is_too_short_to_be_known_for_one_is_heard_again_too() -> None:
    events, settled_ms = await left([AppendAudio(TURN), AppendAudio(speech(3, 1)[:FRAME])], VAD)
    assert sum(isinstance(event, SpeechStarted) for event in events) == 1
    assert TURN_MS - PREFIX_MS - ONSET_MS <= settled_ms <= TURN_MS - PREFIX_MS


@pytest.mark.anyio
async def test_without_detection_all_that_was_not_committed_is_heard_again() -> None:
    events, settled_ms = await left([AppendAudio(speech(1, 2)), CommitAudio(True), AppendAudio(speech(3, 9))], None)
    assert transcripts(events) == [text(1, 2)]
    assert settled_ms == 2 * WORD_MS


@pytest.mark.anyio
async def test_a_client_that_has_muted_itself_leaves_nothing_but_what_was_being_said() -> None:
    _, settled_ms = await left([AppendAudio(TURN)], VAD, muted_s=MUTED_S)
    assert settled_ms == TURN_MS
    _, settled_ms = await left([AppendAudio(TURN), AppendAudio(speech(3, 3))], VAD, muted_s=MUTED_S)
    assert settled_ms == TURN_MS - PREFIX_MS
    _, settled_ms = await left([AppendAudio(TURN)], None, muted_s=MUTED_S)
    assert settled_ms == 0
