"""The codecs of telephone calls over RTP: G.711, G.722 and Opus, in frames of 20 ms. The last two are FFmpeg's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

from antiphon.audio import Pcm
from antiphon.audio.line.g711 import from_alaw, from_ulaw, to_alaw, to_ulaw
from antiphon.errors import RemoteProtocolError

if TYPE_CHECKING:
    from av.audio.codeccontext import AudioCodecContext

FRAMES_PER_S = 50


class LineCodec(Protocol):
    """One codec of one call, with its state.

    `heard_hz` is the rate of what is decoded, `rate_hz` that of what is encoded. `silence` is the payload of a silent
    frame; None if it depends on the frames before.
    """

    heard_hz: int
    rate_hz: int
    silence: bytes | None

    def decode(self, payload: bytes) -> Pcm:
        """Return the audio of one packet: float32 [num_samples] at `heard_hz`. Raises RemoteProtocolError."""
        ...

    def encode(self, pcm: npt.NDArray[np.int16]) -> bytes:
        """Return the payload of 20 ms: int16 [num_samples], mono at `rate_hz`."""
        ...


class G711:
    """G.711: µ-law (PCMU) or A-law (PCMA)."""

    heard_hz = rate_hz = 8000

    def __init__(self, decode: Callable[[bytes], Pcm], encode: Callable[[Pcm], bytes]) -> None:
        self.decode, self._encode = decode, encode
        self.silence: bytes | None = encode(np.zeros(rate_of_frame(self.rate_hz), np.float32))

    def encode(self, pcm: npt.NDArray[np.int16]) -> bytes:
        """Return one byte for each sample."""
        return self._encode(pcm.astype(np.float32) / np.float32(32768))


class FFmpegCodec:
    """A codec of FFmpeg, which has state: packets are decoded in their order."""

    silence: bytes | None = None

    def __init__(self, decoder: str, encoder: str, heard_hz: int, rate_hz: int) -> None:
        self.heard_hz, self.rate_hz = heard_hz, rate_hz
        self._decoder = _context(decoder, "r", heard_hz)
        self._encoder = _context(encoder, "w", rate_hz)
        if encoder == "libopus":
            self._encoder.options = {"application": "voip", "frame_duration": "20", "compression_level": "5"}
            self._encoder.bit_rate = 32_000
        self._encoder.open()

    def decode(self, payload: bytes) -> Pcm:
        """Return the audio of one packet. Raises RemoteProtocolError (`bad_audio`) for a payload of another codec."""
        import av
        from av.error import FFmpegError

        from antiphon.audio.channels import channels_of

        try:
            frames = self._decoder.decode(av.Packet(payload))
        except FFmpegError as error:
            raise RemoteProtocolError("bad_audio", f"A packet cannot be decoded: {error}") from error
        parts = [np.asarray(channels_of(frame), np.float32).mean(0) for frame in frames]
        return np.concatenate(parts).astype(np.float32) if parts else np.zeros(0, np.float32)

    def encode(self, pcm: npt.NDArray[np.int16]) -> bytes:
        """Return the payload of one frame of 20 ms."""
        from av import AudioFrame

        frame = AudioFrame(format="s16", layout="mono", samples=len(pcm))
        frame.planes[0].update(pcm.tobytes())
        frame.sample_rate = self.rate_hz
        return b"".join(bytes(packet) for packet in self._encoder.encode(frame))


def _context(name: str, mode: Literal["r", "w"], rate_hz: int) -> AudioCodecContext:
    # A server without telephone calls needs no FFmpeg.
    from av import CodecContext
    from av.audio.codeccontext import AudioCodecContext

    context = CodecContext.create(name, mode)
    assert isinstance(context, AudioCodecContext)
    context.sample_rate, context.layout, context.format = rate_hz, "mono", "s16"
    return context


def rate_of_frame(rate_hz: int) -> int:
    """Return the number of samples in 20 ms."""
    return rate_hz // FRAMES_PER_S


def line_codec(name: str) -> LineCodec:
    """Return a codec in its initial state. Raises KeyError for another name than pcmu, pcma, g722 and opus."""
    return _MAKERS[name]()


_MAKERS: dict[str, Callable[[], LineCodec]] = {
    "pcmu": lambda: G711(from_ulaw, to_ulaw),
    "pcma": lambda: G711(from_alaw, to_alaw),
    "g722": lambda: FFmpegCodec("g722", "g722", 16_000, 16_000),
    # Voices have 24 kHz or less, so that more would only cost.
    "opus": lambda: FFmpegCodec("libopus", "libopus", 48_000, 24_000),
}
