"""Reads the audio of an answer while it arrives: WAV files, and samples without a header. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from antiphon.audio import Pcm
from antiphon.audio.pcm import Resampler
from antiphon.errors import RemoteError

# The sample rates of voices, in Hz. A header with another rate is taken for damaged.
MIN_RATE_HZ, MAX_RATE_HZ = 8_000, 192_000
# Bounds: the bytes of a WAV header with all chunks before the samples, and the channels of audio.
MAX_HEADER_BYTES, MAX_CHANNELS = 1 << 16, 8
# Sizes from UNKNOWN_FROM on stand for a stream of unknown length, and so does 0.
UNKNOWN_FROM = 0x7FFFF000
# The bytes that are needed to recognize a file.
HEAD_BYTES = 12
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE


@dataclass(frozen=True, slots=True)
class SampleFormat:
    """The format of samples. `bits`: of each sample; 16 or 32 bits, or 24. `is_float`: floating-point numbers."""

    rate_hz: int
    channels: int = 1
    bits: int = 16
    is_float: bool = False

    @property
    def frame_bytes(self) -> int:
        """The bytes of one sample of all channels."""
        return self.channels * self.bits // 8

    def check(self) -> None:
        """Raise RemoteError, which names the property, if samples of this format cannot be read."""
        if not MIN_RATE_HZ <= self.rate_hz <= MAX_RATE_HZ:
            raise RemoteError(
                f"the voice's server sends audio at {self.rate_hz} Hz; a rate is {MIN_RATE_HZ} to {MAX_RATE_HZ} Hz"
            )
        if not 1 <= self.channels <= MAX_CHANNELS:
            raise RemoteError(f"the voice's server sends audio with {self.channels} channels")
        if self.bits not in ((32,) if self.is_float else (16, 24, 32)):
            kind = "floating-point" if self.is_float else "integer"
            raise RemoteError(f"the voice's server sends {kind} samples of {self.bits} bits")


class SoundReader:
    """Converts the bytes of one answer to float32 [num_samples], mono, at `to_hz`.

    An answer that begins like a WAV file is read as one, and its header tells the format. Several WAV files in a row
    are read as one audio, because some servers send one for each chunk. All other answers are samples of the format
    `raw`; with `sniffs`, they are refused if they begin like another kind of file.
    """

    def __init__(self, to_hz: int, raw: SampleFormat, *, sniffs: bool = True) -> None:
        raw.check()
        self._to_hz, self._raw, self._sniffs = to_hz, raw, sniffs
        self._held = b""
        # The format of the samples; None: the header has not been read yet.
        self._format: SampleFormat | None = None
        # The bytes of samples that the header announces and that have not arrived; None: unknown.
        self._left: int | None = None
        self._resampler = Resampler(raw.rate_hz, to_hz)
        self._resampled_hz = raw.rate_hz
        # Whether the answer consists of WAV files, and the number of samples so far, at `to_hz`.
        self._is_wav = False
        self.num_samples = 0

    def feed(self, data: bytes) -> Pcm:
        """Return the audio that `data` completes; it may be empty.

        Raises RemoteError if the answer is another kind of file, or audio of a format that cannot be read.
        """
        found = list[Pcm]()
        self._held += data
        while self._held:
            if self._format is None and not self._read_header():
                break
            if self._left == 0:
                if not self._next_file():
                    break
                continue
            if not self._next_samples(found):
                break
        return self._counted(np.concatenate(found) if len(found) > 1 else found[0] if found else _NONE)

    def finish(self) -> Pcm:
        """Return the rest of the audio. Raises RemoteError if the answer was cut off: it is incomplete."""
        rest = list[Pcm]()
        if self._held and self._format is None and not self._is_wav and not self._held.startswith(b"RIFF"):
            # An answer of a few samples.
            self._format = self._raw
            self._next_samples(rest)
        if self._format is None and (self._held or self._is_wav):
            raise RemoteError("the voice's server ended its answer within the header of a WAV file")
        if self._left:
            raise RemoteError(f"the voice's server ended its answer {self._left} bytes before the end of its WAV file")
        if self._held and self._left is None:
            raise RemoteError("the voice's server ended its answer within a sample")
        return self._counted(np.concatenate((*rest, self._resampler.flush())))

    def _counted(self, pcm: Pcm) -> Pcm:
        self.num_samples += len(pcm)
        return pcm

    def _read_header(self) -> bool:
        """Find the format of the samples. Returns False if more bytes are needed."""
        if len(self._held) < HEAD_BYTES:
            return False
        if self._held.startswith(b"RIFF") and self._held[8:12] == b"WAVE":
            self._is_wav = True
            return self._read_wav_header()
        if self._is_wav:
            raise RemoteError("the voice's server sent something else than a WAV file after a WAV file")
        if self._sniffs and (kind := _other_kind(self._held)):
            raise RemoteError(f"the voice's server sends {kind}, and WAV or PCM is read")
        self._format = self._raw
        return True

    def _read_wav_header(self) -> bool:
        """Read the chunks of a WAV file up to its samples. Returns False if more bytes are needed."""
        at, found = HEAD_BYTES, None
        while len(self._held) >= at + 8:
            name, size = self._held[at : at + 4], int.from_bytes(self._held[at + 4 : at + 8], "little")
            if name == b"data":
                if found is None:
                    raise RemoteError("the voice's server sent a WAV file without a format")
                self._begin(found, size, at + 8)
                return True
            if at + 8 + size > MAX_HEADER_BYTES:
                raise RemoteError("the voice's server sent a WAV file whose header is too long")
            if len(self._held) < at + 8 + size:
                return False
            if name == b"fmt ":
                found = _format_of(self._held[at + 8 : at + 8 + size])
            # Chunks are padded to an even size.
            at += 8 + size + size % 2
        return False

    def _begin(self, found: SampleFormat, size: int, at: int) -> None:
        """Begin the samples of a WAV file, which are at `at`."""
        found.check()
        self._format = found
        self._left = None if size == 0 or size >= UNKNOWN_FROM else size
        self._held = self._held[at:]
        if found.rate_hz != self._resampled_hz:
            self._resampler, self._resampled_hz = Resampler(found.rate_hz, self._to_hz), found.rate_hz

    def _next_file(self) -> bool:
        """Go on to the next WAV file, if one follows. Everything else that follows the samples is dropped."""
        if self._held.startswith(b"RIFF"):
            self._format, self._left = None, None
            return True
        if not b"RIFF".startswith(self._held):
            self._held = b""
        return False

    def _next_samples(self, found: list[Pcm]) -> bool:
        """Convert the whole samples at hand. Returns False if more bytes are needed."""
        assert self._format is not None
        if self._is_wav and self._left is None and self._held.startswith(b"RIFF") and self._held[8:12] == b"WAVE":
            # A server that streams sends each chunk as a WAV file of unknown length.
            self._format = None
            return True
        num_bytes = len(self._held) if self._left is None else min(len(self._held), self._left)
        num_bytes -= num_bytes % self._format.frame_bytes
        if not num_bytes:
            return False
        found.append(self._resampler.feed(_samples(self._held[:num_bytes], self._format)))
        self._held = self._held[num_bytes:]
        if self._left is not None:
            self._left -= num_bytes
        return True


_NONE: Pcm = np.zeros(0, np.float32)


def _format_of(data: bytes) -> SampleFormat:
    """Return the format in a WAV file's format chunk. Raises RemoteError if its samples are compressed."""
    if len(data) < 16:
        raise RemoteError("the voice's server sent a WAV file whose format is cut off")
    tag, channels, rate_hz, _, _, bits = struct.unpack("<HHIIHH", data[:16])
    if tag == _EXTENSIBLE and len(data) >= 26:
        (tag,) = struct.unpack("<H", data[24:26])
    if tag not in (_PCM, _FLOAT):
        raise RemoteError(f"the voice's server sent a WAV file with compressed samples (format {tag})")
    return SampleFormat(rate_hz, channels, bits, tag == _FLOAT)


