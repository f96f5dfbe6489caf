"""The server's estimate of how much of the responses' audio is still to be heard, and their way to the echo guard."""

from __future__ import annotations

from collections.abc import Callable

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import Resampler
from antiphon.audio.playback_clock import PlaybackClock
from antiphon.events.conversation import ResponseAudioDelta
from antiphon.turns.echo import EchoGuard


class Playout:
    """Adds the audio of responses to a PlaybackClock, and feeds it to the echo guard.

    `clock` gives monotonic seconds. `at` is the number of samples at 16 kHz that the microphone has given so far; the
    echo guard needs it to line up both sides.
    """

    def __init__(self, echo_guard: EchoGuard, clock: Callable[[], float]) -> None:
        self._echo_guard = echo_guard
        self._clock = PlaybackClock(clock)
        # The item that is being said, and what resamples its audio to the microphone's rate for the echo guard.
        self._reference: tuple[str, Resampler] | None = None

    @property
    def left_s(self) -> float:
        """Seconds of audio that were sent and, by the clock, are still to be played; 0 where nothing is.
        Acknowledgements of the client are not used.
        """
        return self._clock.left_s

    def hold(self, held: bool) -> None:
        """Note that playback pauses (`held`), or goes on where it paused. Repeating the present state does nothing."""
        self._clock.hold(held)

    def add(self, audio: ResponseAudioDelta, at: int) -> None:
        """Count audio that is about to be sent, and give it to the echo guard as a reference. It is taken to be played
        after all that was sent before it. A new item begins with a fresh resampler.
        """
        self._clock.add(len(audio.pcm) / audio.rate_hz)
        if self._reference is None or self._reference[0] != audio.at.item_id:
            self._reference = (audio.at.item_id, Resampler(audio.rate_hz, SAMPLE_RATE_HZ))
        self._echo_guard.add_reference(self._reference[1].feed(audio.pcm), at)

    def stop(self, at: int) -> None:
        """Note that playback was stopped, as on barge-in: nothing is left to be heard, and the echo guard expects no
        echo of what was not played by then.
        """
        self._clock.stop()
        self._echo_guard.cut_reference(at)
