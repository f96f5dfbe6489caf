"""The time at a client's microphone, which goes on while the client sends nothing. Pure: it is told what time it is."""

from __future__ import annotations

from antiphon.audio import SAMPLE_RATE_HZ

# Audio that comes later than this was not recorded in between: the client has muted itself. A network's stalls are
# mostly shorter; after a longer one, the clock is right again once the delayed audio has come.
MUTED_SAMPLES = int(0.6 * SAMPLE_RATE_HZ)
# How fast the clock follows a microphone whose samples are a little longer than ours: samples a call.
DRIFT_SAMPLES = 1


class MicrophoneClock:
    """Counts the samples that a microphone has given, those included that a muted client did not send.

    Audio that the server sends is heard while the client is muted, too. Counted by received samples alone, it would
    still seem to be heard when the client goes on.
    """

    def __init__(self) -> None:
        # The least time, in samples, by which audio has lagged behind the clock; None before the first call.
        self._least_lag: int | None = None
        self._skipped = 0

    def now(self, now_s: float, num_received: int) -> int:
        """Return the microphone's sample at `now_s`, in monotonic seconds, when `num_received` samples have come.

        It is `num_received` for a client that sends all that it hears, or a file. It may go back, by what a stalled
        network delivers late.
        """
        lag = int(now_s * SAMPLE_RATE_HZ) - num_received
        if self._least_lag is None or lag < self._least_lag:
            self._least_lag = lag
        late = lag - self._least_lag - self._skipped
        if late < 0 or late > MUTED_SAMPLES:
            # It is never behind what has come: what came late once has come by now.
            self._skipped += late
        elif late:
            self._least_lag += DRIFT_SAMPLES
        return num_received + self._skipped
