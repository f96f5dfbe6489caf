from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from antiphon.contracts import Hypothesis, HypothesisWord, tuned
from antiphon.events.transcription import StreamTuning
from antiphon.events.words import bare_word
from antiphon.sessions.transcription.stable_words import TurnPiece, WindowText
from tests.scripted import PROFILE


def pieces(text: str, probability: float = 1.0) -> tuple[HypothesisWord, ...]:
    return tuple(HypothesisWord(f" {w}", (len(w), ord(w[0])), probability) for w in text.split())


def hypothesis(text: str, probability: float = 1.0, language: float = 1.0, heard: bool = True) -> Hypothesis:
    return Hypothesis(pieces(text, probability), "en", language, heard, 4, len(text.split()))


def texts(sent: Iterable[TurnPiece]) -> dict[int, str]:
    """Return the sent text of each turn."""
    out: dict[int, str] = {}
    for turn, piece in sent:
        out[turn] = out.get(turn, "") + piece.text
    return out


def offer(text: WindowText, partial: Hypothesis, audio_s: float, turn: int = 0) -> str:
    """Offer a partial to a window of one turn, and return its new text."""
    return texts(text.offer(partial, audio_s, [turn] * len(partial.pieces), text.untouched(turn))).get(turn, "")


def finish(text: WindowText, final: Hypothesis) -> tuple[str, tuple[HypothesisWord, ...]]:
    sent, kept = text.finish(final, [0] * len(final.pieces))
    return texts(sent).get(0, ""), tuple(p for _, p in kept)


def test_when_a_word_has_stood_long_enough_with_another_behind_it_then_it_is_sent() -> None:
    text = WindowText(PROFILE)
    assert offer(text, hypothesis("so they"), 1.0) == ""
    assert offer(text, hypothesis("so they say"), 1.3) == ""
    assert offer(text, hypothesis("so they say"), 1.9) == " so they"
    assert text.prefix == (2, ord("s"), 4, ord("t"))
    # The pieces continue the sent words; "say" has stood since 1.3.
    assert offer(text, hypothesis("say it"), 2.2) == " say"


def test_when_a_word_changes_then_it_and_those_behind_it_start_anew() -> None:
    text = WindowText(PROFILE)
    offer(text, hypothesis("a cat sat down"), 1.0)
    offer(text, hypothesis("a bat sat down"), 1.5)
    assert offer(text, hypothesis("a bat sat down"), 1.9) == " a"
    assert offer(text, hypothesis("bat sat down"), 2.4) == " bat sat"


def test_when_only_case_or_punctuation_changes_then_the_word_is_the_same() -> None:
    text = WindowText(PROFILE)
    offer(text, hypothesis("well then now"), 1.0)
    assert offer(text, hypothesis("Well, then now"), 2.0) == " Well, then"


def test_when_words_are_unlikely_or_there_is_no_speech_or_the_language_unsure_then_nothing_is_sent() -> None:
    text = WindowText(PROFILE)
    for i in range(5):
        assert offer(text, hypothesis("hmm uh so", probability=0.2), 1.0 + i) == ""
        assert offer(text, hypothesis("thank you all", heard=False), 1.5 + i) == ""
    other = WindowText(PROFILE)
    for i in range(5):
        assert offer(other, hypothesis("bon jour a", language=0.4), 1.0 + i) == ""


def test_when_a_window_was_decoded_once_then_nothing_is_sent_whatever_the_tuning() -> None:
    text = WindowText(tuned(PROFILE, StreamTuning(segment_duration_s=2.0, rollback_tokens=0)))
    assert offer(text, hypothesis("one two three"), 2.0) == ""
    assert offer(text, hypothesis("one two three"), 4.0) == " one two three"


def test_when_no_agreement_is_asked_for_then_a_word_seen_once_is_still_not_sent() -> None:
    text = WindowText(replace(PROFILE, agreement_s=0.0, first_agreement_s=0.0))
    assert offer(text, hypothesis("one two three"), 1.0) == ""
    assert offer(text, hypothesis("one two three"), 1.1) == " one two"


EARLY = replace(PROFILE, first_agreement_s=0.2, first_probability=0.4)


def likely(*words: tuple[str, float]) -> Hypothesis:
    """Return a hypothesis of these words, each with its probability."""
    return Hypothesis(tuple(p for w, x in words for p in pieces(w, x)), "en", 1.0, True, 4, len(words))


def test_when_a_turns_first_word_is_seen_twice_or_a_likely_word_follows_then_it_is_sent() -> None:
    text = WindowText(EARLY)
    assert offer(text, hypothesis("well", 0.4), 0.5) == ""
    assert offer(text, hypothesis("well", 0.4), 0.6) == " well"
    text = WindowText(EARLY)
    assert offer(text, likely(("well", 0.4), ("then", 0.49)), 0.5) == ""
    text = WindowText(EARLY)
    assert offer(text, likely(("well", 0.4), ("then", 0.5)), 0.5) == " well"


