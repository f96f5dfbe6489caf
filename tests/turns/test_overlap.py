"""Which events are reported for speech over a response, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from antiphon.turns.overlap import (
    TRANSITIONS,
    OverlapDecider,
    OverlapInput,
    OverlapReport,
    OverlapState,
    is_backchannel,
)


def done(text: str, turn: int = 0) -> TranscriptDone:
    return TranscriptDone(turn, text, text, (), "en", 1.0, 0, 0)


def speech(outputs: list[TranscriptionEvent]) -> list[TranscriptionEvent]:
    """Return the events except those about the overlap itself."""
    return [o for o in outputs if not isinstance(o, OverlapStarted | OverlapDecided)]


def about(outputs: list[TranscriptionEvent]) -> list[TranscriptionEvent]:
    """Return the events about the overlap itself."""
    return [o for o in outputs if isinstance(o, OverlapStarted | OverlapDecided)]


def run(*outputs: TranscriptionEvent, overlaps: bool = True) -> list[TranscriptionEvent]:
    overlap = OverlapDecider()
    return [t for o in outputs for t in overlap.feed(o, overlaps=overlaps)]


def reported(*outputs: TranscriptionEvent, overlaps: bool = True) -> list[TranscriptionEvent]:
    return speech(run(*outputs, overlaps=overlaps))


START, STOP, COMMIT = SpeechStarted(0, 0), SpeechStopped(0, 500), TurnCommitted(0, 0, 500)


def test_when_the_words_are_a_backchannel_then_nothing_is_reported() -> None:
    assert reported(START, TranscriptPartial(0, "Mm"), STOP, COMMIT, TranscriptDelta(0, "Mm-hm."), done("Mm-hm.")) == []
    assert reported(START, TranscriptGuessed(0, "Yeah."), STOP, COMMIT, done("Yeah.")) == []


@pytest.mark.parametrize("state", ["undecided", "yielded", "dismissed"])
def test_when_the_client_commits_the_overlap_then_it_is_a_turn(state: str) -> None:
    overlap = OverlapDecider()
    for event in (START, TranscriptPartial(0, "Mm"), STOP, COMMIT):
        overlap.feed(event, overlaps=True)
    if state == "yielded":
        overlap.decide(speaking=False)
    if state == "dismissed":
        overlap.dismiss("client_force_listen")
    # A commit of another turn does not concern this one.
    assert overlap.commit(1) == []
    released = overlap.commit(0)
    assert speech(released) == [START, TranscriptPartial(0, "Mm"), STOP, COMMIT]
    # The client's earlier decision about the floor still holds.
    taken = [OverlapDecided(0, True, "client_commit")]
    assert about(released) == ([] if state == "dismissed" else taken)
    assert overlap.feed(done("Mm-hm."), overlaps=True) == [done("Mm-hm.")]


def test_when_the_audio_is_cleared_behind_an_overlap_then_that_is_decided_by_its_own_words() -> None:
    overlap = OverlapDecider()
    for event in (START, STOP, COMMIT):
        overlap.feed(event, overlaps=True)
    assert overlap.feed(TurnCleared(), overlaps=True) == [TurnCleared()]
    released = overlap.feed(done("No, wait."), overlaps=True)
    assert speech(released) == [START, STOP, COMMIT, done("No, wait.")]


def test_when_there_are_no_words_then_nothing_is_reported() -> None:
    assert reported(START, STOP, COMMIT, done("")) == []
    assert reported(START, STOP, COMMIT, TranscriptFailed(0, "no")) == []


@pytest.mark.parametrize(
    "word", [TranscriptPartial(0, "Yeah but"), TranscriptGuessed(0, "No."), TranscriptPartial(0, "Stop")]
)
def test_when_a_word_is_no_backchannel_then_the_speech_takes_the_floor_at_once(word: TranscriptionEvent) -> None:
    assert reported(START, word) == [START, word]
    rest = [STOP, COMMIT, done("Stop it.")]
    assert reported(START, word, *rest) == [START, word, *rest]


def test_when_the_final_words_are_more_than_a_backchannel_then_all_is_reported_in_order() -> None:
    outputs = [START, TranscriptPartial(0, "Okay"), STOP, COMMIT, done("Okay, but why?")]
    assert reported(*outputs) == outputs


def test_when_speech_begins_again_then_it_takes_the_floor() -> None:
    again = SpeechStarted(1, 900)
    assert reported(START, STOP, COMMIT, again) == [START, STOP, COMMIT, again]


def test_when_an_overlap_was_a_backchannel_then_the_next_is_decided_anew() -> None:
    overlap = OverlapDecider()
    for output in (START, STOP, COMMIT, done("Yeah.")):
        assert speech(overlap.feed(output, overlaps=True)) == []
    assert overlap.undecided_turn is None
    assert overlap.feed(SpeechStarted(1, 0), overlaps=False) == [SpeechStarted(1, 0)]


def test_when_an_event_belongs_to_another_turn_then_it_is_reported_at_once() -> None:
    overlap = OverlapDecider()
    overlap.feed(SpeechStarted(1, 0), overlaps=True)
    for output in (done("Yeah."), done("A question."), TranscriptFailed(0, "no")):
        assert overlap.feed(output, overlaps=True) == [output]
    assert overlap.undecided_turn == 1


def test_when_no_response_is_heard_then_nothing_is_held() -> None:
    assert reported(START, done("Yeah."), overlaps=False) == [START, done("Yeah.")]


def test_when_speech_goes_on_then_it_is_reported_and_when_cleared_then_it_is_dropped() -> None:
    overlap = OverlapDecider()
    overlap.feed(START, overlaps=True)
    assert speech(overlap.take_floor()) == [START]
    assert overlap.feed(STOP, overlaps=True) == [STOP]
    overlap.feed(SpeechStarted(1, 0), overlaps=True)
    assert overlap.feed(TurnCleared(), overlaps=True) == [OverlapDecided(1, False, "cleared"), TurnCleared()]
    assert overlap.undecided_turn is None


def test_when_an_overlap_is_decided_then_its_start_and_its_decision_are_reported() -> None:
    begun = OverlapStarted(0)
    assert about(run(START, STOP, COMMIT, done("Yeah."))) == [begun, OverlapDecided(0, False, "short_ack_transcript")]
    assert run(START, TranscriptPartial(0, "Stop")) == [
        begun, OverlapDecided(0, True, "words"), START, TranscriptPartial(0, "Stop"),
    ]  # fmt: skip


def test_when_the_time_to_decide_is_over_then_speech_that_goes_on_takes_the_floor() -> None:
    overlap = OverlapDecider()
    overlap.feed(START, overlaps=True)
    assert overlap.decide(speaking=True)[0] == OverlapDecided(0, True, "speech_goes_on")
    assert overlap.undecided_turn is None
    # The text "Yeah, yeah, y..." may continue with a word that is not a backchannel.
    overlap.feed(START, overlaps=True)
    overlap.feed(TranscriptPartial(0, "Yeah, yeah"), overlaps=True)
    assert overlap.decide(speaking=True) == []
    assert overlap.undecided_turn == 0


def test_when_speech_was_short_then_it_is_a_backchannel_until_its_words_take_the_floor() -> None:
    overlap = OverlapDecider()
    overlap.feed(START, overlaps=True)
    overlap.feed(STOP, overlaps=True)
    assert overlap.decide(speaking=False) == [OverlapDecided(0, False, "short_ack")]
    assert overlap.decide(speaking=False) == []
    assert overlap.feed(TranscriptGuessed(0, "Stop!"), overlaps=True)[:2] == [OverlapDecided(0, True, "words"), START]
    # A backchannel is not reported a second time when its words are known.
    overlap.feed(START, overlaps=True)
    overlap.decide(speaking=False)
    assert overlap.feed(done("Yeah."), overlaps=True) == []


def test_when_the_client_dismisses_an_overlap_then_it_does_not_take_the_floor_whatever_its_words() -> None:
    overlap = OverlapDecider()
    assert overlap.dismiss("client") == []
    overlap.feed(START, overlaps=True)
    assert overlap.dismiss("client") == [OverlapDecided(0, False, "client")]
    assert overlap.dismiss("client") == []
    assert overlap.take_floor() == []
    for output in (TranscriptPartial(0, "Stop that"), STOP, COMMIT):
        assert overlap.feed(output, overlaps=True) == []
    # Another turn begins before the words of the first are known. It is decided separately, and the first is dropped.
    assert overlap.feed(SpeechStarted(1, 900), overlaps=True) == [OverlapStarted(1)]
    assert overlap.feed(done("Stop that."), overlaps=True) == []
    assert overlap.undecided_turn == 1
    assert overlap.feed(TranscriptPartial(1, "Wait"), overlaps=True)[0] == OverlapDecided(1, True, "words")


ACKNOWLEDGEMENTS = (
    *("", "Mm-hmm.", "Yeah, yeah.", "Okay.", "I see.", "Of course!", "Uh-huh", "Right, right.", "Ja, genau."),
    *("Got it.", "D\u2019accord."),
)
OTHER_WORDS = (
    *("No.", "Stop.", "Wait", "Yeah but", "I", "Go", "Okay, what about the second one?", "yes yes yes yes yes"),
    *("See you", "So"),
)


@pytest.mark.parametrize("text", ACKNOWLEDGEMENTS)
def test_when_all_words_acknowledge_then_it_is_a_backchannel(text: str) -> None:
    assert is_backchannel(text)


@pytest.mark.parametrize("text", OTHER_WORDS)
def test_when_a_word_does_not_acknowledge_then_it_is_no_backchannel(text: str) -> None:
    assert not is_backchannel(text)


def test_when_a_text_is_far_too_long_then_it_is_no_backchannel_whatever_it_says() -> None:
    assert is_backchannel("ok" + " " * 100)
    assert not is_backchannel("ok" + " " * (1 << 20))


WORDS = st.sampled_from(["", "Yeah.", "Mm-hm", "Stop it", "Okay, but why?"])
CALLS = st.one_of(
    st.sampled_from([START, STOP, COMMIT, TurnCleared(), SpeechStarted(1, 900), TranscriptFailed(0, "no")]),
    st.builds(TranscriptPartial, st.integers(0, 1), WORDS),
    st.builds(done, WORDS, st.integers(0, 1)),
    st.sampled_from(["decide", "stopped", "take_floor", "dismiss"]),
)


@given(st.lists(CALLS, max_size=30))
def test_whatever_comes_then_an_overlap_is_declined_once_at_most_and_takes_the_floor_last(
    calls: list[TranscriptionEvent | str],
) -> None:
    overlap = OverlapDecider()
    open_turn: int | None = None
    declined = False
    for call in calls:
        match call:
            case "decide" | "stopped":
                out = overlap.decide(speaking=call == "decide")
            case "take_floor":
                out = overlap.take_floor()
            case "dismiss":
                out = overlap.dismiss("client")
            case str():
                raise AssertionError(call)
            case event:
                out = overlap.feed(event, overlaps=True)
        for event in about(out):
            match event:
                case OverlapStarted(turn):
                    open_turn, declined = turn, False
                case OverlapDecided(turn, True, _):
                    assert turn == open_turn
                    open_turn = None
                case OverlapDecided(turn, False, _):
                    assert turn == open_turn
                    assert not declined
                    declined = True
        # Held events are only reported together with the decision that the overlap takes the floor.
        if overlap.undecided_turn is not None:
            assert overlap.undecided_turn == open_turn
            assert not [e for e in speech(out) if getattr(e, "turn", None) == open_turn]
        assert (overlap.undecided_turn is None) == (overlap.state is OverlapState.NONE)


def test_the_table_has_every_state_and_every_input_but_a_beginning_where_one_is_under_way() -> None:
    missing = {(state, event) for state in OverlapState for event in OverlapInput if event not in TRANSITIONS[state]}
    assert missing == {(state, OverlapInput.BEGAN) for state in (OverlapState.UNDECIDED, OverlapState.YIELDED)}


def test_no_way_through_the_table_declines_twice_or_takes_a_floor_that_was_refused() -> None:
    seen = set()
    ways = [(OverlapState.NONE, 0, False)]
    while ways:
        way = ways.pop()
        if way in seen:
            continue
        seen.add(way)
        state, num_declined, is_refused = way
        for event, (following, report) in TRANSITIONS[state].items():
            declined = num_declined + (report is OverlapReport.TAKES_NO_FLOOR)
            refused = is_refused or event is OverlapInput.REFUSED
            assert declined <= 1
            assert not (refused and report is OverlapReport.TAKES_FLOOR)
            is_new = following is OverlapState.NONE or report is OverlapReport.STARTED
            ways.append((following, 0, False) if is_new else (following, declined, refused))
    assert {state for state, _, _ in seen} == set(OverlapState)
