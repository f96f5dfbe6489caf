from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.turns.end_of_turn import (
    MAX_SCALE,
    MAX_SHIFT,
    MAX_SILENCE_MS,
    MIN_SILENCE_MS,
    EndOfTurn,
    PauseEvidence,
    SpeakerPauses,
    completeness,
    probability_over,
    silence_for,
    survival,
)

WHOLE, HALF = "I would like a table for four.", "I would like a table for"
EAGERNESS = tuple(MAX_SILENCE_MS)
# A pause whose length is the median.
TYPICAL_MS = 398
probabilities = st.none() | st.floats(0, 1)
evidences = st.builds(
    PauseEvidence,
    probabilities,
    st.text(max_size=80) | st.sampled_from((WHOLE, HALF, "Yes.", "um", "5 5")),
    st.sampled_from((None, "en", "de", "ja", "xx")),
)


def silence_ms(evidence: PauseEvidence, eagerness: str = "medium", speaker: SpeakerPauses | None = None) -> int:
    return EndOfTurn(eagerness).silence_ms(evidence, speaker)


@pytest.mark.parametrize("sound", [None, 0.02, 0.5, 0.98])
@pytest.mark.parametrize("eagerness", EAGERNESS)
def test_when_the_phrase_is_unfinished_then_the_turn_waits_longer(sound: float | None, eagerness: str) -> None:
    whole = silence_ms(PauseEvidence(sound, WHOLE), eagerness)
    for text in (HALF, "I would like, um,", "My number is 5 5", "I would like a table for four,"):
        assert silence_ms(PauseEvidence(sound, text), eagerness) > whole


def test_when_an_answer_is_all_that_was_said_then_the_turn_ends_sooner_than_after_a_few_other_words() -> None:
    assert silence_ms(PauseEvidence(0.5, "Yes.")) < silence_ms(PauseEvidence(0.5, "Five."))


