"""The recordings that benchmarks play, and what is known of them: a folder with a manifest.jsonl, a row for each."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from antiphon.audio import Pcm
from antiphon.audio.containers import decode_all

# Clips that tools/evalmix.py makes: read sentences with a pause put between two words, and with noise.
PAUSE, NOISY = "pause", "noisy"
MADE = {PAUSE: ("--hold", "0.3,0.5,0.8"), NOISY: ("--snr", "10,5,0")}


@dataclass(slots=True)
class Clip:
    """One recording. `text` is what is said, empty where nobody knows or speaks; `language` is ISO 639-1.

    `speech_start` and `speech_end` are the true bounds of the speech, in seconds of the clip; `active_dbfs` is its
    level. `terms` are words that are said, if no more is known. `label` is what a sound is, and `speaker` the name of
    a voice within the set. `pcm` is empty until `loaded` reads it: float32, mono, 16 kHz.
    """

    id: str
    path: Path
    seconds: float
    text: str
    language: str
    kind: str
    speech_start: float
    speech_end: float
    active_dbfs: float = 0.0
    terms: tuple[str, ...] = ()
    label: str = ""
    speaker: str = ""
    pcm: Pcm = field(default_factory=lambda: np.zeros(0, np.float32))


def read_manifest(data: Path) -> list[Clip]:
    """Return the audio clips of a folder, in the manifest's order, without their samples."""
    clips = []
    for line in (data / "manifest.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if not row["path"].endswith((".flac", ".wav")):
            continue
        clips.append(
            Clip(
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
        )
    return clips


def loaded(clips: Iterable[Clip]) -> list[Clip]:
    """Read the samples of the clips that have none yet, and return all of them."""
    out = list(clips)
    for clip in out:
        if not len(clip.pcm):
            clip.pcm = decode_all(str(clip.path))
    return out


def spread(clips: Sequence[Clip], most: int) -> list[Clip]:
    """Return at most `most` clips, evenly spread over their ids; all of them where `most` is 0."""
    ordered = sorted(clips, key=lambda c: c.id)
    if not most or len(ordered) <= most:
        return ordered
    return [ordered[k * len(ordered) // most] for k in range(most)]


def made(data: Path, kind: str, num_clips: int) -> list[Clip]:
    """Make clips of PAUSE or NOISY out of so many recordings, three of each, and load them.

    A pause lasts 0.3, 0.5 or 0.8 s; noise is 10, 5 or 0 dB below the speech, as the end of a clip's id says. The clips
    are made by the data's tools/evalmix.py, which needs ffmpeg. Returns none, and says why, without them.
    """
    tool = data / "tools" / "evalmix.py"
    if not tool.is_file() or not shutil.which("ffmpeg"):
        print(f"no clips of the kind {kind}: they need {tool} and ffmpeg")
        return []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(tool), kind, str(data), folder, "--n", str(num_clips), *MADE[kind]]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return loaded(read_manifest(Path(folder)))
