"""Speech over an answer: what is told, and when."""

from __future__ import annotations

import pytest

from antiphon.events.transcription import (
    OverlapDecided,
    OverlapStarted,
    SpeechStarted,
    SpeechStopped,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptGuessed,
    TranscriptionEvent,
    TranscriptPartial,
    TurnCleared,
    TurnCommitted,
)
from antiphon.turns.backchannel import is_backchannel
from antiphon.turns.overlap import OverlapDecider


def done(text: str, turn: int = 0) -> TranscriptDone:
    return TranscriptDone(turn, text, text, (), "en", 1.0, 0, 0)


def speech(outputs: list[TranscriptionEvent]) -> list[TranscriptionEvent]:
    """Without what is said about the overlap itself."""
    return [o for o in outputs if not isinstance(o, OverlapStarted | OverlapDecided)]


def about(outputs: list[TranscriptionEvent]) -> list[TranscriptionEvent]:
    """What is said about the overlap itself."""
    return [o for o in outputs if isinstance(o, OverlapStarted | OverlapDecided)]


def whole(*outputs: TranscriptionEvent, overlaps: bool = True) -> list[TranscriptionEvent]:
    overlap = OverlapDecider()
    return [t for o in outputs for t in overlap.feed(o, overlaps=overlaps)]


def told(*outputs: TranscriptionEvent, overlaps: bool = True) -> list[TranscriptionEvent]:
    return speech(whole(*outputs, overlaps=overlaps))


START, STOP, COMMIT = SpeechStarted(0, 0), SpeechStopped(0, 500), TurnCommitted(0, 0, 500)


def test_an_acknowledgement_is_never_told() -> None:
    assert told(START, TranscriptPartial(0, "Mm"), STOP, COMMIT, TranscriptDelta(0, "Mm-hm."), done("Mm-hm.")) == []
    assert told(START, TranscriptGuessed(0, "Yeah."), STOP, COMMIT, done("Yeah.")) == []


def test_a_noise_is_never_told() -> None:
    assert told(START, STOP, COMMIT, done("")) == []
    assert told(START, STOP, COMMIT, TranscriptFailed(0, "no")) == []


@pytest.mark.parametrize(
    "word", [TranscriptPartial(0, "Yeah but"), TranscriptGuessed(0, "No."), TranscriptPartial(0, "Stop")]
)
def test_a_word_of_its_own_takes_the_floor_at_once(word: TranscriptionEvent) -> None:
    assert told(START, word) == [START, word]
    rest = [STOP, COMMIT, done("Stop it.")]
    assert told(START, word, *rest) == [START, word, *rest]


def test_what_turns_out_to_be_more_is_told_whole_and_in_order() -> None:
    outputs = [START, TranscriptPartial(0, "Okay"), STOP, COMMIT, done("Okay, but why?")]
    assert told(*outputs) == outputs


def test_who_begins_again_takes_the_floor() -> None:
    again = SpeechStarted(1, 900)
    assert told(START, STOP, COMMIT, again) == [START, STOP, COMMIT, again]


def test_after_one_was_held_the_next_is_decided_anew() -> None:
    overlap = OverlapDecider()
    for output in (START, STOP, COMMIT, done("Yeah.")):
        assert speech(overlap.feed(output, overlaps=True)) == []
    assert overlap.undecided_turn is None
    assert overlap.feed(SpeechStarted(1, 0), overlaps=False) == [SpeechStarted(1, 0)]


def test_what_belongs_to_another_turn_is_told_at_once() -> None:
    overlap = OverlapDecider()
    overlap.feed(SpeechStarted(1, 0), overlaps=True)
    for output in (done("Yeah."), done("A question."), TranscriptFailed(0, "no")):
        assert overlap.feed(output, overlaps=True) == [output]
    assert overlap.undecided_turn == 1


def test_without_an_answer_nothing_is_held() -> None:
    assert told(START, done("Yeah."), overlaps=False) == [START, done("Yeah.")]


