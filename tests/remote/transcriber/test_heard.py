"""What a session gets of a server's text: words after those that were sent, their times and probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from antiphon.contracts import Hypothesis, Window
from antiphon.events.words import Word
from antiphon.remote.transcriber.heard import MAX_WORDS, HeardText, HeardWord, WordTokens, timed_words, words_of

SOUND = np.ones(16000, np.float32) * 0.1


def text_of(hypothesis: Hypothesis) -> str:
    return "".join(piece.text for piece in hypothesis.pieces)


def tokens_of(hypothesis: Hypothesis, count: int) -> tuple[int, ...]:
    return tuple(token for piece in hypothesis.pieces[:count] for token in piece.tokens)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("  Hello,  world. ", [" Hello,", "  world."]),
        ("你好，世界", ["你", "好，", "世", "界"]),
        ("say 你好 now", [" say", " 你", "好", " now"]),
    ],
)
def test_a_text_is_split_into_words_and_keeps_its_spelling(text: str, words: list[str]) -> None:
    assert [w.text for w in words_of(text)] == words


def test_an_endless_text_is_cut() -> None:
    assert len(words_of("a " * (2 * MAX_WORDS))) == MAX_WORDS


def test_words_after_the_prefix_are_returned_even_if_the_server_changes_its_mind() -> None:
    tokens = WordTokens()
    first = tokens.hypothesis(Window(SOUND), HeardText(words_of("The cat sat")))
    prefix = tokens_of(first, 2)
    window = Window(SOUND, prefix=prefix)
    assert text_of(tokens.hypothesis(window, HeardText(words_of("The cat sat down")))) == " sat down"
    assert text_of(tokens.hypothesis(window, HeardText(words_of("the CAT, sat down")))) == " sat down"
    assert text_of(tokens.hypothesis(window, HeardText(words_of("The cut sat down")))) == " sat down"
    assert text_of(tokens.hypothesis(window, HeardText(words_of("The")))) == ""
    assert text_of(tokens.hypothesis(Window(SOUND, final=True), HeardText(words_of("The cat sat")))) == " The cat sat"


def test_the_same_word_has_the_same_token_and_another_window_begins_anew() -> None:
    tokens = WordTokens()
    found = tokens.hypothesis(Window(SOUND), HeardText(words_of("no no yes")))
    ids = tokens_of(found, 3)
    assert ids[0] == ids[1] != ids[2]
    other = tokens.hypothesis(Window(SOUND, start_sample=1, prefix=ids), HeardText(words_of("maybe")))
    assert text_of(other) == " maybe"


def test_times_of_the_server_are_used_if_they_belong_to_the_words() -> None:
    words = words_of("one two")
    timed = [Word("one", 0.1, 0.2, 0.9), Word("two", 0.3, 0.4, 0.8)]
    window = Window(SOUND, word_times=True)
    found = WordTokens().hypothesis(window, HeardText(timed_words(words, timed)))
    assert found.words == (Word("one", 0.1, 0.2, 0.9), Word("two", 0.3, 0.4, 0.8))
    assert [p.probability for p in found.pieces] == [0.9, 0.8]
    assert timed_words(words, timed[:1]) == words


def test_times_are_estimated_over_the_sound_if_the_server_has_none() -> None:
    pcm = np.concatenate((np.zeros(16000, np.float32), SOUND, np.zeros(16000, np.float32)))
    found = WordTokens().hypothesis(Window(pcm, word_times=True), HeardText(words_of("one two")))
    assert len(found.words) == 2
    assert 1.0 <= found.words[0].start_s < found.words[1].end_s <= 2.0


def test_a_server_that_hears_noise_or_nothing_is_no_speech() -> None:
    tokens = WordTokens()
    assert not tokens.hypothesis(Window(SOUND), HeardText(())).is_speech
    assert not tokens.hypothesis(Window(SOUND), HeardText((HeardWord(" you"),), is_speech=False)).is_speech
    assert tokens.hypothesis(Window(SOUND, language="de"), HeardText(words_of("ja"))).language == "de"
    assert tokens.hypothesis(Window(SOUND, language="de"), HeardText(words_of("ja"), "nl")).language == "nl"
