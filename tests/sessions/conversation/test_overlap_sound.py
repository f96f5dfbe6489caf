"""Speech over a response that is decided by its sound, before its words."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from antiphon.audio import Pcm
from antiphon.contracts import OverlapSound
from antiphon.errors import ModelError
from antiphon.events.transcription import (
    AppendAudio,
    OverlapDecided,
    SpeechStarted,
    TranscriptionConfig,
    TranscriptionEvent,
    TranscriptPartial,
)
from antiphon.sessions.conversation import overlap_sound
from antiphon.sessions.conversation.overlap_sound import hear_overlap
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.microphone import OverlapAudio
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.turns.end_of_turn import semantic_vad
from antiphon.turns.overlap import OverlapDecider, OverlapState
from tests.scripted import FRAME, ScriptedDetector, ScriptedTranscriber, speech

FLOOR, NOD, NOISE = OverlapSound(0.1, 0.9), OverlapSound(0.9, 0.05), OverlapSound(0.1, 0.1)


class Hears:
    """A detector with one answer for each chunk. A ModelError fails the call."""

    id, frame_samples, threshold = "hears", 320, 0.6

    def __init__(self, *sounds: OverlapSound | ModelError) -> None:
        self.sounds = list(sounds)

    def open(self) -> Hears:
        return self

    async def feed(self, pcm: Pcm, response: npt.NDArray[np.float32]) -> list[OverlapSound]:
        sound = self.sounds.pop(0)
        if isinstance(sound, ModelError):
            raise sound
        return [sound]


class Listener:
    """A listener that always has one new chunk, and that speaks for `speaks` chunks."""

    def __init__(self, speaks: int, looked_at: int = 0) -> None:
        self.left, self.looked_at = speaks, looked_at
        self.speakers: Any = self

    @property
    def speaking(self) -> bool:
        return self.left > 0

    def is_looked_at(self, turn: int) -> bool:
        self.looked_at -= 1
        return self.looked_at >= 0

    def overlap_audio(self, since: int | None, frame_samples: int) -> OverlapAudio:
        self.left -= 1
        return OverlapAudio(np.zeros(640, np.float32), np.zeros((2, 8), np.float32), (since or 0) + 640)


def heard(
    monkeypatch: pytest.MonkeyPatch, detector: Hears, listener: Listener, decider: OverlapDecider | None = None
) -> list[TranscriptionEvent]:
    """Return the events that the detector's judgement of one overlap releases."""
    monkeypatch.setattr(overlap_sound, "HEAR_S", 0.0)
    decider, out = decider or OverlapDecider(), list[TranscriptionEvent]()
    decider.feed(SpeechStarted(4, 0), overlaps=True)

    async def decide(decision: Any) -> None:
        out.extend(decision())

    asyncio.run(hear_overlap(detector, decider, decide, 4, listener))  # type: ignore[arg-type]
    return out


def test_a_claim_to_the_floor_takes_it_when_three_chunks_in_a_row_sound_like_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    detector = Hears(FLOOR, FLOOR, NOISE, NOD, FLOOR, FLOOR, FLOOR, NOISE)
    out = heard(monkeypatch, detector, Listener(99))
    assert out == [OverlapDecided(4, True, "sound"), SpeechStarted(4, 0)]
    assert detector.sounds == [NOISE]


def test_a_nod_gives_the_response_back_when_it_is_over_and_its_words_may_still_take_the_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decider = OverlapDecider()
    assert heard(monkeypatch, Hears(NOD, NOD, NOD, NOISE, NOISE), Listener(5), decider) == [
        OverlapDecided(4, False, "short_ack")
    ]
    assert decider.state is OverlapState.YIELDED
    taken = decider.feed(TranscriptPartial(4, "No, wait"), overlaps=True)
    assert taken[0] == OverlapDecided(4, True, "words")


def test_speech_that_sounds_like_a_nod_is_not_cut_off_by_its_length_unless_it_has_other_words() -> None:
    decider = OverlapDecider()
    decider.feed(SpeechStarted(4, 0), overlaps=True)
    decider.sounds_backchannel = True
    assert decider.decide(speaking=True) == []
    decider.feed(SpeechStarted(5, 900), overlaps=True)
    decider.feed(SpeechStarted(6, 9000), overlaps=True)
    # The sound of the last overlap says nothing about this one.
    assert decider.decide(speaking=True)[0] == OverlapDecided(6, True, "speech_goes_on")


def test_an_unknown_voice_does_not_take_the_floor_by_its_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    detector = Hears(*[FLOOR] * 5)
    assert heard(monkeypatch, detector, Listener(99, looked_at=2))[0] == OverlapDecided(4, True, "sound")
    assert detector.sounds == []


def test_when_the_detector_fails_then_the_overlap_goes_on_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    decider = OverlapDecider()
    assert heard(monkeypatch, Hears(NOD, NOD, NOD, ModelError("gone")), Listener(99), decider) == []
    assert (decider.state, decider.sounds_backchannel) == (OverlapState.UNDECIDED, False)


def test_a_detector_that_answers_no_number_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = OverlapSound(float("nan"), float("nan"))
    decider = OverlapDecider()
    assert heard(monkeypatch, Hears(*[nothing] * 5, ModelError("gone")), Listener(99), decider) == []
    assert decider.state is OverlapState.UNDECIDED


def test_a_session_gives_the_new_frames_of_the_open_turn_with_the_response_in_them() -> None:
    async def main() -> tuple[OverlapAudio | None, OverlapAudio | None, OverlapAudio | None]:
        async def emit(event: TranscriptionEvent) -> None: ...

        inbox = Inbox(60)
        session = TranscriptionSession(
            TranscriptionConfig(vad=semantic_vad("medium")),
            ScriptedTranscriber(),
            ScriptedDetector(),
            inbox,
            emit,
            guards_echo=True,
            clock=lambda: 0.0,
        )
        task = asyncio.create_task(session.run())
        before = session.overlap_audio(None, 320)
        session.expect_echo(np.full(FRAME, 0.1, np.float32))
        words = speech(1, 3)
        for at in range(0, len(words), FRAME):
            await inbox.put(AppendAudio(words[at : at + FRAME]))
        for _ in range(200):
            await asyncio.sleep(0)
        first = session.overlap_audio(None, 320)
        assert first
        later = session.overlap_audio(first.end - 1000, 320)
        inbox.close()
        await task
        return before, first, later

    before, first, later = asyncio.run(main())
    assert before is None
    assert first
    assert later
    assert (len(first.pcm) % 320, first.response.shape) == (0, (len(first.pcm) // 320, 8))
    assert (len(later.pcm), later.response.shape, later.end) == (960, (3, 8), first.end - 40)
    np.testing.assert_array_equal(later.pcm[:680], first.pcm[-1000:-320])
