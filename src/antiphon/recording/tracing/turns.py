"""Follows the events of one session, and measures the duration of each stage of its turns. Pure: times are arguments.

The time of an event is when it was reported, the same as in recordings. The end of speech is an exception: its time is
when the sound that contains it arrived.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from antiphon.events.conversation import (
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
    UserTurnCommitted,
)
from antiphon.events.duplex import OverlapReported, PlaybackAcknowledged
from antiphon.events.playback import PlaybackCleared, PlaybackStarted
from antiphon.events.transcription import (
    SpeechStarted,
    SpeechStopped,
    TranscriptFailed,
    TurnCleared,
    TurnCommitted,
)

# The stages from the end of the user's speech to the first sound of the answer, in order. Each one begins when the
# previous one ends.
STAGES = ("endpoint", "final", "first_token", "first_sound")
SAMPLES_A_MS = 16
# Bounds: arrival times of sound (some minutes), decisions of a turn, and open turns of a session.
MOST_ARRIVALS, MOST_DECISIONS, MOST_TURNS = 4096, 64, 16


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision during a turn. `name`: begun_ahead, used, dropped, ducked, unducked, interrupted, ..."""

    name: str
    at_s: float


@dataclass(slots=True)
class TurnTrace:
    """One turn. Times are monotonic seconds; None if the event did not happen."""

    # The number of the turn.
    turn: int
    # The trace id of its root span, in hex.
    trace_id: str
    # The id of its root span, in hex.
    span_id: str
    # When the start of the user's speech arrived.
    speech_start_s: float | None = None
    # When the end of the user's speech arrived.
    speech_end_s: float | None = None
    # When the end of the turn was decided.
    endpoint_s: float | None = None
    # When its transcript was complete.
    final_s: float | None = None
    # When the first text of the answer was sent.
    first_token_s: float | None = None
    # When the first audio of the answer was sent.
    first_sound_s: float | None = None
    # When the client, or the server's own player, began to play the answer.
    heard_s: float | None = None
    # When the answer ended.
    ended_s: float | None = None
    # The response that answers the turn; "" without one.
    response_id: str = ""
    # How the answer ended.
    status: str = ""
    # The decisions during the turn, in order.
    decisions: list[Decision] = field(default_factory=list)

    @property
    def voice_to_voice_s(self) -> float | None:
        """Seconds from the end of the user's speech to the first sound of the answer."""
        if self.speech_end_s is None or self.first_sound_s is None:
            return None
        return max(0.0, self.first_sound_s - self.speech_end_s)

    def stages(self) -> list[tuple[str, float, float]]:
        """Return the stages that happened, as (name, begin, end). Each one begins when the previous one ends.

        A stage that ends after the first sound is cut there, such as a transcript that follows a preemptive answer. The
        stages up to the first sound therefore add up to `voice_to_voice_s`.
        """
        if self.speech_end_s is None:
            return []
        out, before = [], self.speech_end_s
        last = self.first_sound_s if self.first_sound_s is not None else float("inf")
        for name in STAGES:
            at_s: float | None = getattr(self, f"{name}_s")
            if at_s is not None:
                end = max(before, min(at_s, last))
                out.append((name, before, end))
                before = end
        if self.heard_s is not None and self.first_sound_s is not None and self.heard_s >= before:
            out.append(("heard", before, self.heard_s))
        return out


