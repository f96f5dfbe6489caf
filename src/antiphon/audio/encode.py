"""Encodes mono float32 chunk by chunk into the formats that speech can be requested in: raw PCM, WAV, and what PyAV
encodes.
"""

from __future__ import annotations

import io
import struct

import av
import numpy as np

from antiphon.audio import Pcm, SpeechFormat
from antiphon.audio.pcm import Resampler, to_pcm16

# format -> container, codec, the codec's sample format, its rate in Hz (None: the audio's own), bits a second
_CODECS: dict[str, tuple[str, str, str, int | None, int | None]] = {
    "flac": ("flac", "flac", "s16", None, None),
    "mp3": ("mp3", "libmp3lame", "fltp", None, 64_000),
    "opus": ("ogg", "libopus", "flt", 48_000, 48_000),
    "aac": ("adts", "aac", "fltp", None, 64_000),
}
MEDIA_TYPES: dict[SpeechFormat, str] = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}
UNKNOWN_SIZE = 0xFFFFFFFF


def wav_header(rate_hz: int, num_bytes: int = UNKNOWN_SIZE) -> bytes:
    """The 44 bytes that go before PCM16 mono data of `num_bytes` bytes at `rate_hz`.

    Without `num_bytes` both sizes are 0xFFFFFFFF, as in a stream whose length is not known yet; players accept that.
    """
    riff = UNKNOWN_SIZE if num_bytes == UNKNOWN_SIZE else num_bytes + 36
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI", b"RIFF", riff, b"WAVE", b"fmt ", 16, 1, 1, rate_hz, rate_hz * 2, 2, 16, b"data", num_bytes
    )


class Encoder:
    """Encodes one file of one format; joined, what `feed` and `finish` return is the file.

    The header of a WAV carries no sizes, because the file grows while it is sent. With `whole`, everything is returned
    at once by `finish`, and a WAV's header carries its sizes. An encoder is not safe to share between threads.
    """

    def __init__(self, format: SpeechFormat, rate_hz: int, *, whole: bool = False) -> None:
        self._rate_hz = rate_hz
        self._held: list[bytes] | None = [] if whole else None
        self._wav = format == "wav"
        self._codec = _Codec(format, rate_hz) if format in _CODECS else None
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


class _Codec:
    def __init__(self, format: SpeechFormat, rate_hz: int) -> None:
        container, codec, self._layout_format, codec_hz, bits = _CODECS[format]
        self._rate_hz = codec_hz or rate_hz
        self._resampler = Resampler(rate_hz, self._rate_hz)
        self._out = io.BytesIO()
        # A file without `seek`: the muxer then writes nothing back into what was already sent.
        self._container = av.open(_AppendOnlyFile(self._out), mode="w", format=container)
        stream = self._container.add_stream(codec, rate=self._rate_hz)
        assert isinstance(stream, av.AudioStream)
        self._stream: av.AudioStream = stream
        self._stream.codec_context.layout = "mono"
        self._stream.codec_context.format = self._layout_format
        if bits:
            self._stream.bit_rate = bits
        self._num_samples = 0

    def feed(self, pcm: Pcm) -> bytes:
        self._encode(self._resampler.feed(pcm))
        return self._drain()

    def finish(self) -> bytes:
        self._encode(self._resampler.flush())
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._drain()

    def _encode(self, pcm: Pcm) -> None:
        if not len(pcm):
            return
        planar = np.clip(pcm, -1.0, 1.0).reshape(1, -1)
        if self._layout_format == "s16":
            frame = av.AudioFrame.from_ndarray(np.frombuffer(to_pcm16(pcm), np.int16).reshape(1, -1), "s16", "mono")
        else:
            frame = av.AudioFrame.from_ndarray(planar, self._layout_format, "mono")
        frame.sample_rate = self._rate_hz
        frame.pts = self._num_samples
        self._num_samples += len(pcm)
        self._container.mux(self._stream.encode(frame))

    def _drain(self) -> bytes:
        """What the container has written since the last call."""
        data = self._out.getvalue()
        self._out.seek(0)
        self._out.truncate()
        return data


class _AppendOnlyFile:
    """A file for PyAV with `write` and no `seek`."""

    def __init__(self, out: io.BytesIO) -> None:
        self._out = out

    def write(self, data: bytes) -> int:
        return self._out.write(data)
