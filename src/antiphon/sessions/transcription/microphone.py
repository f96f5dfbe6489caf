"""What is known of a client's microphone besides its sound: when audio comes, and what in it is the server's own echo.

Pure: the clock's time is passed in, in monotonic seconds. All positions are samples at 16 kHz.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.turns.echo import EchoGuard, MicrophoneClock

# Audio is live if over LIVE_PERIOD_S it came no faster than it is spoken, except for a burst of LIVE_BURST_S after a
# stall of the network.
LIVE_PERIOD_S, LIVE_BURST_S = 2.0, 0.5
# A client that mutes itself, or that has sent its file, sends no silence. The absence of audio counts as silence after
# STALLED_S, and after STALLED_PIECES times the length of the last piece of audio, so that turns end.
STALLED_S, STALLED_PIECES = 0.6, 1.5
# A client that has sent no audio for MUTED_S has muted itself, and not in the first sound of a word.
MUTED_S = 2.0
# The gaps between pieces of audio over USUAL_S are those that are usual of the client.
USUAL_S = 10.0


class Arrivals:
    """When the audio of one client comes, and for how long none has come."""

    def __init__(self) -> None:
        # When audio was listened to last, and when it came last.
        self._heard_at_s = self._came_at_s = -math.inf
        # Seconds without audio since it came last in which some could have come, and the seconds of its last piece.
        self.stalled_s = self._piece_s = 0.0
        # (when, after how many seconds) audio came, over the last USUAL_S.
        self._gaps: deque[tuple[float, float]] = deque()
        # (when, samples received by then), over the last LIVE_PERIOD_S.
        self._received: deque[tuple[float, int]] = deque()

    def heard(self, now_s: float) -> None:
        """Audio is listened to."""
        self._heard_at_s = now_s

    def came(self, now_s: float, num_samples: int) -> None:
        """A piece of audio has come, and was listened to."""
        if (gap_s := now_s - self._came_at_s) <= MUTED_S:
            self._gaps.append((now_s, gap_s))
        while self._gaps and self._gaps[0][0] < now_s - USUAL_S:
            self._gaps.popleft()
        self.stalled_s, self._piece_s, self._came_at_s = 0.0, num_samples / SAMPLE_RATE_HZ, now_s

    def is_muted(self, now_s: float) -> bool:
        """Whether no audio was listened to for MUTED_S."""
        return now_s - self._heard_at_s >= MUTED_S

    def is_live(self, now_s: float, num_heard: int) -> bool:
        """Whether audio comes as fast as it is spoken. What comes faster was not recorded beside a loudspeaker.
        `num_heard`: the samples that were listened to by now.
        """
        self._received.append((now_s, num_heard))
        while self._received[0][0] < now_s - LIVE_PERIOD_S:
            self._received.popleft()
        since_s, since = self._received[0]
        return (num_heard - since) / SAMPLE_RATE_HZ <= 1.5 * (now_s - since_s) + LIVE_BURST_S

    @property
    def stall_limit_s(self) -> float:
        """Seconds after which the absence of audio is silence in a pause that was heard: later of a client that sends
        large pieces, or after long gaps.
        """
        gap_s = max((gap_s for _, gap_s in self._gaps), default=0.0)
        return min(MUTED_S, max(STALLED_S, STALLED_PIECES * max(self._piece_s, gap_s)))


class EchoFilter:
    """Takes the echo of what the server sends out of the speech probabilities of what it hears.

    `frame_samples`: samples of a frame of the voice activity detector. `guard`: None: nothing is expected to echo.
    `num_received`: samples that the client has sent, those included that wait in the inbox.
    """

    def __init__(self, guard: EchoGuard | None, frame_samples: int) -> None:
        self._guard = guard
        self._frame_samples = frame_samples
        self._clock = MicrophoneClock()
        # The audio of the incomplete frame.
        self._rest: Pcm = np.zeros(0, np.float32)

    def now(self, now_s: float, num_received: int) -> int:
        """Return the sample at which the microphone is, which includes what a muted client does not send."""
        return self._clock.now(now_s, num_received)

    def expect(self, pcm: Pcm, now_s: float, num_received: int) -> None:
        """Expect the echo of audio that is about to be sent, behind what was sent before."""
        if self._guard:
            self._guard.add_reference(pcm, self._clock.now(now_s, num_received))

    def expect_silence(self, now_s: float, num_received: int) -> None:
        """Expect no echo of what was not played by now."""
        if self._guard:
            self._guard.cut_reference(self._clock.now(now_s, num_received))

    def judge(
        self, pcm: Pcm, probabilities: list[float], at: int, now_s: float, num_received: int, *, is_live: bool
    ) -> tuple[list[float], int | None]:
        """Return the probabilities of audio that begins at the sample `at`, without those of an echo, and the sample
        since which the guard has taken speech for one, where that shows now. Audio that is not live has no echo.
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
        """Drop the incomplete frame."""
        self._rest = self._rest[:0]
