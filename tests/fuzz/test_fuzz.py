"""Ten thousand generated inputs for every parser and dialect, and all inputs that failed in earlier campaigns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.campaign import CORPUS, folder_of, run, tried
from tests.fuzz.targets import TARGETS


def test_no_generated_input_raises_and_no_bystander_notices_any() -> None:
    report = run(10_000, seed=19)
    assert report.finds == []
    assert report.tried.keys() == TARGETS.keys()
    assert sum(report.tried.values()) >= 10_000


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_an_input_that_did_not_hold_once_holds_now(path: Path) -> None:
    targets = {folder_of(name).name: target for name, target in TARGETS.items()}
    data = path.read_bytes()
    # Each file is read as bytes, and as the text frame that it may have been.
    assert tried(targets[path.parent.name].new(), data) is None
    assert tried(targets[path.parent.name].new(), data.decode(errors="replace")) is None
