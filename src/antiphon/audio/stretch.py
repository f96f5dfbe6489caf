"""A change of tempo that keeps the pitch (FFmpeg's atempo: WSOLA), chunk by chunk."""

from __future__ import annotations

import av
import av.filter
import numpy as np

from antiphon.audio import Pcm


class Stretch:
    """Mono float32 at `rate_hz`, `tempo` times as fast (0.5 to 100)."""

    def __init__(self, rate_hz: int, tempo: float) -> None:
        self._rate_hz = rate_hz
        self._graph = av.filter.Graph()
        source = self._graph.add_abuffer(sample_rate=rate_hz, format="flt", layout="mono", name="in")
        atempo = self._graph.add("atempo", f"{tempo:.6f}")
        sink = self._graph.add("abuffersink")
        source.link_to(atempo)
        atempo.link_to(sink)
        self._graph.configure()
        self._samples = 0

    def feed(self, pcm: Pcm) -> Pcm:
        """float32 [num_samples] in; the output it completes, which may be empty."""
        if not len(pcm):
            return np.zeros(0, np.float32)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(pcm, np.float32).reshape(1, -1), "flt", "mono")
        frame.sample_rate = self._rate_hz
        frame.pts = self._samples
        self._samples += len(pcm)
        self._graph.push(frame)
        return self._pulled()

    def flush(self) -> Pcm:
        """What is still inside. Nothing may be fed after it."""
        self._graph.push(None)
        return self._pulled()

    def _pulled(self) -> Pcm:
        out = []
        while True:
            try:
                frame = self._graph.pull()
            except (av.error.BlockingIOError, av.error.EOFError):
                break
            assert isinstance(frame, av.AudioFrame)
            out.append(np.asarray(frame.to_ndarray()[0], np.float32))
        return np.concatenate(out) if out else np.zeros(0, np.float32)
