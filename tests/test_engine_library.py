"""The example of docs/engine-library.md runs as written, and each of its requests continues the one before."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine.local import tiny

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "engine-library.md"
# In float32, so that the most likely tokens equal those of full forward passes.
LOAD, FP32 = 'load_model(Path("checkpoint"))', 'load_model(Path("checkpoint"), weights="fp32")'
PROMPTS = ([1, 2, 3], [4, 5], [6, 7, 8])


def likeliest(rows: list[int], count: int) -> list[int]:
    """Return the most likely tokens after these, computed by full forward passes of the model."""
    model, found = tiny.model("qwen3"), list[int]()
    with torch.inference_mode():
        for _ in range(count):
            found.append(int(model(input_ids=torch.tensor([rows + found])).logits[0, -1].argmax()))
    return found


@pytest.mark.slow
def test_the_example_runs_and_a_request_goes_on_without_the_last_token_of_the_one_before(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert LOAD in example
    tiny.model("qwen3").save_pretrained(tmp_path / "checkpoint")
    done = subprocess.run(
        [sys.executable, "-c", example.replace(LOAD, FP32)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected, rows = [], list[int]()
    for number, prompt in enumerate(PROMPTS):
        rows = rows[:-1] + prompt if number else list(prompt)
        tokens = likeliest(rows, 3)
        rows += tokens
        expected.append(f"{len(rows)} {tokens} Finish.LENGTH")
    assert done.stdout.splitlines() == expected
