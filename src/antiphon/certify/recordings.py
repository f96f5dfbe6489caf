"""The recordings that the clients play: a folder with a `manifest.jsonl`, which has a line of JSON per recording."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.containers import decode_all
from antiphon.errors import MediaError, SettingsError

# Shortest and longest recording that is used, in seconds. Longer recordings have pauses that end turns.
SHORTEST_S, LONGEST_S = 1.0, 6.0
# Speech ends with the last 10 ms whose level is at most QUIET_DB below the level of the loudest 10 ms.
QUIET_DB = 35.0
# The largest number of recordings that are read from a folder.
MOST = 48


@dataclass(frozen=True, slots=True)
class Recording:
    """Speech of one person, float32 mono at 16 kHz. Only silence follows `speech_end_s`."""

    id: str
    text: str
    pcm: Pcm
    speech_end_s: float


def read_recordings(folder: Path) -> list[Recording]:
    """Return the English turns of a folder in the order of its manifest, at most MOST.

    A line has `path`, `kind` (`asr_...`), `language`, `seconds`, `text`, and `speech_end` if it is known. Raises
    SettingsError if the manifest cannot be read or has no such turn.
    """
    manifest = folder / "manifest.jsonl"
    try:
        rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines() if line.strip()]
        found: list[Recording] = []
        for row in rows:
            is_turn = row["kind"].startswith("asr_") and row["language"] == "en" and row.get("text")
            if is_turn and SHORTEST_S <= row["seconds"] <= LONGEST_S and len(found) < MOST:
                pcm = decode_all(str(folder / row["path"]))
                end_s = row.get("speech_end") or speech_end_s(pcm)
                found.append(Recording(row["id"], row["text"], pcm, float(end_s)))
    except (OSError, ValueError, KeyError, TypeError, MediaError) as error:
        raise SettingsError(f"--data: {manifest} cannot be read: {error}") from None
    if not found:
        raise SettingsError(f"--data: {manifest} has no English speech of {SHORTEST_S:.0f} to {LONGEST_S:.0f} s")
    return found


def speech_begin_s(pcm: Pcm) -> float:
    """Return where speech begins, in seconds: the start of the first loud 10 ms."""
    return len(pcm) / SAMPLE_RATE_HZ - speech_end_s(pcm[::-1]) if len(pcm) else 0.0


def speech_end_s(pcm: Pcm) -> float:
    """Return where speech ends, in seconds: the end of the last loud 10 ms."""
    frame = SAMPLE_RATE_HZ // 100
    whole = pcm[: len(pcm) // frame * frame].reshape(-1, frame)
    power = np.square(whole).mean(1) if len(whole) else np.zeros(1)
    loud = np.flatnonzero(power > power.max() * 10 ** (-QUIET_DB / 10))
    return float((loud[-1] + 1) * frame / SAMPLE_RATE_HZ) if len(loud) else len(pcm) / SAMPLE_RATE_HZ
