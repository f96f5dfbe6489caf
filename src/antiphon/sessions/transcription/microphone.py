"""Facts about a client's microphone: when its audio arrives, and which part of the audio is the server's own echo.

Pure: times are parameters, in monotonic seconds. All positions are samples at 16 kHz.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.turns.echo import EchoGuard, MicrophoneClock
from antiphon.turns.response_sound import ResponseSound
from antiphon.turns.windows import SpeechWindow

# Audio is live if over LIVE_PERIOD_S it arrived no faster than real time, except for a burst of LIVE_BURST_S after a
# stall of the network.
LIVE_PERIOD_S, LIVE_BURST_S = 2.0, 0.5
# A client that mutes itself, or that has sent all of its file, sends no silence. To end turns all the same, missing
# audio counts as silence after both STALLED_S and STALLED_PIECES times the length of the last piece of audio have
# passed.
STALLED_S, STALLED_PIECES = 0.6, 1.5
# A client that has sent no audio for MUTED_S has muted itself. A shorter gap may be the network's, and may fall into
# the first sound of a word.
MUTED_S = 2.0
# Seconds of audio before the present with which the judgement of an overlap begins. They include its onset.
OVERLAP_S = 1.0
# Length in seconds of the sliding window in which a client's usual gaps between pieces of audio are measured.
USUAL_S = 10.0


class Arrivals:
    """Records when the audio of one client arrives, and for how long none has arrived."""

    def __init__(self) -> None:
        # The times at which audio was last processed and at which it last arrived.
        self._heard_at_s = self._came_at_s = -math.inf
        # Seconds without audio since the last arrival, not counting time in which none could arrive, and the length of
        # the last piece in seconds.
        self.stalled_s = self._piece_s = 0.0
        # (time, gap in seconds before it) of each arrival, over the last USUAL_S.
        self._gaps: deque[tuple[float, float]] = deque()
        # (time, samples received by then), over the last LIVE_PERIOD_S.
        self._received: deque[tuple[float, int]] = deque()

    def heard(self, now_s: float) -> None:
        """Note that audio is being processed at `now_s`."""
        self._heard_at_s = now_s

    def came(self, now_s: float, num_samples: int) -> None:
        """Note that a piece of audio has arrived and was processed."""
        if (gap_s := now_s - self._came_at_s) <= MUTED_S:
            self._gaps.append((now_s, gap_s))
        while self._gaps and self._gaps[0][0] < now_s - USUAL_S:
            self._gaps.popleft()
        self.stalled_s, self._piece_s, self._came_at_s = 0.0, num_samples / SAMPLE_RATE_HZ, now_s

    def is_muted(self, now_s: float) -> bool:
        """Whether no audio was processed for MUTED_S."""
        return now_s - self._heard_at_s >= MUTED_S

    def is_live(self, now_s: float, num_heard: int) -> bool:
        """Return whether audio arrives in real time. Audio that arrives faster is from a file and has no echo.
        `num_heard`: number of samples processed by now.
        """
        self._received.append((now_s, num_heard))
        while self._received[0][0] < now_s - LIVE_PERIOD_S:
            self._received.popleft()
        since_s, since = self._received[0]
        return (num_heard - since) / SAMPLE_RATE_HZ <= 1.5 * (now_s - since_s) + LIVE_BURST_S

    @property
    def stall_limit_s(self) -> float:
        """Seconds after which missing audio counts as silence, if a pause has already begun. The value is larger for a
        client that sends large pieces, or that has had long gaps between its pieces.
        """
        gap_s = max((gap_s for _, gap_s in self._gaps), default=0.0)
        return min(MUTED_S, max(STALLED_S, STALLED_PIECES * max(self._piece_s, gap_s)))


@dataclass(frozen=True, slots=True)
class OverlapAudio:
    """Frames of the user's audio, `pcm`: float32 [num_samples], up to the sample `end`.

    `response`: the state of the response in each frame, see `ResponseSound.features`.
    """

    pcm: Pcm
    response: npt.NDArray[np.float32]
    end: int


class EchoFilter:
    """Removes the echo of the server's output from the speech probabilities of a client's audio.

    `frame_samples` is the number of samples per frame of the voice activity detector. Without a `guard`, no echo is
    expected. The methods' `num_received` counts the samples that the client has sent, including those in the inbox.
    """

    def __init__(self, guard: EchoGuard | None, frame_samples: int) -> None:
        self._guard = guard
        self._frame_samples = frame_samples
        self._clock = MicrophoneClock()
        self._response = ResponseSound()
        # The audio of the incomplete frame.
        self._rest: Pcm = np.zeros(0, np.float32)

    def now(self, now_s: float, num_received: int) -> int:
        """Return the microphone's current sample. It includes the time for which a muted client sends nothing."""
        return self._clock.now(now_s, num_received)

    def expect(self, pcm: Pcm, now_s: float, num_received: int) -> None:
        """Expect the echo of audio that is about to be sent and that plays after all audio sent before."""
        if self._guard:
            now = self._clock.now(now_s, num_received)
            self._guard.add_reference(pcm, now)
            self._response.add(pcm, now)

    def expect_silence(self, now_s: float, num_received: int) -> None:
        """Expect no more echo, because audio that was not played by now never will be."""
        if self._guard:
            now = self._clock.now(now_s, num_received)
            self._guard.cut_reference(now)
            self._response.cut(now)

    def overlap(
        self, window: SpeechWindow, since: int | None, frame_samples: int, now_s: float, num_received: int
    ) -> OverlapAudio | None:
        """Return the whole frames of the open window from the sample `since` on, with the state of the response in
        each. `since` None: its last OVERLAP_S. None if no frame is new.
        """
        start = max(window.start, window.end - int(OVERLAP_S * SAMPLE_RATE_HZ) if since is None else since)
        num_frames = (window.end - start) // frame_samples
        if num_frames <= 0:
            return None
        end = start + num_frames * frame_samples
        muted = self._clock.now(now_s, num_received) - num_received
        response = self._response.features(start + muted, num_frames, frame_samples)
        return OverlapAudio(window.pcm[start - window.start : end - window.start], response, end)

    def judge(
        self, pcm: Pcm, probabilities: list[float], at: int, now_s: float, num_received: int, *, is_live: bool
    ) -> tuple[list[float], int | None]:
        """Return the speech probabilities of audio that begins at the sample `at`, with 0 for frames that are an echo.
        Only live audio has an echo. Also returns the first sample of earlier speech if the guard finds now that it took
        that speech for an echo, else None.
        """
        if self._guard is None:
            return probabilities, None
        begin = at - len(self._rest)
        audio = np.concatenate((self._rest, pcm))
        size = self._frame_samples * len(probabilities)
        self._rest = audio[size:]
        muted = self._clock.now(now_s, num_received) - num_received
        if not is_live:
            return probabilities, None
        judged = self._guard.judge(audio[:size].reshape(-1, self._frame_samples), probabilities, begin + muted)
        return judged, None if self._guard.held_since is None else self._guard.held_since - muted

    def clear(self) -> None:
        """Drop the incomplete frame, after the client cleared its audio."""
        self._rest = self._rest[:0]
