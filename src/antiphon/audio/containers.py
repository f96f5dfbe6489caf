"""Decodes the first audio stream of any container and codec that PyAV reads, to mono float32.

Damage does not end it: what cannot be decoded is left out and counted, as players do.
"""

from __future__ import annotations

import errno
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.channels import ChannelMixer, channels_of
from antiphon.audio.file_parts import UNREADABLE, FilePart, is_rifx, parts, size_of, why_silent
from antiphon.errors import MediaError

if TYPE_CHECKING:
    from av import AudioCodecContext, AudioFrame, AudioResampler, AudioStream, Packet
    from av.container import InputContainer

# Audio of a lower rate is refused: its frames would become hours of samples each when they are resampled.
MIN_RATE_HZ = 1000
# Streams of frames alone: how long a damaged stretch is follows from its bytes. FFmpeg's names.
FRAME_FORMATS = ("mp3", "aac")
_END_TAGS = (b"APETAGEX", b"LYRICSBEGIN", b"TAG")
# FFmpeg's names of formats whose head says how long the audio is. Of a hundred times what is there, it is damaged.
DECLARING_FORMATS, MAX_RATIO = ("mov", "flac"), 100.0
# Formats whose bytes are all audio, in pages of this length.
PAGED_FORMATS, PAGE_S = ("ogg", "matroska"), 2.0
# A break in the times of packets that is damage, and not rounding.
MIN_GAP_S = 0.05
# A gap is damage where this share of the bytes is missing that such a time usually takes.
MIN_DENSITY = 0.25
# What one packet can hold: damaged times make days of it.
MAX_PACKET_S = 10.0
# Errors of a container in a row, after which nothing more is read of it.
MAX_ERRORS = 50
# Silence in the place of a damaged stretch, which keeps the times behind it, is this long at most.
MAX_SILENCE_S = 600.0


@dataclass(slots=True)
class SkippedAudio:
    """Counts the audio of a file that could not be decoded, in seconds: partly estimated from its bytes."""

    seconds: float = 0.0


def decode(
    file: str | BinaryIO, rate_hz: int = SAMPLE_RATE_HZ, skipped: SkippedAudio | None = None
) -> Generator[Pcm, None, None]:
    """Decode the first audio stream of a file, lazily and in order, to float32 [num_samples] chunks, mono, at
    `rate_hz`.

    `file` is a path or URL, or an object with `read`; it is read while the iterator is advanced, which blocks. Chunks
    have the length of the codec's frames. Recordings that follow each other in one file are all decoded, if it can
    seek. What is damaged is silence of its length, where that is known, and its seconds are added to `skipped`. Raises
    MediaError, at the latest when the iterator is exhausted, where the file has no audio or no samples.
    """
    import av.error  # 60 ms and 18 MB, which a server of raw audio never needs

    output = _Output(rate_hz, skipped or SkippedAudio())
    fault: Exception | None = None
    read_bytes = unread_bytes = 0
    try:
        with _opened(file) as found:
            for part in found:
                num_samples = output.num_samples
                try:
                    for piece in _pieces(part):
                        yield from output.take(piece)
                except (MediaError, av.error.FFmpegError, ValueError, EOFError, IndexError) as error:
                    if isinstance(part, str) and output.num_samples:
                        raise MediaError(f"{part}: it cannot be read to its end: {error}") from error
                    fault = fault or error
                yield from output.flush()
                if len(found) > 1 and not isinstance(part, str):
                    is_read, num_bytes = output.num_samples > num_samples, size_of(part)
                    read_bytes, unread_bytes = (
                        read_bytes + num_bytes * is_read,
                        unread_bytes + num_bytes * (not is_read),
                    )
    except OSError as error:
        fault = error
    if not output.num_samples:
        if fault is None or isinstance(fault, MediaError):
            raise fault or MediaError("the file holds no sound")
        raise MediaError(_reason(file, fault)) from fault
    if unread_bytes:
        output.skip(output.num_samples / rate_hz * unread_bytes / read_bytes)


@contextmanager
def _opened(file: str | BinaryIO) -> Generator[list[str | BinaryIO | FilePart], None, None]:
    """The recordings in a file. What cannot seek is taken as one."""
    if not isinstance(file, str):
        yield list(parts(file)) if hasattr(file, "seekable") and file.seekable() else [file]
    elif not Path(file).is_file():
        yield [file]
    else:
        with Path(file).open("rb") as opened:
            yield list(parts(opened))


