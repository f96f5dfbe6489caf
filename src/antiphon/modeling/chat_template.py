"""From messages to tokens by a model's own chat template, so that nothing a user writes becomes a control token.

A template's text and the users' text are told apart by marks around the latter. Where the plain encoding of the whole has just
the control tokens that the template itself put there, it is taken: that is the spelling the model was trained on. Where
it has others (somebody wrote `<|im_end|>`), users' text is encoded by itself, by a tokenizer that knows no control tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer

from antiphon.contracts import AudioPart, ImagePart, Message, MessagePart
from antiphon.events.tools import Tool

# Unicode noncharacters, never interchanged; taken out of users' text.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


def plain_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer without its control tokens."""
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"], spec["post_processor"] = [], None
    return Tokenizer.from_str(json.dumps(spec))


class ChatTemplate:
    """`tokenizer`: a fast tokenizer of `transformers` with a chat template. `takes_media`: it has places for sound and images."""

    def __init__(self, tokenizer: Any, *, takes_media: bool = False) -> None:
        self._tokenizer = tokenizer
        self._takes_media = takes_media
        self.control = frozenset(int(i) for i in tokenizer.added_tokens_decoder)
        self.source: str = tokenizer.chat_template or ""
        self.knows_tools = "tools" in self.source

    @cached_property
    def _plain(self) -> Tokenizer:
        """Made when it is first needed: it takes a second."""
        return plain_tokenizer(self._tokenizer.backend_tokenizer)

    @property
    def stop_tokens(self) -> frozenset[int]:
        """What ends an answer: the tokenizer's end, and the control token that the template puts after one."""
        ends = {i for i in (self._tokenizer.eos_token_id,) if i is not None}
        probe = self._marked([Message("user", "a"), Message("assistant", "b")], (), False)
        tail = probe.rpartition(CLOSE)[2]
        ends |= set([i for i in self._encode(tail) if i in self.control][:1])
        return frozenset(ends)

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool], *, answer: bool) -> list[int]:
        """The conversation's tokens. `answer`: with the opening of the answer that is to come."""
        marked = self._marked(messages, tools, answer)
        ids = self._encode(marked.replace(OPEN, "").replace(CLOSE, ""))
        pieces = _pieces(marked)
        ours = [i for text, theirs in pieces if not theirs for i in self._encode(text) if i in self.control]
        if [i for i in ids if i in self.control] == ours:
            return ids
        return [i for text, theirs in pieces for i in (self.encode_text(text) if theirs else self._encode(text))]

    def encode_text(self, text: str) -> list[int]:
        """A user's text; never a control token."""
        ids = list(self._plain.encode(text, add_special_tokens=False).ids)
        if not self.control.isdisjoint(ids):
            ids = [i for c in text for i in self._plain.encode(c, add_special_tokens=False).ids]
        return ids

    def encode_opening(self, text: str) -> list[int]:
        """Text of ours, control tokens and all: how an answer is made to begin."""
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    def _marked(self, messages: Sequence[Message], tools: Sequence[Tool], answer: bool) -> str:
        if tools and not self.knows_tools:
            messages = _with_tools_told(messages, tools)
        given = [_tool(t) for t in tools] if tools and self.knows_tools else None
        try:
            return self._render(messages, given, answer)
        except TemplateError:
            # Gemma's template, for one, has no system turn: what it says goes before the first user's words.
            return self._render(_without_system(messages), given, answer)

    def _render(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, answer: bool) -> str:
        turns = [_for_template(m, takes_media=self._takes_media) for m in messages]
        return str(
            self._tokenizer.apply_chat_template(turns, tools=tools, add_generation_prompt=answer, tokenize=False)
        )


def _mark(text: str) -> str:
    return OPEN + text.replace(OPEN, "\ufffd").replace(CLOSE, "\ufffd") + CLOSE


def _mark_all(value: Any) -> Any:
    """Every string inside, keys too: schemas and arguments are users' text."""
    match value:
        case str():
            return _mark(value)
        case Mapping():
            return {_mark(str(k)): _mark_all(v) for k, v in value.items()}
        case list() | tuple():
            return [_mark_all(v) for v in value]
    return value


def _for_template(message: Message, *, takes_media: bool) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": _mark(message.text)}
    if message.parts and takes_media:
        out["content"] = [_part(p) for p in message.parts]
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "type": "function",
                "id": c.id,
                "function": {"name": _mark(c.name), "arguments": _mark_all(_loaded(c.arguments))},
            }
            for c in message.tool_calls
        ]
        if not message.text:
            out["content"] = ""
    if message.role == "tool":
        out |= {"tool_call_id": message.tool_call_id, "name": _mark(message.name)}
    return out


def _part(part: MessagePart) -> dict[str, str]:
    match part:
        case str():
            return {"type": "text", "text": _mark(part)}
        case AudioPart():
            return {"type": "audio", "audio": ""}
        case ImagePart():
            return {"type": "image", "image": ""}


def _loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _tool(tool: Tool) -> dict[str, Any]:
    # The keys of a function's description are ours; what they hold is not.
    function = {
        "name": _mark(tool.name),
        "description": _mark(tool.description),
        "parameters": _mark_all(dict(tool.parameters)),
    }
    return {"type": "function", "function": function}


def _with_tools_told(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """For templates that know no tools: told in the system turn, in the Hermes form that most small models have seen."""
    lines = [
        "You may call functions. Their signatures are in <tools></tools>:",
        "<tools>",
        *(
            json.dumps(
                {"name": t.name, "description": t.description, "parameters": dict(t.parameters)}, ensure_ascii=False
            )
            for t in tools
        ),
        "</tools>",
        'To call one, answer with <tool_call>\n{"name": its name, "arguments": its arguments}\n</tool_call>',
    ]
    told = "\n".join(lines)
    out: list[Message] = []
    for message in messages:
        if message.tool_calls:
            calls = [
                f'<tool_call>\n{{"name": {json.dumps(c.name)}, "arguments": {c.arguments}}}\n</tool_call>'
                for c in message.tool_calls
            ]
            message = replace(message, text="\n".join([message.text, *calls]).strip(), tool_calls=())
        elif message.role == "tool":
            message = Message("user", f"<tool_response>\n{message.text}\n</tool_response>")
        out.append(message)
    if out and out[0].role == "system":
        return [replace(out[0], text=f"{out[0].text}\n\n{told}"), *out[1:]]
    return [Message("system", told), *out]


def _without_system(messages: Sequence[Message]) -> list[Message]:
    told = "\n\n".join(m.text for m in messages if m.role == "system")
    rest = [m for m in messages if m.role != "system"]
    first = next((i for i, m in enumerate(rest) if m.role == "user"), None)
    if not told or first is None:
        return rest or [Message("user", told)]
    return [*rest[:first], replace(rest[first], text=f"{told}\n\n{rest[first].text}"), *rest[first + 1 :]]


def _pieces(marked: str) -> list[tuple[str, bool]]:
    """(text, whether it is a user's) of a marked rendering, in order."""
    out: list[tuple[str, bool]] = []
    for part in marked.split(OPEN):
        theirs, mark, ours = part.partition(CLOSE)
        if mark:
            out += [(theirs, True), (ours, False)]
        else:
            out.append((theirs, False))
    return [(text, whose) for text, whose in out if text]
