"""Encodes mono float32 with the codecs of FFmpeg, through PyAV.

This is a separate module because importing PyAV takes 60 ms and 18 MB, and raw PCM and WAV do not need it.
"""

from __future__ import annotations

import io

import av
import numpy as np

from antiphon.audio import Pcm, SpeechFormat
from antiphon.audio.pcm import Resampler, to_pcm16

# format -> container, codec, the codec's sample format, its rate in Hz (None: the audio's rate), bits per second
CODECS: dict[str, tuple[str, str, str, int | None, int | None]] = {
    "flac": ("flac", "flac", "s16", None, None),
    "mp3": ("mp3", "libmp3lame", "fltp", None, 64_000),
    "opus": ("ogg", "libopus", "flt", 48_000, 48_000),
    "aac": ("adts", "aac", "fltp", None, 64_000),
}


class FfmpegEncoder:
    """Encodes one file of a format in CODECS. Not thread-safe.

    The results of `feed` and `finish`, joined, are the file. Each may be empty. `bits_per_s` replaces the bit rate of
    CODECS.
    """

    def __init__(self, format: SpeechFormat, rate_hz: int, bits_per_s: int | None = None) -> None:
        container, codec, self._layout_format, codec_hz, bits = CODECS[format]
        self._rate_hz = codec_hz or rate_hz
        self._resampler = Resampler(rate_hz, self._rate_hz)
        self._out = io.BytesIO()
        # The file has no `seek`, so that the muxer does not rewrite bytes that were already sent.
        self._container = av.open(_AppendOnlyFile(self._out), mode="w", format=container)
        stream = self._container.add_stream(codec, rate=self._rate_hz)
        assert isinstance(stream, av.AudioStream)
        self._stream: av.AudioStream = stream
        self._stream.codec_context.layout = "mono"
        self._stream.codec_context.format = self._layout_format
        if bits:
            self._stream.bit_rate = bits_per_s or bits
        self._num_samples = 0

    def feed(self, pcm: Pcm) -> bytes:
        """Encode float32 [num_samples], mono, at the encoder's rate. Samples outside [-1, 1] are clipped."""
        self._encode(self._resampler.feed(pcm))
        return self._drain()

    def finish(self) -> bytes:
        """Return the codec's buffered audio and the container's trailer. `feed` must not be called after it."""
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
        """Return the bytes that the container has written since the last call."""
        data = self._out.getvalue()
        self._out.seek(0)
        self._out.truncate()
        return data


class _AppendOnlyFile:
    """A file for PyAV that has `write`, but not `seek`."""

    def __init__(self, out: io.BytesIO) -> None:
        self._out = out

    def write(self, data: bytes) -> int:
        return self._out.write(data)
