from __future__ import annotations

from antiphon.contracts import HypothesisWord
from antiphon.sessions.transcription.transcripts import LOOP_REPEATS, SpokenContext


def words(text: str) -> list[HypothesisWord]:
    return [HypothesisWord(f" {w}", (1,) * len(w), 1.0) for w in text.split()]


def test_it_has_the_newest_words_of_so_many_tokens() -> None:
    context = SpokenContext(5)
    context.add(words("one two"))
    assert context.text == " two"
    context.add(words("hi a"))
    assert context.text == " hi a"
    context.limit(1)
    assert context.text == " a"
    context.limit(0)
    context.add(words("a"))
    context.add([HypothesisWord("", (), 1.0)])
    assert context.text == ""


def test_when_an_utterance_is_said_again_then_it_is_there_again() -> None:
    context = SpokenContext(1000)
    for _ in range(LOOP_REPEATS - 1):
        context.add(words("what is the time?"))
    assert context.text.count("what is the time?") == LOOP_REPEATS - 1


def test_when_the_text_is_a_loop_then_its_phrase_is_there_once() -> None:
    """A model whose context holds a loop continues it, for as long as the context holds it."""
    for phrase in ("no", "thank you.", "one two three four five six seven eight"):
        context = SpokenContext(1000)
        context.add(words("so it was"))
        for _ in range(50):
            context.add(words(phrase.title()))
            context.add(words(phrase))
        assert context.text.lower().count(phrase) < LOOP_REPEATS
        assert context.text.startswith(" so it was")
    bounded = SpokenContext(20)
    bounded.add(words("a" * 3 + " b " * 100))
    assert bounded.text.split().count("b") < LOOP_REPEATS
