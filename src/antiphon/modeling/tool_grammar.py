"""Function calls in a model's text: grammars that hold them to their schema, and a reader that finds them.

A grammar constrains what is sampled; the reader tells calls and prose apart as the text streams. Pure but for the
grammar library; knows no model.

The form of a call is that of Hermes, which Qwen and most small models were trained on:

    <tool_call>
    {"name": NAME, "arguments": {...}}
    </tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from antiphon.contracts import Reply, TextDelta, ToolCallDelta, ToolCallStarted
from antiphon.events.tools import Tool
from antiphon.modeling.detokenizer import held_back

# The tags around a call.
CALL_OPENING, CALL_CLOSING = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')
_TAIL = re.compile(r"\s*\}\s*$")


class Grammar:
    """Allows only text that a grammar allows, then one of the model's stop tokens. A Constraint of the engine.

    `vocabulary`: how many tokens the model's head has, which may be more than the tokenizer knows.
    """

    def __init__(self, tokenizer: LLTokenizer, vocabulary: int, grammar: str) -> None:
        """Begin at the grammar's start. Raises ValueError for a grammar that the library does not accept."""
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if error := self._matcher.get_error():
            raise ValueError(error)
        self._bits = np.zeros(-(-vocabulary // 32), np.uint32)

    @property
    def complete(self) -> bool:
        """Whether the text is all that the grammar asks for, so that nothing but a stop token may follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> Any:
        """Return the tokens that may come next, as a bit mask that is valid until the next call."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        return self._bits

    def accept(self, token: int) -> None:
        """Advance past a sampled token. Raises ValueError where the grammar does not allow it."""
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            raise ValueError(self._matcher.get_error() or f"token {token}")


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of JSON text that fits a JSON schema. It is checked when a Grammar is made of it."""
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema)))


def call_grammar(tools: Sequence[Tool], closing: int | None) -> str:
    """Return the grammar of one call of any of `tools`, from behind its opening tag to its closing tag.

    `closing`: the token of the closing tag, where the tokenizer has one. The tools' schemas are checked when a Grammar
    is made of it.
    """
    options = [
        {
            "type": "object",
            "properties": {"name": {"const": t.name}, "arguments": dict(t.parameters) or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for t in tools
    ]
    schema = options[0] if len(options) == 1 else {"anyOf": options}
    end = f'"{CALL_CLOSING}"' if closing is None else f"<[{closing}]>"
    lines = [f'start: "\\n" call "\\n" {end}', f"call: %json {json.dumps(schema)}"]
    return str(LLMatcher.grammar_from_lark("\n".join(lines) + "\n"))


class CallGrammar:
    """Allows any text until a call is opened, and then what that call's grammar allows. A Constraint of the engine.

    A reply that had to begin with a call ends after it: small models that are asked for one call go on calling.
    """

    def __init__(self, make: Callable[[], Grammar], token_text: Callable[[int], str], *, begun: bool) -> None:
        """`make`: a new grammar of one call. `token_text`: a token's text. `begun`: the prompt ends in an opening tag.

        Raises ValueError where `make` does, whether or not a call ever comes.
        """
        self._make, self._token_text = make, token_text
        self._inside: Grammar | None = make()
        self._once = begun
        self._tail = ""
        if not begun:
            self._inside = None

    def allowed(self) -> Any:
        """Return what the open call's grammar allows; None, which allows all, outside of calls."""
        return self._inside.allowed() if self._inside else None

    def accept(self, token: int) -> None:
        """Advance past a sampled token, into a call or out of it. Raises ValueError where an open call forbids it."""
        if self._inside:
            self._inside.accept(token)
            if self._inside.complete and not self._once:
                self._inside, self._tail = None, ""
            return
        self._tail = (self._tail + self._token_text(token))[-2 * len(CALL_OPENING) :]
        if self._tail.endswith(CALL_OPENING):
            self._inside = self._make()


class CallReader:
    """Splits a reply's text into prose and calls as it streams.

    `ids`: gives each call its id. `begun`: the text begins behind an opening tag. `calls`: how many calls have begun.
    A call's name is given out as soon as it is known, and its arguments as they come, without the brace that closes the
    call. What is no call behind an opening tag gives nothing.
    """

    def __init__(self, ids: Iterator[str], *, begun: bool = False) -> None:
        self._ids = ids
        self._text = ""
        self._inside = begun
        self._open = False
        self._fresh = False
        self._sent = 0
        self.calls = 0

    def feed(self, text: str) -> Iterator[Reply]:
        """Feed the text's next part; yield what it adds: prose, beginnings of calls, parts of their arguments."""
        self._text += text
        while True:
            if self._inside:
                body, end, rest = self._text.partition(CALL_CLOSING)
                yield from self._call(
                    body if end else body[: len(body) - held_back(body, (CALL_CLOSING,))], done=bool(end)
                )
                if not end:
                    return
                self._inside, self._open, self._text, self._fresh = False, False, rest, True
            else:
                if self._fresh:
                    # So does the line break after it.
                    self._text = self._text.lstrip("\n")
                    self._fresh = not self._text
                prose, start, rest = self._text.partition(CALL_OPENING)
                if start:
                    # The line break before a call belongs to its form.
                    prose = prose.rstrip()
                    self._inside, self._sent, self._text = True, 0, rest
                else:
                    settled = prose[: len(prose) - held_back(prose, (CALL_OPENING,))]
                    cut = len(settled.rstrip("\n"))
                    prose, self._text = prose[:cut], prose[cut:]
                if prose:
                    yield TextDelta(prose)
                if not start:
                    return

    def flush(self) -> Iterator[Reply]:
        """Yield what was held back, once no more text comes: the prose, or the rest of a call that was never closed."""
        if self._inside:
            yield from self._call(self._text, done=True)
        elif self._text:
            yield TextDelta(self._text)
        self._text = ""

    def _call(self, body: str, *, done: bool) -> Iterator[Reply]:
        head = _HEAD.match(body)
        if not head:
            return
        if not self._open:
            self._open = True
            self.calls += 1
            yield ToolCallStarted(next(self._ids), json.loads(head[1]))
        arguments = body[head.end() :]
        # The last brace closes the call, not the arguments: it is known to be the last when the call is done.
        tail = _TAIL.search(arguments)
        ready = arguments[: tail.start()] if tail else arguments.rstrip()
        if len(ready) > self._sent:
            yield ToolCallDelta(ready[self._sent :])
            self._sent = len(ready)
