"""Encodes mono float32 chunk by chunk into the formats that speech can be requested in.

Raw PCM and WAV are made here, the rest by FFmpeg (`ffmpeg_encoder.py`).
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
    """Encodes one file of one format; joined, what `feed` and `finish` return is the file.

    The header of a WAV carries no sizes, because the file grows while it is sent. With `whole`, everything is returned
    at once by `finish`, and a WAV's header carries its sizes. An encoder is not safe to share between threads. The
    first one of a format other than WAV and PCM takes 60 ms to make, for FFmpeg is imported then.
    """

    def __init__(self, format: SpeechFormat, rate_hz: int, *, whole: bool = False) -> None:
        self._rate_hz = rate_hz
        self._held: list[bytes] | None = [] if whole else None
        self._wav = format == "wav"
        self._codec = None if format in ("wav", "pcm") else _ffmpeg_encoder(format, rate_hz)
        self._header_sent = False

    def feed(self, pcm: Pcm) -> bytes:
        """Encode float32 [num_samples], mono, at the encoder's rate, and return the bytes that became complete.

        The result may be empty: codecs hold samples back until a frame of theirs is full. What exceeds [-1, 1] is
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
        """Return the rest of the file: what the codec still holds, its trailer, and with `whole` all of it. To be
        called once, after which nothing more may be fed. A file without any audio is still a valid file of its format.
        """
        data = self._codec.finish() if self._codec else b""
        if self._held is not None:
            data = b"".join([*self._held, data])
            return wav_header(self._rate_hz, len(data)) + data if self._wav else data
        return wav_header(self._rate_hz) + data if self._wav and not self._header_sent else data


def _ffmpeg_encoder(format: SpeechFormat, rate_hz: int) -> FfmpegEncoder:
    from antiphon.audio.ffmpeg_encoder import FfmpegEncoder

    return FfmpegEncoder(format, rate_hz)