@given(evidences, st.floats(0, 1), st.floats(0, 1))
def test_when_it_sounds_more_complete_then_the_turn_never_waits_longer(e: PauseEvidence, a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert silence_ms(PauseEvidence(high, e.text, e.language)) <= silence_ms(PauseEvidence(low, e.text, e.language))


def test_when_it_sounds_complete_then_the_turn_ends_much_sooner() -> None:
    assert silence_ms(PauseEvidence(0.99, WHOLE)) < 0.7 * silence_ms(PauseEvidence(0.01, WHOLE))


def test_there_is_no_cliff() -> None:
    # Over the whole range, a small change of the probability changes the wait only slightly.
    waits = [silence_for(PauseEvidence(p / 1000, WHOLE), 0.9) for p in range(1, 1000)]
    steps = [a - b for a, b in itertools.pairwise(waits)]
    assert min(steps) >= 0
    assert max(steps[5:-5]) < 0.1 * (waits[0] - waits[-1])


@given(evidences, st.floats(0, 20_000), st.floats(0, 20_000))
def test_the_probability_never_falls_with_time(e: PauseEvidence, a: float, b: float) -> None:
    early, late = sorted((a, b))
    assert 0 < probability_over(e, early) <= probability_over(e, late) + 1e-12 <= 1 + 1e-12


@given(evidences)
def test_the_probability_begins_at_the_completeness_and_goes_to_one(e: PauseEvidence) -> None:
    assert probability_over(e, MIN_SILENCE_MS) == pytest.approx(completeness(e))
    assert survival(MIN_SILENCE_MS) == 1
    assert probability_over(e, 1e9) > 0.999


@given(evidences, st.floats(0.05, 0.98), st.floats(0.5, 2))
def test_the_silence_is_where_the_probability_reaches_the_threshold(
    e: PauseEvidence, threshold: float, scale: float
) -> None:
    silence = silence_for(e, threshold, scale)
    if silence == MIN_SILENCE_MS:
        assert probability_over(e, silence, scale) >= threshold - 1e-9
    else:
        assert probability_over(e, silence, scale) == pytest.approx(threshold, abs=1e-6)


@given(evidences, st.lists(st.integers(0, 60_000), max_size=40), st.sampled_from(EAGERNESS))
def test_the_silence_is_bounded(e: PauseEvidence, lengths: list[int], eagerness: str) -> None:
    speaker = SpeakerPauses()
    for length in lengths:
        speaker.add(length)
    assert MIN_SILENCE_MS <= silence_ms(e, eagerness, speaker) <= MAX_SILENCE_MS[eagerness]
    assert 1 / MAX_SCALE <= speaker.scale <= MAX_SCALE
    assert -MAX_SHIFT <= speaker.shift <= 0


@given(evidences)
def test_a_more_eager_turn_never_ends_later(e: PauseEvidence) -> None:
    assert silence_ms(e, "high") <= silence_ms(e, "medium") <= silence_ms(e, "low")


def test_eagerness_makes_a_difference() -> None:
    unclear = PauseEvidence(0.5, HALF)
    assert silence_ms(unclear, "high") < silence_ms(unclear, "medium") < silence_ms(unclear, "low")


def test_another_eagerness_is_an_error() -> None:
    with pytest.raises(KeyError):
        EndOfTurn("eager")


def speaker_of(length_ms: int, times: int) -> SpeakerPauses:
    speaker = SpeakerPauses()
    for _ in range(times):
        speaker.add(length_ms)
    return speaker


def test_when_a_speaker_makes_long_pauses_then_auto_waits_longer() -> None:
    unclear = PauseEvidence(0.5, HALF)
    typical = silence_ms(unclear, "auto")
    assert typical == silence_ms(unclear, "auto", SpeakerPauses())
    once, often = (silence_ms(unclear, "auto", speaker_of(1500, n)) for n in (1, 20))
    assert typical < once < often
    assert silence_ms(unclear, "auto", speaker_of(230, 20)) < typical


def test_when_the_eagerness_is_not_auto_then_the_speaker_does_not_count() -> None:
    unclear = PauseEvidence(0.5, HALF)
    for eagerness in ("low", "medium", "high"):
        assert silence_ms(unclear, eagerness, speaker_of(1500, 20)) == silence_ms(unclear, eagerness)


def test_when_a_pause_is_too_short_then_it_tells_nothing_of_the_speaker() -> None:
    assert speaker_of(MIN_SILENCE_MS - 1, 20).scale == 1


def test_when_the_speaker_changes_then_the_last_pauses_count() -> None:
    speaker = speaker_of(1500, 100)
    for _ in range(100):
        speaker.add(240)
    assert speaker.scale < 1


def turns_of(num_turns: int, num_pauses: int) -> SpeakerPauses:
    """Return a speaker who made the same number of pauses in each turn, all of the typical length."""
    speaker = SpeakerPauses()
    for _ in range(num_turns):
        for _ in range(num_pauses):
            speaker.add(TYPICAL_MS)
        speaker.end_turn()
    return speaker


def test_when_a_speaker_makes_many_pauses_in_a_turn_then_auto_waits_longer() -> None:
    unclear = PauseEvidence(0.5, HALF)
    few, some, many = (silence_ms(unclear, "auto", turns_of(4, n)) for n in (0, 3, 9))
    assert few == silence_ms(unclear, "auto") < some < many
    assert silence_ms(unclear, "medium", turns_of(4, 9)) == silence_ms(unclear, "medium")


def test_the_pauses_of_a_long_first_turn_count_before_it_ends() -> None:
    speaker = SpeakerPauses()
    for _ in range(6):
        speaker.add(TYPICAL_MS)
    assert speaker.shift < -0.5


def test_when_turns_are_joined_then_they_count_as_one_with_a_pause_more() -> None:
    joined, one = SpeakerPauses(), turns_of(1, 12)
    for _ in range(6):
        joined.end_turn()
        joined.add(TYPICAL_MS)
        joined.join_turns(TYPICAL_MS)
    joined.end_turn()
    assert joined.shift == one.shift < 0
    assert turns_of(7, 0).shift == 0
    # The turn before may be unknown.
    SpeakerPauses().join_turns(TYPICAL_MS)


def test_when_later_turns_have_no_pauses_then_the_earlier_ones_are_forgotten() -> None:
    speaker = turns_of(3, 50)
    assert speaker.shift == -MAX_SHIFT
    for _ in range(30):
        speaker.end_turn()
    assert speaker.shift == 0


@pytest.mark.parametrize("text", ["", "  \n"])
def test_when_no_words_are_there_then_the_sound_decides(text: str) -> None:
    assert silence_ms(PauseEvidence(0.98, text)) < silence_ms(PauseEvidence(0.02, text))
    assert completeness(PauseEvidence(0.5, text)) == completeness(PauseEvidence(0.5))


def test_when_nothing_is_known_then_the_turn_still_ends() -> None:
    assert MIN_SILENCE_MS <= silence_ms(PauseEvidence()) < MAX_SILENCE_MS["medium"]


@pytest.mark.parametrize(
    ("expects", "fits", "contradicts", "longer"),
    [
        ("digits", "It is 415", "I do not have one.", True),
        ("digits", "four one five", "It is 415-555-0132", True),
        ("yes_no", "Yes.", "I would rather not.", False),
        ("open", "It broke.", "It broke when I tried to open the door yesterday.", True),
        ("open", "My printer", "No.", True),
    ],
)
def test_a_hint_counts_while_the_words_fit_it(expects: Any, fits: str, contradicts: str, longer: bool) -> None:
    model = EndOfTurn("auto")
    for text, is_hinted in ((fits, True), (contradicts, False)):
        plain = model.silence_ms(PauseEvidence(0.9, text))
        hinted = model.silence_ms(PauseEvidence(0.9, text, expects=expects))
        assert (hinted != plain) is is_hinted
        assert not is_hinted or (hinted > plain) is longer
        assert hinted <= model.max_silence_ms


def test_before_there_are_words_only_a_hint_at_digits_and_at_an_open_answer_counts() -> None:
    plain = completeness(PauseEvidence(0.9))
    found = {e: completeness(PauseEvidence(0.9, expects=e)) for e in ("digits", "yes_no", "open")}
    assert found["digits"] < found["open"] < found["yes_no"] == plain
