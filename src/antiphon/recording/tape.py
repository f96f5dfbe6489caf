"""A recorded session, read back."""

from __future__ import annotations

import json
import wave
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.audio import Pcm
from antiphon.audio.pcm import from_pcm16
from antiphon.errors import StoreError

VERSION = 1


@dataclass(frozen=True, slots=True)
class TapeEntry:
    """One line: `kind` is in, sound or out."""

    at_s: float
    kind: str
    value: Any


@dataclass(slots=True)
class RecordedTurn:
    """One turn of the user and its answer; times in seconds of the session, None for what did not happen."""

    item_id: str
    started: float | None = None
    ended: float | None = None
    transcribed: float | None = None
    transcript: str = ""
    response_id: str = ""
    asked: float | None = None
    first_text: float | None = None
    first_sound: float | None = None
    done: float | None = None
    status: str = ""
    answer: str = ""


@dataclass(slots=True)
class Tape:
    """A recorded session. `heard`: in.wav, float32 at 16 kHz."""

    facts: dict[str, Any]
    entries: list[TapeEntry]
    input_pcm: Pcm
    output_pcm: Pcm = field(default_factory=lambda: np.zeros(0, np.float32))
    output_hz: int = 24_000

    @classmethod
    def read(cls, folder: Path) -> Tape:
        """Raises StoreError for a folder that is none of a session. A line that a killed process left half is dropped."""
        try:
            facts = json.loads((folder / "session.json").read_text(encoding="utf-8"))
            lines = (folder / "events.jsonl").read_bytes().split(b"\n")
            heard, _ = _read_wav(folder / "in.wav")
            said, said_hz = _read_wav(folder / "out.wav") if (folder / "out.wav").exists() else (heard[:0], 24_000)
        except (OSError, ValueError, EOFError, wave.Error) as error:
            raise StoreError(f"{folder} is no recorded session: {error}") from error
        if facts.get("version") != VERSION:
            raise StoreError(f"{folder} was recorded in version {facts.get('version')}; this reads {VERSION}")
        return cls(facts, list(_entries(lines)), heard, said, said_hz)

    @property
    def duration_s(self) -> float:
        """Its length."""
        return self.entries[-1].at_s if self.entries else 0.0

    def outputs(self) -> list[TapeEntry]:
        """What the server said."""
        return [e for e in self.entries if e.kind == "out"]


def _entries(lines: list[bytes]) -> Iterator[TapeEntry]:
    for line in lines:
        try:
            row = json.loads(line)
            t = float(row.pop("t"))
            ((kind, value),) = row.items()
        except ValueError:
            continue
        yield TapeEntry(t, kind, value)


def _read_wav(path: Path) -> tuple[Pcm, int]:
    with wave.open(str(path), "rb") as file:
        return from_pcm16(file.readframes(file.getnframes())), file.getframerate()


def turns(outputs: list[TapeEntry]) -> list[RecordedTurn]:
    """What a session's events say of its turns, in order. An answer belongs to the turn that ended last before it."""
    found: dict[str, RecordedTurn] = {}
    by_response: dict[str, RecordedTurn] = {}

    def turn(item_id: str) -> RecordedTurn:
        return found.setdefault(item_id, RecordedTurn(item_id))

    for entry in outputs:
        event, t = entry.value, entry.at_s
        match event.get("type"):
            case "input_audio_buffer.speech_started":
                turn(event["item_id"]).started = t
            case "input_audio_buffer.committed":
                turn(event["item_id"]).ended = t
            case "conversation.item.input_audio_transcription.completed":
                turn(event["item_id"]).transcribed = t
                turn(event["item_id"]).transcript = event["transcript"]
            case "conversation.item.added" | "conversation.item.created" if event["item"].get("role") == "user":
                written = " ".join(c.get("text") or "" for c in event["item"].get("content", []))
                if written.strip():
                    turn(event["item"]["id"]).ended = t
                    turn(event["item"]["id"]).transcript = written
            case "response.created":
                response_id = event["response"]["id"]
                mine = next((x for x in reversed(found.values()) if not x.response_id), None) or turn(response_id)
                mine.response_id, mine.asked = response_id, t
                by_response[response_id] = mine
            case (
                "response.output_audio_transcript.delta"
                | "response.output_text.delta"
                | "response.audio_transcript.delta"
                | "response.text.delta"
            ):
                mine = by_response.get(event["response_id"], RecordedTurn(""))
                mine.first_text = t if mine.first_text is None else mine.first_text
                mine.answer += event["delta"]
            case "sound":
                open_ones = [x for x in by_response.values() if x.done is None]
                for mine in open_ones[-1:]:
                    mine.first_sound = t if mine.first_sound is None else mine.first_sound
            case "response.done":
                mine = by_response.get(event["response"]["id"], RecordedTurn(""))
                mine.done, mine.status = t, event["response"]["status"]
            case _:
                continue
    return list(found.values())
