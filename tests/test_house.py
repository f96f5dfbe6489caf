"""The figures of `make house` for a small source tree."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.house import Report, measure

LONG = "def long() -> None:\n" + "    pass\n" * 40
FILES = {
    "src/antiphon/__init__.py": "",
    "src/antiphon/one.py": '''"""One."""

from antiphon import two
from antiphon.three import Third

Event = dict[str, Any]


class First:
    """A class of four words."""

    field: int = 1
    never_set: int
    constant = 2

    def __init__(self, other: First) -> None:
        self.field = 2
        self.more, self._last = 1, 2
        other.elsewhere = 3

    def use(self, event: Event) -> Mapping[str, object] | Mapping[K]:
        """Use it."""

    def _use(self) -> None:
        """Words that do not count."""
''',
    "src/antiphon/two.py": "import antiphon.one\n" + LONG + "\n" * 30,
    "src/antiphon/three.py": "import antiphon.three\ndef later():\n    import antiphon.one\n\nclass Third: pass\n",
    "src/antiphon/four.py": "from antiphon.five import five\n",
    "src/antiphon/five.py": "from antiphon.four import four\n",
    "tests/test_one.py": "def test() -> None:\n    one._hidden, self._own, one.__dict__, one.public\n",
    "docs/page.md": "x" * 120 + "\n" + "x" * 121 + "\n",
}


@pytest.fixture
def report(tmp_path: Path) -> Report:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return measure(tmp_path)


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        ("lines", 104),
        ("modules", 6),
        ("modules under 60 lines", 4),
        ("functions <= 40 lines, %", 80.0),
        ("dict[str, Any]", 1),
        ("untyped maps", 3),
        ("docstring words", 3.5),
        ("attributes of a class", 4),
        ("own imports", 2),
        ("import circles", 2),
        ("over 120 columns", 1),
        ("private in tests", 1),
    ],
)
def test_each_figure_counts_what_it_says(report: Report, figure: str, value: float) -> None:
    assert report.figures[figure] == value


def test_places_say_where(report: Report) -> None:
    assert report.places["functions <= 40 lines, %"] == ["src/antiphon/two.py:2"]
    assert report.places["attributes of a class"][0].endswith("First: 4")
    assert report.places["own imports"][0] == "antiphon.one: 2"
    circles = [set(circle.split(" -> ")) for circle in report.places["import circles"]]
    assert {"antiphon.one", "antiphon.two"} in circles
    assert {"antiphon.four", "antiphon.five"} in circles
    assert report.places["over 120 columns"] == ["docs/page.md:2"]
