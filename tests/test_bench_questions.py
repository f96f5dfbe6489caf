"""How benchmarks judge answers to questions, function calls, and answers that begin in a pause."""

from __future__ import annotations

import re

import pytest
from bench.answers import QUESTIONS, is_right
from bench.calls import fits, prompts_of
from bench.talk import Hesitation


def test_each_question_has_an_answer() -> None:
    assert len(QUESTIONS) == 100
    for question, accepted in QUESTIONS:
        assert question.endswith((".", "?"))
        assert all(accepted.split("|"))


def test_an_answer_is_right_by_a_word_of_its_own() -> None:
    assert is_right("There are EIGHT planets.", "eight|8")
    assert not is_right("There are eighteen.", "eight|8")
    assert not is_right("There are 18.", "eight|8")


@pytest.mark.parametrize(("name", "num_wanted", "num_unwanted"), [("home", 60, 40), ("errands", 30, 20)])
def test_each_call_that_is_wanted_is_one_of_a_tool_that_is_offered(
    name: str, num_wanted: int, num_unwanted: int
) -> None:
    prompts = prompts_of(name)
    tools = {tool["name"]: tool["parameters"] for tool in prompts["tools"]}
    for one in prompts["wanted"]:
        assert one["arguments"].keys() <= tools[one["tool"]]["properties"].keys()
        assert all(map(re.compile, one["arguments"].values()))
    assert (len(prompts["wanted"]), len(prompts["unwanted"])) == (num_wanted, num_unwanted)


def test_a_call_fits_by_its_name_and_the_arguments_that_were_said() -> None:
    call = {"function": {"name": "set_timer", "arguments": '{"minutes": 5, "label": "tea"}'}}
    assert fits(call, "set_timer", {"minutes": "5"})
    assert not fits(call, "set_timer", {"minutes": "10"})
    assert not fits(call, "play_music", {"minutes": "5"})
    assert not fits({"function": {"name": "set_timer", "arguments": '{"minutes'}}, "set_timer", {})


def test_what_comes_in_a_pause_is_early() -> None:
    hesitation = Hesitation({"pause": [1.0, 2.0], "turn_end": 4.0}, [], [0.9, 1.5, 2.5, 2.52, 4.5])
    assert [at for at in (0.9, 1.5, 2.05, 2.2) if hesitation.is_early(at)] == [1.5, 2.05]
    assert hesitation.was_spoken_into
    assert hesitation.talked_over_s == pytest.approx(0.04)


def test_a_turn_is_answered_whole_if_each_item_continues_the_one_before() -> None:
    def said(*items: dict[str, str]) -> Hesitation:
        added = [(0.0, {"type": "conversation.item.added", "item": item}) for item in items]
        return Hesitation({"pause": [1.0, 2.0], "turn_end": 4.0}, added, [])

    first, answer = {"id": "a", "role": "user"}, {"id": "b", "role": "assistant"}
    assert said(first, answer).is_whole
    assert said(first, answer, {"id": "c", "role": "user", "continues": "a"}).is_whole
    assert not said(first, answer, {"id": "c", "role": "user"}).is_whole