def test_when_a_turns_first_word_is_less_likely_then_it_waits_as_later_words_do() -> None:
    text = WindowText(EARLY)
    unsure = likely(("well", 0.39), ("then", 0.9), ("now", 0.9))
    assert [offer(text, unsure, at) for at in (0.5, 0.7, 1.3)] == ["", "", ""]
    assert offer(text, unsure, 1.4) == " well then"


def test_only_the_very_first_word_is_sent_that_early() -> None:
    text = WindowText(EARLY)
    assert offer(text, hypothesis("well then now"), 0.5) == " well"
    # A word of the turn was sent, so the next words have to stand for the whole agreement.
    assert offer(text, hypothesis("then now"), 1.3) == ""
    assert offer(text, hypothesis("then now"), 1.4) == " then"
    # Without the early rule, a first word has to stand as long as the other first words.
    text = WindowText(replace(EARLY, first_probability=None))
    assert [offer(text, hypothesis("well then"), at) for at in (0.5, 0.6, 0.7)] == ["", "", " well"]
    assert [offer(WindowText(EARLY), hypothesis(""), 0.5)] == [""]


def test_when_tuning_asks_for_more_rollback_or_unfixed_chunks_then_words_are_sent_later() -> None:
    text = WindowText(tuned(PROFILE, StreamTuning(rollback_tokens=5, unfixed_chunks=2)))
    assert offer(text, hypothesis("one two three four"), 1.0) == ""
    assert offer(text, hypothesis("one two three four"), 2.0) == ""
    assert offer(text, hypothesis("one two three four"), 3.0) == " one"


def test_the_final_adds_what_was_not_sent() -> None:
    text = WindowText(PROFILE)
    offer(text, hypothesis("so they say"), 1.0)
    offer(text, hypothesis("so they say"), 2.0)
    assert finish(text, hypothesis("So they said it.")) == (" said it.", pieces("So they said it."))


def test_when_the_final_changes_a_sent_word_then_it_is_not_sent_twice() -> None:
    text = WindowText(PROFILE)
    offer(text, hypothesis("desire and they say now"), 1.0)
    assert offer(text, hypothesis("desire and they say now"), 2.0) == " desire and they say"
    final = "There's iron and they say in all our blood."
    assert finish(text, hypothesis(final)) == (" in all our blood.", pieces(final))


def test_when_the_final_has_no_speech_then_it_is_dropped() -> None:
    text = WindowText(PROFILE)
    assert finish(text, hypothesis("Thanks for watching!", heard=False)) == ("", ())


def test_the_base_is_part_of_the_prefix_and_never_sent() -> None:
    text = WindowText(PROFILE, base=pieces("we went there"))
    assert text.prefix == text.base_tokens == tuple(t for p in pieces("we went there") for t in p.tokens)
    assert finish(text, hypothesis("and go on."))[0] == " and go on."


def test_when_turns_share_a_window_then_each_gets_its_own_words() -> None:
    text = WindowText(PROFILE)
    turns = [0, 0, 1, 1]
    for at in (1.0, 2.0):
        partial = hypothesis("one two three four")
        sent = text.offer(partial, at, turns, eager=False)
    assert texts(sent) == {0: " one two", 1: " three"}
    # The final gives turn 0 another word; turn 1 keeps its words, and none is sent twice.
    final = hypothesis("one two too three four five")
    sent, kept = text.finish(final, [0, 0, 0, 1, 1, 1])
    assert texts(sent) == {0: " too", 1: " four five"}
    assert [t for t, _ in kept] == [0, 0, 0, 1, 1, 1]


def test_words_are_compared_by_letters() -> None:
    assert bare_word(" Don't,") == "don't"
    assert bare_word("ＡＢＣ！") == "abc"


words = st.lists(st.sampled_from(["a", "bee", "sea", "dee", "eat", "eff", "Gee,"]), max_size=8)


@given(st.lists(words, max_size=12), words)
def test_whatever_the_partials_then_nothing_sent_is_taken_back(partials: list[list[str]], final: list[str]) -> None:
    """Joined deltas only grow. Each partial continues the sent words, which are its forced prefix."""
    text = WindowText(PROFILE)
    sent = ""
    for i, partial in enumerate(partials):
        sent += offer(text, hypothesis(" ".join(partial)), i * 0.5)
        assert "".join(p.text for _, p in text.sent) == sent
        assert text.prefix == tuple(t for _, p in text.sent for t in p.tokens)
    delta, kept = finish(text, hypothesis(" ".join(final)))
    assert "".join(p.text for _, p in text.sent) == sent + delta
    assert [p.text.strip() for p in kept] == final
    if not sent:
        assert delta.split() == final
