"""Speech that begins while an answer sounds, held back until it is known whether it takes the floor. Pure: outputs in, outputs out.

A client that is told of speech falls silent at once. So an acknowledgement ("mm-hm") is not told at all: no event, no item, no answer. Speech
that has a word of its own, or goes on for long, is told as if nothing had been held.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from antiphon.events.transcription import (
    GuessDropped,
    OverlapDecided,
    OverlapStarted,
    SpeechStarted,
    SpeechStopped,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptGuessed,
    TranscriptionEvent,
    TranscriptPartial,
    TurnCleared,
    TurnCommitted,
)
from antiphon.turns.backchannel import is_backchannel

# An acknowledgement is over by then: speech that goes on is told whatever its words. Seconds since its onset was found.
MAX_BACKCHANNEL_S = 0.9
# A client that has ducked the answer's sound is told by then, unless the words so far are an acknowledgement's.
DECISION_S = 0.4
# With less than this left of the answer's sound, what is said is a turn: "yes" to a question just asked.
RESPONSE_TAIL_S = 0.4
TurnEvent = (
    SpeechStarted | SpeechStopped | TurnCommitted | TranscriptDelta | TranscriptPartial | TranscriptGuessed | GuessDropped | TranscriptDone | TranscriptFailed
)  # fmt: skip


@dataclass(slots=True)
class OverlapDecider:
    """`take` gives on what may be told now. `held`: the turn that is not decided yet."""

    undecided_turn: int | None = None
    _waiting: list[TranscriptionEvent] = field(default_factory=list)
    # What was understood of it so far; "" before anything was.
    _text: str = ""
    # It was said that it does not take the floor; only its words can say otherwise.
    _yielded: bool = False
    # Nothing can.
    _dismissed: bool = False
    # Turns that were dismissed and whose transcripts are still to come.
    _gone: set[int] = field(default_factory=set)

    def feed(self, output: TranscriptionEvent, *, overlaps: bool) -> list[TranscriptionEvent]:
        """`overlaps`: an answer sounds, and acknowledgements do not end it."""
        if isinstance(output, TurnEvent) and output.turn in self._gone:
            if isinstance(output, TranscriptDone | TranscriptFailed):
                self._gone.discard(output.turn)
            return []
        if self._dismissed and self.undecided_turn is not None and isinstance(output, SpeechStarted):
            # Another turn, of which nothing is said yet.
            self._gone.add(self.undecided_turn)
            self.undecided_turn, self._waiting, self._dismissed = None, [], False
        if self.undecided_turn is None:
            if not (overlaps and isinstance(output, SpeechStarted)):
                return [output]
            self.undecided_turn, self._waiting = output.turn, [output]
            self._text, self._yielded, self._dismissed = "", False, False
            return [OverlapStarted(output.turn)]
        if isinstance(output, TurnCleared):
            return [*self._end("cleared"), output]
        if not isinstance(output, TurnEvent) or (
            output.turn != self.undecided_turn and not isinstance(output, SpeechStarted)
        ):
            return [output]
        self._waiting.append(output)
        if isinstance(output, SpeechStarted):
            # Somebody who begins again is not done after one word.
            return self.take_floor("speech_again")
        if isinstance(output, TranscriptPartial | TranscriptGuessed | TranscriptDone):
            self._text = output.text
            if not is_backchannel(output.text) and not self._dismissed:
                return self.take_floor("words")
        if isinstance(output, TranscriptDone | TranscriptFailed):
            return self._end("short_ack_transcript")
        return []

    def decide(self, *, speaking: bool) -> list[TranscriptionEvent]:
        """DECIDE_S have passed: say what it seems to be. `speaking`: it goes on."""
        if self._yielded or self._dismissed or self.undecided_turn is None:
            return []
        if speaking:
            return [] if self._text and is_backchannel(self._text) else self.take_floor("speech_goes_on")
        self._yielded = True
        return [OverlapDecided(self.undecided_turn, False, "short_ack")]

    def take_floor(self, reason: str = "speech_goes_on") -> list[TranscriptionEvent]:
        """It takes the floor: all that was held, in order. Nothing where nothing is held, or it was dismissed."""
        if self.undecided_turn is None or self._dismissed:
            return []
        out: list[TranscriptionEvent] = [OverlapDecided(self.undecided_turn, True, reason), *self._waiting]
        self.undecided_turn, self._waiting = None, []
        return out

    def dismiss(self, reason: str) -> list[TranscriptionEvent]:
        """Whatever it is, it does not take the floor: the client says so."""
        if self.undecided_turn is None or self._dismissed:
            return []
        self._dismissed = True
        return [] if self._yielded else [OverlapDecided(self.undecided_turn, False, reason)]

    def _end(self, reason: str) -> list[TranscriptionEvent]:
        turn, told = self.undecided_turn, self._yielded or self._dismissed
        self.undecided_turn, self._waiting = None, []
        return [] if told or turn is None else [OverlapDecided(turn, False, reason)]
