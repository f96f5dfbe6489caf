"""Remembers when the server's own response could be heard, as a backchannel detector needs it. Pure.

The sound of the response is placed on the microphone's clock, as in `echo.py`. A gap of PAUSE_S is a pause of the
response; a gap of END_S ends it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import RESPONSE_FEATURES

# A piece of 20 ms has sound if a sample reaches SOUND_PEAK (-50 dB).
PIECE_SAMPLES, SOUND_PEAK = SAMPLE_RATE_HZ // 50, 0.003
PAUSE_S, END_S = 0.2, 1.0
# Times are clipped to MAX_S. Only the last KEPT_STRETCHES stretches of sound are kept.
MAX_S, KEPT_STRETCHES = 5.0, 64


class ResponseSound:
    """The stretches of sound in the responses of one session. All positions are samples at 16 kHz."""

    def __init__(self) -> None:
        # The first sample of each stretch and the sample after it, in order, with gaps of at least PAUSE_S.
        self._stretches: list[tuple[int, int]] = []
        # The sample at which the response that was sent ends.
        self._end = 0

    def add(self, pcm: Pcm, at: int) -> None:
        """Add audio, float32 [num_samples], that was sent at sample `at` and plays after the audio sent before."""
        at = max(at, self._end)
        self._end = at + len(pcm)
        for start in range(0, len(pcm), PIECE_SAMPLES):
            piece = pcm[start : start + PIECE_SAMPLES]
            if float(np.abs(piece).max()) < SOUND_PEAK:
                continue
            begin, end = at + start, at + start + len(piece)
            if self._stretches and begin - self._stretches[-1][1] < PAUSE_S * SAMPLE_RATE_HZ:
                self._stretches[-1] = (self._stretches[-1][0], end)
            else:
                self._stretches = [*self._stretches[1 - KEPT_STRETCHES :], (begin, end)]

    def cut(self, at: int) -> None:
        """Forget sound after sample `at`, because the client has stopped playing."""
        self._stretches = [(start, min(end, at)) for start, end in self._stretches if start < at]
        self._end = at

    def features(self, at: int, num_frames: int, frame_samples: int) -> npt.NDArray[np.float32]:
        """Return the state of the response in each frame from sample `at` on: float32 [num_frames, RESPONSE_FEATURES].

        The columns are: whether it sounds (0 or 1); the seconds since it began, since its last pause, and since a
        response last ended, each clipped to MAX_S and divided by it; four zeros (pipecat-ai/backchannel-detector).
        """
        found = np.zeros((num_frames, RESPONSE_FEATURES), np.float32)
        for k in range(num_frames):
            found[k, :4] = self._state(at + k * frame_samples)
        return found

    def _state(self, sample: int) -> tuple[float, float, float, float]:
        past = [stretch for stretch in self._stretches if stretch[0] <= sample]
        if not past:
            return 0.0, 1.0, 1.0, 1.0
        first = len(past) - 1
        while first and past[first][0] - past[first - 1][1] < END_S * SAMPLE_RATE_HZ:
            first -= 1
        start, end = past[-1]
        sounds = sample < end
        ended = end if not sounds else past[first - 1][1] if first else None
        return (
            float(sounds),
            _share(sample - past[first][0]),
            1.0 if first == len(past) - 1 else _share(sample - start),
            1.0 if ended is None else _share(sample - ended),
        )


def _share(samples: int) -> float:
    return min(1.0, samples / SAMPLE_RATE_HZ / MAX_S)
