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
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import from_pcm16, to_pcm16
from antiphon.errors import StoreError
from antiphon.recording.tape import VERSION

log = logging.getLogger(__name__)


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

    def audio_in(self, pcm: Pcm) -> Pcm:
        """Sound of the client, 16 kHz. Returns what was written, which is what the session should hear: a replay hears no other."""
        data = to_pcm16(pcm)
        self._keep(lambda: self._in.write(data))
        self._line("sound", [self._heard, len(pcm)])
        self._heard += len(pcm)
        return from_pcm16(data)

    def audio_out(self, item_id: str, pcm: Pcm, rate_hz: int) -> None:
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
