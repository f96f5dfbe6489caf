"""Compilation of grammars into objects that constrain sampled tokens.

A `GrammarCompiler` holds the tokenizer of one model. Each object it returns serves one generation. This module uses the
llguidance library, and knows neither sessions nor steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from antiphon.engine.api import Grammar
from antiphon.engine.generation import Constraint
from antiphon.engine.grammar_trial import TRIALS
from antiphon.errors import GrammarError

# The maximum number of compiled grammars that are kept for later generations with the same schema or tools. All of them
# together take no more memory than a single grammar is allowed to take (GrammarLimits.memory_mb).
MAX_KEPT = 16
# Masks are computed in the model's step, which all sessions share. A grammar is refused if its masks take more than
# MAX_MASK_S seconds of processor time on average, over at least MIN_MASKS masks. A mask of ordinary tools takes 0.1 ms.
MAX_MASK_S, MIN_MASKS = 0.020, 8
# The maximum number of refused grammars that are remembered.
MAX_SLOW = 64
# The whitespace allowed between two tokens of JSON. Without a limit, a small model may emit line breaks forever.
WHITESPACE = r"\n? {0,16}"

# The maximum number of symbols in a grammar (the library's limit is 65,536), and in one schema. The latter allows
# objects of some 1,500 properties, which the library compiles in 0.5 s.
MAX_SYMBOLS, MAX_SCHEMA_SYMBOLS = 60_000, 20_000


def fault_of(grammar: Grammar) -> str:
    """Return why no engine can enforce a grammar, whatever its tokenizer, in one line; "" if one can.

    A JSON schema may have MAX_SCHEMA_SYMBOLS. Time and memory are not limited here: `grammar_trial.py` calls this in a
    process that limits both.
    """
    try:
        is_schema = grammar.kind == "json_schema"
        matcher = _matcher(_byte_tokenizer(), grammar, MAX_SCHEMA_SYMBOLS if is_schema else MAX_SYMBOLS)
        matcher.compute_bitmask()
        if matcher.is_stopped():
            return "no text matches it"
    except ValueError as error:
        return _reason(str(error))
    return ""


@cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def _matcher(tokenizer: LLTokenizer, grammar: Grammar, max_symbols: int) -> LLMatcher:
    """A matcher at the start of the grammar. Raises ValueError if the grammar does not compile."""
    if grammar.kind == "json_schema":
        text = LLMatcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_pattern": WHITESPACE})
    else:
        text = LLMatcher.grammar_from_lark(grammar.text)
    limits = LLParserLimits(max_grammar_size=max_symbols, verbose_errors=False)
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if error := matcher.get_error():
        raise ValueError(error)
    return matcher


def _reason(text: str) -> str:
    """The library's error in one line. Omits the position, because the client did not write the grammar."""
    first, *more = text.removeprefix("failed to compile JSON schema: ").splitlines()
    stated = next((line.removeprefix("error: ") for line in more if line.startswith("error: ")), "")
    return " ".join(filter(None, (first, stated)))


class GrammarFollower(Constraint, Protocol):
    """A constraint of one generation that also reports its progress in the grammar."""

    @property
    def num_tokens(self) -> int | None:
        """The number of tokens matched by the grammar so far; None while any text is allowed."""
        ...


