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
        *("eagerness", "truncation", "dialect", "kind", "finish_reason", "param", "unreadable_type"),
    }
)
# Text that comes in pieces: a number may be cut by the seam of two, so that neither looks like one.
_PIECES = frozenset({"delta", "partial", "unreadable"})
_DIGIT = r"(?:zero|oh|one|two|three|four|five|six|seven|eight|nine|double|triple)"
_EMAIL = re.compile(
    r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+|\b\w[\w.+-]*(?:\s+dot\s+\w+)*\s+at\s+[\w-]+(?:\s+dot\s+\w+)+\b", re.IGNORECASE
)
# Digits with what stands inside a number, and three digits or more that are spelled out.
_NUMBER = re.compile(rf"[+(]*\d(?:[\d\s().,:/-]*\d)?|\b{_DIGIT}(?:[\s,.-]+{_DIGIT}){{2,}}\b", re.IGNORECASE)


def redacted(value: object, redaction: Redaction, key: str = "") -> object:
    """Return a JSON value without what is to be left out. `key`: the field that the value stands in."""
    if redaction == "off":
        return value
    match value:
        case dict():
            return {k: redacted(v, redaction, str(k)) for k, v in value.items()}
        case list():
            return [redacted(v, redaction, key) for v in value]
        case str() if key in _PROTOCOL or key.endswith("_id") or value.startswith("sha256:"):
            return value
        case str():
            return "" if redaction == "drop" or key in _PIECES else masked(value)
        case _:
            return value


def masked(text: str) -> str:
    """Return a text with `[email]` for each e-mail address, also a spoken one, and `[number]` for each number.

    Numbers are digits, and three or more English digits that are spelled out; other numbers in words stay.
    """
    return _NUMBER.sub("[number]", _EMAIL.sub("[email]", text))
