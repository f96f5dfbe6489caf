"""What a recording leaves out of what people say: numbers and e-mail addresses, or all of it.

Where words are left out, the recorder writes silence for what was said and heard: the recording still tells who spoke
when, and what took how long. Anything that is not known to be a word of the protocol counts as said by somebody: an
event that is new is redacted rather than kept.
"""

from __future__ import annotations

import re
from typing import Literal

# Nothing; numbers and e-mail addresses; every text.
Redaction = Literal["off", "mask", "drop"]
# Fields whose strings are words of the protocols, and say nothing of what people said. Those that end in `_id` too.
_PROTOCOL = frozenset(
    {
        *("type", "id", "object", "event", "status", "role", "code", "reason", "how", "model", "voice", "format"),
        *("language", "modality", "modalities", "output_modalities", "tool_choice", "overlap", "phase", "state"),
        *("eagerness", "truncation", "dialect", "kind", "finish_reason", "param", "intent", "path", "mode"),
    }
)
_WORD_OF_A_PROTOCOL = re.compile(r"[A-Za-z0-9_./:-]{0,80}")
_HASH = re.compile(r"sha256:[0-9a-f]{16}")
# Text that comes in pieces: a number may be cut by the seam of two, so that neither looks like one.
_PIECES = frozenset({"delta", "partial", "unreadable"})
# Lists of a text's parts, each of which shows nothing, and objects whose names and values are the client's own.
_LEFT_OUT = frozenset({"words", "logprobs", "bytes", "tokens", "metadata", "extra_body"})
# Sound and images in base64 have no white space; a text that is longer than any is left out.
_BASE64 = re.compile(r"data:.*|[A-Za-z0-9+/_=-]{64,}", re.DOTALL)
MAX_TEXT_CHARS = 100_000
_DIGIT = r"(?:zero|oh|one|two|three|four|five|six|seven|eight|nine|double|triple)"
# Bounded, so that no text takes more than time in proportion to it.
_EMAIL = re.compile(
    r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}"
    r"|\b\w[\w+-]{0,63}(?:\s{1,4}dot\s{1,4}\w{1,63}){0,8}"
    r"\s{1,4}at\s{1,4}[\w-]{1,63}(?:\s{1,4}dot\s{1,4}\w{1,63}){1,8}\b",
    re.IGNORECASE,
)
# Digits with what stands inside a number, and three digits or more that are spelled out.
_NUMBER = re.compile(
    rf"[+(]{{0,3}}\d(?:[\s().,:/-]{{0,8}}\d)*|\b{_DIGIT}(?:[\s,.-]{{1,4}}{_DIGIT}){{2,}}\b", re.IGNORECASE
)


def redacted(value: object, redaction: Redaction, key: str = "") -> object:
    """Return a JSON value without what is to be left out. `key`: the field that the value stands in."""
    if redaction == "off":
        return value
    match value:
        case dict() if key in _LEFT_OUT:
            return {}
        case list() if key in _LEFT_OUT:
            return []
        case dict():
            return {k: redacted(v, redaction, str(k)) for k, v in value.items()}
        case list():
            return [redacted(v, redaction, key) for v in value]
        case str() if _HASH.fullmatch(value):
            return value
        case str() if (key in _PROTOCOL or key.endswith("_id")) and _WORD_OF_A_PROTOCOL.fullmatch(value):
            return value
        case str():
            return "" if redaction == "drop" or key in _PIECES or _is_no_text(value) else masked(value)
        case _:
            return value


def masked(text: str) -> str:
    """Return a text with `[email]` for each e-mail address, also a spoken one, and `[number]` for each number.

    Numbers are digits, and three or more English digits that are spelled out; other numbers in words stay.
    """
    return _NUMBER.sub("[number]", _EMAIL.sub("[email]", text))


def _is_no_text(value: str) -> bool:
    return len(value) > MAX_TEXT_CHARS or bool(_BASE64.fullmatch(value))
