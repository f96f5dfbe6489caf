"""When an answer is released: if it says what was read or heard, and not if it is made up."""

from __future__ import annotations

import pytest

from antiphon.pipelines.grounding import Grounding

READ = ["RUE DE LONDRES", "Google France", "Total: 12.50 EUR"]


@pytest.mark.parametrize(
    ("question", "answer", "grounded"),
    [
        ("Which company is on the board?", "The company on the board is Google.", True),
        ("Does it say Google?", "Yes, it says Google.", True),
        ("What does the sign say?", 'The sign says "RUE DE LONDRES".', True),
        ("How much is it?", "It is 12.50 EUR.", True),
        ("What animal is it?", "The animal is a cat.", False),
        ("Is the person speaking?", "The person is speaking.", False),
        ("Which tower is it?", "It is the Eiffel Tower.", False),
        ("What does it say?", "I do not know.", False),
        ("What does it say?", "", False),
        # A model that repeats the question says nothing.
        ("Is the picture bright?", "Is the picture bright? " * 10 + "Google", False),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_first_word_that_carries_meaning_decides(question: str, answer: str, grounded: bool, size: int) -> None:
    check = Grounding(question, READ)
    out = "".join(check.feed(answer[i : i + size]) for i in range(0, len(answer), size)) + check.finish()
    assert check.grounded is grounded
    assert out == (answer if grounded else "")


def test_when_an_answer_is_grounded_then_the_rest_of_it_streams() -> None:
    check = Grounding("What is the company?", READ)
    assert check.feed("The company is Goo") == ""
    assert check.grounded is None
    # "Goo" might have been a complete word.
    assert check.feed("gle") == ""
    assert check.feed(",") == "The company is Google,"
    assert check.feed(" a cat") == " a cat"
    assert check.finish() == ""


def test_when_a_word_is_made_up_then_the_answer_is_not_waited_for() -> None:
    check = Grounding("What animal is it?", READ)
    assert check.feed("It is a dog") == ""
    assert check.grounded is None
    assert check.feed(" and") == ""
    assert check.grounded is False
