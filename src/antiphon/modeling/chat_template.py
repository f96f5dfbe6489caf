"""Renders messages as tokens with a model's chat template, so that a user's text never becomes a control token.

Marks around the users' text distinguish it from the template's text. If the plain encoding of the whole conversation
contains exactly the template's control tokens, that encoding is used, because the model was trained on it. If it
contains other control tokens (a user wrote `<|im_end|>`), the users' text is encoded separately, by a tokenizer without
control tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NotRequired, TypedDict

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer

from antiphon.contracts import AudioPart, ImagePart, Message, MessagePart, VideoPart
from antiphon.events.tools import Tool

# The marks around users' text. They are Unicode noncharacters, which texts do not contain; any that a user's text does
# contain are removed.
USER_TEXT_START, USER_TEXT_END = "\ufdd0", "\ufdd1"
# Limit of characters that are rendered and encoded for each token of the context. English has four or five characters
# per token. Longer text does not fit into the context, so encoding it would waste time.
MAX_CHARS_PER_TOKEN = 16


class _TemplateFunction(TypedDict):
    name: str
    description: str
    parameters: Any


class _TemplateTool(TypedDict):
    type: str
    function: _TemplateFunction


class _TemplateCalledFunction(TypedDict):
    name: str
    arguments: Any


class _TemplateCall(TypedDict):
    type: str
    id: str
    function: _TemplateCalledFunction


class _TemplateTurn(TypedDict):
    """A message in the form that chat templates read. Only a tool's result has `tool_call_id` and `name`."""

    role: str
    content: str | list[dict[str, str]]
    tool_calls: NotRequired[list[_TemplateCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


def token_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text, without the tokens that the tokenizer would add at its start and end.

    `Tokenizer.encode` holds the GIL, so that all other threads of the process wait (0.5 s for a word of 256 Ki
    characters). `encode_batch_fast` releases it, and is faster.
    """
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def plain_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy of a tokenizer without control tokens. Takes about a second for a large vocabulary."""
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"], spec["post_processor"] = [], None
    return Tokenizer.from_str(json.dumps(spec))


class ChatTemplate:
    """Renders conversations as tokens with the chat template of a fast tokenizer of `transformers`.

    `takes_media`: the template has placeholders for audio and images. `control`: the tokenizer's control tokens.
    `source`: the template's text. `knows_tools`: the template renders tools. Otherwise this class adds them to the
    system turn.
    """

    def __init__(self, tokenizer: Any, *, takes_media: bool = False) -> None:
        self._tokenizer = tokenizer
        self._takes_media = takes_media
        self.control = frozenset(int(i) for i in tokenizer.added_tokens_decoder)
        self.source: str = tokenizer.chat_template or ""
        self.knows_tools = "tools" in self.source

    @cached_property
    def _plain(self) -> Tokenizer:
        """The tokenizer without control tokens. It is created on first use, because that takes a second."""
        return plain_tokenizer(self._tokenizer.backend_tokenizer)

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The tokens that end a reply: the tokenizer's end token, and the template's control token after a reply.

        Renders a conversation on every access, so the caller should keep the result.
        """
        ends = {i for i in (self._tokenizer.eos_token_id,) if i is not None}
        probe = self._marked([Message("user", "a"), Message("assistant", "b")], (), False)
        tail = probe.rpartition(USER_TEXT_END)[2]
        ends |= set([i for i in self._encode(tail) if i in self.control][:1])
        return frozenset(ends)

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool], *, answer: bool) -> list[int]:
        """Return the whole conversation's tokens.

        `answer`: also include the tokens that open the reply. May raise any exception, because the template is a
        program that the checkpoint contains.
        """
        marked = self._marked(messages, tools, answer)
        ids = self._encode(marked.replace(USER_TEXT_START, "").replace(USER_TEXT_END, ""))
        parts = _split_marked(marked)
        template_text = [text for text, is_users in parts if not is_users]
        template_control = [i for text in template_text for i in self._encode(text) if i in self.control]
        if [i for i in ids if i in self.control] == template_control:
            return ids
        return [i for text, is_users in parts for i in (self.encode_text(text) if is_users else self._encode(text))]

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a user's text, none of them a control token.

        If the plain tokens still include a control token, the text is encoded character by character.
        """
        ids = token_ids(self._plain, text)
        if not self.control.isdisjoint(ids):
            of_character = {c: token_ids(self._plain, c) for c in set(text)}
            ids = [i for c in text for i in of_character[c]]
        return ids

    def encode_opening(self, text: str) -> list[int]:
        """Return the tokens of the server's own text, including control tokens. Used to force a reply's beginning."""
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return token_ids(self._tokenizer.backend_tokenizer, text)

    def _marked(self, messages: Sequence[Message], tools: Sequence[Tool], answer: bool) -> str:
        if tools and not self.knows_tools:
            messages = _with_tools_in_system(messages, tools)
        given = [_tool(t) for t in tools] if tools and self.knows_tools else None
        try:
            return self._render(messages, given, answer)
        except TemplateError:
            # Some templates, such as Gemma's, have no system turn. The system text is then put before the first user's
            # text.
            return self._render(_without_system(messages), given, answer)

    def _render(self, messages: Sequence[Message], tools: list[_TemplateTool] | None, answer: bool) -> str:
        turns = [_for_template(m, takes_media=self._takes_media) for m in messages]
        return str(
            self._tokenizer.apply_chat_template(turns, tools=tools, add_generation_prompt=answer, tokenize=False)
        )


def _mark(text: str) -> str:
    return USER_TEXT_START + text.replace(USER_TEXT_START, "\ufffd").replace(USER_TEXT_END, "\ufffd") + USER_TEXT_END


def _mark_all(value: Any) -> Any:
    """Mark every string in the value, including keys: schemas and arguments are users' text."""
    match value:
        case str():
            return _mark(value)
        case Mapping():
            return {_mark(str(k)): _mark_all(v) for k, v in value.items()}
        case list() | tuple():
            return [_mark_all(v) for v in value]
    return value


def _for_template(message: Message, *, takes_media: bool) -> _TemplateTurn:
    out: _TemplateTurn = {"role": message.role, "content": _mark(message.text)}
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
        out["tool_call_id"], out["name"] = message.tool_call_id, _mark(message.name)
    return out


def _part(part: MessagePart) -> dict[str, str]:
    match part:
        case str():
            return {"type": "text", "text": _mark(part)}
        case AudioPart():
            return {"type": "audio", "audio": ""}
        case ImagePart():
            return {"type": "image", "image": ""}
        case VideoPart():
            return {"type": "video", "video": ""}


def _loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _tool(tool: Tool) -> _TemplateTool:
    # The server chooses the keys of a function's description. The values are users' text.
    function: _TemplateFunction = {
        "name": _mark(tool.name),
        "description": _mark(tool.description),
        "parameters": _mark_all(dict(tool.parameters)),
    }
    return {"type": "function", "function": function}


def _with_tools_in_system(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Put tools, calls and results into plain messages, for templates that do not render tools.

    Uses the Hermes format, on which most small models were trained.
    """
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
    instructions = "\n".join(lines)
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
        return [replace(out[0], text=f"{out[0].text}\n\n{instructions}"), *out[1:]]
    return [Message("system", instructions), *out]


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """Move the system text before the first user's text, for templates without a system turn."""
    instructions = "\n\n".join(m.text for m in messages if m.role == "system")
    rest = [m for m in messages if m.role != "system"]
    first = next((i for i, m in enumerate(rest) if m.role == "user"), None)
    if not instructions or first is None:
        return rest or [Message("user", instructions)]
    return [*rest[:first], replace(rest[first], text=f"{instructions}\n\n{rest[first].text}"), *rest[first + 1 :]]


def _split_marked(marked: str) -> list[tuple[str, bool]]:
    """The parts of a marked rendering, in order, as pairs of the text and True if a user wrote it."""
    out: list[tuple[str, bool]] = []
    for part in marked.split(USER_TEXT_START):
        text, end, rest = part.partition(USER_TEXT_END)
        if end:
            out += [(text, True), (rest, False)]
        else:
            out.append((text, False))
    return [(text, is_users) for text, is_users in out if text]


def text_size(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
    """Return the approximate length of the rendered conversation in characters, with a constant for each message."""
    num_chars = sum(len(t.name) + len(t.description) + len(json.dumps(t.parameters)) for t in tools)
    for message in messages:
        parts = sum(len(part) for part in message.parts if isinstance(part, str))
        calls = sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
        num_chars += max(len(message.text), parts) + calls + len(message.name) + MAX_CHARS_PER_TOKEN
    return num_chars


def told_plainly(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation without calls in its last turn: the user says the results of the functions.

    Models that were not trained on calls understand this form.
    """
    at = max((i for i, m in enumerate(messages) if m.role == "user"), default=-1) + 1
    names = {call.id: call.name for m in messages for call in m.tool_calls}
    results = ((names.get(m.tool_call_id, m.name), m.text) for m in messages[at:] if m.role == "tool")
    return [*messages[:at], *(Message("user", f"{name} gave: {text}") for name, text in results)]


def newest_turn(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the system message, if any, and what the user said after the last reply.

    Empty if there was no reply yet, or if the last message is not the user's.
    """
    replied = max((i for i, m in enumerate(messages) if m.role in ("assistant", "tool")), default=-1)
    said = messages[replied + 1 :]
    if replied < 0 or not said or said[-1].role != "user":
        return ()
    return (*(m for m in messages[:1] if m.role == "system"), *said)
