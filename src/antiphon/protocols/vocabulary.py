"""The names of all fields that the dialects read: what else a client's message has is named by the client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import msgspec

# Its dialects define the messages.
import antiphon.protocols.dialects  # noqa: F401

# How the names of fields end that hold a number of any type, which is checked later.
_MEASURES = ("_ms", "_s", "_hz", "_index", "_seq", "_tokens", "_frames", "_bytes")


def field_names() -> dict[str, bool]:
    """Return the names of the fields of every message of the dialects, and whether each may hold a number."""
    found = dict[str, bool]()
    for kind in _structs(msgspec.Struct):
        if not kind.__module__.startswith("antiphon.protocols."):
            continue
        if tag := kind.__struct_config__.tag_field:
            found[tag] = False
        for field in msgspec.structs.fields(kind):
            name = field.encode_name
            is_number = _holds_number(field.type) or name.endswith(_MEASURES)
            found[name] = found.get(name, False) or is_number
    return found


def _structs(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _structs(inner)


def _holds_number(kind: Any) -> bool:
    return kind in (int, float) or any(_holds_number(inner) for inner in get_args(kind))