class TurnTracer:
    """Follows one session. Pure, except for random ids.

    It is called for arriving sound (`sound`), reported events (`follow`), and internal events (`final`, `decided`), in
    the order in which they happen.
    """

    def __init__(self) -> None:
        self._samples: list[int] = []
        self._arrivals: list[float] = []
        self._total = 0
        # Turns that are open or whose answer is open, by number; the newest last.
        self._turns: dict[int, TurnTrace] = {}
        self._by_response: dict[str, TurnTrace] = {}

    @property
    def traceparent(self) -> str:
        """The `traceparent` of the newest open turn; "" without one."""
        newest = next(reversed(self._turns.values()), None)
        return f"00-{newest.trace_id}-{newest.span_id}-01" if newest else ""

    def sound(self, num_samples: int, at_s: float) -> None:
        """Note that `num_samples` samples, at 16 kHz, have arrived."""
        self._total += num_samples
        self._samples.append(self._total)
        self._arrivals.append(at_s)
        if len(self._samples) > MOST_ARRIVALS:
            del self._samples[: MOST_ARRIVALS // 2], self._arrivals[: MOST_ARRIVALS // 2]

    def follow(self, event: Any, at_s: float) -> list[TurnTrace]:
        """Note an event that is reported now, and return the turns that it ends."""
        match event:
            case SpeechStarted():
                trace = self._turn(event.turn)
                if trace.speech_start_s is None:
                    trace.speech_start_s = self._came_s(event.at_ms, at_s)
            case SpeechStopped():
                self._turn(event.turn).endpoint_s = at_s
            case TurnCommitted():
                end_ms = event.end_ms if event.speech_end_ms is None else event.speech_end_ms
                self._committed(event.turn, end_ms, at_s)
            case UserTurnCommitted(turn=int() as turn, end_ms=int() as end_ms):
                self._committed(turn, end_ms, at_s)
            case OverlapReported():
                self.decided(event.action, at_s)
            case TurnCleared() | TranscriptFailed():
                return self._drop_unanswered(event, at_s)
            case _:
                return self._follow_response(event, at_s)
        return []

    def _follow_response(self, event: Any, at_s: float) -> list[TurnTrace]:
        match event:
            case ResponseCreated():
                waiting = [t for t in self._turns.values() if not t.response_id and t.endpoint_s is not None]
                if waiting:
                    # The unanswered turns before it were spoken together with it.
                    waiting[-1].response_id = event.response.id
                    self._by_response[event.response.id] = waiting[-1]
            case ResponseTextDelta() if trace := self._by_response.get(event.at.response_id):
                trace.first_token_s = at_s if trace.first_token_s is None else trace.first_token_s
            case ResponseAudioDelta() if trace := self._by_response.get(event.at.response_id):
                trace.first_sound_s = at_s if trace.first_sound_s is None else trace.first_sound_s
            case PlaybackStarted() if trace := self._by_response.get(event.response_id):
                trace.heard_s = at_s if trace.heard_s is None else trace.heard_s
            case PlaybackAcknowledged() if trace := self._by_response.get(event.response_id):
                trace.heard_s = at_s if trace.heard_s is None else trace.heard_s
            case PlaybackCleared() if trace := self._by_response.get(event.response_id):
                trace.decisions.append(Decision("interrupted", at_s))
            case ResponseDone() if trace := self._by_response.pop(event.response.id, None):
                trace.status, trace.ended_s = event.response.status, at_s
                # Drop the turns that were spoken together with it.
                for number in [n for n in self._turns if n <= trace.turn]:
                    del self._turns[number]
                return [trace]
            case _:
                pass
        return []

    def _drop_unanswered(self, event: TurnCleared | TranscriptFailed, at_s: float) -> list[TurnTrace]:
        """End a turn without an answer. Returns a turn that failed, and forgets a turn that was cleared."""
        if isinstance(event, TurnCleared):
            for number in [n for n, t in self._turns.items() if not t.response_id]:
                del self._turns[number]
            return []
        trace = self._turns.get(event.turn)
        if trace is None or trace.response_id:
            # A model that hears has answered the turn without its transcript.
            self.decided("transcript_failed", at_s)
            return []
        trace.status, trace.ended_s = "failed", at_s
        del self._turns[event.turn]
        return [trace]

    def _turn(self, number: int) -> TurnTrace:
        if number not in self._turns:
            self._turns[number] = TurnTrace(number, secrets.token_hex(16), secrets.token_hex(8))
            while len(self._turns) > MOST_TURNS:
                gone = self._turns.pop(next(iter(self._turns)))
                self._by_response.pop(gone.response_id, None)
        return self._turns[number]

    def final(self, at_s: float) -> None:
        """Note that the transcript of the first ended turn without a transcript is complete."""
        for trace in self._turns.values():
            if trace.endpoint_s is not None and trace.final_s is None:
                trace.final_s = at_s
                return

    def decided(self, name: str, at_s: float) -> None:
        """Note a decision in the newest turn."""
        newest = next(reversed(self._turns.values()), None)
        if newest and len(newest.decisions) < MOST_DECISIONS:
            newest.decisions.append(Decision(name, at_s))

    def _committed(self, turn: int, end_ms: int, at_s: float) -> None:
        trace = self._turn(turn)
        trace.endpoint_s = at_s if trace.endpoint_s is None else trace.endpoint_s
        trace.speech_end_s = min(self._came_s(end_ms, at_s), trace.endpoint_s)

    def _came_s(self, ms: int, now_s: float) -> float:
        """Return when the sound at this millisecond of the session arrived, interpolated within a piece of sound."""
        sample = ms * SAMPLES_A_MS
        at = bisect_left(self._samples, sample)
        if at >= len(self._samples):
            return now_s
        end_s, end = self._arrivals[at], self._samples[at]
        return min(now_s, end_s - (end - sample) / 1000 / SAMPLES_A_MS)
