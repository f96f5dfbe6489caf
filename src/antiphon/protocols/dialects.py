"""The table of the dialects of realtime sessions.

To add a dialect, add a folder and a line in this table (docs/add-a-dialect.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, get_args

import msgspec

from antiphon.protocols.connection import Dialect
from antiphon.protocols.opening import Opening

# Modules that each define a DIALECT. The first dialect that matches an opening is used; the last matches any opening.
_MODULES = (
    "assemblyai.connection",
    "gemini.connection",
    "openai_live.connection",
    "bridges.minicpmo_worker",
    "bridges.omni",
    "bridges.openbmb",
    "cartesia.hearing",
    "deepgram.agent",
    "deepgram.flux",
    "deepgram.listen",
    "duplex.connection",
    "elevenlabs.agent",
    "elevenlabs.scribe",
    "negotiation",
)
DIALECTS: tuple[Dialect, ...] = tuple(import_module(f"antiphon.protocols.{name}").DIALECT for name in _MODULES)


def dialect_of(opening: Opening) -> Dialect:
    """Return the dialect that an opening requests."""
    return next(dialect for dialect in DIALECTS if dialect.matches(opening))


def dialect_named(name: str) -> Dialect:
    """Return the dialect with this name, for a stored session. Raises KeyError for an unknown name."""
    return {dialect.name: dialect for dialect in DIALECTS}[name]


# Name suffixes of numeric fields. A field with such a name counts as numeric even if its type is `object`.
_MEASURES = ("_ms", "_s", "_hz", "_index", "_seq", "_tokens", "_frames", "_bytes")


def field_names() -> dict[str, bool]:
    """Return the names of all fields in the messages of all dialects, and whether each field may hold a number."""
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
