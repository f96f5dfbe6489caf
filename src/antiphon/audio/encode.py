"""Encodes mono float32 chunk by chunk, in the formats in which clients can request speech.

This module encodes raw PCM, G.711 and WAV; FFmpeg encodes the other formats (`ffmpeg_encoder.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from antiphon.audio import Pcm, SpeechFormat
from antiphon.audio.line.g711 import to_alaw, to_ulaw
from antiphon.audio.pcm import from_pcm16, to_pcm16
from antiphon.audio.wav import wav_header

if TYPE_CHECKING:
    from antiphon.audio.ffmpeg_encoder import FfmpegEncoder

MEDIA_TYPES: dict[SpeechFormat, str] = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}


class Encoder:
    """Encodes one file. The results of `feed` and `finish`, joined, are the file.

    A WAV header has no sizes, because the file is sent while it grows. With `whole`, `finish` returns the complete
    file, and a WAV header has sizes. An encoder is not thread-safe. The first encoder of a format other than WAV and
    PCM takes 60 ms to create, because it imports FFmpeg. `bits_per_s` is the bit rate of a lossy codec; None for its
    default.
    """

    def __init__(
        self, format: SpeechFormat, rate_hz: int, *, whole: bool = False, bits_per_s: int | None = None
    ) -> None:
        self._rate_hz = rate_hz
        self._held: list[bytes] | None = [] if whole else None
        self._wav = format == "wav"
        self._codec = None if format in ("wav", "pcm") else _ffmpeg_encoder(format, rate_hz, bits_per_s)
        self._header_sent = False

    def feed(self, pcm: Pcm) -> bytes:
        """Encode float32 [num_samples], mono, at the encoder's rate, and return the bytes that are complete.

        The result may be empty, because codecs buffer samples until a frame is full. Samples outside [-1, 1] are
        clipped.
        """
        data = self._codec.feed(pcm) if self._codec else to_pcm16(pcm)
        if self._held is not None:
            self._held.append(data)
            return b""
        if self._wav and not self._header_sent:
            data = wav_header(self._rate_hz) + data
        self._header_sent = True
        return data

    def finish(self) -> bytes:
        """Return the rest of the file: the codec's buffered audio and the trailer; with `whole`, the complete file.

        Must be called once; `feed` must not be called after it. A file without audio is still valid.
        """
        data = self._codec.finish() if self._codec else b""
        if self._held is not None:
            data = b"".join([*self._held, data])
            return wav_header(self._rate_hz, len(data)) + data if self._wav else data
        return wav_header(self._rate_hz) + data if self._wav and not self._header_sent else data


# Codecs without a container: the sample formats and G.711.
RawCodec = Literal["pcm_s16le", "pcm_f32le", "ulaw", "alaw"]
_RAW: Mapping[str, Callable[[Pcm], bytes]] = {
    "pcm_s16le": to_pcm16,
    "pcm_f32le": lambda pcm: pcm.astype("<f4").tobytes(),
    "ulaw": to_ulaw,
    "alaw": to_alaw,
}


@dataclass(frozen=True, slots=True)
class StreamEncoding:
    """How the audio of one stream is encoded.

    - `codec`: a codec without a container, or a format of `Encoder`.
    - `rate_hz`: sample rate, in Hz.
    - `bits_per_s`: bit rate of a lossy codec; None for its default.
    """

    codec: RawCodec | SpeechFormat
    rate_hz: int
    bits_per_s: int | None = None

    @property
    def is_slow(self) -> bool:
        """Whether encoding a chunk takes milliseconds, so that it has to be done in a thread."""
        return self.codec not in _RAW and self.codec not in ("wav", "pcm")


class StreamEncoder:
    """Encodes PCM16 as one stream, over any number of sentences. The results of `feed` and `finish`, joined, are it.

    Not thread-safe. If the encoding `is_slow`, create and use the encoder in a thread.
    """

    def __init__(self, encoding: StreamEncoding) -> None:
        self._raw = _RAW.get(encoding.codec)
        self._file: Encoder | None = None
        if self._raw is None:
            codec = cast(SpeechFormat, encoding.codec)
            self._file = Encoder(codec, encoding.rate_hz, bits_per_s=encoding.bits_per_s)

    def feed(self, data: bytes) -> bytes:
        """Encode PCM16 of the stream's rate. The result may be empty, because codecs fill frames."""
        pcm = from_pcm16(data)
        if self._raw:
            return self._raw(pcm)
        assert self._file
        return self._file.feed(pcm)

    def finish(self) -> bytes:
        """Return the rest of the stream. Call it once, after the last `feed`."""
        return self._file.finish() if self._file else b""


def _ffmpeg_encoder(format: SpeechFormat, rate_hz: int, bits_per_s: int | None) -> FfmpegEncoder:
    from antiphon.audio.ffmpeg_encoder import FfmpegEncoder

    return FfmpegEncoder(format, rate_hz, bits_per_s)
