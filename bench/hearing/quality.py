"""Word errors of finals, shown text and whole files: by kind of recording, with the language given or detected."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common import Server, show
from bench.hearing.client import Heard, play_shared, whole_files
from bench.hearing.clips import Clip
from bench.hearing.figures import Reading, cells, errors_row, readings

STREAMS = 4
FAST_NOTE = ", faster than real time: shown words are not those of a live client"


async def hear(srv: Server, clips: Sequence[Clip], *, speed: float, session: dict[str, Any]) -> dict[str, Heard]:
    """Play clips of one language over four concurrent live sessions. `session` has fields of `session.audio.input`."""
    return await play_shared(srv, clips, min(STREAMS, len(clips)), session=session, speed=speed, chunk_s=0.1)


async def read_clips(srv: Server, clips: Sequence[Clip], *, speed: float, tell_language: bool = True) -> list[Reading]:
    """Let the server transcribe clips live and as files.

    All clips of a session have one language, which may be given.
    """
    files = await whole_files(srv, clips, tell_language=tell_language)
    found: list[Reading] = []
    for language in dict.fromkeys(c.language for c in clips):
        part = [c for c in clips if c.language == language]
        session = {"transcription": {"language": language}} if tell_language else {}
        found += readings(part, await hear(srv, part, speed=speed, session=session), files)
    return found


def keep(found: Sequence[Reading], section: str, path: Path | None) -> None:
    """Append the transcripts of each clip to a file of JSON lines, for reading."""
    if path is None:
        return
    with path.open("a", encoding="utf-8") as file:
        for r in found:
            row = {"section": section, "id": r.clip.id, "kind": r.clip.kind, "language": r.clip.language}
            row |= {"text": r.clip.text, "live": r.live, "shown": r.shown, "file": r.file, "turns": r.num_turns}
            row |= {f"{which}_errors": r.errors(which) for which in ("live", "shown", "file")}
            file.write(json.dumps(row | {"words": r.num_words}, ensure_ascii=False) + "\n")


async def quality(srv: Server, clips: list[Clip], *, speed: float, transcripts: Path | None) -> dict[str, Any]:
    """Measure errors by kind of recording and language, with the language given to each session."""
    found = await read_clips(srv, clips, speed=speed)
    keep(found, "quality", transcripts)
    rows = {}
    for kind in dict.fromkeys(r.clip.kind for r in found):
        for language in sorted({r.clip.language for r in found if r.clip.kind == kind}):
            mine = [r for r in found if (r.clip.kind, r.clip.language) == (kind, language)]
            rows[f"{kind} {language}"] = errors_row(mine)
    reported = [r for r in found if r.clip.language == "en"]
    if reported:
        rows["all en"] = errors_row(reported)
    title = f"word errors in %, {STREAMS} streams at once, and whole files{FAST_NOTE if speed > 1 else ''}"
    show(title, {name: cells(row) for name, row in rows.items()})
    return {"speed": speed, "rows": rows}


async def languages(srv: Server, clips: list[Clip], *, speed: float, transcripts: Path | None) -> dict[str, Any]:
    """Measure errors by language, given and detected. Japanese, Chinese and Korean in characters."""
    rows = {}
    for name, tell in (("reported", True), ("detected", False)):
        found = await read_clips(srv, clips, speed=speed, tell_language=tell)
        keep(found, f"languages {name}", transcripts)
        for language in sorted({r.clip.language for r in found}):
            rows[f"{language} {name}"] = errors_row([r for r in found if r.clip.language == language])
        rows[f"all {name}"] = errors_row(found)
    title = f"errors by language in %{FAST_NOTE if speed > 1 else ''}"
    show(title, {name: cells(rows[name]) for name in sorted(rows)})
    return {"speed": speed, "rows": rows}
