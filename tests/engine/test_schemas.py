"""JSON schemas as programs send them: what they enforce, and which are refused, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from antiphon.engine.grammar import MAX_SCHEMA_SYMBOLS
from antiphon.engine.schemas import check_schemas, json_grammar
from antiphon.errors import GrammarError
from tests.engine.test_grammar import fits

CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
GIVEN, WRONG = '{"to": {"city": "Oslo"}}', '{"to": {"city": 1}}'


def to(schema: object, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"to": schema}, "required": ["to"], **more}


# Each is followed by a text that fits and one that does not.
REFERENCES = {
    "pydantic 2": (to({"$ref": "#/$defs/City"}, **{"$defs": {"City": CITY}}), GIVEN, WRONG),
    "pydantic 1": (
        to({"title": "To", "description": "d", "allOf": [{"$ref": "#/definitions/City"}]}, definitions={"City": CITY}),
        GIVEN,
        WRONG,
    ),
    "keywords beside it": (
        to({"$ref": "#/$defs/City", "description": "Where to", "default": None}, **{"$defs": {"City": CITY}}),
        GIVEN,
        WRONG,
    ),
    "zod, by name": (
        {
            "$ref": "#/definitions/Trip",
            "definitions": {"Trip": to(CITY, additionalProperties=False)},
            "$schema": "http://json-schema.org/draft-07/schema#",
        },
        GIVEN,
        WRONG,
    ),
    "zod, by place": (
        {"type": "object", "properties": {"from": CITY, "to": {"$ref": "#/properties/from"}}, "required": ["to"]},
        GIVEN,
        WRONG,
    ),
    "itself": (
        {"type": "object", "properties": {"to": {"anyOf": [{"$ref": "#"}, {"type": "string"}]}}, "required": ["to"]},
        '{"to": {"to": "Oslo"}}',
        WRONG,
    ),
    "a list of itself": (
        {
            "$ref": "#/$defs/Node",
            "$defs": {"Node": to({"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]})},
        },
        '{"to": {"to": {"to": null}}}',
        WRONG,
    ),
    "a generic's name": (to({"$ref": "#/$defs/Page[City]"}, **{"$defs": {"Page[City]": CITY}}), GIVEN, WRONG),
    "a name with a space": (to({"$ref": "#/$defs/A City"}, **{"$defs": {"A City": CITY}}), GIVEN, WRONG),
    "a property named default": (
        {"type": "object", "properties": {"default": {"$ref": "#/$defs/A B"}}, "$defs": {"A B": CITY}},
        '{"default": {"city": "Oslo"}}',
        '{"default": 1}',
    ),
}
# Keywords that no grammar can enforce are ignored; the rest still holds.
OTHERS = {
    "not": (to({"type": "string", "not": {"const": "x"}}), '{"to": "x"}', '{"to": 1}'),
    "not alone": (to({"not": {}}), '{"to": 1}', "{}"),
    "if and then": (
        {**to({"type": "string"}), "if": {"required": ["to"]}, "then": {"required": ["a"]}},
        '{"to": "x"}',
        "{}",
    ),
    "a set": (
        to({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
        '{"to": [1, 2]}',
        '{"to": ["a"]}',
    ),
    "a record": (
        to({"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "integer"}}),
        '{"to": {"a": 1}}',
        '{"to": {"a": "b"}}',
    ),
    "overlapping kinds": (
        to({"oneOf": [CITY, {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}]}),
        '{"to": {"a": 1}}',
        '{"to": 1}',
    ),
    "an unknown format": (to({"type": "string", "format": "binary"}), '{"to": "x"}', '{"to": 1}'),
    "a format": (to({"type": "string", "format": "date"}), '{"to": "2024-02-03"}', '{"to": "soon"}'),
    "a pattern that looks ahead": (
        to({"type": "string", "format": "email", "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z.]+$"}),
        '{"to": "a@b.no"}',
        '{"to": "a"}',
    ),
    "a pattern": (to({"type": "string", "pattern": r"^\d{2}$"}), '{"to": "12"}', '{"to": "1"}'),
    "or null": (to({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}), '{"to": null}', '{"to": 1}'),
    "mixed values": (to({"enum": ["a", 1, None, True]}), '{"to": null}', '{"to": 2}'),
    "a constant": (to({"const": None}), '{"to": null}', '{"to": 1}'),
    "null for what is missing": (
        {"type": "object", "title": None, "properties": {"to": {"type": "string", "items": None}}, "required": None},
        '{"to": "x"}',
        '{"to": 1}',
    ),
    "no properties": ({"type": "object", "properties": {}, "additionalProperties": False}, "{}", '{"a": 1}'),
    "nothing": ({}, "1", "x"),
}


@pytest.mark.parametrize(
    ("schema", "fitting", "wrong"), [*REFERENCES.values(), *OTHERS.values()], ids=[*REFERENCES, *OTHERS]
)
def test_a_text_is_held_to_what_a_schema_says(schema: dict[str, Any], fitting: str, wrong: str) -> None:
    check_schemas([schema])
    grammar = json_grammar(schema)
    assert fits(grammar, fitting)
    assert not fits(grammar, wrong)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (to({"$ref": "#/$defs/City"}), "Pointer '/$defs/City' does not exist"),
        (to({"$ref": "https://example.com/city.json"}), "'https://example.com/city.json' is not present"),
        (to({"type": "any"}), "Invalid type: any"),
        (to({"type": "integer", "minimum": 2, "maximum": 1}), "required property 'to' is unsatisfiable"),
        ({"$ref": "#"}, "no text matches it"),
        (to({"type": "string", "pattern": "("}), "unclosed group"),
        ({"type": "object", "properties": []}, "properties must be an object"),
        ({"type": "object", "properties": {f"p{i}": CITY for i in range(MAX_SCHEMA_SYMBOLS // 10)}}, "too big"),
    ],
)
def test_a_schema_that_no_text_can_be_held_to_is_refused_with_the_reason(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(GrammarError) as refused:
        check_schemas([schema])
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_hundred_large_tools_are_taken_and_ten_times_as_many_are_not() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": ["string", "null"]} for i in range(20)}}
    check_schemas([schema] * 100, together=True)
    with pytest.raises(GrammarError, match="too big"):
        check_schemas([schema] * 1000, together=True)
