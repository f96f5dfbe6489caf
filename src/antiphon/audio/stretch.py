"""Changes the tempo of speech without changing its pitch, chunk by chunk (FFmpeg's atempo filter, which is WSOLA)."""

from __future__ import annotations

import av
import av.filter
import numpy as np

from antiphon.audio import Pcm


class Stretch:
    """Speeds up one stream of mono float32 at `rate_hz` by `tempo`, from 0.5 to 100.

    The output of its filter graph lags behind the input by a fraction of a second.
    """

    def __init__(self, rate_hz: int, tempo: float) -> None:
        self._rate_hz = rate_hz
        self._graph = av.filter.Graph()
        source = self._graph.add_abuffer(sample_rate=rate_hz, format="flt", layout="mono", name="in")
        atempo = self._graph.add("atempo", f"{tempo:.6f}")
        sink = self._graph.add("abuffersink")
        source.link_to(atempo)
        atempo.link_to(sink)
        self._graph.configure()
        self._num_samples = 0

    def feed(self, pcm: Pcm) -> Pcm:
        """Return the output that `pcm` completes, float32 [num_samples] at the same rate. It may be empty."""
        if not len(pcm):
            return np.zeros(0, np.float32)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(pcm, np.float32).reshape(1, -1), "flt", "mono")
        frame.sample_rate = self._rate_hz
        frame.pts = self._num_samples
        self._num_samples += len(pcm)
        self._graph.push(frame)
        return self._drain()

    def flush(self) -> Pcm:
        """Return the rest of the output, float32 [num_samples]. `feed` must not be called after it."""
        self._graph.push(None)
        return self._drain()

    def _drain(self) -> Pcm:
        """Return all output that the filter has ready."""
        out = []
        while True:
            try:
                frame = self._graph.pull()
            except (av.error.BlockingIOError, av.error.EOFError):
                break
            assert isinstance(frame, av.AudioFrame)
            out.append(np.asarray(frame.to_ndarray()[0], np.float32))
        return np.concatenate(out) if out else np.zeros(0, np.float32)
