"""A session whose client does not read for a while: listening and decoding stay in order."""

from __future__ import annotations

import anyio

from antiphon.events.transcription import (
    CommitAudio,
    ServerVad,
    SpeechStopped,
    TranscriptDone,
    TranscriptionCommand,
    TranscriptionConfig,
    TranscriptionEvent,
    TurnCommitted,
)
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.session import TranscriptionSession
from tests.scripted import ScriptedDetector, ScriptedTranscriber, speech, text
from tests.sessions.transcription.test_session import VAD, chunks, done, joined


class Gated(ScriptedTranscriber):
    """A transcriber whose finals wait until the gate opens."""

    def __init__(self) -> None:
        self.opens = anyio.Event()
        super().__init__(gate=lambda window: self.opens if window.final else None)


def held(
    inputs: list[TranscriptionCommand], hold: type, transcriber: ScriptedTranscriber, turn: ServerVad | None
) -> tuple[list[TranscriptionEvent], list[TranscriptionEvent]]:
    """Let the client not read the first event of the kind `hold`. Returns the events emitted until it reads on, and all
    events.

    The transcriber's gates open while the event is held.
    """
    out, before = list[TranscriptionEvent](), list[TranscriptionEvent]()

    async def main() -> None:
        reads = anyio.Event()

        async def emit(output: TranscriptionEvent) -> None:
            out.append(output)
            if isinstance(output, hold):
                await reads.wait()

        inbox = Inbox(3600)
        config = TranscriptionConfig(vad=turn, preflight=True)
        session = TranscriptionSession(config, transcriber, ScriptedDetector(), inbox, emit)
        async with anyio.create_task_group() as group:
            group.start_soon(session.run)
            for item in inputs:
                await inbox.put(item)
                for _ in range(12):
                    await anyio.lowlevel.checkpoint()
            assert isinstance(out[-1], hold)
            if isinstance(transcriber, Gated):
                transcriber.opens.set()
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
            before.extend(out)
            reads.set()
            inbox.close()

    anyio.run(main)
    return before, out


def test_when_the_end_of_a_turn_waits_for_the_client_then_no_transcript_overtakes_it() -> None:
    """The words are known by then: only the end of the turn is missing."""
    for transcriber in (ScriptedTranscriber(), Gated()):
        before, out = held(chunks(speech(1, 4, 12), 512), SpeechStopped, transcriber, VAD)
        assert not done(before)
        kinds = [type(o) for o in out if isinstance(o, SpeechStopped | TurnCommitted | TranscriptDone)]
        assert kinds == [SpeechStopped, TurnCommitted, TranscriptDone]
        assert sum(w.final for w in transcriber.windows) == 1


def test_when_a_window_ends_during_its_cut_then_none_of_its_words_is_lost() -> None:
    """The decode for the cut is done while the client has not yet read the end of the turn."""
    transcriber = Gated()
    before, out = held([*chunks(speech(1, 72)), CommitAudio()], TurnCommitted, transcriber, None)
    assert not done(before)
    assert [w.final for w in transcriber.windows].count(True) == 2
    assert done(out)[0].text == text(1, 72)
    assert joined(out, 0) == text(1, 72)
