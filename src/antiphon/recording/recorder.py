"""Records one session's events and audio, in both directions and with their times, in one folder.

`session.json` says what was opened and with which models; `events.jsonl` has a line for each thing that came or went,
in order:

    {"t": 1.204, "in": {...}}           an event of the client, without audio
    {"t": 1.224, "sound": [0, 320]}     audio of the client: first sample and number of samples in in.wav (16 kHz)
    {"t": 2.071, "out": {...}}          an event of the server; the "delta" of audio is [first sample, samples, item]
                                        in out.wav

`t` is seconds since the session began. Keys are never written. The WAVs hold the audio end to end, without the pauses
between.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import wave
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import from_pcm16, to_pcm16
from antiphon.errors import StoreError
from antiphon.recording.tape import SessionFacts

log = logging.getLogger(__name__)


class Recorder:
    """Writes one session. What was written so far can be read at any time, also if the process is killed.

    Writing blocks for as long as the disk takes. Where it fails, for one because the disk is full, the recording ends
    with an error in the log and the session goes on. `folder` is the recording's own folder, named by time and session.
    """

    def __init__(self, folder: Path, facts: SessionFacts, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the recording's folder below `folder`. `facts` are written into session.json; `clock` gives seconds.
        Raises StoreError where nothing can be written.
        """
        self._clock = clock
        self._begun_s = clock()
        self.folder = folder / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{facts.id}"
        try:
            self.folder.mkdir(parents=True, mode=0o700)
            (self.folder / "session.json").write_bytes(msgspec.json.encode(facts))
            self._events = (self.folder / "events.jsonl").open("w", encoding="utf-8")
            self._in = _Wav(self.folder / "in.wav", SAMPLE_RATE_HZ)
        except OSError as error:
            raise StoreError(f"cannot record in {folder}: {error}") from error
        self._out: _Wav | None = None
        # Writing has failed once, so nothing more is written; the client has sent audio in an event.
        self._failed = self._has_append = False
        # Samples written to in.wav and out.wav.
        self._num_in = self._num_out = 0

    def event_in(self, data: str | bytes) -> None:
        """Record a message of the client. One that carries audio is left out, because `audio_in` records the audio; the
        first 1,000 characters of a message that is not JSON are kept.
        """
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            event = {"unreadable": str(data)[:1000]}
        if isinstance(event, dict) and event.get("type") == "input_audio_buffer.append":
            if self._has_append:
                return
            # The first one is kept, without its audio: it may be what tells the dialect of the session.
            self._has_append, event = True, {"type": "input_audio_buffer.append", "audio": ""}
        self._line("in", event)

    def audio_in(self, pcm: Pcm) -> Pcm:
        """Record audio of the client: float32 [num_samples], 16 kHz. Returns it as it was written, in 16 bits, which is
        what the session should hear, because a replay hears no other.
        """
        data = to_pcm16(pcm)
        self._write(lambda: self._in.write(data))
        self._line("sound", [self._num_in, len(pcm)])
        self._num_in += len(pcm)
        return from_pcm16(data)

    def audio_out(self, item_id: str, pcm: Pcm, rate_hz: int) -> None:
        """Record audio of a response: float32 [num_samples] at `rate_hz`. The first call sets the rate of out.wav."""

        def write() -> None:
            if self._out is None:
                self._out = _Wav(self.folder / "out.wav", rate_hz)
            self._out.write(to_pcm16(pcm))

        self._write(write)
        self._line("out", {"type": "sound", "delta": [self._num_out, len(pcm), item_id]})
        self._num_out += len(pcm)

    def event_out(self, frame: str) -> None:
        """Record a message to the client. Messages that carry audio are left out, because `audio_out` records the
        audio.
        """
        event = json.loads(frame)
        if event.get("type") in ("response.output_audio.delta", "response.audio.delta"):
            return
        self._line("out", event)

    def close(self) -> None:
        """Close the files when the session is over. An error of the disk is ignored."""
        for file in (self._events, self._in, self._out):
            if file:
                with contextlib.suppress(OSError):
                    file.close()

    def _line(self, kind: str, value: object) -> None:
        line = json.dumps({"t": round(self._clock() - self._begun_s, 4), kind: value})
        self._write(lambda: print(line, file=self._events, flush=True))

    def _write(self, write: Callable[[], object]) -> None:
        """Write unless writing has failed before: a recording must not end the session that it records."""
        if self._failed:
            return
        try:
            write()
        except OSError as error:
            self._failed = True
            log.error("%s is recorded no further: %s", self.folder.name, error)


class _Wav:
    """A WAV file whose header fits its data after each write."""

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
        try:
            self._wave.close()
        finally:
            self._file.close()
