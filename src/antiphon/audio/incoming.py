"""Decodes audio that arrives in pieces, raw, in a container or as Opus packets, to mono float32 at SAMPLE_RATE_HZ.

FFmpeg reads containers from a file that blocks. So each container has a thread of its own, which waits for more bytes.
"""

from __future__ import annotations

import struct
import threading
import weakref
from typing import TYPE_CHECKING, BinaryIO, Literal, Protocol, cast, get_args

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.line.g711 import from_alaw, from_ulaw
from antiphon.audio.pcm import MAX_CHANNELS, RATES_HZ, Resampler, from_pcm16
from antiphon.audio.wav import ALAW, FLOAT, PCM, ULAW
from antiphon.errors import MediaError

if TYPE_CHECKING:
    from av import AudioFrame

# Bytes from which FFmpeg finds out what a container holds, and the seconds of audio that it may read for that. The
# first words wait for both.
PROBE_BYTES, PROBE_S = 2048, 0.05
# Bytes after which what is no container is refused.
MAX_UNKNOWN_BYTES = 32 << 10
# Bytes within which the header of a WAV file has to end.
MAX_HEADER_BYTES = 64 << 10
# Maximum seconds of audio in one piece of a container: a few bytes may stand for hours.
MAX_PIECE_S = 300.0
# The sample rate at which FFmpeg decodes Opus.
OPUS_HZ = 48_000
# Encodings of raw samples: PCM16, float32, and G.711.
RawEncoding = Literal["s16", "f32", "ulaw", "alaw"]
# `opus`: packets, one in each message, or a container. `container`: it is found out which.
Encoding = Literal["s16", "f32", "ulaw", "alaw", "opus", "container"]
_BYTES: dict[RawEncoding, int] = {"s16": 2, "f32": 4, "ulaw": 1, "alaw": 1}
# The format tags of a WAV file, each with its bits per sample.
_WAV_FORMATS: dict[tuple[int, int], RawEncoding] = {
    (PCM, 16): "s16",
    (FLOAT, 32): "f32",
    (ALAW, 8): "alaw",
    (ULAW, 8): "ulaw",
}
_EXTENSIBLE = 0xFFFE
# How the containers of Opus begin: Ogg, and Matroska or WebM.
_OPUS_CONTAINERS = (b"OggS", b"\x1aE\xdf\xa3")


class _Decoder(Protocol):
    def feed(self, data: bytes) -> Pcm: ...
    def flush(self) -> Pcm: ...


class IncomingAudio:
    """The audio of one client, in pieces of any size. `rate_hz` and `channels` are those of raw samples.

    Raises ValueError for a rate or a number of channels that cannot be decoded. The channels are mixed.
    """

    def __init__(self, encoding: Encoding, rate_hz: int = SAMPLE_RATE_HZ, channels: int = 1) -> None:
        self._encoding = encoding
        self._decoder: _Decoder | None = None
        if encoding in get_args(RawEncoding):
            self._decoder = RawDecoder(cast(RawEncoding, encoding), rate_hz, channels)
        # The beginning of a container, until it is known which.
        self._head, self._wav = b"", _WavHeader()

    def feed(self, data: bytes) -> Pcm:
        """Return the audio that `data` completes: float32 [num_samples]. It may be empty. Raises MediaError."""
        if self._decoder:
            return self._decoder.feed(data)
        self._head += data
        if len(self._head) < 4:
            return np.zeros(0, np.float32)
        data = self._head
        if data[:4] == b"RIFF":
            if (found := self._wav.read(data)) is None:
                if len(data) > MAX_HEADER_BYTES:
                    raise MediaError("the header of the WAV file has no end")
                return np.zeros(0, np.float32)
            self._decoder, data = found
        elif self._encoding == "opus" and data[:4] not in _OPUS_CONTAINERS:
            self._decoder = OpusPacketDecoder()
        else:
            self._decoder = ContainerDecoder()
        self._head = b""
        return self._decoder.feed(data)

    def flush(self) -> Pcm:
        """Return the rest of the audio. Call it once, at the end. Raises MediaError if no audio was found."""
        if self._decoder is None and self._head:
            raise MediaError("the audio is in no format that can be decoded")
        return self._decoder.flush() if self._decoder else np.zeros(0, np.float32)


