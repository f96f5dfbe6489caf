"""Speech that begins while an answer sounds, held back until it is known whether it takes the floor. Pure: outputs in, outputs out.

A client that is told of speech falls silent at once. So an acknowledgement ("mm-hm") is not told at all: no event, no item, no answer. Speech
that has a word of its own, or goes on for long, is told as if nothing had been held.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from antiphon.events import (
    GuessDropped,
    Output,
    SpeechStarted,
    SpeechStopped,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptGuess,
    TranscriptPartial,
    TurnCleared,
    TurnCommitted,
)
from antiphon.turn.backchannel import is_backchannel

# An acknowledgement is over by then: speech that goes on is told whatever its words. Seconds since its onset was found.
LONGEST_S = 0.9
# With less than this left of the answer's sound, what is said is a turn: "yes" to a question just asked.
LAST_S = 0.4
OfTurn = (
    SpeechStarted | SpeechStopped | TurnCommitted | TranscriptDelta | TranscriptPartial | TranscriptGuess | GuessDropped | TranscriptDone | TranscriptFailed
)  # fmt: skip


@dataclass(slots=True)
class Overlap:
    """`take` gives on what may be told now. `held`: the turn that is not decided yet."""

    held: int | None = None
    _waiting: list[Output] = field(default_factory=list)

    def take(self, output: Output, *, overlaps: bool) -> list[Output]:
        """`overlaps`: an answer sounds, and acknowledgements do not end it."""
        if self.held is None:
            if not (overlaps and isinstance(output, SpeechStarted)):
                return [output]
            self.held, self._waiting = output.turn, [output]
            return []
        if isinstance(output, TurnCleared):
            self.held, self._waiting = None, []
            return [output]
        if not isinstance(output, OfTurn) or (output.turn != self.held and not isinstance(output, SpeechStarted)):
            return [output]
        self._waiting.append(output)
        if isinstance(output, SpeechStarted):
            # Somebody who begins again is not done after one word.
            return self.release()
        if isinstance(output, TranscriptPartial | TranscriptGuess | TranscriptDone) and not is_backchannel(output.text):
            return self.release()
        if isinstance(output, TranscriptDone | TranscriptFailed):
            self.held, self._waiting = None, []
        return []

    def release(self) -> list[Output]:
        """It takes the floor: all that was held, in order."""
        out, self.held, self._waiting = self._waiting, None, []
        return out
