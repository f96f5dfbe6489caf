"""Grammars that would exhaust the machine: each trial has limits of time and memory."""

from __future__ import annotations

import atexit
import os
import signal
import string
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.engine.api import Grammar
from antiphon.engine.grammar_trial import GrammarLimits, GrammarTrials
from antiphon.engine.schemas import MAX_INTERSECTED, MAX_PATTERN_CHARS, MAX_PATTERNS, check_schemas, json_grammar
from antiphon.errors import GrammarError

TOOL = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
# A list of words, which takes some 50 MB.
LARGE = {"enum": [f"{i * 7919 % 100_003} words {i}" for i in range(19_000)]}


def intersection(count: int) -> dict[str, Any]:
    """A text that contains each of `count` letters: a library that intersects patterns needs 2 ** count states."""
    return {"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in string.ascii_letters[:count]]}


@pytest.fixture
def trials() -> Iterator[GrammarTrials]:
    made = GrammarTrials(GrammarLimits(cpu_s=0.3))
    yield made
    made.close()


def test_when_patterns_intersect_without_end_then_the_deadline_ends_it_and_the_next_grammar_passes(
    trials: GrammarTrials,
) -> None:
    grammars = [json_grammar(TOOL), json_grammar(intersection(26))]
    with pytest.raises(GrammarError, match=r"compiling it takes more than 0\.3 s") as caught:
        trials.check_all(grammars)
    assert caught.value.index == 1
    process = trials.pids
    trials.check(json_grammar({"type": "string"}))
    assert trials.pids == process


def test_when_a_grammar_wants_more_memory_than_there_is_for_one_then_it_is_refused_and_nothing_stays(
    trials: GrammarTrials,
) -> None:
    trials.limits = GrammarLimits(cpu_s=20.0, memory_mb=16)
    with pytest.raises(GrammarError, match="compiling it takes more than 16 MB"):
        trials.check(json_grammar(LARGE))
    (pid,) = trials.pids
    assert psutil.Process(pid).children() == []
    trials.limits = GrammarLimits(cpu_s=20.0, memory_mb=512)
    assert trials.check(json_grammar({**LARGE, "title": "again"})) > 5.0


def test_a_grammar_that_was_tried_is_not_tried_again(trials: GrammarTrials) -> None:
    slow = json_grammar(intersection(26))
    for grammar in (json_grammar(TOOL), slow):
        for _ in range(2):
            try:
                trials.check(grammar)
            except GrammarError:
                assert grammar is slow
    (pid,) = trials.pids
    os.kill(pid, signal.SIGSTOP)
    # A trial would wait for the stopped process.
    trials.check(json_grammar(TOOL))
    with pytest.raises(GrammarError, match=r"0\.3 s"):
        trials.check(slow)


def test_when_the_process_that_tries_was_killed_then_another_one_tries(trials: GrammarTrials) -> None:
    trials.check(json_grammar(TOOL))
    (pid,) = trials.pids
    os.killpg(pid, signal.SIGKILL)
    trials.check(json_grammar({"type": "string"}))
    assert trials.pids != [pid]


def test_a_token_by_its_id_is_no_fault_of_a_grammar(trials: GrammarTrials) -> None:
    trials.check(Grammar("lark", 'start: "a" <[151645]>\n'))
    with pytest.raises(GrammarError):
        trials.check(Grammar("lark", 'start: "a" <[\n'))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (intersection(MAX_INTERSECTED + 1), "match 7 patterns at once"),
        ({"properties": {"a": {"items": intersection(20)}}}, "match 20 patterns at once"),
        ({"allOf": [{"pattern": "a"}, {"anyOf": [intersection(6), {"pattern": "b"}]}]}, "match 7 patterns at once"),
        ({"anyOf": [{"pattern": f"a{i}"} for i in range(MAX_PATTERNS + 1)]}, "has 513 patterns"),
        ({"$defs": {"a": {"pattern": "a" * (MAX_PATTERN_CHARS + 1)}}}, "has 4097 characters"),
    ],
)
def test_too_many_patterns_are_refused_before_a_trial(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(GrammarError, match=reason) as caught:
        check_schemas([TOOL, schema])
    assert caught.value.index == 1


def test_patterns_of_properties_and_of_alternatives_are_not_intersected() -> None:
    properties = {f"p{i}": {"type": "string", "pattern": f"^x{i}$"} for i in range(20)}
    check_schemas([{"allOf": [{"type": "object", "properties": properties}]}])
    check_schemas([{"anyOf": [{"type": "string", "pattern": f"^x{i}$"} for i in range(20)]}])


PATTERNS = st.sampled_from([".*a.*", "^[a-z]{3,40}$", "(a|b)*c(d|e){1,20}", "x.{30}y", "^$", "[^a]", "(", r"\p{L}+"])
LEAVES = st.one_of(
    st.builds(lambda p: {"type": "string", "pattern": p}, PATTERNS),
    st.sampled_from([{}, {"type": "integer", "minimum": 3}, {"$ref": "#"}, {"$ref": "#/$defs/d"}, {"enum": [1, "a"]}]),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(
            lambda key, some: {key: some},
            st.sampled_from(["allOf", "anyOf", "oneOf"]),
            st.lists(inner, min_size=1, max_size=5),
        ),
        st.builds(lambda some: {"type": "object", "properties": some}, st.dictionaries(st.sampled_from("abcd"), inner)),
        st.builds(lambda one, low: {"type": "array", "items": one, "minItems": low}, inner, st.integers(0, 1000)),
        st.builds(lambda one: {"$defs": {"d": one}, "allOf": [{"$ref": "#/$defs/d"}, one]}, inner),
    ),
    max_leaves=25,
)
FUZZED = GrammarTrials(GrammarLimits(cpu_s=0.5, memory_mb=128))
atexit.register(FUZZED.close)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SCHEMAS)
def test_any_schema_is_compiled_or_refused_and_its_memory_is_given_back(schema: dict[str, Any]) -> None:
    with suppress(GrammarError):
        FUZZED.check(json_grammar(schema))
    for pid in FUZZED.pids:
        assert psutil.Process(pid).children() == []
