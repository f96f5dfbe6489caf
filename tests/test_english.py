"""All text is in the field's English: the phrases that must not come back, and a sentence at each field."""

from __future__ import annotations

import pytest

from tests.english import MAX_FIELDS, ROOT, bare_fields, files, phrases, short_docstrings

SRC = ROOT / "src" / "antiphon"


@pytest.mark.parametrize("folder", ["src", "tests", "docs", "bench", "deploy", "examples"])
def test_no_phrase_of_the_list_comes_back(folder: str) -> None:
    found = [line for file in files(ROOT / folder) for line in phrases(file)]
    assert found == []


def test_no_phrase_of_the_list_is_in_the_pages_of_the_root() -> None:
    assert [line for page in ROOT.glob("*.md") for line in phrases(page)] == []


def test_every_field_of_a_large_class_has_a_sentence() -> None:
    found = [line for file in files(SRC) if file.suffix == ".py" for line in bare_fields(file)]
    assert found == [], f"classes with more than {MAX_FIELDS} fields"


def test_public_docstrings_say_something() -> None:
    found = [line for file in files(SRC) if file.suffix == ".py" for line in short_docstrings(file)]
    assert len(found) <= 20, found
