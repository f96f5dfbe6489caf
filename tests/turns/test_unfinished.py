from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.turns.unfinished import MAX_CHARS, WordCues, word_cues


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("I would like a table for four and", "en"),
        ("Could you send it to my", "en"),
        ("I'd like the.", "en"),
        ("Ich hätte gern einen Tisch für", "de"),
        ("Je voudrais un café et", "fr"),
        ("Je suis d'accord avec l'", "fr"),
        ("Quiero una mesa para", "es"),
        ("Vorrei un tavolo per", "it"),
        ("Eu quero uma mesa para", "pt"),
        ("I would like the", None),
        ("I would like the", "en-US"),
    ],
)
def test_when_a_phrase_has_to_follow_then_the_words_dangle(text: str, language: str | None) -> None:
    assert word_cues(text, language).dangling


@pytest.mark.parametrize("text", ["Um...", "So I was, uh,", "Let me think.", "The place is, you know", "I mean,"])
def test_when_a_delay_is_announced_then_it_is_a_filler(text: str) -> None:
    assert word_cues(text).filler


@pytest.mark.parametrize("text", ["My number is 555", "It is A, B", "five five one", "1-2-3", "zero 4 9 double 2."])
def test_when_groups_of_digits_or_letters_are_few_then_they_are_dictated(text: str) -> None:
    assert word_cues(text).dictating is (text != "My number is 555")


@pytest.mark.parametrize("text", ["It is 415-555-0132", "At seven.", "In 2017.", "555 0132 I think", "0" * 50])
def test_when_a_number_is_whole_or_a_word_follows_then_nothing_is_dictated(text: str) -> None:
    assert not word_cues(text).dictating


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("Jane dot Miller at.", False),
        ("My email is jane dot miller at", True),
        ("jane underscore", True),
        ("What are you looking at?", False),
        ("My number is 415-555-01", True),
        ("My number is 415-555-0132", False),
        ("My card is 4242 4242 4242", True),
        ("My card is 4242 4242 4242 4242", False),
        ("It is spelled S, M, I", True),
    ],
)
def test_when_a_sign_or_a_digit_has_to_follow_then_it_is_dictated(text: str, is_open: bool) -> None:
    assert word_cues(text).dictating is is_open


@pytest.mark.parametrize(
    ("text", "follows"), [("It was late, so", True), ("I think so.", False), ("So", False), ("Why not so?", False)]
)
def test_a_clause_follows_so_unless_it_stands_for_one(text: str, follows: bool) -> None:
    assert word_cues(text).dangling is follows


@pytest.mark.parametrize(
    ("text", "goes_on"),
    [
        ("I need eggs, milk, bread.", True),
        ("I need eggs, milk and bread.", False),
        ("I need eggs, milk, and bread", False),
        ("Eggs, milk", False),
        ("When I came home yesterday, it was late, and nobody was there.", False),
    ],
)
def test_a_list_goes_on_until_its_last_item_is_announced(text: str, goes_on: bool) -> None:
    assert word_cues(text).listing is goes_on


@pytest.mark.parametrize("text", ["Yes.", "Stop", "No, thanks.", "Thank you!", "Ja", "Oui, merci.", "Sì"])
def test_when_an_answer_or_a_command_is_all_then_it_is_complete(text: str) -> None:
    assert word_cues(text).complete


@pytest.mark.parametrize("text", ["Yes, I would like to", "stop stop stop stop", "", "Yesterday", "..."])
def test_when_there_is_more_or_less_than_an_answer_then_it_is_not_complete(text: str) -> None:
    assert not word_cues(text).complete


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("It is late.", "stop"),
        ("It is late!", "stop"),
        ('"It is late."', "stop"),
        ("Is it late?", "question"),
        ("It is late,", "open"),
        ("It is late...", "open"),
        ("It is late\u2026", "open"),
        ("It is late \u2014", "open"),
        ("It is late", "none"),
        ("もう遅いです。", "stop"),
        ("もう遅いですか？", "question"),
        ("", "none"),
    ],
)
def test_the_mark_is_that_at_the_end(text: str, mark: str) -> None:
    assert word_cues(text).mark == mark


def test_when_a_list_is_for_another_language_then_it_does_not_count() -> None:
    # "die" is an article only in German, and "so" is not dangling in any language.
    assert word_cues("Alle müssen die", "de").dangling
    assert not word_cues("All men must die", "en").dangling
    assert not word_cues("すべての the", "ja").dangling


def test_when_the_sentence_is_whole_then_no_cue_says_otherwise() -> None:
    assert word_cues("Please book a table for four.") == WordCues(mark="stop", number="part")


@given(st.text(max_size=200), st.sampled_from([None, "en", "de", "fr", "es", "it", "pt", "ja", "zh", "xx", ""]))
def test_any_text_has_cues(text: str, language: str | None) -> None:
    cues = word_cues(text, language)
    assert not (cues.auxiliary and cues.filler)


@given(st.text(max_size=50))
def test_only_the_end_of_a_long_text_counts(text: str) -> None:
    long = "word " * MAX_CHARS + text
    longer = "other " * 1000 + long
    a, b = word_cues(long), word_cues(longer)
    assert (a.mark, a.dangling, a.filler, a.dictating) == (b.mark, b.dangling, b.filler, b.dictating)
