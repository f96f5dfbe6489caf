"""Writes the rows of a data set in Parquet as JSON lines, and its audio as files: rows.py DATASET FOLDER

Each value of the form {"bytes": ..., "path": ...}, which is how `datasets` stores audio, becomes a file of FOLDER, and
its name in rows.jsonl.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet

ROWS_AT_ONCE = 8


def main(data: Path, out: Path) -> None:
    num_files = 0
    with (out / "rows.jsonl").open("w", encoding="utf-8") as lines:
        for file in sorted(data.rglob("*.parquet")):
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    for name, value in row.items():
                        if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
                            num_files += 1
                            # Its bytes say what it is.
                            row[name] = f"{num_files}.audio"
                            (out / row[name]).write_bytes(value["bytes"])
                    lines.write(json.dumps(row, ensure_ascii=False, default=_text) + "\n")


def _text(value: Any) -> str:
    """Return a value that JSON does not have, such as a date, as text."""
    return str(value)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
