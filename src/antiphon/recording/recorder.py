"""Records one session's events and audio in both directions, with their times, into one folder.

`session.json` contains the connection's request and the loaded models. `events.jsonl` has one line for each message or
piece of audio, in order:

    {"t": 1.204, "in": {...}}           an event of the client, without audio
    {"t": 1.224, "sound": [0, 320]}     audio of the client: first sample and number of samples in in.wav (16 kHz)
    {"t": 2.071, "out": {...}}          an event of the server; the "delta" of audio is [first sample, samples, item]
                                        in out.wav

`t` is seconds since the session began. Keys are never written, and tokens only as hashes. Sound that a client streams
is written only to the WAV files, whichever field carried it. The WAV files contain the pieces of audio end to end,
without the pauses between them. If texts are redacted (redaction.py), they contain silence.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
import time
import wave
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import from_pcm16, to_pcm16
from antiphon.errors import StoreError
from antiphon.recording.disk import KEEP_ALL, MAX_WAITING_BYTES, DiskWriter, Keep, prune
from antiphon.recording.redaction import SECRETS, Redactor
from antiphon.recording.tape import SessionFacts

# Long base64, which is left out unless it is an image. A replay has to show images to the model again.
_BASE64 = re.compile(r"(?:data:audio/[^,]*,)?[A-Za-z0-9+/_-]{256,}={0,2}")
_IMAGES = ("/9j/", "iVBORw0KGgo", "R0lGOD")
# Messages that keep their sound, because it belongs to an item or a voice. All other sound is in the WAV files.
_HOLDS_SOUND = frozenset({"conversation.item.create", "response.create", "session.update", "session.init"})

KEEPS_ALL = Redactor("off")


class Recorder:
    """Writes one session. The part that is already written can be read at any time, even if the process is killed.

    A thread writes, so that no method waits for the disk. If the disk is too slow, entries that do not fit into memory
    are dropped, which is logged. If writing fails, for example because the disk is full, the recording ends with an
    error in the log and the session continues. `folder` is the recording's own folder, named by time and session.
    """

    def __init__(
        self,
        folder: Path,
        facts: SessionFacts,
        clock: Callable[[], float] = time.monotonic,
        *,
        keep: Keep = KEEP_ALL,
        redactor: Redactor = KEEPS_ALL,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        """Create the recording's folder inside `folder`. `facts` are written to session.json. `clock` returns seconds.

        - `keep`: the limits of the recordings in `folder`. Older ones are deleted at the beginning and the end of this
          one.
        - `redactor`: redacts texts. Unless it keeps everything, audio is written as silence.
        - `max_waiting_bytes`: the maximum number of bytes that wait for the disk.

        Raises StoreError if the folder cannot be written.
        """
        self._clock = clock
        self._begun_s = clock()
        self._keep = keep
        self._redactor = redactor
        self.folder = folder / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{facts.id}"
        try:
            self.folder.mkdir(parents=True, mode=0o700)
            self._events = (self.folder / "events.jsonl").open("w", encoding="utf-8")
            fcntl.flock(self._events, fcntl.LOCK_EX)
            (self.folder / "session.json").write_bytes(msgspec.json.encode(self._redacted(facts)))
            self._in = _Wav(self.folder / "in.wav", SAMPLE_RATE_HZ)
        except OSError as error:
            raise StoreError(f"cannot record in {folder}: {error}") from error
        self._out: _Wav | None = None
        # Whether an event of the client with audio was recorded.
        self._has_append = False
        # The numbers of samples written to in.wav and out.wav.
        self._num_in = self._num_out = 0
        self._writer = DiskWriter(self.folder.name, max_waiting_bytes)
        self._writer.put(0, lambda: prune(folder, keep))

    @property
    def num_dropped(self) -> int:
        """The number of entries that were dropped because the disk was too slow."""
        return self._writer.num_dropped

    def event_in(self, data: str | bytes) -> None:
        """Record a message of the client, with credentials hashed.

        A message that carries audio is skipped, because `audio_in` records the audio. If a message is not JSON, its
        first 1,000 characters are kept.
        """
        at_s = self._now_s()
        self._writer.put(len(data), lambda: self._line(at_s, "in", self._received(data)))

    def audio_in(self, pcm: Pcm) -> Pcm:
        """Record audio of the client: float32 [num_samples], 16 kHz.

        Returns the audio as written, rounded to 16 bits. The session should use this audio, because a replay gets the
        same.
        """
        data = to_pcm16(pcm)
        at_s, start = self._now_s(), self._num_in

        def write() -> None:
            self._in.write(self._kept(data))
            self._line(at_s, "sound", [start, len(pcm)])

        if self._writer.put(len(data), write):
            self._num_in += len(pcm)
        return from_pcm16(data)

    def audio_out(self, item_id: str, pcm: Pcm, rate_hz: int) -> None:
        """Record audio of a response: float32 [num_samples] at `rate_hz`. The first call sets the rate of out.wav."""
        data = to_pcm16(pcm)
        at_s, start = self._now_s(), self._num_out

        def write() -> None:
            if self._out is None:
                self._out = _Wav(self.folder / "out.wav", rate_hz)
            self._out.write(self._kept(data))
            self._line(at_s, "out", {"type": "sound", "delta": [start, len(pcm), item_id]})

        if self._writer.put(len(data), write):
            self._num_out += len(pcm)

    def event_out(self, frame: str) -> None:
        """Record a message to the client, with credentials hashed.

        Messages that carry audio are skipped, because `audio_out` records the audio.
        """
        at_s = self._now_s()
        self._writer.put(len(frame), lambda: self._write_sent(at_s, frame))

    def close(self) -> None:
        """Close the files after everything is written, and delete old recordings. Does not wait; see `join`."""
        self._writer.close(self._close_files)

    def join(self) -> None:
        """Wait until everything is written and the files are closed. Call it after `close`."""
        self._writer.join()

    # --- in the writer's thread ---------------------------------------------------------------------------------------

    def _received(self, data: str | bytes) -> object:
        try:
            event = json.loads(data)
            kind = event.get("type") if isinstance(event, dict) else None
            if kind == "input_audio_buffer.append":
                # The first append is kept without its audio, because a replay may need it to detect the session's
                # dialect.
                event, self._has_append = ({"type": kind, "audio": ""} if not self._has_append else None), True
                return event
            keeps_sound = self._redactor.redaction == "off" and isinstance(kind, str) and kind in _HOLDS_SOUND
            return _cleaned(event, keeps_sound=keeps_sound)
        except (ValueError, RecursionError):
            return {"unreadable": str(data)[:1000]}

    def _write_sent(self, at_s: float, frame: str) -> None:
        event = json.loads(frame)
        if event.get("type") not in ("response.output_audio.delta", "response.audio.delta"):
            self._line(at_s, "out", _cleaned(event))

    def _redacted(self, facts: SessionFacts) -> SessionFacts:
        """Return the facts, with the client's opening message redacted."""
        opening = _cleaned(json.loads(bytes(facts.opening)), keeps_sound=True)
        opening = self._redactor.redacted(opening, by_client=True)
        return msgspec.structs.replace(facts, opening=msgspec.Raw(msgspec.json.encode(opening)))

    def _kept(self, pcm: bytes) -> bytes:
        return pcm if self._redactor.redaction == "off" else bytes(len(pcm))

    def _line(self, at_s: float, kind: str, value: object) -> None:
        if kind != "sound" and not (isinstance(value, dict) and value.get("type") == "sound"):
            value = self._redactor.redacted(value, by_client=kind == "in")
        if value is not None:
            print(json.dumps({"t": at_s, kind: value}), file=self._events, flush=True)

    def _close_files(self) -> None:
        for file in (self._in, self._out, self._events):
            if file:
                with contextlib.suppress(OSError):
                    file.close()
        prune(self.folder.parent, self._keep)

    def _now_s(self) -> float:
        return round(self._clock() - self._begun_s, 4)


def _cleaned(value: object, *, keeps_sound: bool = False) -> object:
    """Return a JSON value with its credentials hashed, and without sound in base64 unless it is kept."""
    match value:
        case dict():
            hidden = SECRETS | {"headers"} if value.get("type") == "mcp" else SECRETS
            return {k: _hashed(v) if k in hidden else _cleaned(v, keeps_sound=keeps_sound) for k, v in value.items()}
        case list():
            return [_cleaned(v, keeps_sound=keeps_sound) for v in value]
        case str() if not keeps_sound and _BASE64.fullmatch(value) and not _is_image(value):
            return ""
        case _:
            return value


def _hashed(value: object) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]}" if value else ""


def _is_image(base64: str) -> bool:
    """Return whether base64 is a JPEG, PNG, GIF or WebP, by its first bytes."""
    return base64.startswith(_IMAGES) or (base64.startswith("UklGR") and base64[12:16] == "RUJQ")


class _Wav:
    """A WAV file whose header matches its data after each write."""

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
