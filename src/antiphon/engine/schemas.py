"""JSON schemas as grammars: made such that a grammar library takes them, and checked before anything is generated.

A grammar holds a text to what it can. Keywords that no grammar can hold a text to, such as `not`, `if` and
`uniqueItems`, hold it to nothing; nor does a pattern that looks around.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from antiphon.engine.api import Grammar

# A JSON schema has keys and values of any kind.
Schema = Mapping[str, Any]
# Of a grammar in `%json`: keywords that no grammar can hold a text to are passed over.
_LENIENT = {"x-guidance": {"lenient": True}}
# Keywords whose value has schemas by names of its own, and those whose value is no schema.
_NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_VALUES = frozenset({"const", "default", "enum", "example", "examples"})
# What a pattern may have and no grammar can: assertions about what stands around, and references to groups.
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[bB1-9]|\\k<")


def json_grammar(schema: Schema) -> Grammar:
    """Return the grammar of JSON text that fits a schema, which the engine checks. Its references are to itself."""
    return Grammar("json_schema", json.dumps({**_compilable(schema), **_LENIENT}))


def check_schema(schema: Schema) -> None:
    """Raise GrammarError, with the reason, for a schema that no engine can keep to. Blocks as `check_grammar`."""
    _check(json_grammar(schema))


def check_together(schemas: Sequence[Schema]) -> None:
    """Raise GrammarError as `check_schema`, for schemas that are too large for one grammar that offers them all."""
    rules = [f"schema_{i}: %json {json_grammar(schema).text}" for i, schema in enumerate(schemas)]
    start = " | ".join(f"schema_{i}" for i in range(len(schemas)))
    _check(Grammar("lark", "\n".join([f"start: {start}", *rules]) + "\n"))


def _check(grammar: Grammar) -> None:
    # The grammar library comes with an extra, without which a server hears and speaks.
    from antiphon.engine.grammar import check_grammar

    check_grammar(grammar)


def _compilable(schema: Schema) -> Schema:
    """A schema without what a grammar library refuses and its writer need not mean: a pattern that looks around, null
    for a keyword that is not there, and references that are not quoted as a URI's fragment.
    """
    compilable = dict[str, Any]()
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


def _inner(value: Any) -> Any:
    """The schemas in the value of a keyword, as `_compilable` has them."""
    if isinstance(value, Mapping):
        return _compilable(value)
    return [_inner(one) for one in value] if isinstance(value, list) else value
