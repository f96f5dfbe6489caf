"""Holds back speech that begins during a response until it is known whether it takes the floor. Pure: events in, events
out.

A client that is told of speech falls silent at once. So a backchannel ("mm-hm") is not reported at all: no event, no
item, no response. Speech with a word of its own, or that goes on for long, is reported as if nothing had been held.
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

# A backchannel is over by then: speech that goes on takes the floor whatever its words. Seconds since its onset was
# found.
MAX_BACKCHANNEL_S = 0.9
# A client that has ducked the response learns by then what the overlap is, unless its words so far are a backchannel.
# Seconds since its onset was found.
DECISION_S = 0.4
# Speech that begins with less than this left of the response is a turn, not an overlap: "yes" to a question just
# asked. Seconds.
RESPONSE_TAIL_S = 0.4
TurnEvent = (
    SpeechStarted
    | SpeechStopped
    | TurnCommitted
    | TranscriptDelta
    | TranscriptPartial
    | TranscriptGuessed
    | GuessDropped
    | TranscriptDone
    | TranscriptFailed
)


@dataclass(slots=True)
class OverlapDecider:
    """Passes transcription events on, and holds back those of a turn that overlaps a response until it is decided.

    `undecided_turn` is the number of that turn, None while nothing is held. For it OverlapStarted is reported at once,
    for clients that duck the response, and in the end one OverlapDecided, together with the held events where the turn
    takes the floor. The owner keeps the time: it calls `decide` after DECISION_S and `take_floor` after
    MAX_BACKCHANNEL_S.
    """

    undecided_turn: int | None = None
    _held_events: list[TranscriptionEvent] = field(default_factory=list)
    # The undecided turn's text so far; "" before there is any.
    _text: str = ""
    # It was reported that the turn does not take the floor; only its words can change that.
    _yielded: bool = False
    # The client has said that the turn does not take the floor; nothing can change that.
    _dismissed: bool = False
    # Turns that were dismissed and whose transcripts are still to come.
    _dismissed_turns: set[int] = field(default_factory=set)

    def feed(self, event: TranscriptionEvent, *, overlaps: bool) -> list[TranscriptionEvent]:
        """Handle one event of the transcription, and return the events that may be reported now, in order.

        `overlaps`: a response is being heard and backchannels do not end it; a SpeechStarted then begins an overlap.
        Words that are no backchannel, or a second start of speech, decide it in favour of the floor.
        """
        if isinstance(event, TurnEvent) and event.turn in self._dismissed_turns:
            if isinstance(event, TranscriptDone | TranscriptFailed):
                self._dismissed_turns.discard(event.turn)
            return []
        if self._dismissed and self.undecided_turn is not None and isinstance(event, SpeechStarted):
            # Another turn begins, of which nothing is known yet.
            self._dismissed_turns.add(self.undecided_turn)
            self.undecided_turn, self._held_events, self._dismissed = None, [], False
        if self.undecided_turn is None:
            if not (overlaps and isinstance(event, SpeechStarted)):
                return [event]
            self.undecided_turn, self._held_events = event.turn, [event]
            self._text, self._yielded, self._dismissed = "", False, False
            return [OverlapStarted(event.turn)]
        if isinstance(event, TurnCleared):
            return [*self._end("cleared"), event]
        if not isinstance(event, TurnEvent) or (
            event.turn != self.undecided_turn and not isinstance(event, SpeechStarted)
        ):
            return [event]
        self._held_events.append(event)
        if isinstance(event, SpeechStarted):
            # A speaker who begins again is not done after one word.
            return self.take_floor("speech_again")
        if isinstance(event, TranscriptPartial | TranscriptGuessed | TranscriptDone):
            self._text = event.text
            if not is_backchannel(event.text) and not self._dismissed:
                return self.take_floor("words")
        if isinstance(event, TranscriptDone | TranscriptFailed):
            return self._end("short_ack_transcript")
        return []

    def decide(self, *, speaking: bool) -> list[TranscriptionEvent]:
        """Decide the overlap DECISION_S after its start by whether its speech goes on (`speaking`), and return what is
        reported.

        Speech that goes on takes the floor, unless its words so far are a backchannel. Speech that has stopped is
        reported as a backchannel; its words, when they are known, may still take the floor.
        """
        if self._yielded or self._dismissed or self.undecided_turn is None:
            return []
        if speaking:
            return [] if self._text and is_backchannel(self._text) else self.take_floor("speech_goes_on")
        self._yielded = True
        return [OverlapDecided(self.undecided_turn, False, "short_ack")]

    def take_floor(self, reason: str = "speech_goes_on") -> list[TranscriptionEvent]:
        """Decide that the overlap takes the floor, and return OverlapDecided with `reason` and all held events, in
        order. Returns nothing where nothing is held, or where the client has dismissed it.
        """
        if self.undecided_turn is None or self._dismissed:
            return []
        out: list[TranscriptionEvent] = [OverlapDecided(self.undecided_turn, True, reason), *self._held_events]
        self.undecided_turn, self._held_events = None, []
        return out

    def dismiss(self, reason: str) -> list[TranscriptionEvent]:
        """Decide that the overlap does not take the floor whatever its words turn out to be, because the client says
        so. Returns OverlapDecided with `reason`, unless that it is a backchannel was already reported.
        """
        if self.undecided_turn is None or self._dismissed:
            return []
        self._dismissed = True
        return [] if self._yielded else [OverlapDecided(self.undecided_turn, False, reason)]

    def _end(self, reason: str) -> list[TranscriptionEvent]:
        turn, was_reported = self.undecided_turn, self._yielded or self._dismissed
        self.undecided_turn, self._held_events = None, []
        return [] if was_reported or turn is None else [OverlapDecided(turn, False, reason)]