class RawDecoder:
    """Decodes interleaved samples of one encoding. Raises ValueError as IncomingAudio does."""

    def __init__(self, encoding: RawEncoding, rate_hz: int, channels: int) -> None:
        if not 1 <= channels <= MAX_CHANNELS:
            raise ValueError(f"audio of {channels} channels is not supported")
        self._encoding, self._channels = encoding, channels
        self._resampler = Resampler(rate_hz, SAMPLE_RATE_HZ)
        self._frame_bytes = channels * _BYTES[encoding]
        # A part of a frame.
        self._rest = b""

    def feed(self, data: bytes) -> Pcm:
        """Return the audio that `data` completes. A sample that is no number counts as silence."""
        data = self._rest + data
        end = len(data) - len(data) % self._frame_bytes
        self._rest = data[end:]
        samples = self._samples(data[:end])
        if self._channels > 1:
            samples = samples.reshape(-1, self._channels).mean(axis=1, dtype=np.float32)
        return self._resampler.feed(samples)

    def flush(self) -> Pcm:
        """Return the rest of the audio."""
        return self._resampler.flush()

    def _samples(self, data: bytes) -> Pcm:
        match self._encoding:
            case "s16":
                return from_pcm16(data)
            case "f32":
                finite = np.nan_to_num(np.frombuffer(data, "<f4"), posinf=1.0, neginf=-1.0)
                return np.asarray(np.clip(finite, -1.0, 1.0), np.float32)
            case "ulaw":
                return from_ulaw(data)
            case "alaw":
                return from_alaw(data)


class _WavHeader:
    """Reads the header of a WAV file as it arrives.

    FFmpeg would read a second of samples first. Sizes of a stream are unknown, so all that follows are samples. Samples
    of other kinds are left to FFmpeg.
    """

    def __init__(self) -> None:
        # The position of the next chunk, and the format: its tag, channels, sample rate and bits per sample.
        self._at = 12
        self._format: tuple[int, int, int, int] | None = None

    def read(self, head: bytes) -> tuple[_Decoder, bytes] | None:
        """Return what decodes the rest of the file, and the first of that. None if the header is incomplete.

        `head` begins with the bytes of the last call.
        """
        while len(head) >= self._at + 8:
            name, size = struct.unpack_from("<4sI", head, self._at)
            if name == b"data":
                return self._decoder(head)
            if name == b"fmt ":
                if len(head) < self._at + 8 + min(size, 40):
                    return None
                self._read_format(head, size)
            self._at += 8 + size + size % 2
        return None

    def _read_format(self, head: bytes, size: int) -> None:
        if size < 16:
            return
        tag, channels, rate_hz, _, _, bits = struct.unpack_from("<HHIIHH", head, self._at + 8)
        if tag == _EXTENSIBLE and size >= 26:
            tag = struct.unpack_from("<H", head, self._at + 32)[0]
        self._format = (tag, channels, rate_hz, bits)

    def _decoder(self, head: bytes) -> tuple[_Decoder, bytes]:
        tag, channels, rate_hz, bits = self._format or (0, 0, 0, 0)
        encoding = _WAV_FORMATS.get((tag, bits))
        if encoding and RATES_HZ[0] <= rate_hz <= RATES_HZ[1] and 1 <= channels <= MAX_CHANNELS:
            return RawDecoder(encoding, rate_hz, channels), head[self._at + 8 :]
        return ContainerDecoder(), head


