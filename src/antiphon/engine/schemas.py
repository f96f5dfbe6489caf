"""JSON schemas as grammars: adapted to the grammar library, and checked before any text is generated.

A grammar cannot enforce every keyword: `not`, `if`, `uniqueItems` and patterns with lookaround are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias
from urllib.parse import quote

from antiphon.engine.api import Grammar
from antiphon.engine.grammar_trial import TRIALS
from antiphon.errors import GrammarError

Json: TypeAlias = "bool | float | str | Sequence[Json] | Mapping[str, Json] | None"
Schema: TypeAlias = Mapping[str, Json]
# An option of `%json` grammars: the library ignores keywords that no grammar can enforce.
_LENIENT = {"x-guidance": {"lenient": True}}
# Keywords whose value maps arbitrary names to schemas, and keywords whose value is not a schema.
_NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_VALUES = frozenset({"const", "default", "enum", "example", "examples"})
# The maximum number of patterns in one schema, of characters in one pattern, and of patterns that one text has to match
# at the same time. Each additional pattern of the last kind doubles the library's work.
MAX_PATTERNS, MAX_PATTERN_CHARS, MAX_INTERSECTED = 512, 4096, 6
# Features of a pattern that no grammar supports: lookaround, word boundaries and backreferences.
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[bB1-9]|\\k<")


def json_grammar(schema: Schema) -> Grammar:
    """Return a grammar for JSON text that matches `schema`, unchecked. Its references may only point into itself."""
    return Grammar("json_schema", json.dumps({**_compilable(schema), **_LENIENT}))


def check_schemas(schemas: Sequence[Schema], *, together: bool = False) -> None:
    """Raise GrammarError, with the reason and the schema's `index`, for the first schema that no engine can enforce.

    `together`: the schemas are the alternatives of one grammar. If that grammar is too large, `index` is the number of
    schemas. Blocks like `GrammarTrials.check_all`.
    """
    for i, schema in enumerate(schemas):
        if reason := _fault_of_patterns(schema):
            raise GrammarError(reason, i)
    grammars = [json_grammar(schema) for schema in schemas]
    if together and len(schemas) > 1:
        rules = [f"schema_{i}: %json {grammar.text}" for i, grammar in enumerate(grammars)]
        start = " | ".join(f"schema_{i}" for i in range(len(grammars)))
        grammars.append(Grammar("lark", "\n".join([f"start: {start}", *rules]) + "\n"))
    TRIALS.check_all(grammars)


def _fault_of_patterns(schema: Schema) -> str:
    """Why a schema's patterns exceed the limits; "" if they do not."""
    patterns = [p for inner in _schemas_in(schema) if isinstance(p := inner.get("pattern"), str)]
    if len(patterns) > MAX_PATTERNS:
        return f"it has {len(patterns)} patterns; at most {MAX_PATTERNS} are accepted"
    if (longest := max(map(len, patterns), default=0)) > MAX_PATTERN_CHARS:
        return f"a pattern has {longest} characters; at most {MAX_PATTERN_CHARS} are accepted"
    if (most := max(map(_num_intersected, _schemas_in(schema)))) > MAX_INTERSECTED:
        return f"a text must match {most} patterns at once; at most {MAX_INTERSECTED} are accepted"
    return ""


def _num_intersected(schema: Schema) -> int:
    """The number of patterns that one text has to match, without the patterns in referenced schemas."""
    both, either = schema.get("allOf"), [schema.get("anyOf"), schema.get("oneOf")]
    count = int(isinstance(schema.get("pattern"), str))
    count += sum(_num_intersected(one) for one in both if isinstance(one, Mapping)) if isinstance(both, list) else 0
    branches = [one for some in either if isinstance(some, list) for one in some if isinstance(one, Mapping)]
    return count + max(map(_num_intersected, branches), default=0)


def _schemas_in(value: Json) -> Iterator[Schema]:
    """The schema itself and all schemas nested in it."""
    if isinstance(value, Mapping):
        yield value
        for key, inner in value.items():
            if key not in _VALUES:
                yield from _schemas_in(list(inner.values()) if key in _NAMED and isinstance(inner, Mapping) else inner)
    elif isinstance(value, list):
        for one in value:
            yield from _schemas_in(one)


def _compilable(schema: Schema) -> Schema:
    """The schema in a form that the grammar library accepts.

    Drops patterns with lookaround, and keywords whose value is null, which are probably mistakes. Quotes references
    as URI fragments.
    """
    compilable = dict[str, Json]()
    for key, value in schema.items():
        if value is None and key not in _VALUES:
            continue
        if key == "pattern" and isinstance(value, str) and _LOOKS_AROUND.search(value):
            continue
        if key == "$ref" and isinstance(value, str):
            compilable[key] = quote(value, safe="#/:?&=%~!$'()*+,;@")
        elif key in _NAMED and isinstance(value, Mapping):
            compilable[key] = {name: _inner(inner) for name, inner in value.items()}
        else:
            compilable[key] = value if key in _VALUES else _inner(value)
    return compilable


def _inner(value: Json) -> Json:
    """Apply `_compilable` to the schemas in a keyword's value."""
    if isinstance(value, Mapping):
        return _compilable(value)
    return [_inner(one) for one in value] if isinstance(value, list) else value
