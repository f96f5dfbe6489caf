"""Detection of hallucinated words: pure, on words and their seconds of sound."""

from __future__ import annotations

import numpy as np
import pytest

from antiphon.adapters.whisper.guard import (
    MIN_FILE_LOGPROB,
    has_words,
    is_loop,
    is_noise,
    says_twice,
    seconds_of_sound,
    unspoken_copies,
)


def left(text: str, unspoken: str, first: int = 0) -> str:
    """Return the remaining words. `unspoken` has a `0` for each word without sound, and a `1` for each other word."""
    words = text.split()
    cut = unspoken_copies(words, [0.3 * int(c) for c in unspoken], first)
    return " ".join(w for k, w in enumerate(words) if k not in cut)


@pytest.mark.parametrize(
    ("text", "sound", "spoken"),
    [
        ("Yes. Help me, please. Yes. Help me, please.", "11110000", "Yes. Help me, please."),
        # Audio after the last word may be aligned with it.
        ("Yes. Help me, please. Yes. Help me, please.", "11110001", "Yes. Help me, please."),
        # The alignment assigned the sound to the second occurrence.
        ("help me please, help me please", "000111", "help me please"),
        ("go on. yes yes yes yes yes", "1111000", "go on. yes yes"),
        # The copy was cut off by the limit of tokens.
        ("can you help me now can you help", "11111000", "can you help me now"),
        ("one two one two one two", "111100", "one two one two"),
        ("so it is so it is and then", "11100011", "so it is and then"),
    ],
)
def test_a_copy_without_sound_is_cut(text: str, sound: str, spoken: str) -> None:
    assert left(text, sound) == spoken


@pytest.mark.parametrize(
    ("text", "sound"),
    [
        ("no no no", "111"),
        ("one one two", "111"),
        ("seven of clubs ten of clubs seven of clubs", "111111111"),
        # One word of a repeated phrase is often too short for the alignment.
        ("a lot a lot", "1101"),
        # Short words that repeat nothing are not removed.
        ("in the end", "001"),
        ("the cat and the dog", "01001"),
    ],
)
def test_what_is_said_again_stays(text: str, sound: str) -> None:
    assert left(text, sound) == text


def test_given_words_are_never_cut() -> None:
    assert left("help me help me", "0011", first=2) == "help me help me"
    assert left("help me help me", "1100", first=2) == "help me"


def test_case_and_punctuation_do_not_count_and_punctuation_alone_is_no_copy() -> None:
    assert says_twice(["No,", "can", "you?", "no", "CAN", "you."])
    assert not says_twice(["-", "-", "..."])
    assert not says_twice(["one", "two", "three", "one"])
    assert not says_twice([])


def test_only_sound_counts_and_no_pause() -> None:
    pcm = np.zeros(32000, np.float32)
    pcm[:8000] = np.random.default_rng(0).normal(0, 0.1, 8000)
    assert seconds_of_sound(pcm, [(0.0, 0.3), (0.3, 2.0), (1.0, 2.0), (1.9, 9.0)]) == pytest.approx([0.3, 0.2, 0, 0])


def test_a_repeated_phrase_is_a_loop_and_speech_is_none() -> None:
    assert is_loop(" and then he said so" * 12)
    assert not is_loop(
        "She pulled her hair down, turned her skirt back, put her feet on the fender and took part on her lap."
    )
    assert not is_loop(" yes yes yes")


def test_unlikely_words_and_lone_punctuation_are_noise() -> None:
    assert is_noise(-0.9, 0.7)
    assert not is_noise(-0.7, 0.9)
    assert not is_noise(-1.1, 0.3)
    assert is_noise(-1.1, 0.3, MIN_FILE_LOGPROB)
    assert not has_words(" . . !")
    assert has_words(" 5.")
    assert has_words(" はい。")
    assert not has_words(" W-W-W-W-W-W-W-W.")
    assert has_words(" W-W-W-W-W-W-W-W what?")
    assert has_words(" No-no-no.")
