"""Paths, functions and classes that the pages about the code mention exist, and the map of the folders is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "antiphon"
DOCS = ROOT / "docs"
ARCHITECTURE = DOCS / "architecture.md"
PAGES = [ARCHITECTURE, DOCS / "add-a-model.md", DOCS / "add-a-dialect.md", *sorted((DOCS / "design").glob("*.md"))]
MAX_LINES, MAX_COLUMNS = 250, 120

CODE = re.compile(r"`([^`\n]+)`")
FOLDER_OR_MODULE = re.compile(r"[\w./-]*(?:/|\.py|\.md)")
# A path with names in brackets after it: `path.py` (`name`, `Class.name`).
NAMES_OF = re.compile(r"`([\w./-]+\.py)`\s+\(((?:`[\w.]+`(?:,\s+)?)+)\)")
CLASS = re.compile(r"[A-Z][a-z0-9]+(?:[A-Z][A-Za-z0-9]*)+(?:\.\w+)*")


def text_of(page: Path) -> str:
    """Return the text of the page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def defines(source: str, name: str) -> bool:
    return bool(re.search(rf"^\s*(?:(?:async )?def|class) {name}\b|^\s*{name}\b.*[:=]", source, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_path_exists(page: Path) -> None:
    for code in CODE.findall(text_of(page)):
        if FOLDER_OR_MODULE.fullmatch(code) and len(code) > 1 and "NAME" not in code:
            assert (SRC / code).exists() or (ROOT / code).exists(), code


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_name_behind_a_module_is_defined_there(page: Path) -> None:
    for path, names in NAMES_OF.findall(text_of(page)):
        source = (SRC / path).read_text(encoding="utf-8")
        for name in CODE.findall(names):
            for part in name.split("."):
                assert defines(source, part), f"{path}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_class_is_defined_somewhere(page: Path) -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in SRC.rglob("*.py"))
    for code in CODE.findall(text_of(page)):
        if CLASS.fullmatch(code):
            for part in code.split("."):
                assert defines(sources, part), code


def test_the_map_names_every_folder() -> None:
    named = set(CODE.findall(text_of(ARCHITECTURE)))
    folders = {
        f"{path.relative_to(SRC)}/" for path in SRC.rglob("*") if path.is_dir() and not path.name.startswith("__")
    }
    assert folders - named == set()


def test_the_architecture_is_a_page_that_can_be_read_at_once() -> None:
    assert len(ARCHITECTURE.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_lines_are_of_bounded_width(page: Path) -> None:
    assert [line for line in page.read_text(encoding="utf-8").splitlines() if len(line) > MAX_COLUMNS] == []