def test_what_goes_on_is_released_and_what_is_cleared_is_gone() -> None:
    overlap = OverlapDecider()
    overlap.feed(START, overlaps=True)
    assert speech(overlap.take_floor()) == [START]
    assert overlap.feed(STOP, overlaps=True) == [STOP]
    overlap.feed(SpeechStarted(1, 0), overlaps=True)
    assert overlap.feed(TurnCleared(), overlaps=True) == [OverlapDecided(1, False, "cleared"), TurnCleared()]
    assert overlap.undecided_turn is None


def test_a_client_that_ducks_is_told_of_each_overlap_and_what_became_of_it() -> None:
    begun = OverlapStarted(0)
    assert about(whole(START, STOP, COMMIT, done("Yeah."))) == [begun, OverlapDecided(0, False, "short_ack_transcript")]
    assert whole(START, TranscriptPartial(0, "Stop")) == [
        begun, OverlapDecided(0, True, "words"), START, TranscriptPartial(0, "Stop"),
    ]  # fmt: skip


def test_in_time_it_is_decided_by_whether_it_goes_on() -> None:
    overlap = OverlapDecider()
    overlap.feed(START, overlaps=True)
    assert overlap.decide(speaking=True)[0] == OverlapDecided(0, True, "speech_goes_on")
    assert overlap.undecided_turn is None
    # "Yeah, yeah, y..." may go on.
    overlap.feed(START, overlaps=True)
    overlap.feed(TranscriptPartial(0, "Yeah, yeah"), overlaps=True)
    assert overlap.decide(speaking=True) == []
    assert overlap.undecided_turn == 0


def test_what_was_short_is_let_go_and_its_words_may_still_take_the_floor() -> None:
    overlap = OverlapDecider()
    overlap.feed(START, overlaps=True)
    overlap.feed(STOP, overlaps=True)
    assert overlap.decide(speaking=False) == [OverlapDecided(0, False, "short_ack")]
    assert overlap.decide(speaking=False) == []
    assert overlap.feed(TranscriptGuessed(0, "Stop!"), overlaps=True)[:2] == [OverlapDecided(0, True, "words"), START]
    # And what was let go is not told of again where its words are an acknowledgement's.
    overlap.feed(START, overlaps=True)
    overlap.decide(speaking=False)
    assert overlap.feed(done("Yeah."), overlaps=True) == []


def test_what_the_client_dismisses_takes_no_floor_whatever_it_says() -> None:
    overlap = OverlapDecider()
    assert overlap.dismiss("client") == []
    overlap.feed(START, overlaps=True)
    assert overlap.dismiss("client") == [OverlapDecided(0, False, "client")]
    assert overlap.dismiss("client") == []
    assert overlap.take_floor() == []
    for output in (TranscriptPartial(0, "Stop that"), STOP, COMMIT):
        assert overlap.feed(output, overlaps=True) == []
    # Another turn begins before the words of the first are known: it is one of its own, and they are nothing.
    assert overlap.feed(SpeechStarted(1, 900), overlaps=True) == [OverlapStarted(1)]
    assert overlap.feed(done("Stop that."), overlaps=True) == []
    assert overlap.undecided_turn == 1
    assert overlap.feed(TranscriptPartial(1, "Wait"), overlaps=True)[0] == OverlapDecided(1, True, "words")


@pytest.mark.parametrize("text", ["", "Mm-hmm.", "Yeah, yeah.", "Okay.", "I see.", "Of course!", "Uh-huh", "Right, right.", "Ja, genau.", "Got it."])  # fmt: skip
def test_acknowledgements(text: str) -> None:
    assert is_backchannel(text)


@pytest.mark.parametrize("text", ["No.", "Stop.", "Wait", "Yeah but", "I", "Go", "Okay, what about the second one?", "yes yes yes yes yes", "See you", "So"])  # fmt: skip
def test_words_of_ones_own(text: str) -> None:
    assert not is_backchannel(text)
