"""Compiled grammars: each generation has its own, and the newest are kept."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from antiphon.engine.api import Grammar
from antiphon.engine.generation import Constraint
from antiphon.engine.grammar import MAX_KEPT, MIN_MASKS, GrammarCompiler
from antiphon.errors import GrammarError
from tests.engine.contract.engines import tiny_tokenizer
from tests.engine.local.tiny import VOCABULARY

TOKENIZER = tiny_tokenizer()
END = VOCABULARY - 1
STOP = frozenset((END,))
WORD = Grammar("lark", 'start: "ab" | "ac"\n')


def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCABULARY)


def token(character: str) -> int:
    return int(TOKENIZER.token_to_id(character))


def allowed(constraint: Constraint) -> set[str] | None:
    """The tokens that may come next, as text; None: any."""
    words: Any = constraint.allowed()
    if words is None:
        return None
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return {TOKENIZER.id_to_token(int(i)) for i in np.flatnonzero(bits)}


def fits(grammar: Grammar, text: str) -> bool:
    """Whether a grammar allows a text, character by character, and then its end."""
    constraint = compiler().compile(grammar, STOP)
    for character in text:
        name = {" ": "\u0120", "\n": "\u010a"}.get(character, character)
        if name not in (allowed(constraint) or ()):
            return False
        constraint.accept(token(name))
    return "<end>" in (allowed(constraint) or ())


def test_a_text_is_allowed_character_by_character_and_then_only_its_end() -> None:
    constraint = compiler().compile(WORD, STOP)
    assert allowed(constraint) == {"a"}
    constraint.accept(token("a"))
    assert allowed(constraint) == {"b", "c"}
    with pytest.raises(ValueError, match="satisfy the grammar"):
        constraint.accept(token("x"))


def test_when_a_text_is_whole_only_a_stop_token_may_follow() -> None:
    constraint = compiler().compile(WORD, STOP)
    for character in "ac":
        constraint.accept(token(character))
    assert allowed(constraint) == {"<end>"}


def test_behind_the_trigger_the_grammar_holds_until_the_text_is_whole() -> None:
    constraint = compiler().compile(Grammar("lark", WORD.text, trigger="go:"), STOP)
    for character in "let me go":
        assert allowed(constraint) is None
        constraint.accept(token("\u0120" if character == " " else character))
    constraint.accept(token(":"))
    for _ in range(2):
        for character, expected in (("a", {"a"}), ("b", {"b", "c"})):
            assert allowed(constraint) == expected
            constraint.accept(token(character))
        for character in "go:":
            assert allowed(constraint) is None
            constraint.accept(token(character))


def test_generations_with_the_same_grammar_do_not_disturb_each_other() -> None:
    made = compiler()
    assert made.kept(WORD, STOP) is None
    first = made.compile(WORD, STOP)
    first.accept(token("a"))
    second = made.kept(WORD, STOP)
    assert second is not None
    assert allowed(second) == {"a"}
    assert allowed(first) == {"b", "c"}
    # The same grammar with other stop tokens counts as another grammar.
    assert made.kept(WORD, frozenset((0,))) is None


def test_the_newest_grammars_are_kept() -> None:
    made = compiler()
    grammars = [Grammar("lark", f'start: "{"a" * (n + 1)}"\n') for n in range(MAX_KEPT + 1)]
    for grammar in grammars:
        made.compile(grammar, STOP)
    assert [made.kept(g, STOP) is not None for g in grammars] == [False] + [True] * MAX_KEPT


def test_a_grammar_that_is_refused_is_not_kept() -> None:
    made, broken = compiler(), Grammar("lark", "start: ???")
    with pytest.raises(GrammarError):
        made.compile(broken, STOP)
    assert made.kept(broken, STOP) is None


def test_a_grammar_whose_masks_take_too_long_is_refused_from_then_on_and_others_are_not() -> None:
    # Each mask reads the clock twice: 0.05 s, where an average of 0.02 s is allowed.
    ticks = itertools.count()
    slow = GrammarCompiler(TOKENIZER, VOCABULARY, clock=lambda: next(ticks) * 0.05)
    word = slow.compile(Grammar("lark", "start: /a*/\n"), STOP)
    with pytest.raises(GrammarError, match="more than 20 ms a token"):
        for _ in range(MIN_MASKS):
            word.allowed()
            word.accept(token("a"))
    with pytest.raises(GrammarError, match="more than 20 ms a token"):
        slow.compile(Grammar("lark", "start: /a*/\n"), STOP)
    assert slow.kept(Grammar("lark", "start: /a*/\n"), STOP) is None
    slow.compile(WORD, STOP)


def test_one_mask_that_takes_long_is_no_reason_to_refuse_a_grammar() -> None:
    ticks = iter([0.0, 0.1, *[0.1] * 100])
    word = GrammarCompiler(TOKENIZER, VOCABULARY, clock=lambda: next(ticks)).compile(
        Grammar("lark", "start: /a*/\n"), STOP
    )
    for _ in range(40):
        word.allowed()
        word.accept(token("a"))
