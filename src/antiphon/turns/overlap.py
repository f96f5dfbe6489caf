"""Holds back speech that begins during a response until it is known whether it takes the floor. Pure: events in, events
out.

A client that is told of speech falls silent at once. So a backchannel ("mm-hm") is not reported at all: no event, no
item, no response. Speech with a word of its own, or that goes on for long, is reported as if nothing had been held.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from antiphon.events.transcription import (
    GuessDropped,
    LanguageDetected,
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
    | LanguageDetected
    | TranscriptFailed
)


class OverlapState(Enum):
    """What is known of an overlap whose events are held. An overlap that takes the floor is over, and so is one that is
    known to be a backchannel.

    | State | Input | Next | Reported |
    |---|---|---|---|
    | none | speech starts during a response | UNDECIDED | OverlapStarted |
    | UNDECIDED, YIELDED | words that are no backchannel | none | it takes the floor, and the held events |
    | UNDECIDED, YIELDED | speech starts again, `take_floor`, or `commit` | none | the same |
    | UNDECIDED | `decide`: speech goes on, and is no backchannel so far | none | the same |
    | UNDECIDED | `decide`: speech has stopped | YIELDED | it does not take the floor |
    | UNDECIDED, YIELDED | `dismiss` | DISMISSED | it does not take the floor |
    | all three | its transcript is complete, and a backchannel; or it is cleared | none | it does not take the floor |
    | DISMISSED | `commit` | none | the held events |
    | DISMISSED | its transcript is complete, whatever its words | none | |
    | DISMISSED | speech starts again, in another turn | as from none | as from none |

    That it does not take the floor is reported once at most.
    """

    UNDECIDED = auto()
    YIELDED = auto()
    DISMISSED = auto()


@dataclass(slots=True)
class _Overlap:
    """One overlap: its turn, the events that are held, and the turn's text so far ("" before there is any)."""

    turn: int
    held_events: list[TranscriptionEvent]
    state: OverlapState = OverlapState.UNDECIDED
    text: str = ""


class OverlapDecider:
    """Passes transcription events on, and holds back those of a turn that overlaps a response until it is decided.

    For that turn OverlapStarted is reported at once, for clients that duck the response, and in the end one
    OverlapDecided, together with the held events where the turn takes the floor. The owner keeps the time: it calls
    `decide` after DECISION_S and `take_floor` after MAX_BACKCHANNEL_S.
    """

    def __init__(self) -> None:
        self._overlap: _Overlap | None = None
        # Turns that were dismissed and whose transcripts are still to come.
        self._dismissed_turns: set[int] = set()

    @property
    def undecided_turn(self) -> int | None:
        """The number of the turn whose events are held; None while there is none."""
        return self._overlap.turn if self._overlap else None

    def feed(self, event: TranscriptionEvent, *, overlaps: bool) -> list[TranscriptionEvent]:
        """Handle one event of the transcription, and return the events that may be reported now, in order.

        `overlaps`: a response is being heard and backchannels do not end it; a SpeechStarted then begins an overlap.
        Words that are no backchannel, or a second start of speech, decide it in favour of the floor.
        """
        if isinstance(event, TurnEvent) and event.turn in self._dismissed_turns:
            if isinstance(event, TranscriptDone | TranscriptFailed):
                self._dismissed_turns.discard(event.turn)
            return []
        overlap = self._overlap
        if overlap and overlap.state is OverlapState.DISMISSED and isinstance(event, SpeechStarted):
            # Another turn begins, of which nothing is known yet.
            self._dismissed_turns.add(overlap.turn)
            self._overlap = overlap = None
        if overlap is None:
            if not (overlaps and isinstance(event, SpeechStarted)):
                return [event]
            self._overlap = _Overlap(event.turn, [event])
            return [OverlapStarted(event.turn)]
        if isinstance(event, TurnCleared):
            if any(isinstance(held, TurnCommitted) for held in overlap.held_events):
                # What is cleared came after it.
                return [event]
            return [*self._end(overlap, "cleared"), event]
        if isinstance(event, SpeechStarted) or (isinstance(event, TurnEvent) and event.turn == overlap.turn):
            return self._feed_overlap(overlap, event)
        return [event]

    def _feed_overlap(self, overlap: _Overlap, event: TurnEvent) -> list[TranscriptionEvent]:
        overlap.held_events.append(event)
        if isinstance(event, SpeechStarted):
            # A speaker who begins again is not done after one word.
            return self.take_floor("speech_again")
        if isinstance(event, TranscriptPartial | TranscriptGuessed | TranscriptDone):
            overlap.text = event.text
            if not is_backchannel(event.text) and overlap.state is not OverlapState.DISMISSED:
                return self.take_floor("words")
        if isinstance(event, TranscriptDone | TranscriptFailed):
            return self._end(overlap, "short_ack_transcript")
        return []

    def decide(self, *, speaking: bool) -> list[TranscriptionEvent]:
        """Decide the overlap DECISION_S after its start by whether its speech goes on (`speaking`), and return what is
        reported.

        Speech that goes on takes the floor, unless its words so far are a backchannel. Speech that has stopped is
        reported as a backchannel; its words, when they are known, may still take the floor.
        """
        overlap = self._overlap
        if overlap is None or overlap.state is not OverlapState.UNDECIDED:
            return []
        if speaking:
            return [] if overlap.text and is_backchannel(overlap.text) else self.take_floor("speech_goes_on")
        overlap.state = OverlapState.YIELDED
        return [OverlapDecided(overlap.turn, False, "short_ack")]

    def take_floor(self, reason: str = "speech_goes_on") -> list[TranscriptionEvent]:
        """Decide that the overlap takes the floor, and return OverlapDecided with `reason` and all held events, in
        order. Returns nothing where nothing is held, or where the client has dismissed it.
        """
        overlap = self._overlap
        if overlap is None or overlap.state is OverlapState.DISMISSED:
            return []
        self._overlap = None
        return [OverlapDecided(overlap.turn, True, reason), *overlap.held_events]

    def commit(self, turn: int) -> list[TranscriptionEvent]:
        """The client has ended this turn itself, so that it is one, whatever its words. Returns all held events, in
        order, behind OverlapDecided; without that where the client has said that it takes no floor. Returns nothing for
        a turn of which nothing is held.
        """
        overlap = self._overlap
        if overlap is None or overlap.turn != turn:
            return []
        if overlap.state is not OverlapState.DISMISSED:
            return self.take_floor("client_commit")
        self._overlap = None
        return overlap.held_events

    def dismiss(self, reason: str) -> list[TranscriptionEvent]:
        """Decide that the overlap does not take the floor whatever its words turn out to be, because the client says
        so. Returns OverlapDecided with `reason`, unless that it is a backchannel was already reported.
        """
        overlap = self._overlap
        if overlap is None:
            return []
        declined, overlap.state = _declined(overlap, reason), OverlapState.DISMISSED
        return declined

    def _end(self, overlap: _Overlap, reason: str) -> list[TranscriptionEvent]:
        self._overlap = None
        return _declined(overlap, reason)


def _declined(overlap: _Overlap, reason: str) -> list[TranscriptionEvent]:
    """The report that the overlap does not take the floor, which was made before in all states but the first."""
    return [OverlapDecided(overlap.turn, False, reason)] if overlap.state is OverlapState.UNDECIDED else []
