"""The splitter: the rules of the speech stream. It finds the same sentences however the text is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.events.speech import Granularity
from antiphon.text.sentences import SentenceSplitter

GRANULARITIES: tuple[Granularity, ...] = ("sentence", "clause", "none")


def split(text: str, granularity: Granularity = "sentence") -> list[str]:
    splitter = SentenceSplitter(granularity)
    return splitter.feed(text) + splitter.flush()


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Hello there. How are you? Fine!", ["Hello there.", "How are you?", "Fine!"]),
        ("Wait... what?! Yes.", ["Wait...", "what?!", "Yes."]),
        ('He said "Stop." Then he left (slowly.) Gone.', ['He said "Stop."', "Then he left (slowly.)", "Gone."]),
        ("It is 3.14, or 1,234.5 in all. Good.", ["It is 3.14, or 1,234.5 in all.", "Good."]),
        ("See www.example.com now. Then go.", ["See www.example.com now.", "Then go."]),
        ("Dr. Smith met Mr. J. R. Jones of the U.S. Hi.", ["Dr. Smith met Mr. J. R. Jones of the U.S. Hi."]),
        ("They met in St. Louis. Hi.", ["They met in St. Louis.", "Hi."]),
        ("At 9 a.m. or 5 p.m. vs. never. Ok.", ["At 9 a.m. or 5 p.m. vs. never.", "Ok."]),
        ("It is, e.g. now, i.e. today. Ok.", ["It is, e.g. now, i.e. today.", "Ok."]),
        ("(e.g.) this one. Next.", ["(e.g.) this one.", "Next."]),
        ("See No. 5 there. No. That is wrong.", ["See No. 5 there.", "No.", "That is wrong."]),
        ("I said no. Then I left.", ["I said no.", "Then I left."]),
        ("你好。今天天气怎么样？很好！", ["你好。", "今天天气怎么样？", "很好！"]),
        ("「行きます。」彼は言った。", ["「行きます。」", "彼は言った。"]),
        ("मैं ठीक हूँ। आप?॥ठीक", ["मैं ठीक हूँ।", "आप?॥", "ठीक"]),
        ("كيف حالك؟ أنا بخير.", ["كيف حالك؟", "أنا بخير."]),
        ("So… what", ["So…", "what"]),
        ("他来了。Dr. Smith走了。", ["他来了。", "Dr. Smith走了。"]),
        ("No." + " " * 70 + "5 men.", ["No.", "5 men."]),
        ("one, two; three. four", ["one, two; three.", "four"]),
        ("  \n ", []),
        ("", []),
        ("Am 3. Mai kommt sie. Er auch.", ["Am 3. Mai kommt sie.", "Er auch."]),
        ("Es waren 3. Maibäume auch.", ["Es waren 3.", "Maibäume auch."]),
        ("Zum 2. Mal. Ja.", ["Zum 2. Mal.", "Ja."]),
        ("It has 3. Then more.", ["It has 3.", "Then more."]),
        ("Im 19. Jahrhundert, z.B. in Bonn, waren es 5. Ja.", ["Im 19. Jahrhundert, z.B. in Bonn, waren es 5.", "Ja."]),
        ("It has 3." + " " * 70 + "Mai.", ["It has 3.", "Mai."]),
        ("Mme. Dupont et M. Martin. Oui.", ["Mme. Dupont et M. Martin.", "Oui."]),
        ("La Sra. Ruiz vive en EE. UU. desde hace años. Sí.", ["La Sra. Ruiz vive en EE. UU. desde hace años.", "Sí."]),
        ("Il Sig. Rossi, ecc. Va bene.", ["Il Sig. Rossi, ecc. Va bene."]),
        ("no end", ["no end"]),
        ("...", ["..."]),
    ],
)  # fmt: skip
def test_when_text_is_split_then_marks_end_sentences_and_abbreviations_do_not(text: str, sentences: list[str]) -> None:
    assert split(text) == sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("one, two; three. four", ["one,", "two;", "three.", "four"]),
        ("1,234 men, and 2;3", ["1,234 men,", "and 2;3"]),
        ("甲，乙；丙。", ["甲，", "乙；", "丙。"]),
        ("واحد، اثنان؛ ثلاثة", ["واحد،", "اثنان؛", "ثلاثة"]),
    ],
)
def test_when_the_granularity_is_clause_then_commas_end_one(text: str, sentences: list[str]) -> None:
    assert split(text, "clause") == sentences


def test_when_the_granularity_is_none_then_only_a_flush_ends_a_sentence() -> None:
    splitter = SentenceSplitter("none")
    assert splitter.feed("One. Two! Three? ") == []
    assert splitter.flush() == ["One. Two! Three?"]


def test_when_the_next_character_is_known_then_the_sentence_is_returned() -> None:
    splitter = SentenceSplitter()
    assert splitter.feed("Hello there.") == []
    assert splitter.feed(" ") == ["Hello there."]
    assert splitter.feed("你好。") == []
    assert splitter.feed("今") == ["你好。"]
    assert splitter.feed("天。”") == []
    assert splitter.feed("好") == ["今天。”"]


def test_when_flushed_or_cleared_then_the_splitter_starts_anew() -> None:
    splitter = SentenceSplitter()
    assert splitter.feed("Half a sent") == []
    splitter.clear()
    assert splitter.num_pending == 0
    assert splitter.feed("Whole. ") + splitter.flush() == ["Whole."]
    assert splitter.flush() == []


def test_when_words_are_cut_off_then_they_are_whole_and_no_mark_among_them_is_undecided() -> None:
    splitter = SentenceSplitter("clause")
    assert splitter.feed("One two thr") == []
    assert splitter.cut_words(3, 1) == ""
    splitter.feed("ee ")
    assert splitter.cut_words(4, 1) == ""
    assert splitter.cut_words(3, 100) == ""
    assert splitter.cut_words(3, 1) == "One two three"
    assert splitter.feed("Dr. No. ") == []
    assert splitter.cut_words(2, 1) == ""
    assert splitter.feed("x, y") == ["Dr. No.", "x,"]
    assert splitter.flush() == ["y"]


def test_when_marks_arrive_one_by_one_then_each_is_looked_at_once() -> None:
    splitter = SentenceSplitter()
    for _ in range(50_000):
        assert splitter.feed(".") == []
    # If the run were scanned again for each mark, this would take 1,250 million steps.
    assert splitter.feed(" x") == ["." * 50_000]


TEXTS = st.text(st.sampled_from("ab3 \n\t.!?,;。？…，।\"')」NoDr1U") | st.characters(), max_size=60) | st.lists(
    st.sampled_from(["Dr.", "No.", "U.S.", "e.g.", "No", "5", " ", "1.5", "end.", "J.", '"', "。", "..."]), max_size=20
).map("".join)  # fmt: skip


@given(TEXTS, st.lists(st.integers(0, 60), max_size=8), st.sampled_from(GRANULARITIES))
def test_when_text_is_cut_anywhere_then_the_sentences_are_the_same(
    text: str, cuts: list[int], granularity: Granularity
) -> None:
    splitter, units = SentenceSplitter(granularity), list[str]()
    for start, end in pairwise([0, *sorted(c for c in cuts if c <= len(text)), len(text)]):
        units += splitter.feed(text[start:end])
    assert units + splitter.flush() == split(text, granularity)


@given(TEXTS, st.sampled_from(GRANULARITIES))
def test_when_sentences_are_joined_then_only_white_space_at_the_seams_is_missing(
    text: str, granularity: Granularity
) -> None:
    units, rest = split(text, granularity), text
    for unit in units:
        assert unit
        assert unit == unit.strip()
        rest = rest.lstrip()
        assert rest.startswith(unit)
        rest = rest[len(unit) :]
    assert not rest.strip()
