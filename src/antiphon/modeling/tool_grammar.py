"""Calls of functions in a model's text: held to their JSON schema while they are sampled, told apart from prose as they stream.

The form is that of Hermes, which Qwen and most small models were trained on:

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

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')
_TAIL = re.compile(r"\s*\}\s*$")


class Grammar:
    """Only text that a JSON schema allows, then one of the model's stop tokens. A Constraint of the engine."""

    def __init__(self, tokenizer: LLTokenizer, vocabulary: int, grammar: str) -> None:
        """Raises ValueError for a grammar the library does not take."""
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if error := self._matcher.get_error():
            raise ValueError(error)
        self._bits = np.zeros(-(-vocabulary // 32), np.uint32)

    @property
    def complete(self) -> bool:
        """The text is all the grammar asks for, and can get no longer."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> Any:
        """See engine.sequence.Constraint."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        return self._bits

    def accept(self, token: int) -> None:
        """See engine.sequence.Constraint."""
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            raise ValueError(self._matcher.get_error() or f"token {token}")


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Of JSON text that fits `schema`."""
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema)))


def call_grammar(tools: Sequence[Tool], closing: int | None) -> str:
    """Of one call from its opening on. `closing`: the token of the closing tag, where it is one."""
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
    end = f'"{CLOSING}"' if closing is None else f"<[{closing}]>"
    lines = [f'start: "\\n" call "\\n" {end}', f"call: %json {json.dumps(schema)}"]
    return str(LLMatcher.grammar_from_lark("\n".join(lines) + "\n"))


class CallGrammar:
    """Free text until a call is opened; then that call's grammar. A Constraint of the engine.

    An answer that had to begin with a call ends after it: small models asked for one call go on calling.
    """

    def __init__(self, make: Callable[[], Grammar], piece: Callable[[int], str], *, begun: bool) -> None:
        """`make`: the grammar of a call. `piece`: a token's text. `begun`: the text so far ends with a call's opening.

        Raises ValueError for a schema that the grammar does not take.
        """
        self._make, self._piece = make, piece
        self._inside: Grammar | None = make()
        self._once = begun
        self._tail = ""
        if not begun:
            self._inside = None

    def allowed(self) -> Any:
        """See engine.sequence.Constraint."""
        return self._inside.allowed() if self._inside else None

    def accept(self, token: int) -> None:
        """See engine.sequence.Constraint."""
        if self._inside:
            self._inside.accept(token)
            if self._inside.complete and not self._once:
                self._inside, self._tail = None, ""
            return
        self._tail = (self._tail + self._piece(token))[-2 * len(OPENING) :]
        if self._tail.endswith(OPENING):
            self._inside = self._make()


class CallReader:
    """Splits text as it streams into prose and calls. `new_id()` names each call."""

    def __init__(self, ids: Iterator[str], *, begun: bool = False) -> None:
        self._ids = ids
        self._text = ""
        self._inside = begun
        self._open = False
        self._fresh = False
        self._sent = 0
        self.calls = 0

    def feed(self, text: str) -> Iterator[Reply]:
        """What `text` adds."""
        self._text += text
        while True:
            if self._inside:
                body, end, rest = self._text.partition(CLOSING)
                yield from self._call(body if end else body[: len(body) - held_back(body, (CLOSING,))], done=bool(end))
                if not end:
                    return
                self._inside, self._open, self._text, self._fresh = False, False, rest, True
            else:
                if self._fresh:
                    # So does the one after it.
                    self._text = self._text.lstrip("\n")
                    self._fresh = not self._text
                prose, start, rest = self._text.partition(OPENING)
                if start:
                    # The line break before a call belongs to its form.
                    prose = prose.rstrip()
                    self._inside, self._sent, self._text = True, 0, rest
                else:
                    settled = prose[: len(prose) - held_back(prose, (OPENING,))]
                    cut = len(settled.rstrip("\n"))
                    prose, self._text = prose[:cut], prose[cut:]
                if prose:
                    yield TextDelta(prose)
                if not start:
                    return

    def flush(self) -> Iterator[Reply]:
        """What was held back, when nothing more comes."""
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
