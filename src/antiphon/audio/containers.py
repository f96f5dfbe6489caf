"""Any container and codec that PyAV reads, as mono float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import av
import av.error
import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.errors import MediaError


def decode(file: str | BinaryIO, rate_hz: int = SAMPLE_RATE_HZ) -> Iterator[Pcm]:
    """The first sound stream of a file, in order, as float32 [num_samples] chunks at `rate_hz`, mono.

    Raises MediaError if nothing reads it, it has no sound, or the sound is empty.
    """
    heard = False
    try:
        with av.open(file, mode="r", metadata_errors="ignore") as container:
            if not container.streams.audio:
                raise MediaError("the file has no sound")
            resampler = av.AudioResampler(format="flt", layout="mono", rate=rate_hz)
            for frame in container.decode(container.streams.audio[0]):
                frame.pts = None
                for out in resampler.resample(frame):
                    heard = heard or out.samples > 0
                    yield np.ascontiguousarray(out.to_ndarray()[0], np.float32)
            for out in resampler.resample(None):
                heard = heard or out.samples > 0
                yield np.ascontiguousarray(out.to_ndarray()[0], np.float32)
    except (av.error.FFmpegError, ValueError, EOFError, IndexError) as error:
        raise MediaError(f"the file cannot be decoded: {error}") from error
    if not heard:
        raise MediaError("the file holds no sound")


def decode_all(file: str | BinaryIO, rate_hz: int = SAMPLE_RATE_HZ) -> Pcm:
    """The whole file as one array; see `decode`."""
    return np.concatenate(list(decode(file, rate_hz)))


def decode_beginning(file: str | BinaryIO, rate_hz: int, most_s: float) -> Pcm:
    """Of a file at most so much, and no more than that is decoded: a small one may hold hours. See `decode`."""
    made, count, most = list[Pcm](), 0, int(most_s * rate_hz)
    for chunk in decode(file, rate_hz):
        made.append(chunk)
        count += len(chunk)
        if count >= most:
            break
    return np.concatenate(made)[:most].copy()
