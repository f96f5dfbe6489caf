"""Decodes the first audio stream of a file to mono float32, for all containers and codecs that PyAV reads.

Decoding continues after damaged places, as in media players. The duration of the damaged places is counted.
"""

from __future__ import annotations

import errno
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.channel_survey import ChannelFacts, ChannelPicker, ChannelSurvey
from antiphon.audio.channels import ChannelMixer, channels_of
from antiphon.audio.file_parts import UNREADABLE, FilePart, is_rifx, parts, size_of, why_silent
from antiphon.errors import MediaError

if TYPE_CHECKING:
    from av import AudioCodecContext, AudioFrame, AudioResampler, AudioStream, Packet
    from av.container import InputContainer

# Audio with a lower rate is refused, because resampling could turn a single frame into hours of samples.
MIN_RATE_HZ = 1000
# Formats (FFmpeg's names) that consist only of frames. The duration of a damaged stretch is computed from its length in
# bytes.
FRAME_FORMATS = ("mp3", "aac")
_END_TAGS = (b"APETAGEX", b"LYRICSBEGIN", b"TAG")
# Formats (FFmpeg's names) whose header declares the duration. The header is damaged if the undecoded rest would have
# MAX_RATIO times the duration of the decoded audio.
DECLARING_FORMATS, MAX_RATIO = ("mov", "flac"), 100.0
# Formats that consist only of audio, in pages of up to PAGE_S seconds.
PAGED_FORMATS, PAGE_S = ("ogg", "matroska"), 2.0
# A shorter gap in the times of packets is due to rounding, not damage.
MIN_GAP_S = 0.05
# A gap counts as damage if at least this share of the bytes that its duration normally takes is missing.
MIN_DENSITY = 0.25
# Limit of a packet's duration, because damaged times could make it days.
MAX_PACKET_S = 10.0
# Reading a container stops after this number of consecutive errors.
MAX_ERRORS = 50
# Limit of the silence that replaces a damaged stretch. The silence preserves the times of later audio.
MAX_SILENCE_S = 600.0


@dataclass(slots=True)
class SkippedAudio:
    """Counts the seconds of a file's audio that could not be decoded. Some of them are estimated from bytes."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class OneChannel:
    """The number of a channel to decode by itself, and the facts about all channels of its file."""

    number: int
    facts: ChannelFacts

    def picker(self, rate_hz: int) -> ChannelPicker:
        """Return what takes this channel out of a stream of several."""
        return ChannelPicker(rate_hz, self.number, self.facts.loud)


def decode(
    file: str | BinaryIO,
    rate_hz: int = SAMPLE_RATE_HZ,
    skipped: SkippedAudio | None = None,
    channel: OneChannel | None = None,
) -> Generator[Pcm, None, None]:
    """Decode the first audio stream of a file, lazily and in order, to float32 [num_samples] chunks, mono, at
    `rate_hz`.

    `file` is a path or URL, or an object with `read`. The iterator reads it on demand, and blocks meanwhile. Chunks
    have the length of the codec's frames. If a seekable file contains several recordings in a row, all of them are
    decoded. Damaged stretches become silence if their duration is known, and are added to `skipped`. Channels are
    mixed, or only `channel` is decoded. Raises MediaError if the file has no audio, at the latest when the file ends.
    """
    import av.error  # Takes 60 ms and 18 MB; raw audio does not need it.

    output = _Output(rate_hz, skipped or SkippedAudio(), channel)
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
    """Open a file, and return its recordings. A file that is not seekable is treated as one recording."""
    if not isinstance(file, str):
        yield list(parts(file)) if hasattr(file, "seekable") and file.seekable() else [file]
    elif not Path(file).is_file():
        yield [file]
    else:
        with Path(file).open("rb") as opened:
            yield list(parts(opened))


def _reason(file: str | BinaryIO, error: Exception) -> str:
    """Return a message about the fault of a file. FFmpeg's messages name neither the file nor the expected data."""
    name = f"{file}: " if isinstance(file, str) else ""
    said = getattr(error, "strerror", None) or str(error)
    if isinstance(error, FileNotFoundError):
        return f"{name}no such file"
    if isinstance(error, IsADirectoryError):
        return f"{name}this is a folder"
    # Errors of the system, such as missing permissions or an unreachable server.
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
    """Return the first audio stream that has a decoder. Raises MediaError if there is none."""
    streams = container.streams.audio
    if not streams:
        raise MediaError("the file has no sound")
    for stream in streams:
        if stream.codec_context is not None:
            return stream
    raise MediaError("the file's sound is in a codec that cannot be decoded")