def _reason(file: str | BinaryIO, error: Exception) -> str:
    """What is wrong with a file, for who gave it: FFmpeg's own words name neither the file nor what it should be."""
    name = f"{file}: " if isinstance(file, str) else ""
    said = getattr(error, "strerror", None) or str(error)
    if isinstance(error, FileNotFoundError):
        return f"{name}no such file"
    if isinstance(error, IsADirectoryError):
        return f"{name}this is a folder"
    # Of the system, such as a file that may not be read, or a server that cannot be reached.
    if isinstance(error, OSError) and error.errno in errno.errorcode and error.errno != errno.EINVAL:
        return f"{name}{said}"
    if not isinstance(file, str):
        return why_silent(file) if hasattr(file, "seekable") and file.seekable() else UNREADABLE
    if not Path(file).is_file():
        return name + UNREADABLE
    with Path(file).open("rb") as opened:
        return name + why_silent(opened)


# --- packets and frames -----------------------------------------------------------------------------------------------


def _stream(container: InputContainer) -> AudioStream:
    """The first audio stream that there is a decoder for."""
    streams = container.streams.audio
    if not streams:
        raise MediaError("the file has no sound")
    for stream in streams:
        if stream.codec_context is not None:
            return stream
    raise MediaError("the file's sound is in a codec that cannot be decoded")


def _packets(container: InputContainer, stream: AudioStream) -> Iterator[Packet[AudioStream]]:
    """The packets of a stream, those behind a damaged place too. At the end comes an empty one, for the decoder.

    Raises FFmpegError where a network or a device fails.
    """
    import av.error

    errors = 0
    while errors < MAX_ERRORS:
        try:
            for packet in container.demux(stream):
                errors = 0
                yield packet
            return
        except av.error.FFmpegError as error:
            if container.file is None and not isinstance(error, av.error.InvalidDataError):
                raise
            errors += 1


def _pieces(part: str | BinaryIO | FilePart) -> Iterator[AudioFrame | float]:
    """The frames of a recording, and the seconds that cannot be decoded, in order."""
    import av
    import av.error

    is_big_endian = is_rifx(part)
    with av.open(cast(BinaryIO, part), mode="r", metadata_errors="ignore") as container:
        stream = _stream(container)
        codec, clock = stream.codec_context, _Clock(container, stream)
        if is_big_endian and codec.name.startswith("pcm_") and codec.name.endswith("le"):
            # FFmpeg reads the head of a RIFX file, and takes its samples for those of a RIFF file.
            codec = cast("AudioCodecContext", av.CodecContext.create(f"{codec.name[:-2]}be", "r"))
            codec.sample_rate, codec.layout = stream.codec_context.sample_rate, stream.codec_context.layout
        if 0 < codec.sample_rate < MIN_RATE_HZ:
            raise MediaError(f"the file has {codec.sample_rate} samples a second, under {MIN_RATE_HZ}")
        for packet in _packets(container, stream):
            yield clock.gap_s(packet)
            try:
                frames = codec.decode(packet)
            except av.error.FFmpegError:
                yield clock.lost_s(packet)
                continue
            clock.keep(packet, sum(frame.samples / frame.sample_rate for frame in frames if frame.sample_rate))
            # A damaged head can name any rate.
            yield from (frame for frame in frames if frame.sample_rate >= MIN_RATE_HZ)
        yield clock.left_s()


