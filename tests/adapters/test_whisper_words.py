"""Word edges and the choice of a language, without the model."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.adapters.whisper.windows import chosen_language
from antiphon.adapters.whisper.word_edges import with_edges
from antiphon.events.words import Word
from antiphon.modeling.token_words import token_bytes

RANKED = [("en", 0.6), ("de", 0.25), ("nl", 0.1), ("fr", 0.05)]


@pytest.mark.parametrize(
    ("languages", "likely", "chosen"),
    [
        ((), None, ("en", 0.6)),
        (("de", "fr"), None, ("de", 0.25 / 0.3)),
        (("tlh",), None, ("en", 0.6)),
        # No language is clear enough to replace the likely one.
        ((), "de", ("de", 1.0)),
        (("de", "fr"), "fr", ("fr", 1.0)),
        # One of the two allowed languages is clear enough.
        (("en", "fr"), "fr", ("en", 0.6 / 0.65)),
    ],
)
def test_the_language_is_the_best_of_the_choice_and_the_likely_one_is_kept_unless_another_is_clear(
    languages: tuple[str, ...], likely: str | None, chosen: tuple[str, float]
) -> None:
    code, probability = chosen_language(RANKED, languages, likely)
    assert (code, probability) == (chosen[0], pytest.approx(chosen[1], abs=0.01))


def sound(*loud: tuple[float, float], length_s: float = 4.0) -> np.ndarray:
    """Return noise that is loud in these spans of seconds, and soft elsewhere."""
    noise = np.random.default_rng(0).normal(0, 1, int(length_s * 16000)).astype(np.float32)
    level = np.full(len(noise), 0.0005, np.float32)
    for start_s, end_s in loud:
        level[int(start_s * 16000) : int(end_s * 16000)] = 0.1
    return noise * level


def test_a_pause_belongs_to_neither_of_the_words_beside_it() -> None:
    pcm = sound((0.5, 1.0), (2.0, 2.5), (3.0, 3.3))
    # Attention assigns the first pause to the word after it, and the second to the word before it.
    words = [Word("a", 0.0, 0.95, 1.0), Word("b", 0.95, 2.95, 1.0), Word("c", 2.95, 3.6, 1.0)]
    found = with_edges(words, pcm)
    assert [(w.start_s, w.end_s) for w in found] == [
        (pytest.approx(a, abs=0.03), pytest.approx(b, abs=0.03)) for a, b in ((0.5, 1.0), (2.0, 2.5), (3.0, 3.3))
    ]
    assert [(w.text, w.probability) for w in found] == [("a", 1.0), ("b", 1.0), ("c", 1.0)]


def test_two_words_without_a_pause_meet_where_it_is_softest_nearby() -> None:
    # A dip that is too short to be a pause, 30 ms after the shifted edge.
    pcm = sound((0.2, 1.09), (1.11, 2.0))
    first, second = with_edges([Word("a", 0.2, 1.01, 1.0), Word("b", 1.01, 1.9, 1.0)], pcm)
    assert first.end_s == second.start_s == pytest.approx(1.1, abs=0.011)


@given(
    st.lists(st.floats(0, 5), max_size=12),
    st.lists(st.tuples(st.floats(0, 4), st.floats(0, 4)), max_size=4),
    st.sampled_from([0.0, 0.005, 1.0, 4.0]),
)
def test_words_stay_in_order_and_in_the_audio(
    edges: list[float], loud: list[tuple[float, float]], length_s: float
) -> None:
    words = [Word("w", a, b, 0.5) for a, b in pairwise(sorted(min(e, length_s) for e in edges))]
    found = with_edges(words, sound(*loud, length_s=length_s))
    times = [t for w in found for t in (w.start_s, w.end_s)]
    assert len(found) == len(words)
    assert times == sorted(times)
    assert all(0 <= t <= length_s for t in times)


def test_a_tokens_bytes_are_those_that_its_spelling_stands_for() -> None:
    assert token_bytes("\u0120caf\u00c3\u00a9") == " café".encode()
    # An incomplete character is returned as its bytes.
    assert token_bytes("\u00e3\u0123") == bytes([0xE3, 0x81])
    assert token_bytes("") == b""