def _packets(container: InputContainer, stream: AudioStream) -> Iterator[Packet[AudioStream]]:
    """Yield the packets of a stream, including those after damaged places.

    The last packet is empty: it flushes the decoder. Raises FFmpegError if a network or a device fails.
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
    """Yield the frames of a recording in order, and for each stretch that cannot be decoded its seconds as a float."""
    import av
    import av.error

    is_big_endian = is_rifx(part)
    with av.open(cast(BinaryIO, part), mode="r", metadata_errors="ignore") as container:
        stream = _stream(container)
        codec, clock = stream.codec_context, _Clock(container, stream)
        if is_big_endian and codec.name.startswith("pcm_") and codec.name.endswith("le"):
            # FFmpeg reads the header of a RIFX file, but treats its big-endian samples as little-endian, as in RIFF.
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
            # A damaged header may state any rate.
            yield from (frame for frame in frames if frame.sample_rate >= MIN_RATE_HZ)
        yield clock.left_s()


class _Clock:
    """Measures the missing audio of a stream from the times and sizes of its packets and the declared duration."""

    def __init__(self, container: InputContainer, stream: AudioStream) -> None:
        self._stream, self._size = stream, container.size
        self._tick_s = float(stream.time_base or 0)
        self._format = container.format.name
        self._is_alone = len(container.streams) == 1
        self._first_byte = self._num_bytes = self._kept_bytes = 0
        self._kept_s = self._start_s = self._end_s = 0.0
        self._end_byte: int | None = None

    def gap_s(self, packet: Packet[AudioStream]) -> float:
        """Return the seconds of audio that are missing before a packet."""
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
            # Gaps without missing bytes are not damage: the recorder was paused, or the codec encodes silence as
            # nothing.
            missing_bytes = (packet.pos or 0) - before_byte
            if not self._is_alone or missing_bytes < MIN_DENSITY * gap_s * self._bytes_per_s():
                return 0.0
        return gap_s

    def lost_s(self, packet: Packet[AudioStream]) -> float:
        """Return the seconds of a packet that cannot be decoded."""
        if self._format not in FRAME_FORMATS:
            return min((packet.duration or 0) * self._tick_s, MAX_PACKET_S)
        if any(tag in bytes(packet) for tag in _END_TAGS):
            return 0.0
        return packet.size / self._bytes_per_s() if self._kept_s else 0.0

    def keep(self, packet: Packet[AudioStream], seconds: float) -> None:
        """Record that a packet was decoded to `seconds` of audio. Not every packet states its duration."""
        self._kept_bytes += packet.size
        self._kept_s += seconds
        self._end_s = max(self._end_s, self._start_s + seconds)

    def left_s(self) -> float:
        """Return the seconds that are missing at the end of the file, or that were skipped without a packet."""
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
        """Return an upper bound of a gap, based on the file's size. Damaged times can be arbitrarily large."""
        return 4 * self._size / self._bytes_per_s() if self._kept_bytes else MAX_SILENCE_S