class _Clock:
    """Measures what is missing of a stream: by the times of its packets, by their bytes, and by the declared length."""

    def __init__(self, container: InputContainer, stream: AudioStream) -> None:
        self._stream, self._size = stream, container.size
        self._tick_s = float(stream.time_base or 0)
        self._format = container.format.name
        self._is_alone = len(container.streams) == 1
        self._first_byte = self._num_bytes = self._kept_bytes = 0
        self._kept_s = self._start_s = self._end_s = 0.0
        self._end_byte: int | None = None

    def gap_s(self, packet: Packet[AudioStream]) -> float:
        """The seconds of audio that are missing before a packet."""
        before_s, before_byte = self._end_s, self._end_byte
        if before_byte is None:
            self._first_byte = packet.pos or 0
        self._num_bytes += packet.size
        self._start_s = before_s
        if packet.pos is not None:
            self._end_byte = packet.pos + packet.size
        if packet.pts is None or self._format in FRAME_FORMATS:
            return 0.0
        self._start_s = packet.pts * self._tick_s
        self._end_s = (packet.pts + (packet.duration or 0)) * self._tick_s
        gap_s = self._start_s - before_s
        if before_byte is None or not MIN_GAP_S <= gap_s <= self._most_s():
            return 0.0
        if self._format.startswith("matroska"):
            # Recorders that pause, and codecs that send nothing for silence, leave gaps without bytes.
            missing_bytes = (packet.pos or 0) - before_byte
            if not self._is_alone or missing_bytes < MIN_DENSITY * gap_s * self._bytes_per_s():
                return 0.0
        return gap_s

    def lost_s(self, packet: Packet[AudioStream]) -> float:
        """The seconds of a packet that cannot be decoded."""
        if self._format not in FRAME_FORMATS:
            return min((packet.duration or 0) * self._tick_s, MAX_PACKET_S)
        if any(tag in bytes(packet) for tag in _END_TAGS):
            return 0.0
        return packet.size / self._bytes_per_s() if self._kept_s else 0.0

    def keep(self, packet: Packet[AudioStream], seconds: float) -> None:
        """Note that a packet was decoded, to `seconds` of audio, which not every packet tells."""
        self._kept_bytes += packet.size
        self._kept_s += seconds
        self._end_s = max(self._end_s, self._start_s + seconds)

    def left_s(self) -> float:
        """The seconds that are missing when the file has ended, or were passed over without a packet."""
        left_s = 0.0
        if self._format == "aac" and self._kept_s:
            left_s = (self._size - self._first_byte - self._num_bytes) / self._bytes_per_s()
        elif self._format.startswith(DECLARING_FORMATS):
            left_s = (self._stream.duration or 0) * self._tick_s - self._end_s
        elif self._is_alone and self._format.startswith(PAGED_FORMATS) and self._end_byte and self._kept_s:
            left_s = (self._size - self._end_byte) / self._bytes_per_s() - PAGE_S
        return left_s if MIN_GAP_S < left_s < MAX_RATIO * self._kept_s else 0.0

    def _bytes_per_s(self) -> float:
        return self._kept_bytes / self._kept_s if self._kept_s else 0.0

    def _most_s(self) -> float:
        """What a file of this size can miss: a damaged time can be of any year."""
        return 4 * self._size / self._bytes_per_s() if self._kept_bytes else MAX_SILENCE_S


class _Output:
    """Makes one mono stream of frames, which may change in their rate and channels, and of damaged stretches."""

    def __init__(self, rate_hz: int, skipped: SkippedAudio) -> None:
        self.num_samples = 0
        self._rate_hz, self._skipped = rate_hz, skipped
        self._kind: tuple[object, ...] = ()
        self._resampler: AudioResampler | None = None
        self._mixer = ChannelMixer(rate_hz, 1)
        self._silence_s = 0.0

    def take(self, piece: AudioFrame | float) -> Iterator[Pcm]:
        """Yield the audio that a frame completes; a number is the seconds of a damaged stretch."""
        import av.error

        if isinstance(piece, float):
            self.skip(piece)
            return
        while self._silence_s > 0:
            seconds = min(self._silence_s, 1.0)
            self._silence_s -= seconds
            yield np.zeros(round(seconds * self._rate_hz), np.float32)
        kind = piece.sample_rate, piece.format.name, piece.layout.nb_channels
        if kind != self._kind:
            yield from self.flush()
            self._resampler = av.AudioResampler(format="flt", layout="mono", rate=self._rate_hz)
            self._mixer, self._kind = ChannelMixer(piece.sample_rate, piece.layout.nb_channels), kind
        piece.pts = None
        try:
            mono = piece if piece.layout.nb_channels == 1 else self._mixed(piece)
            yield from self._resampled(mono)
        except (av.error.FFmpegError, ValueError):
            self._kind = ()
            self.skip(piece.samples / piece.sample_rate)

    def flush(self) -> Iterator[Pcm]:
        """Yield what the resampler still holds, before another stream begins."""
        if self._kind:
            yield from self._resampled(None)
        self._kind = ()

    def skip(self, seconds: float) -> None:
        """Count a damaged stretch, which becomes silence if something follows it."""
        if seconds > 0:
            self._skipped.seconds += seconds
            self._silence_s = min(self._silence_s + seconds, MAX_SILENCE_S)

    def _resampled(self, frame: AudioFrame | None) -> Iterator[Pcm]:
        if self._resampler:
            for out in self._resampler.resample(frame):
                self.num_samples += out.samples
                yield np.ascontiguousarray(out.to_ndarray()[0], np.float32)

    def _mixed(self, frame: AudioFrame) -> AudioFrame:
        import av

        mono = av.AudioFrame.from_ndarray(self._mixer.feed(channels_of(frame))[None], "flt", "mono")
        mono.sample_rate = frame.sample_rate
        return mono


