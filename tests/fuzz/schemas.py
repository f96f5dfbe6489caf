"""Random JSON schemas with every keyword: with patterns, with circular and broken references, and with deep nesting."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tests.fuzz.mutations import mutated_value

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
FORMATS = ("date-time", "email", "uuid", "ipv6", "uri", "regex", "no-such-format")
NUMBERS = (0, 1, -1, 0.1, 3, 10**9, -(10**20), 1e308, 2**63)
ATOMS = (
    "a",
    "b",
    ".",
    r"\d",
    r"\w",
    r"\s",
    "[a-z]",
    "[^x]",
    r"\p{L}",
    "é",
    r"\b",
    "^",
    "$",
    "(?=a)",
    r"\1",
    "(?i)x",
    "[",
)
# Largest number of levels of a schema. One schema in a hundred is this deep.
DEEP = 150


def draw_pattern(draw: random.Random, depth: int = 0) -> str:
    """Return a regular expression. Some cost exponential time or memory, and some are invalid."""
    parts = []
    for _ in range(draw.randrange(1, 5)):
        match draw.randrange(6) if depth < 4 else 0:
            case 0 | 1:
                part = draw.choice(ATOMS)
            case 2:
                part = f"({draw_pattern(draw, depth + 1)}|{draw_pattern(draw, depth + 1)})"
            case 3:
                part = f"({draw_pattern(draw, depth + 1)})*"
            case 4:
                part = (
                    f"({draw_pattern(draw, depth + 1)}){{{draw.choice((0, 2, 30, 999))},{draw.choice((2, 40, 1000))}}}"
                )
            case _:
                part = f".*{draw.choice('abcdefgh')}.*"
        parts.append(part)
    return "".join(parts)


def draw_schema(draw: random.Random, depth: int = 0, most: int = 5) -> Any:
    """Return a schema with some of the keywords. It is at level `depth` of at most `most` levels."""
    if depth >= most or draw.random() < 0.05:
        return draw.choice((True, False, {}, {"type": draw.choice(TYPES)}, {"$ref": "#"}, {"$ref": "#/$defs/a"}))
    schema: dict[str, Any] = {}
    inner = lambda: draw_schema(draw, depth + 1, most)  # noqa: E731
    several = lambda: [inner() for _ in range(draw.randrange(1, 4))]  # noqa: E731
    named = lambda: {draw.choice("abcde"): inner() for _ in range(draw.randrange(1, 4))}  # noqa: E731
    keywords: dict[str, Callable[[], Any]] = {
        "type": lambda: draw.choice((*TYPES, ["string", "null"], [])),
        "properties": named,
        "required": lambda: draw.sample("abcde", draw.randrange(4)),
        "additionalProperties": inner,
        "patternProperties": lambda: {draw_pattern(draw): inner()},
        "propertyNames": lambda: {"pattern": draw_pattern(draw)},
        "items": inner,
        "prefixItems": several,
        "minItems": lambda: draw.choice(NUMBERS),
        "maxItems": lambda: draw.choice(NUMBERS),
        "uniqueItems": lambda: True,
        "pattern": lambda: draw_pattern(draw),
        "format": lambda: draw.choice(FORMATS),
        "minLength": lambda: draw.choice(NUMBERS),
        "maxLength": lambda: draw.choice(NUMBERS),
        "minimum": lambda: draw.choice(NUMBERS),
        "exclusiveMaximum": lambda: draw.choice(NUMBERS),
        "multipleOf": lambda: draw.choice(NUMBERS),
        "enum": lambda: [draw.choice((None, 1, "a", {}, [1])) for _ in range(draw.choice((0, 1, 3, 300)))],
        "const": lambda: draw.choice((None, 1, "a", {"a": 1})),
        "anyOf": several,
        "allOf": several,
        "oneOf": several,
        "not": inner,
        "if": inner,
        "then": inner,
        "dependentSchemas": named,
        "$ref": lambda: f"#/$defs/{draw.choice('abz')}",
        "$anchor": lambda: "a",
        "title": lambda: "x" * draw.choice((1, 5000)),
    }
    for keyword in draw.sample(list(keywords), draw.randrange(1, 5)):
        schema[keyword] = keywords[keyword]()
    if draw.random() < 0.1:
        # A text has to match all of these patterns at once.
        schema["allOf"] = [{"type": "string", "pattern": draw_pattern(draw)} for _ in range(draw.choice((2, 5, 20)))]
    return schema


def nested(draw: random.Random, depth: int) -> Any:
    """Return nested schemas, `depth` levels deep."""
    schema = draw_schema(draw, most=2)
    for _ in range(depth):
        keyword = draw.choice(("items", "allOf", "anyOf", "properties", "not"))
        wrapped = {"allOf": [schema], "anyOf": [schema], "properties": {"a": schema}}
        schema = {keyword: wrapped.get(keyword, schema)}
    return schema


def draw_grammar(draw: random.Random) -> str:
    """Return a schema as text, with definitions that refer to each other. Sometimes the text is mutated."""
    schema = nested(draw, DEEP) if draw.random() < 0.01 else draw_schema(draw)
    if isinstance(schema, dict):
        schema["$defs"] = {"a": draw_schema(draw, most=3), "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#"}]}}
    if draw.random() < 0.3:
        schema = mutated_value([schema], draw)
    return json.dumps(schema)