class _Output:
    """Combines frames, whose rate and channels may change, and damaged stretches into one mono stream."""

    def __init__(self, rate_hz: int, skipped: SkippedAudio, channel: OneChannel | None = None) -> None:
        self.num_samples = 0
        self._rate_hz, self._skipped, self._channel = rate_hz, skipped, channel
        self._kind: tuple[object, ...] = ()
        self._resampler: AudioResampler | None = None
        self._mixer: ChannelMixer | ChannelPicker = ChannelMixer(rate_hz, 1)
        self._silence_s = 0.0

    def take(self, piece: AudioFrame | float) -> Iterator[Pcm]:
        """Yield the audio that a piece completes. A piece is a frame, or the seconds of a damaged stretch."""
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
            self._mixer, self._kind = self._made_mixer(piece), kind
        piece.pts = None
        try:
            is_mono = piece.layout.nb_channels == 1 and self._channel is None
            mono = piece if is_mono else self._mixed(piece)
            yield from self._resampled(mono)
        except (av.error.FFmpegError, ValueError):
            self._kind = ()
            self.skip(piece.samples / piece.sample_rate)

    def flush(self) -> Iterator[Pcm]:
        """Yield the resampler's remaining output, before another stream begins."""
        if self._kind:
            yield from self._resampled(None)
        self._kind = ()

    def skip(self, seconds: float) -> None:
        """Count a damaged stretch. It becomes silence if audio follows it."""
        if seconds > 0:
            self._skipped.seconds += seconds
            self._silence_s = min(self._silence_s + seconds, MAX_SILENCE_S)

    def _made_mixer(self, frame: AudioFrame) -> ChannelMixer | ChannelPicker:
        if self._channel:
            return self._channel.picker(frame.sample_rate)
        return ChannelMixer(frame.sample_rate, frame.layout.nb_channels)

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
    file: str | BinaryIO, slab_s: float, skipped: SkippedAudio | None = None, channel: OneChannel | None = None
) -> Generator[Pcm, None, None]:
    """Decode a file to slabs: float32 [num_samples], mono, 16 kHz. A slab has `slab_s` seconds, or up to a frame more.

    The last slab may be shorter. Holds only one slab in memory. Blocks. `skipped`, `channel`, MediaError: see `decode`.
    """
    chunks, num_samples = list[Pcm](), 0
    for chunk in decode(file, skipped=skipped, channel=channel):
        chunks.append(chunk)
        num_samples += len(chunk)
        if num_samples >= slab_s * SAMPLE_RATE_HZ:
            yield np.concatenate(chunks)
            chunks, num_samples = [], 0
    if chunks:
        yield np.concatenate(chunks)


def survey_channels(file: str | BinaryIO) -> Generator[None, None, ChannelFacts]:
    """Measure the channels of a whole file: yields about once per second of audio, and returns what it found.

    Blocks while it decodes, and rewinds a file. A file that cannot be decoded counts as one silent channel.
    """
    import av.error

    survey, seconds = ChannelSurvey(), 0.0
    with suppress(av.error.FFmpegError, MediaError, ValueError, EOFError, IndexError, OSError), _opened(file) as found:
        for part in found:
            with suppress(av.error.FFmpegError, MediaError, ValueError, EOFError, IndexError):
                for piece in _pieces(part):
                    if isinstance(piece, float):
                        continue
                    survey.feed(channels_of(piece), piece.sample_rate)
                    seconds += piece.samples / piece.sample_rate
                    if seconds >= 1.0:
                        seconds = 0.0
                        yield
    if not isinstance(file, str):
        file.seek(0)
    return survey.facts()


def measure_s(file: BinaryIO, max_s: float) -> float:
    """Return the seconds of audio in a file, measured by its packets, not by its header.

    Decodes only the beginning, to check that the file can be decoded. Stops counting after `max_s`. In some formats,
    packets do not state their duration, and the result is too low. Blocks while it reads the file, and rewinds it.
    Raises MediaError like `decode`.
    """
    import av.error

    with closing(decode(file)) as chunks:
        next(chunks, None)
    seconds = 0.0
    for part in parts(file):
        # Count in whole ticks: sums of fractions are slow, and a few megabytes can contain hundreds of thousands of
        # packets.
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
            # Skip a part that cannot be read.
            pass
        seconds += float(num_ticks * tick_s)
        if seconds > max_s:
            break
    file.seek(0)
    return seconds


def decode_all(file: str | BinaryIO, rate_hz: int = SAMPLE_RATE_HZ) -> Pcm:
    """Decode a whole file to float32 [num_samples], mono, at `rate_hz`. Blocks. Raises MediaError like `decode`.

    An hour of audio at 16 kHz takes 230 MB, so callers must limit the size of the file.
    """
    return np.concatenate(list(decode(file, rate_hz)))


def decode_beginning(file: str | BinaryIO, rate_hz: int, max_s: float) -> Pcm:
    """Decode up to the first `max_s` seconds of a file to float32 [num_samples], mono, at `rate_hz`.

    Decoding stops there, because a small file may have hours of audio. Blocks. Raises MediaError like `decode`.
    """
    chunks, num_samples, max_samples = list[Pcm](), 0, int(max_s * rate_hz)
    for chunk in decode(file, rate_hz):
        chunks.append(chunk)
        num_samples += len(chunk)
        if num_samples >= max_samples:
            break
    # A copy, so that the samples after the cut are freed.
    return np.concatenate(chunks)[:max_samples].copy()
