"""Reads the examples in docs/wire: the notation is in README.md beside this file. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parents[2] / "docs" / "wire"
FENCE = "```"
PLACEHOLDER = re.compile(r"<([^<>]+)>")
ANYTHING = "..."
# A string, or dots outside of one.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\.\.\.')


@dataclass(frozen=True, slots=True)
class Line:
    """One line of an example, joined with its continuations. `mark`: `->`, `<-` or `(` for time that passes."""

    number: int
    mark: str
    text: str


@dataclass(frozen=True, slots=True)
class Example:
    """One example. `page`: its file's name. `number`: its place there, from 1. `options`: the words after `wire`."""

    page: str
    number: int
    options: frozenset[str]
    lines: tuple[Line, ...]

    @property
    def name(self) -> str:
        """The same as long as the examples before it stay."""
        return f"{self.page.removesuffix('.md')}-{self.number}"


def examples() -> list[Example]:
    """All examples of all pages, in order."""
    return [example for page in sorted(PAGES.glob("*.md")) for example in _of_page(page)]


def blocks(text: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """The fenced blocks of a page: what follows the fence, and the numbered lines inside."""
    inside: list[tuple[int, str]] | None = None
    info = ""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith(FENCE):
            if inside is not None:
                inside.append((number, line))
        elif inside is None:
            inside, info = [], line.removeprefix(FENCE).strip()
        else:
            yield info, inside
            inside = None


def _of_page(page: Path) -> Iterator[Example]:
    found = [(info.split(), lines) for info, lines in blocks(page.read_text(encoding="utf-8"))]
    wire = [(options[1:], lines) for options, lines in found if options[:1] == ["wire"]]
    for number, (options, lines) in enumerate(wire, 1):
        yield Example(page.name, number, frozenset(options), tuple(_joined(page.name, lines)))


def _joined(page: str, lines: list[tuple[int, str]]) -> Iterator[Line]:
    whole: Line | None = None
    for number, text in lines:
        if not text.strip():
            continue
        if text.startswith(" ") and whole:
            whole = Line(whole.number, whole.mark, f"{whole.text}\n{text.strip()}")
            continue
        if whole:
            yield whole
        mark, text = ("(", text) if text.startswith("(") else (text[:2], text[3:])
        if mark not in ("->", "<-", "("):
            raise ValueError(f"{page}:{number}: a line begins with ->, <- or (")
        whole = Line(number, mark, text)
    if whole:
        yield whole


def shown(text: str) -> Any:
    """A JSON value in which `...` may stand for fields, elements and values. Raises ValueError."""

    def dots(found: re.Match[str]) -> str:
        if found[0] != ANYTHING:
            return found[0]
        is_field = text[: found.start()].rstrip()[-1:] in ("{", ",") and text[found.end() :].lstrip()[:1] == "}"
        return '"...": null' if is_field else '"..."'

    return json.loads(_TOKEN.sub(dots, text))


def difference(expected: Any, actual: Any, chosen: dict[str, Any], at: str = "") -> str | None:
    """What of `expected` is not in `actual`; None where all of it is. Adds to `chosen` what the server chose."""
    match expected:
        case "...":
            return None
        case dict():
            if not isinstance(actual, dict):
                return f"{at or 'the frame'} is not an object"
            for key, value in expected.items():
                if key != ANYTHING and key not in actual:
                    return f"{at}.{key} is missing"
                if key != ANYTHING and (found := difference(value, actual[key], chosen, f"{at}.{key}")):
                    return found
            return None
        case list():
            return _elements(expected, actual, chosen, at)
        case str() if isinstance(actual, str | int | float):
            return _text(expected, actual, chosen, at)
        case _:
            same = expected == actual and isinstance(expected, bool) == isinstance(actual, bool)
            return None if same else f"{at} is {actual!r}, not {expected!r}"


def _elements(expected: list[Any], actual: Any, chosen: dict[str, Any], at: str) -> str | None:
    if not isinstance(actual, list):
        return f"{at} is not an array"
    more = expected[-1:] == [ANYTHING]
    wanted = expected[:-1] if more else expected
    if len(actual) < len(wanted) or (len(actual) > len(wanted) and not more):
        return f"{at} has {len(actual)} elements, not {len(wanted)}"
    found = (difference(e, a, chosen, f"{at}[{i}]") for i, (e, a) in enumerate(zip(wanted, actual, strict=False)))
    return next((text for text in found if text), None)


def _text(expected: str, actual: Any, chosen: dict[str, Any], at: str) -> str | None:
    if name := PLACEHOLDER.fullmatch(expected):
        known = chosen.setdefault(name[1], actual)
        return None if known == actual else f"{at} is {actual!r}, not {expected} = {known!r}"
    if isinstance(actual, str) and expected.endswith(ANYTHING) and actual.startswith(expected[: -len(ANYTHING)]):
        return None
    return None if expected == actual else f"{at} is {actual!r}, not {expected!r}"
