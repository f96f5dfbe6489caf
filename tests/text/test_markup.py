"""Plain text and its spoken form: the examples of docs/wire/speech.md, cut at any point."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.text.markup import MarkupReader, pause_mark, pause_s, plain, split_pauses, without_pauses
from antiphon.text.written import WrittenReader, is_heard, said_text, said_words

PAGE = Path(__file__).parents[2] / "docs" / "wire" / "speech.md"
_ROW = re.compile(r"^\| `(.+)` \| (.+) \|$")


def examples() -> list[tuple[str, str]]:
    table = PAGE.read_text(encoding="utf-8").partition("| Text | What the voice is given |")[2].partition("\n\n")[0]
    rows = [_ROW.match(line) for line in table.splitlines()[2:]]
    assert all(rows)
    assert len(rows) > 20
    return [(row[1].replace("\\n", "\n").replace("\\|", "|"), row[2]) for row in rows if row]


def shown(text: str) -> str:
    """Return the spoken form, with pauses written as on the page."""
    parts = (f"({pause_s(p):g} s)" if pause_s(p) else said_text(said_words(p, "en")) for p in split_pauses(text))
    return " ".join(" ".join(parts).split())


def cut(text: str, size: int) -> str:
    reader = MarkupReader()
    return "".join(reader.feed(text[at : at + size]) for at in range(0, len(text), size)) + reader.flush()


@pytest.mark.parametrize(("written", "said"), examples())
def test_the_examples_of_the_page_are_said_as_it_has_them(written: str, said: str) -> None:
    assert shown(plain(written)) == said
    for size in (1, 2, 5):
        assert cut(written, size) == plain(written)


@pytest.mark.parametrize(
    ("written", "said", "language"),
    [
        # Text as chat clients, home automation and workflow tools send it.
        ("<think>\nThe user greets me.\n</think>\n\nHello!", "Hello!", "en"),
        ("</think>Hello!", "Hello!", "en"),
        ('<?xml version="1.0"?><speak version="1.1" xml:lang="en-US">Hi<mark name="a"/>.</speak>', "Hi.", "en"),
        ('<amazon:effect name="whispered">psst</amazon:effect>', "psst", "en"),
        ('<a href="https://x.y/?a=1&amp;b=2">the link</a>', "the link", "en"),
        ("<https://x.io/a> and <bob@x.com>", "x dot I O slash a> and bob at x dot com>", "en"),
        ("It's 21:30, -3.5 °C; 50% off €1,299.99!", "It's 21:30, minus 3.5 °C; 50% off €1,299.99!", "en"),
        ("+49-30-123456, (555) 123-4567, 1-800-555-0199", "+49-30-123456, (555) 123-4567, 1-800-555-0199", "en"),
        ("Louis XIV, 10-year-old COVID-19, F-16", "Louis XIV, 10-year-old COVID-19, F-16", "en"),
        ("- one\n- two\n* three", "- one - two three", "en"),
        ("a ** b and 2^10", "a to the power of b and 2 to the power of 10", "en"),
        ("I <3 you & x<y", "I <3 you & x<y", "en"),
        ("AT&amp;T &copy; &nbsp;&unknown; &#x1F600;", "AT&T © &unknown;", "en"),
        ("<tool_call>go</tool_call>", "go", "en"),
        ("x <y and so on", "x <y and so on", "en"),
        ("~~~\ncode\n~~~", "code", "en"),
        ("say [read](/ɹˈɛd/) so", "say [read](/ɹˈɛd/) so", "en"),
        (
            "10–12 Uhr bei −5 °C: a-b.de/x#y",
            "10 bis 12 Uhr bei minus 5 °C: a Strich b Punkt D E Schrägstrich x Raute y",
            "de",
        ),
        ("de 10–12 h à −5 °C", "de 10 à 12 h à moins 5 °C", "fr"),
        # For other languages, signs that their voices read are kept.
        ("10–12 −5 x−y **a** 😀", "10–12 -5 x-y a", "ru"),
    ],
)
def test_what_programs_send_is_said_as_people_read_it(written: str, said: str, language: str) -> None:
    assert " ".join(said_text(said_words(plain(written), language)).split()) == said
    reader = WrittenReader(language)
    live = "".join(reader.feed(c) for c in plain(written)) + reader.flush()
    assert " ".join(live.split()) == said


@given(st.text(st.sampled_from("<>/&;`~ \n\"'=ab1-!?|s")), st.integers(1, 7))
def test_the_plain_text_does_not_depend_on_how_the_text_was_cut(text: str, size: int) -> None:
    assert cut(text, size) == plain(text)


@pytest.mark.parametrize("piece", ["<", "a<", "&", "<a x=1 ", "```", "\n", "<!--", "<think>", "<a ", "[a](", "1-", "−"])
def test_when_a_text_is_full_of_brackets_then_it_takes_no_longer_than_another(piece: str) -> None:
    # Without bounds in the patterns these take minutes; only the suite's timeout limits them.
    assert list(said_words(plain(piece * 20_000), "en")) is not None


def test_a_pause_is_bounded_and_cannot_be_given_as_a_character() -> None:
    assert pause_s(pause_mark(3600)) == 10
    assert pause_mark(0) == ""
    assert plain(f"a{pause_mark(5)}b &#x{ord(pause_mark(5)):x};") == "ab "
    assert without_pauses(plain('One.<break time="2s"/>Two.')) == "One. Two."


@pytest.mark.parametrize(
    "text", ["", "...", "?!", "—", "\u200b", " \n ", "😀", "…", "**", "<b></b>", "<think>a</think>"]
)
def test_some_texts_say_nothing(text: str) -> None:
    assert not is_heard(said_text(said_words(plain(text), "en")))
