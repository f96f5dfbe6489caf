"""The recordings of the benchmarks: a folder with a manifest.jsonl, which has one row of facts for each recording."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from bench.common import HERE

from antiphon.audio import Pcm
from antiphon.audio.containers import decode_all

# The kind of clips that the data's tools/evalmix.py makes from read sentences.
PAUSE = "pause"
QUIETEST_DBFS = -45.0
DATA = HERE.parent / "tests" / "data"


@dataclass(slots=True)
class Clip:
    """One recording of a folder with a manifest."""

    # Its name, unique within the folder.
    id: str
    # The audio file.
    path: Path
    # Its length in seconds.
    seconds: float
    # The spoken text; empty if it is unknown, or if nobody speaks.
    text: str
    # ISO 639-1.
    language: str
    # The manifest's kind of recording, such as `asr_read`.
    kind: str
    # True start of the speech, in seconds.
    speech_start: float
    # True end of the speech, in seconds.
    speech_end: float
    # Level of the speech, in dB of full scale.
    active_dbfs: float = 0.0
    # Words that are certainly said, if the full text is unknown.
    terms: tuple[str, ...] = ()
    # For a clip of a sound: what it is.
    label: str = ""
    # The voice's name within the set.
    speaker: str = ""
    # float32, mono, 16 kHz; empty until `loaded` reads it.
    pcm: Pcm = field(default_factory=lambda: np.zeros(0, np.float32))


def with_data(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return the command line with the option for the folder of recordings."""
    parser.add_argument("--data", type=Path, default=DATA, help="folder with a manifest.jsonl")
    return parser


def rows_of(data: Path) -> list[dict[str, Any]]:
    """Return the rows of a folder's manifest."""
    return [json.loads(line) for line in (data / "manifest.jsonl").read_text(encoding="utf-8").splitlines()]


def clip_of(row: dict[str, Any], data: Path) -> Clip:
    """Return the clip that a row of the manifest describes, without its samples."""
    return Clip(
        row["id"],
        data / row["path"],
        row["seconds"],
        row.get("text") or "",
        row.get("language") or "",
        row["kind"],
        row.get("speech_start", 0.0),
        row.get("speech_end", row["seconds"]),
        row.get("active_dbfs", 0.0),
        tuple(row.get("slots", {}).values()),
        row.get("label") or "",
        row.get("speaker") or "",
    )


def read_manifest(data: Path) -> list[Clip]:
    """Return the audio clips of a folder in the manifest's order, without their samples."""
    return [clip_of(row, data) for row in rows_of(data) if row["path"].endswith((".flac", ".wav"))]


def loaded(clips: Iterable[Clip]) -> list[Clip]:
    """Read the samples of the clips that have none. Return all clips."""
    out = list(clips)
    for clip in out:
        if not len(clip.pcm):
            clip.pcm = decode_all(str(clip.path))
    return out


def spread(clips: Sequence[Clip], most: int) -> list[Clip]:
    """Return at most `most` clips, taken evenly from all in the order of their ids; all clips if `most` is 0."""
    ordered = sorted(clips, key=lambda c: c.id)
    if not most or len(ordered) <= most:
        return ordered
    return [ordered[k * len(ordered) // most] for k in range(most)]


def mixed(data: Path, kind: str, num_clips: int, *options: str) -> list[tuple[dict[str, Any], Clip]]:
    """Let the data's tools/evalmix.py make clips out of this number of recordings.

    Return them with their manifest rows.

    Prints the reason and returns no clips if the tool or ffmpeg, which it needs, is missing.
    """
    tool = data / "tools" / "evalmix.py"
    if not tool.is_file() or not shutil.which("ffmpeg"):
        print(f"no clips of the kind {kind}: they need {tool} and ffmpeg")
        return []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(tool), kind, str(data), folder, "--n", str(num_clips), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = rows_of(Path(folder))
        return list(zip(rows, loaded(clip_of(row, Path(folder)) for row in rows), strict=True))


def with_pauses(data: Path, num_clips: int) -> list[Clip]:
    """Return sentences with a pause of 0.3, 0.5 or 0.8 s between two words, three sentences for each recording."""
    return [clip for _, clip in mixed(data, PAUSE, num_clips, "--hold", "0.3,0.5,0.8")]


def whole_turns(data: Path) -> list[Clip]:
    """Return read and spoken English clips of 2 to 7 s with known bounds of speech: at least forty, evenly chosen."""
    clips = [
        c
        for c in read_manifest(data)
        if c.language == "en"
        and c.text
        and c.kind.startswith("asr_")
        and 2 < c.seconds < 7
        # The data's bounds of speech are detected by energy, with a floor of -62 dBFS. For a recording near that level
        # they are off by half a second.
        and c.active_dbfs > QUIETEST_DBFS
    ]
    return loaded(sorted(clips, key=lambda c: c.id)[:: max(1, len(clips) // 40)])
