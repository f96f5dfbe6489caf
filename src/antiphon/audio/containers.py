"""Decodes the first audio stream of any container and codec that PyAV reads, to mono float32."""

from __future__ import annotations

import errno
from collections.abc import Generator
from contextlib import closing
from fractions import Fraction
from typing import BinaryIO

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.errors import MediaError

# Audio of a lower rate is refused: its frames would become hours of samples each when they are resampled.
MIN_RATE_HZ = 1000


def decode(file: str | BinaryIO, rate_hz: int = SAMPLE_RATE_HZ) -> Generator[Pcm, None, None]:
    """Decode the first audio stream of a file, lazily and in order, to float32 [num_samples] chunks, mono, at
    `rate_hz`.

    `file` is a path or URL, or an object with `read`; it is read while the iterator is advanced, which blocks. Chunks
    have the length of the codec's frames. Raises MediaError, at the latest when the iterator is exhausted, where the
    file cannot be decoded or has no audio or no samples.
    """
    import av.error  # 60 ms and 18 MB, which a server of raw audio never needs

    has_samples = False
    try:
        with av.open(file, mode="r", metadata_errors="ignore") as container:
            if not container.streams.audio:
                raise MediaError("the file has no sound")
            resampler = av.AudioResampler(format="flt", layout="mono", rate=rate_hz)
            for frame in container.decode(container.streams.audio[0]):
                if frame.sample_rate < MIN_RATE_HZ:
                    raise MediaError(f"the file has {frame.sample_rate} samples a second, under {MIN_RATE_HZ}")
                frame.pts = None
                for out in resampler.resample(frame):
                    has_samples = has_samples or out.samples > 0
                    yield np.ascontiguousarray(out.to_ndarray()[0], np.float32)
            for out in resampler.resample(None):
                has_samples = has_samples or out.samples > 0
                yield np.ascontiguousarray(out.to_ndarray()[0], np.float32)
    except (av.error.FFmpegError, ValueError, EOFError, IndexError) as error:
        raise MediaError(_reason(file, error, has_samples)) from error
    if not has_samples:
        raise MediaError("the file holds no sound")


def _reason(file: str | BinaryIO, error: Exception, has_samples: bool) -> str:
    """What is wrong with a file, for who gave it: FFmpeg's own words name neither the file nor what it should be."""
    name = f"{file}: " if isinstance(file, str) else ""
    said = getattr(error, "strerror", None) or str(error)
    if has_samples:
        return f"{name}the file cannot be decoded to its end: {said}"
    if isinstance(error, FileNotFoundError):
        return f"{name}no such file"
    if isinstance(error, IsADirectoryError):
        return f"{name}this is a folder"
    # Of the system, such as a file that may not be read, or a server that cannot be reached.
    if isinstance(error, OSError) and error.errno in errno.errorcode and error.errno != errno.EINVAL:
        return f"{name}{said}"
    return f"{name}this is no sound file that can be read"


def decode_in_slabs(file: str | BinaryIO, slab_s: float) -> Generator[Pcm, None, None]:
    """Decode a file to slabs of `slab_s` seconds, or a codec's frame more: float32 [num_samples], mono, 16 kHz.

    The last slab may be shorter. Holds one slab, however long the file is. Blocks; raises MediaError as `decode` does.
    """
    chunks, num_samples = list[Pcm](), 0
    for chunk in decode(file):
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
    import av

    with closing(decode(file)) as chunks:
        next(chunks, None)
    file.seek(0)
    # Counted in whole ticks: a file of a few megabytes has hundreds of thousands of packets.
    tick_s, num_ticks = Fraction(1), 0
    try:
        with av.open(file, mode="r", metadata_errors="ignore") as container:
            stream = container.streams.audio[0]
            tick_s = stream.time_base or tick_s
            max_ticks = max_s / tick_s
            for packet in container.demux(stream):
                num_ticks += packet.duration or 0
                if num_ticks > max_ticks:
                    break
    except av.error.FFmpegError:
        # Broken behind its beginning: what is before that is decoded, and says what is wrong.
        pass
    file.seek(0)
    return float(num_ticks * tick_s)


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
