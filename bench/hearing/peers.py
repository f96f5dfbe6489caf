"""Other programs with the same clips and weights: RealtimeSTT for live audio, faster-whisper for whole files."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from bench.common import peer, percentile, table
from bench.hearing.client import Heard
from bench.hearing.clips import Clip
from bench.hearing.figures import first_words_s, rate

LIVE = "realtimestt"
FILES = "faster-whisper, whole files"
KEYS = ("first_words_p50", "final_p50", "final_p95", "wer", "cpu_per_audio_s")
THREADS = 2


def peers(clips: list[Clip], model: Path) -> dict[str, Any]:
    """Run each installed peer (`make peers`) on the clips. `model` is the folder of the loaded Whisper."""
    rows = {FILES: whole_files_row(clips, model)}
    listing = [{"id": c.id, "path": str(c.path), "seconds": c.seconds} for c in clips]
    with tempfile.TemporaryDirectory() as folder:
        result = peer(LIVE, Path(folder), "--model", str(model), clips=listing)
    return rows | ({LIVE: peer_row(clips, result)} if result else {})


def whole_files_row(clips: list[Clip], model: Path) -> dict[str, Any]:
    """Run the faster-whisper package in this process, with its defaults and the given language."""
    import faster_whisper

    whisper = faster_whisper.WhisperModel(str(model), device="cpu", compute_type="int8", cpu_threads=THREADS)
    texts, before_s = [], time.process_time()
    for clip in clips:
        segments, _ = whisper.transcribe(clip.pcm, language=clip.language)
        texts.append((clip, " ".join(s.text for s in segments)))
    cost = (time.process_time() - before_s) / sum(c.seconds for c in clips)
    return {"version": faster_whisper.__version__, "wer": rate(texts), "cpu_per_audio_s": cost}


def peer_row(clips: list[Clip], result: dict[str, Any]) -> dict[str, Any]:
    """Return a live peer's figures.

    Each of its partials replaces the last one, and counts as the text on the screen.
    """
    by_id = {c["id"]: c for c in result["clips"]}
    final, onset, texts = [], [], []
    for clip in clips:
        events = by_id[clip.id]["events"]
        finals = [e for e in events if e["kind"] == "final"]
        texts.append((clip, " ".join(e["text"] for e in finals)))
        if finals:
            final.append(finals[-1]["t"] - clip.speech_end)
        shown = (first_words_s(clip, Heard(deltas=[(e["t"], e["text"])])) for e in events)
        onset += [s for s in shown if s is not None][:1]
    return {
        "version": result["version"],
        "settings": result["settings"],
        "first_words_p50": percentile(onset, 50),
        "final_p50": percentile(final, 50),
        "final_p95": percentile(final, 95),
        "wer": rate(texts),
        "cpu_per_audio_s": result["cpu_s"] / result.get("streamed_s", result["audio_s"]),
    }


def ratios(ours: dict[str, float], rows: dict[str, Any]) -> None:
    """Print the peers' figures next to antiphon's, and relative to them."""
    out: list[tuple[Any, ...]] = [("antiphon", *(ours[k] for k in KEYS))]
    for name, row in rows.items():
        out.append((name, *(row.get(k, "-") for k in KEYS)))
        out.append((f"{name} / antiphon", *(row[k] / ours[k] if k in row else "-" for k in KEYS)))
    table("side by side, one stream, the same clips and weights (ratios above 1: antiphon is better)", ("", *KEYS), out)
