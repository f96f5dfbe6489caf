"""Encodes mono float32 chunk by chunk, in the formats in which clients can request speech.

This module encodes raw PCM and WAV; FFmpeg encodes the other formats (`ffmpeg_encoder.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.audio import Pcm, SpeechFormat
from antiphon.audio.pcm import to_pcm16
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
    PCM takes 60 ms to create, because it imports FFmpeg.
    """

    def __init__(self, format: SpeechFormat, rate_hz: int, *, whole: bool = False) -> None:
        self._rate_hz = rate_hz
        self._held: list[bytes] | None = [] if whole else None
        self._wav = format == "wav"
        self._codec = None if format in ("wav", "pcm") else _ffmpeg_encoder(format, rate_hz)
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


def _ffmpeg_encoder(format: SpeechFormat, rate_hz: int) -> FfmpegEncoder:
    from antiphon.audio.ffmpeg_encoder import FfmpegEncoder

    return FfmpegEncoder(format, rate_hz)
