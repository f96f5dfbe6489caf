"""Shared parts of benchmarks: percentiles, tables, sections that are saved one by one, helper processes."""

from __future__ import annotations

import asyncio
import json
import math
import signal
from functools import partial
from pathlib import Path

import pytest
from bench import common
from bench.common import beside, changed, measured, numbers, options, peer, percentile, save, show, spread, together


@pytest.mark.parametrize(("values", "q", "expected"), [([3, 1, 2], 50, 2), ([0, 10], 95, 9.5), ([7], 99, 7)])
def test_a_percentile_is_interpolated_between_the_sorted_values(values: list[float], q: float, expected: float) -> None:
    assert percentile(values, q) == pytest.approx(expected)


def test_a_percentile_of_nothing_is_no_number() -> None:
    assert math.isnan(percentile([], 50))


def test_a_spread_has_each_percentile_under_its_key() -> None:
    assert spread([0, 100], "first", "ms") == {"first_p50_ms": 50, "first_p95_ms": 95}
    assert spread([0, 100], qs=(99,)) == {"p99_s": 99}


def test_what_changed_is_the_difference_pair_by_pair() -> None:
    assert changed([1, 2], [4, 3]) == [3, 1]
    with pytest.raises(ValueError):
        changed([1], [1, 2])


def test_work_is_done_at_once_and_its_results_are_in_order() -> None:
    gate = asyncio.Barrier(3)

    async def work(number: int) -> int:
        await gate.wait()
        return number * 10

    async def main() -> list[int]:
        async with asyncio.timeout(60):
            return await together(3, work)

    assert asyncio.run(main()) == [0, 10, 20]


def test_a_table_has_a_column_for_each_key_of_any_row(capsys: pytest.CaptureFixture[str]) -> None:
    show("title", {"one": {"first_ms": 1.234}, "two": {"first_ms": 2.0, "more": "x"}})
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        [], ["##", "title"], ["first", "ms", "more"], ["one", "1.23"], ["two", "2.00", "x"],
    ]  # fmt: skip


def test_numbers_and_sections_are_read_from_the_command_line() -> None:
    assert numbers("1,8,32") == [1, 8, 32]
    parser = options("name", "First line.\n\nMore.", ("one", "two"))
    assert (parser.prog, parser.description) == ("name", "First line.")
    assert parser.parse_args([]).sections == "one,two"
    assert not hasattr(options("name", None).parse_args([]), "sections")


def test_sections_are_written_as_they_are_measured_and_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "save", partial(save, folder=tmp_path))
    save("name", {"old": 1, "one": 1}, tmp_path)

    def broken() -> None:
        raise ValueError

    sections = {"one": lambda: 2, "none": lambda: None, "left": lambda: 3, "broken": broken}
    with pytest.raises(ValueError):
        measured("name", "broken,none,one", sections, fact="x")
    written = json.loads((tmp_path / "name.json").read_text())
    assert written.pop("machine")["cores"]
    assert written == {"old": 1, "one": 2, "fact": "x"}


def test_a_section_that_is_not_there_is_named_before_anything_is_measured() -> None:
    with pytest.raises(SystemExit, match="no three; there are one, two"):
        measured("name", "one,three", {"one": pytest.fail, "two": pytest.fail})


def test_a_helper_runs_beside_until_the_end_and_its_first_line_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys, threading; print(*sys.argv[1:], flush=True); threading.Event().wait()"
    (tmp_path / "a_helper.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with beside("a_helper", "one", "two") as (line, process):
        assert line == "one two"
        assert process.poll() is None
    assert process.returncode == -signal.SIGKILL


def test_a_peer_that_is_not_set_up_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert peer("nowhere", tmp_path) is None
    assert capsys.readouterr().out == "nowhere is not installed: make peers\n"
