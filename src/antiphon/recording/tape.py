"""Reads a recorded session back, and gathers its turns."""

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

# The version of the recording's format; another version is not read.
VERSION = 1


@dataclass(frozen=True, slots=True)
class TapeEntry:
    """One line of a recording: its time in seconds of the session, its kind ("in", "sound" or "out"), and what it
    holds.
    """

    at_s: float
    kind: str
    value: Any


@dataclass(slots=True)
class RecordedTurn:
    """One turn of the user and its response. Times are in seconds of the session; None for what did not happen.

    - `started`, `ended`: of the user's speech; of a written message only the end.
    - `transcribed`, `transcript`: when the transcript was complete, and what it is.
    - `asked`: when the response was created; `first_text`, `first_sound`, `done`: when its first text and first audio
      were sent, and when it was done.
    - `status`, `answer`: the response's status and text.
    """

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
    """A recorded session.

    - `facts`: what session.json holds.
    - `entries`: everything that came and went, in order.
    - `input_pcm`: the client's audio, float32 [num_samples], 16 kHz.
    - `output_pcm`, `output_hz`: the audio of the responses and its rate; empty where there was none.
    """

    facts: dict[str, Any]
    entries: list[TapeEntry]
    input_pcm: Pcm
    output_pcm: Pcm = field(default_factory=lambda: np.zeros(0, np.float32))
    output_hz: int = 24_000

    @classmethod
    def read(cls, folder: Path) -> Tape:
        """Read a session's folder. A line that a killed process left incomplete is dropped. Raises StoreError for a
        folder that holds no recorded session, or one of another version.
        """
        try:
            facts = json.loads((folder / "session.json").read_text(encoding="utf-8"))
            lines = (folder / "events.jsonl").read_bytes().split(b"\n")
            input_pcm, _ = _read_wav(folder / "in.wav")
            output_pcm, output_hz = input_pcm[:0], 24_000
            if (folder / "out.wav").exists():
                output_pcm, output_hz = _read_wav(folder / "out.wav")
        except (OSError, ValueError, EOFError, wave.Error) as error:
            raise StoreError(f"{folder} is no recorded session: {error}") from error
        if facts.get("version") != VERSION:
            raise StoreError(f"{folder} was recorded in version {facts.get('version')}; this reads {VERSION}")
        return cls(facts, list(_entries(lines)), input_pcm, output_pcm, output_hz)

    @property
    def duration_s(self) -> float:
        """The time of the last entry in seconds; 0 where there is none."""
        return self.entries[-1].at_s if self.entries else 0.0

    def outputs(self) -> list[TapeEntry]:
        """The entries of the server's messages and audio, in order."""
        return [e for e in self.entries if e.kind == "out"]


def _entries(lines: list[bytes]) -> Iterator[TapeEntry]:
    for line in lines:
        try:
            row = json.loads(line)
            at_s = float(row.pop("t"))
            ((kind, value),) = row.items()
        except ValueError:
            continue
        yield TapeEntry(at_s, kind, value)


def _read_wav(path: Path) -> tuple[Pcm, int]:
    with wave.open(str(path), "rb") as file:
        return from_pcm16(file.readframes(file.getnframes())), file.getframerate()


def turns(outputs: list[TapeEntry]) -> list[RecordedTurn]:
    """The turns of a session by its server's events, in order. A response belongs to the last turn before it that has
    none; a response without one is a turn of its own.
    """
    reader = _TurnReader()
    for entry in outputs:
        reader.read(entry.value, entry.at_s)
    return list(reader.turns.values())


@dataclass(slots=True)
class _TurnReader:
    """Gathers turns from a session's events, which are read in order."""

    turns: dict[str, RecordedTurn] = field(default_factory=dict)
    _by_response: dict[str, RecordedTurn] = field(default_factory=dict)

    def read(self, event: dict[str, Any], at_s: float) -> None:
        """One event of the server, at its time in seconds."""
        match event.get("type"):
            case "input_audio_buffer.speech_started":
                self._turn(event["item_id"]).started = at_s
            case "input_audio_buffer.committed":
                self._turn(event["item_id"]).ended = at_s
            case "conversation.item.input_audio_transcription.completed":
                turn = self._turn(event["item_id"])
                turn.transcribed, turn.transcript = at_s, event["transcript"]
            case "conversation.item.added" | "conversation.item.created" if event["item"].get("role") == "user":
                text = " ".join(c.get("text") or "" for c in event["item"].get("content", []))
                if text.strip():
                    turn = self._turn(event["item"]["id"])
                    turn.ended, turn.transcript = at_s, text
            case _:
                self._read_response(event, at_s)

    def _read_response(self, event: dict[str, Any], at_s: float) -> None:
        match event.get("type"):
            case "response.created":
                response_id = event["response"]["id"]
                unanswered = next((t for t in reversed(self.turns.values()) if not t.response_id), None)
                turn = unanswered or self._turn(response_id)
                turn.response_id, turn.asked = response_id, at_s
                self._by_response[response_id] = turn
            case (
                "response.output_audio_transcript.delta"
                | "response.output_text.delta"
                | "response.audio_transcript.delta"
                | "response.text.delta"
            ):
                turn = self._by_response.get(event["response_id"], RecordedTurn(""))
                turn.first_text = at_s if turn.first_text is None else turn.first_text
                turn.answer += event["delta"]
            case "sound":
                # Audio is recorded without its response: it belongs to the newest one that is not done.
                under_way = [t for t in self._by_response.values() if t.done is None]
                for turn in under_way[-1:]:
                    turn.first_sound = at_s if turn.first_sound is None else turn.first_sound
            case "response.done":
                turn = self._by_response.get(event["response"]["id"], RecordedTurn(""))
                turn.done, turn.status = at_s, event["response"]["status"]
            case _:
                return

    def _turn(self, item_id: str) -> RecordedTurn:
        return self.turns.setdefault(item_id, RecordedTurn(item_id))