def _samples(data: bytes, format: SampleFormat) -> Pcm:
    """Return samples as float32 [num_samples], the mean of the channels."""
    pcm: np.ndarray[Any, Any]
    if format.is_float:
        pcm = np.clip(np.nan_to_num(np.frombuffer(data, "<f4")), -1.0, 1.0)
    elif format.bits == 16:
        pcm = np.frombuffer(data, "<i2") / np.float32(1 << 15)
    elif format.bits == 32:
        pcm = np.frombuffer(data, "<i4") / np.float32(1 << 31)
    else:
        # The three bytes become the upper bytes of 32-bit samples.
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        pcm = wide.view("<i4")[:, 0] / np.float32(1 << 31)
    if format.channels > 1:
        pcm = pcm.reshape(-1, format.channels).mean(1)
    return pcm.astype(np.float32, copy=False)


# The first bytes of answers that are neither WAV files nor samples, and the names of what they are.
_OTHERS = (
    (b"ID3", "MP3"),
    (b"OggS", "Ogg"),
    (b"fLaC", "FLAC"),
    (b"\x1aE\xdf\xa3", "WebM"),
    (b"RIFX", "big-endian WAV"),
    (b"RF64", "WAV with 64-bit sizes"),
    (b'{"', "JSON"),
    (b"<!", "a page of HTML"),
    (b"<html", "a page of HTML"),
)


def _other_kind(head: bytes) -> str:
    """Return what the bytes are if they begin like something else than samples; "" if not."""
    if head[4:8] == b"ftyp":
        return "MP4"
    return next((kind for start, kind in _OTHERS if head.lstrip(b" \r\n").startswith(start)), "")
