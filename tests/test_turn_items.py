"""Turns of eot-bench and TurnBench: where their pauses and ends are, and what the points of both benchmarks count."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from bench.hearing.clips import DATA
from bench.referees.servers import environment
from bench.turn_taking.items import agreed, items, measured, rows_of, turns_of
from bench.turn_taking.pauses import Pause

# Five seconds long.
RECORDING = DATA / "audio" / "lj-LJ001-0004.flac"


def written(folder: Path, row: dict[str, Any], *audio: str) -> None:
    for name in audio:
        shutil.copy(RECORDING, folder / name)
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")


def eot_row() -> dict[str, Any]:
    ends = [(0.5, 0.6), (1.0, 1.7), (2.0, 7.5), (4.8, 5.1)]
    spans = [{"start": start, "end": end} for start, end in ends]
    return {"id": "t1", "language": "en", "audio": "t1.flac", "silence_spans": spans, "messages": [], "words": []}


def test_the_last_span_of_eot_bench_is_the_end_and_short_or_long_ones_do_not_count(tmp_path: Path) -> None:
    written(tmp_path, eot_row(), "t1.flac")
    with rows_of(tmp_path) as (folder, rows):
        (turn,) = turns_of(rows[0], folder)
    assert (turn.pauses, turn.end_s, turn.language) == (((1.0, 1.7),), 4.8, "en")
    assert len(turn.pcm) == pytest.approx(5.14 * 16_000, abs=160)


def segment(start_s: float, end_s: float, label: str = "Normal Turn") -> dict[str, Any]:
    return {"start_s": start_s, "end_s": end_s, "label": label}


def test_two_annotators_make_a_segment_and_one_makes_a_doubt() -> None:
    first = [segment(1, 2), segment(3, 4), segment(8, 9)]
    second = [segment(1.1, 2.1, "Overlap"), segment(3, 4.5)]
    third = [segment(5, 5.3, "Continuer Backchannel")]
    assert agreed([first, second, third]) == ([(1.05, 2.05)], [(3, 4), (3, 4.5), (5, 5.3), (8, 9)])


def test_an_end_of_a_segment_of_turn_bench_is_an_end_only_if_the_floor_passes(tmp_path: Path) -> None:
    # The first speaker pauses twice, and answers the second one. One pause has a backchannel of the speaker inside.
    first = [segment(0.5, 1), segment(1.5, 2), segment(2.9, 3.1), segment(4.4, 4.9)]
    second = [segment(3.2, 4.2)]
    noted = [segment(2.2, 2.5, "Acknowledgement Backchannel")]
    row: dict[str, Any] = {"conversation_id": "20", "speaker_1_audio": "1.flac", "speaker_2_audio": "2.flac"}
    for annotator in "abc":
        row[f"speaker_1_annotation_{annotator}"] = first + (noted if annotator == "c" else [])
        row[f"speaker_2_annotation_{annotator}"] = second
    written(tmp_path, row, "1.flac", "2.flac")
    with rows_of(tmp_path) as (folder, rows):
        turns = list(turns_of(rows[0], folder))
    found = {
        turn.id: ([tuple(round(t, 2) for t in pause) for pause in turn.pauses], round(turn.end_s, 2)) for turn in turns
    }
    # Times count from 0.3 s before each turn.
    assert found == {"20-1-0": ([(0.8, 1.3)], 2.9), "20-1-1": ([], 0.8), "20-2-0": ([], 1.3)}


def pause(length_s: float | None, complete: float, at_s: float = 1.0) -> Pause:
    return Pause("r", at_s, "s", "eot-bench", "conversation", "en", False, length_s, complete, None, "Yes.", 1)


def test_the_points_are_the_best_that_any_threshold_and_silence_reaches() -> None:
    # Half of the pauses sound finished, and last longer than the shortest wait at the ends.
    inner = [pause(0.5, 0.9), pause(0.5, 0.1)] * 10
    found = measured([*inner, *(pause(None, 0.95) for _ in range(10))])
    alone = found["points"]["turn detector"]
    # A threshold between 0.9 and 0.95 tells them apart.
    assert (alone["cut_off_at_300_ms"]["count"], alone["wait_s_at_5_percent"]) == (0, 0.2)
    same = measured([*inner, *(pause(None, 0.9) for _ in range(10))])["points"]["turn detector"]
    assert (same["cut_off_at_300_ms"]["count"], same["wait_s_at_5_percent"]) == (10, 0.6)
    assert found["eagerness"]["auto"]["ends_found_in_3_s"]["count"] == 10


def test_rows_of_neither_benchmark_are_refused(tmp_path: Path) -> None:
    written(tmp_path, {"id": "1", "text": "yes"})
    with rows_of(tmp_path) as (folder, rows), pytest.raises(SystemExit, match="no row of eot-bench or TurnBench"):
        list(turns_of(rows[0], folder))
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(SystemExit, match="no Parquet file"), rows_of(tmp_path):
        pass


@pytest.mark.heavy
def test_a_folder_in_parquet_is_judged_with_the_models_of_the_server(tmp_path: Path) -> None:
    row = eot_row() | {"audio": {"bytes": RECORDING.read_bytes().hex(), "path": "t1.flac"}}
    (tmp_path / "row.json").write_text(json.dumps(row))
    write = (
        "import json, pyarrow, pyarrow.parquet, sys; row = json.load(open('row.json'));"
        "row['audio']['bytes'] = bytes.fromhex(row['audio']['bytes']);"
        "pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), 'validation-0.parquet')"
    )
    subprocess.run([str(environment("parquet")), "-c", write], cwd=tmp_path, check=True)
    found = items(tmp_path)
    assert (found["en"]["pauses"], found["en"]["ends"]) == (1, 1)
