"""The search for keyterms, with a scripted decoder."""

from __future__ import annotations

from antiphon.adapters.whisper.keyterms import MAX_CANDIDATES, find_candidates, search, similarity, sounds_of
from antiphon.contracts import HypothesisWord


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def pieces(text: str) -> list[HypothesisWord]:
    return [HypothesisWord(f" {w}", tuple(encode(f" {w}")), 1.0) for w in text.split()]


def text_of(found: tuple[HypothesisWord, ...]) -> str:
    return "".join(p.text for p in found).strip()


class Decoder:
    """A decoder that returns the same probability for all tokens of a hypothesis.

    `first`: the probability in the first row. `rest`: the probability in the other rows. `calls`: the number of calls.
    """

    def __init__(self, first: float = 0.9, rest: float = 0.9) -> None:
        self.first, self.rest, self.calls = first, rest, 0

    def __call__(self, rows: list[list[int]]) -> list[list[float]]:
        self.calls += 1
        return [[self.rest if i else self.first] * len(row) for i, row in enumerate(rows)]


def test_words_that_sound_alike_are_similar_and_others_are_not() -> None:
    assert similarity(sounds_of("moka"), sounds_of("mocha")) == 1.0
    assert similarity(sounds_of("Americana"), sounds_of("americano")) > 0.9
    assert similarity(sounds_of("ice smoke ah"), sounds_of("iced mocha")) > 0.6
    assert similarity(sounds_of("sugar"), sounds_of("Reykjavik")) < 0.4


def test_a_probable_keyterm_replaces_what_sounds_like_it_and_keeps_marks_and_capitals() -> None:
    found = search(pieces("Americana, with moka."), ("americano", "mocha"), encode, Decoder())
    assert text_of(found) == "Americano, with mocha."
    assert [t for p in found for t in p.tokens] == encode(" Americano, with mocha.")


def test_a_keyterm_replaces_several_words() -> None:
    assert text_of(search(pieces("an ice tomoka here"), ("iced mocha",), encode, Decoder())) == "an iced mocha here"


def test_an_improbable_keyterm_changes_nothing() -> None:
    said = pieces("a moka please")
    assert search(said, ("mocha",), encode, Decoder(rest=0.01)) == tuple(said)


def test_without_words_that_sound_alike_the_decoder_is_not_asked() -> None:
    decoder, said = Decoder(), pieces("tell me a story")
    assert search(said, ("Reykjavik", "amoxicillin"), encode, decoder) == tuple(said)
    assert search([], ("mocha",), encode, decoder) == ()
    assert decoder.calls == 0


def test_words_that_spell_a_keyterm_are_not_replaced_by_another() -> None:
    decoder, said = Decoder(), pieces("mocha")
    assert search(said, ("mocha", "moka"), encode, decoder) == tuple(said)
    assert find_candidates(["mocha"], ("mocha", "mochas")) == []


def test_candidates_are_bounded_and_the_most_alike_come_first() -> None:
    found = find_candidates(["moka"] * 40, ("mocha", "mochas"))
    assert len(found) == MAX_CANDIDATES
    assert [c.similarity for c in found] == sorted((c.similarity for c in found), reverse=True)
    assert find_candidates(["moka"], ()) == []
    assert find_candidates(["moka"], ("...",)) == []
