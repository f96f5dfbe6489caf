"""Every JSON type in every field of a message, generated from the message's class."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

# One value of each JSON type, and all false values, because some fields treat these as missing.
JSON_TYPES: tuple[object, ...] = (None, True, False, 7, 0, -1.5, "x", "", ["x"], [], [[]], {"x": 1}, {})


def fields_of_every_type(message: type[msgspec.Struct]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield messages, each with one field changed to another JSON type, and the path of that field.

    The path has the same form as in errors: `messages[0].role`. A message also has all required fields, with values of
    the right types.
    """
    yield from _varied(inspect.type_info(message))


def has_wrong_type(message: type[msgspec.Struct], fields: dict[str, Any]) -> bool:
    """Whether a value in `fields` has a type that the message's class does not accept."""
    config = message.__struct_config__
    tagged = {config.tag_field: config.tag} if config.tag_field else {}
    try:
        msgspec.json.decode(json.dumps(tagged | fields), type=message)
    except msgspec.ValidationError:
        return True
    return False


def _varied(info: inspect.Type) -> Iterator[tuple[str, dict[str, Any]]]:
    assert isinstance(info, inspect.StructType)
    required = {f.encode_name: _example(f.type) for f in info.fields if f.required}
    for field in info.fields:
        name = field.encode_name
        yield from ((name, required | {name: value}) for value in JSON_TYPES)
        for kind in _members(field.type):
            if isinstance(kind, inspect.StructType):
                yield from ((f"{name}.{path}", required | {name: inner}) for path, inner in _varied(kind))
            if isinstance(kind, inspect.ListType) and isinstance(kind.item_type, inspect.StructType):
                yield from (
                    (f"{name}[0].{path}", required | {name: [inner]}) for path, inner in _varied(kind.item_type)
                )


def _members(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _example(kind: inspect.Type) -> object:
    match kind:
        case inspect.StrType():
            return "x"
        case inspect.IntType() | inspect.FloatType():
            return 0
        case inspect.RawType():
            return {}
        case inspect.ListType(item_type=item):
            return [_example(item)]
        case inspect.StructType(fields=fields):
            return {f.encode_name: _example(f.type) for f in fields if f.required}
        case _:
            raise AssertionError(f"no example of {kind}")