class GrammarCompiler:
    """Compiles grammars for one model, and keeps the newest. May be used from any thread.

    `tokenizer`: the model's tokenizer. `vocabulary_size`: tokens of the model's head, which may exceed the tokenizer's.
    `clock`: seconds of processor time of the calling thread.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocabulary_size: int, *, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._tokenizer, self._vocabulary_size, self._clock = tokenizer, vocabulary_size, clock
        # The library's copies of the tokenizer, by the stop tokens. Bound: one, because all conversations of a model
        # have the same stop tokens.
        self._copies: dict[frozenset[int], LLTokenizer] = {}
        # Matchers at the start of their grammar, each with its memory in MiB, the oldest first. Bound: MAX_KEPT, and
        # the memory of one grammar; the oldest is dropped.
        self._kept: dict[tuple[Grammar, frozenset[int]], tuple[LLMatcher, float]] = {}
        # Grammars whose masks take too long, and why. Bound: MAX_SLOW; the oldest is dropped.
        self._slow: dict[Grammar, str] = {}
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar, stop: frozenset[int]) -> GrammarFollower:
        """Return a constraint that enforces `grammar` in one generation. One of the tokens `stop` ends a complete text.

        Blocks for milliseconds. With new stop tokens it blocks for about a second, because it copies the tokenizer.
        With a new grammar it blocks as long as `GrammarTrials.check_all` does. Raises GrammarError if the library does
        not accept the grammar, even if its trigger never occurs, or if it exceeds the limits.
        """
        if reason := self._slow.get(grammar):
            raise GrammarError(reason)
        memory_mb = TRIALS.check(grammar)
        try:
            matcher = self._compiled(grammar, stop)
        except ValueError as error:
            raise GrammarError(str(error)) from error
        with self._lock:
            self._kept[grammar, stop] = matcher, memory_mb
            while len(self._kept) > MAX_KEPT or self._kept_mb() > TRIALS.limits.memory_mb:
                del self._kept[next(iter(self._kept))]
        return self._constraint(grammar, matcher)

    def kept(self, grammar: Grammar, stop: frozenset[int]) -> GrammarFollower | None:
        """Return the result of `compile` without blocking if the grammar is kept, else None."""
        with self._lock:
            found = self._kept.get((grammar, stop))
        return None if found is None else self._constraint(grammar, found[0])

    def _kept_mb(self) -> float:
        return sum(memory_mb for _, memory_mb in self._kept.values())

    def _refuse(self, grammar: Grammar, reason: str) -> None:
        """Remember that a grammar is refused, and drop its compiled forms."""
        with self._lock:
            self._slow[grammar] = reason
            if len(self._slow) > MAX_SLOW:
                del self._slow[next(iter(self._slow))]
            for key in [key for key in self._kept if key[0] == grammar]:
                del self._kept[key]

    def _compiled(self, grammar: Grammar, stop: frozenset[int]) -> LLMatcher:
        """A matcher at the start of the grammar. Raises ValueError if the grammar does not compile."""
        copy = self._copies.get(stop)
        if copy is None:
            copy = LLTokenizer(self._tokenizer.to_str(), n_vocab=self._vocabulary_size, eos_token=sorted(stop))
            self._copies[stop] = copy
        return _matcher(copy, grammar, MAX_SYMBOLS)

    def _constraint(self, grammar: Grammar, matcher: LLMatcher) -> GrammarFollower:
        def begin() -> GrammarMatcher:
            return GrammarMatcher(
                matcher.deep_copy(), self._vocabulary_size, partial(self._refuse, grammar), self._clock
            )

        return TriggeredMatcher(begin, self._token_text, grammar.trigger) if grammar.trigger else begin()

    def _token_text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))


class GrammarMatcher:
    """Allows only text that matches a grammar, then one of the stop tokens. A GrammarFollower."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary_size: int,
        refuse: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """Begin at the start of a grammar.

        `matcher`: at the start of the grammar; this object owns it from now on. `refuse`: called with the reason if its
        masks take too long. `clock`: as in GrammarCompiler.
        """
        self._matcher, self._refuse, self._clock = matcher, refuse, clock
        self._bits = np.zeros(-(-vocabulary_size // 32), np.uint32)
        self._masks, self._masks_s = 0, 0.0
        self.num_tokens: int | None = 0

    @property
    def complete(self) -> bool:
        """Whether the text is complete, so that only a stop token may follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> Any:
        """Return the tokens that may come next, as a bit mask that is valid until the next call.

        Raises GrammarError if the masks so far took more than MAX_MASK_S on average.
        """
        started_s = self._clock()
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._masks, self._masks_s = self._masks + 1, self._masks_s + self._clock() - started_s
        if self._masks_s > MAX_MASK_S * max(self._masks, MIN_MASKS):
            reason = f"evaluating it takes more than {MAX_MASK_S * 1e3:.0f} ms a token"
            self._refuse(reason)
            raise GrammarError(reason)
        return self._bits

    def accept(self, token: int) -> None:
        """Advance past a sampled token. Raises ValueError if the grammar does not allow it."""
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            raise ValueError(self._matcher.get_error() or f"token {token}")
        self.num_tokens = (self.num_tokens or 0) + 1


class TriggeredMatcher:
    """Allows any text until a trigger, then only text that matches a grammar until that is complete. A GrammarFollower.

    `begin`: returns a new matcher of the grammar. `token_text`: returns a token's text.
    """

    def __init__(self, begin: Callable[[], GrammarMatcher], token_text: Callable[[int], str], trigger: str) -> None:
        self._begin, self._token_text, self._trigger = begin, token_text, trigger
        self._inside: GrammarMatcher | None = None
        self._tail = ""

    @property
    def num_tokens(self) -> int | None:
        """The number of tokens matched since the last trigger; None while any text is allowed."""
        return self._inside.num_tokens if self._inside else None

    def allowed(self) -> Any:
        """Return the tokens that the grammar allows, if it is active, or None, which allows all tokens."""
        return self._inside.allowed() if self._inside else None

    def accept(self, token: int) -> None:
        """Advance past a sampled token. Raises ValueError if the grammar is active and forbids it."""
        if self._inside:
            self._inside.accept(token)
            if self._inside.complete:
                self._inside, self._tail = None, ""
            return
        self._tail = (self._tail + self._token_text(token))[-2 * len(self._trigger) :]
        if self._tail.endswith(self._trigger):
            self._inside = self._begin()