# --- whole files ------------------------------------------------------------------------------------------------------


def decode_in_slabs(
    file: str | BinaryIO, slab_s: float, skipped: SkippedAudio | None = None
) -> Generator[Pcm, None, None]:
    """Decode a file to slabs of `slab_s` seconds, or a codec's frame more: float32 [num_samples], mono, 16 kHz.

    The last slab may be shorter. Holds one slab, however long the file is. Blocks; counts in `skipped` and
    raises MediaError as `decode` does.
    """
    chunks, num_samples = list[Pcm](), 0
    for chunk in decode(file, skipped=skipped):
        chunks.append(chunk)
        num_samples += len(chunk)
        if num_samples >= slab_s * SAMPLE_RATE_HZ:
            yield np.concatenate(chunks)
            chunks, num_samples = [], 0
    if chunks:
        yield np.concatenate(chunks)


def measure_s(file: BinaryIO, max_s: float) -> float:
    """Return how many seconds of audio a file holds, by the packets in it and not by what its header says.

    Decodes nothing but the beginning, which shows whether the file can be decoded, and stops counting beyond `max_s`.
    Packets of some formats do not tell how long they are: the audio is then longer than what is returned. Blocks while
    it reads the file, and leaves it at its start. Raises MediaError as `decode` does.
    """
    import av.error

    with closing(decode(file)) as chunks:
        next(chunks, None)
    seconds = 0.0
    for part in parts(file):
        # Counted in whole ticks: a file of a few megabytes has hundreds of thousands of packets.
        tick_s, num_ticks = Fraction(1), 0
        try:
            with av.open(cast(BinaryIO, part), mode="r", metadata_errors="ignore") as container:
                stream = _stream(container)
                tick_s = stream.time_base or tick_s
                max_ticks, max_packet_ticks = (max_s - seconds) / tick_s, int(MAX_PACKET_S / tick_s)
                for packet in _packets(container, stream):
                    num_ticks += min(packet.duration or 0, max_packet_ticks)
                    if num_ticks > max_ticks:
                        break
        except (av.error.FFmpegError, ValueError, MediaError):
            # A part that cannot be read, which is left out.
            pass
        seconds += float(num_ticks * tick_s)
        if seconds > max_s:
            break
    file.seek(0)
    return seconds


def decode_all(file: str | BinaryIO, rate_hz: int = SAMPLE_RATE_HZ) -> Pcm:
    """Decode a whole file to float32 [num_samples], mono, at `rate_hz`. Blocks until it is read. Raises MediaError as
    `decode` does. An hour of audio at 16 kHz takes 230 MB, so callers bound the size of the file before.
    """
    return np.concatenate(list(decode(file, rate_hz)))


def decode_beginning(file: str | BinaryIO, rate_hz: int, max_s: float) -> Pcm:
    """Decode at most the first `max_s` seconds of a file to float32 [num_samples], mono, at `rate_hz`.

    Decoding stops there, because a small file may hold hours of audio. Blocks; raises MediaError as `decode` does.
    """
    chunks, num_samples, max_samples = list[Pcm](), 0, int(max_s * rate_hz)
    for chunk in decode(file, rate_hz):
        chunks.append(chunk)
        num_samples += len(chunk)
        if num_samples >= max_samples:
            break
    # A copy, so that the samples behind the cut are freed.
    return np.concatenate(chunks)[:max_samples].copy()