class _Pipe:
    """The file that a container's thread reads, and the audio that it has decoded."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.pcm: list[Pcm] = []
        self.num_samples = 0
        self.error: Exception | None = None
        self.is_over = False
        self._data = bytearray()
        self._is_waiting = self._has_ended = False

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, after waiting for the first of them. b"" after the end."""
        with self.condition:
            while not self._data and not self._has_ended:
                self._is_waiting = True
                self.condition.notify_all()
                self.condition.wait()
            taken = bytes(self._data[:size])
            del self._data[:size]
            return taken

    def add(self, pcm: Pcm) -> None:
        """Add decoded audio. Raises MediaError if one piece has too much of it."""
        self.num_samples += len(pcm)
        if self.num_samples > MAX_PIECE_S * SAMPLE_RATE_HZ:
            raise MediaError(f"one message may hold {MAX_PIECE_S:.0f} s of audio")
        self.pcm.append(pcm)

    def feed(self, data: bytes, *, is_last: bool = False) -> Pcm:
        """Let the thread decode more bytes. Returns when it waits for more, or has ended. Raises MediaError."""
        with self.condition:
            self._data += data
            self._has_ended = self._has_ended or is_last
            self._is_waiting = False
            self.condition.notify_all()
            while not self._is_waiting and not self.is_over:
                self.condition.wait()
            pcm, self.pcm, self.num_samples = self.pcm, [], 0
            if self.error and not pcm:
                raise MediaError("the audio is in no format that can be decoded") from self.error
            return np.concatenate(pcm) if pcm else np.zeros(0, np.float32)

    def close(self) -> None:
        """Let the thread end. Its audio is not read any more."""
        with self.condition:
            self._has_ended = True
            self._data.clear()
            self.condition.notify_all()


class ContainerDecoder:
    """Decodes one container of any kind that PyAV reads, in pieces of any size. Not thread-safe."""

    def __init__(self) -> None:
        self._pipe = _Pipe()
        self._thread = threading.Thread(target=_decode, args=(self._pipe,), name="container", daemon=True)
        self._has_begun = False
        # The thread has no reference to this object, and ends with it.
        weakref.finalize(self, self._pipe.close)

    def feed(self, data: bytes) -> Pcm:
        """Return the audio that `data` completes: float32 [num_samples] at SAMPLE_RATE_HZ. It may be empty.

        Blocks while it is decoded. Raises MediaError if the bytes are no container, or hold more than MAX_PIECE_S.
        """
        self._begin()
        return self._pipe.feed(data)

    def flush(self) -> Pcm:
        """Return the rest of the audio. Ends the container. Raises MediaError if no audio was found in it."""
        self._begin()
        return self._pipe.feed(b"", is_last=True)

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._thread.start()


def _decode(pipe: _Pipe) -> None:
    try:
        _decode_to_end(pipe)
    except Exception as error:
        # The boundary of the thread: any failure is an error of the client's audio, which `feed` raises.
        pipe.error = error
    with pipe.condition:
        pipe.is_over = True
        pipe.condition.notify_all()


def _decode_to_end(pipe: _Pipe) -> None:
    import av
    import av.error

    options = {
        "probesize": str(PROBE_BYTES),
        "analyzeduration": str(round(PROBE_S * 1e6)),
        "formatprobesize": str(MAX_UNKNOWN_BYTES),
    }
    with av.open(cast(BinaryIO, pipe), mode="r", metadata_errors="ignore", options=options) as container:
        if not container.streams.audio:
            raise MediaError("there is no audio in the container")
        resampler = av.AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE_HZ)
        stream = container.streams.audio[0]
        for packet in container.demux(stream):
            try:
                frames = stream.codec_context.decode(packet)
            except av.error.InvalidDataError:
                continue
            for frame in frames:
                for resampled in resampler.resample(frame):
                    pipe.add(_mono(resampled))
        for resampled in resampler.resample(None):
            pipe.add(_mono(resampled))


def _mono(frame: AudioFrame) -> Pcm:
    return np.asarray(frame.to_ndarray().mean(axis=0), np.float32)


class OpusPacketDecoder:
    """Decodes Opus packets without a container, one at a time."""

    def __init__(self) -> None:
        import av

        self._codec = av.CodecContext.create("opus", "r")
        self._resampler = Resampler(OPUS_HZ, SAMPLE_RATE_HZ)

    def feed(self, packet: bytes) -> Pcm:
        """Return the audio of a packet: float32 [num_samples] at SAMPLE_RATE_HZ. Raises MediaError."""
        import av
        import av.error

        try:
            frames = self._codec.decode(av.Packet(packet))
        except av.error.FFmpegError as error:
            raise MediaError("this is no Opus packet") from error
        pcm = [_mono(frame) for frame in frames]
        return self._resampler.feed(np.concatenate(pcm) if pcm else np.zeros(0, np.float32))

    def flush(self) -> Pcm:
        """Return the rest of the audio."""
        return self._resampler.flush()
