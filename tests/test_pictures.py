"""The pictures of the pages (Mermaid text) name and draw only what is in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from antiphon.transports.lifecycle import LIFECYCLE_TRANSITIONS
from tests.test_layout import MAY_IMPORT, SRC

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PICTURE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PICTURES = [(page, text) for page in PAGES for text in PICTURE.findall(page.read_text(encoding="utf-8"))]
CLASS = re.compile(r"\b[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]+)+\b")
# Words of Mermaid itself, and names of things outside of the code.
NOT_OURS = {"WebSocket"}
# Rooms that nearly all others import. They are not drawn, because their arrows would hide the rest.
NOT_DRAWN = {"shares", "settings", "web"}


def picture(page: str, kind: str) -> str:
    """Return the first picture of this kind on a page."""
    return next(text for path, text in PICTURES if path == ROOT / page and text.startswith(kind))


def arrows(text: str) -> set[tuple[str, str]]:
    """Return the arrows of a flowchart. `a & b --> c & d` stands for four."""
    found = set[tuple[str, str]]()
    for line in text.splitlines():
        if "-->" in line:
            left, right = line.split("-->")
            found |= {(a.strip(), b.strip()) for a in left.split("&") for b in right.split("&")}
    return found


def test_there_are_six_pictures_and_more() -> None:
    assert len(PICTURES) >= 6


@pytest.mark.parametrize(("page", "text"), PICTURES, ids=[path.name for path, _ in PICTURES])
def test_every_class_in_a_picture_exists(page: Path, text: str) -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in SRC.rglob("*.py"))
    unknown = {n for n in CLASS.findall(text) if n not in NOT_OURS and not re.search(rf"\b(class )?{n}\b", sources)}
    assert unknown == set()


def test_the_rooms_are_drawn_as_they_import_each_other() -> None:
    drawn = arrows(picture("docs/architecture.md", "flowchart"))
    rooms = {path.name for path in SRC.iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert {room for arrow in drawn for room in arrow} == rooms - NOT_DRAWN
    for room, other in drawn:
        assert other in MAY_IMPORT[room], f"{room} may not import {other}"
        used = any(f"antiphon.{other}" in path.read_text(encoding="utf-8") for path in (SRC / room).rglob("*.py"))
        assert used, f"{room} does not import {other}"


def test_the_life_of_a_session_is_drawn_as_its_table_has_it() -> None:
    text = picture("docs/design/resume.md", "stateDiagram")
    drawn = set(re.findall(r"^\s*([A-Z]+) --> ([A-Z]+): ([A-Z_]+)$", text, re.MULTILINE))
    table = {(a.name, b.name, e.name) for a, row in LIFECYCLE_TRANSITIONS.items() for e, b in row.items()}
    assert drawn == table
