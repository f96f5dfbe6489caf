"""The black box: one session's events and sound, both ways, with their times, in one folder; and how such a folder is read.

`session.json` says what was opened and with which models; `events.jsonl` has a line for each thing that came or went, in order:

    {"t": 1.204, "in": {...}}           an event of the client, without sound
    {"t": 1.224, "sound": [0, 320]}     sound of the client: first sample and number of samples in in.wav (16 kHz)
    {"t": 2.071, "out": {...}}          an event of the server; "delta" of sound is [first sample, samples, item] in out.wav

`t` is seconds since the session began. Keys are never written. The WAVs hold the sound end to end, without the pauses between.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import wave
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import from_pcm16, to_pcm16
from antiphon.errors import StoreError

log = logging.getLogger(__name__)

VERSION = 1


class Recorder:
    """Writes one session. What was written so far can be read at any time, also if the process is killed."""

    def __init__(
        self, folder: Path, session_id: str, facts: Mapping[str, Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises StoreError where nothing can be written."""
        self._clock = clock
        self._begun_s = clock()
        self.folder = folder / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{session_id}"
        try:
            self.folder.mkdir(parents=True, mode=0o700)
            (self.folder / "session.json").write_text(json.dumps({"version": VERSION, "id": session_id} | dict(facts)))
            self._events = (self.folder / "events.jsonl").open("w", encoding="utf-8")
            self._in = _Wav(self.folder / "in.wav", SAMPLE_RATE_HZ)
        except OSError as error:
            raise StoreError(f"cannot record in {folder}: {error}") from error
        self._out: _Wav | None = None
        self._broken = self._appended = False
        self._heard = self._said = 0

    def event_in(self, data: str | bytes) -> None:
        """A frame of the client. One that carries sound is written as its sound alone."""
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            event = {"unreadable": str(data)[:1000]}
        if isinstance(event, dict) and event.get("type") == "input_audio_buffer.append":
            if self._appended:
                return
            # The first one may be what says which dialect is spoken.
            self._appended, event = True, {"type": "input_audio_buffer.append", "audio": ""}
        self._line("in", event)

    def sound_in(self, pcm: Pcm) -> Pcm:
        """Sound of the client, 16 kHz. Returns what was written, which is what the session should hear: a replay hears no other."""
        data = to_pcm16(pcm)
        self._keep(lambda: self._in.write(data))
        self._line("sound", [self._heard, len(pcm)])
        self._heard += len(pcm)
        return from_pcm16(data)

    def sound_out(self, item_id: str, pcm: Pcm, rate_hz: int) -> None:
        """Sound of an answer, at the voice's rate."""

        def keep() -> None:
            if self._out is None:
                self._out = _Wav(self.folder / "out.wav", rate_hz)
            self._out.write(to_pcm16(pcm))

        self._keep(keep)
        self._line("out", {"type": "sound", "delta": [self._said, len(pcm), item_id]})
        self._said += len(pcm)

    def event_out(self, frame: str) -> None:
        """A frame to the client; those that carry sound are `sound_out`'s."""
        event = json.loads(frame)
        if event.get("type") in ("response.output_audio.delta", "response.audio.delta"):
            return
        self._line("out", event)

    def close(self) -> None:
        """The session is over."""
        for file in (self._events, self._in, self._out):
            if file:
                with contextlib.suppress(OSError):
                    file.close()

    def _line(self, kind: str, value: Any) -> None:
        line = json.dumps({"t": round(self._clock() - self._begun_s, 4), kind: value})
        self._keep(lambda: print(line, file=self._events, flush=True))

    def _keep(self, write: Callable[[], object]) -> None:
        """Write, as long as that works: what is to be remembered is not worth more than what is going on."""
        if self._broken:
            return
        try:
            write()
        except OSError as error:
            self._broken = True
            log.error("%s is recorded no further: %s", self.folder.name, error)


class _Wav:
    """A WAV file that is whole after each write."""

    def __init__(self, path: Path, rate_hz: int) -> None:
        self._file = path.open("wb", buffering=0)
        self._wave = wave.open(self._file, "wb")  # noqa: SIM115
        self._wave.setnchannels(1)
        self._wave.setsampwidth(2)
        self._wave.setframerate(rate_hz)
        self.write(b"")

    def write(self, data: bytes) -> None:
        self._wave.writeframes(data)

    def close(self) -> None:
        self._wave.close()
        self._file.close()


@dataclass(frozen=True, slots=True)
class Entry:
    """One line: `kind` is in, sound or out."""

    t: float
    kind: str
    value: Any


@dataclass(slots=True)
class Turn:
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
    entries: list[Entry]
    heard: Pcm
    said: Pcm = field(default_factory=lambda: np.zeros(0, np.float32))
    said_hz: int = 24_000

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
    def seconds(self) -> float:
        """Its length."""
        return self.entries[-1].t if self.entries else 0.0

    def outputs(self) -> list[Entry]:
        """What the server said."""
        return [e for e in self.entries if e.kind == "out"]


def _entries(lines: list[bytes]) -> Iterator[Entry]:
    for line in lines:
        try:
            row = json.loads(line)
            t = float(row.pop("t"))
            ((kind, value),) = row.items()
        except ValueError:
            continue
        yield Entry(t, kind, value)


def _read_wav(path: Path) -> tuple[Pcm, int]:
    with wave.open(str(path), "rb") as file:
        return from_pcm16(file.readframes(file.getnframes())), file.getframerate()


def turns(outputs: list[Entry]) -> list[Turn]:
    """What a session's events say of its turns, in order. An answer belongs to the turn that ended last before it."""
    found: dict[str, Turn] = {}
    by_response: dict[str, Turn] = {}

    def turn(item_id: str) -> Turn:
        return found.setdefault(item_id, Turn(item_id))

    for entry in outputs:
        event, t = entry.value, entry.t
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
                mine = by_response.get(event["response_id"], Turn(""))
                mine.first_text = t if mine.first_text is None else mine.first_text
                mine.answer += event["delta"]
            case "sound":
                open_ones = [x for x in by_response.values() if x.done is None]
                for mine in open_ones[-1:]:
                    mine.first_sound = t if mine.first_sound is None else mine.first_sound
            case "response.done":
                mine = by_response.get(event["response"]["id"], Turn(""))
                mine.done, mine.status = t, event["response"]["status"]
            case _:
                continue
    return list(found.values())
