"""Holds back the events of speech that begins during a response until it is known whether the speech takes the floor.
Pure: gets events, and returns the events to report.

A client stops playback as soon as speech is reported. So a backchannel ("mm-hm") is not reported at all: it causes no
event, no item and no response. Speech that has other words, or that continues for too long, is reported with all its
events.

The words of backchannels are the most common acknowledgements in conversation (Ward & Tsukahara 2000; the backchannel
act of the AMI corpus), in languages that spell them alike or nearly so.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType

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
from antiphon.events.words import bare_word
from antiphon.state_machine import transition

# A text of more than MAX_WORDS words or MAX_CHARS characters is not a backchannel. A longer text is not examined,
# because a client may send any text.
MAX_WORDS, MAX_CHARS = 4, 200
_ACKNOWLEDGEMENTS = (
    "mm mmm mhm mhmm hm hmm uh um huh ah aha ha oh ooh yeah yea yep yup yes ok okay kay right sure really wow nice "
    "cool great good true exactly absolutely indeed alright see i of course got it go on interesting "
    # German, French, Spanish, Italian, Portuguese
    "ja genau stimmt klar ach so oui ouais d'accord bien sûr sí si vale claro sì certo va bene sim pois é"
)
WORDS = frozenset(_ACKNOWLEDGEMENTS.split())
# Words that may be the beginning of a sentence if they stand alone, and the acknowledgements that contain them.
FRAGMENTS = frozenset(("i", "see", "of", "it", "go", "on", "got", "so", "va", "é", "d'accord", "bien"))
PHRASES = frozenset(
    (
        ("i", "see"),
        ("of", "course"),
        ("got", "it"),
        ("go", "on"),
        ("ach", "so"),
        ("va", "bene"),
        ("d'accord",),
        ("bien", "sûr"),
    )
)


def is_backchannel(text: str) -> bool:
    """Return whether the text is empty, or consists of at most MAX_WORDS words of acknowledgement.

    Case, punctuation and hyphens do not matter. "no", "stop" and "wait" are not in the list, because they ask for the
    floor. A word that only begins an acknowledgement ("I", "got") does not count unless the rest of the acknowledgement
    follows.
    """
    if len(text) > MAX_CHARS:
        return False
    # "Mm-hmm" counts as two words. A typographic apostrophe counts as a plain one, but a quotation mark does not.
    plain = text.replace("-", " ").replace("\u2019", "'")
    words = tuple(w for w in (bare_word(w).strip("'") for w in plain.split()) if w)
    if len(words) > MAX_WORDS or any(w not in WORDS for w in words):
        return False
    return all(w not in FRAGMENTS for w in words) or words in PHRASES


# Maximum length of a backchannel, in seconds after its onset was detected. Longer speech takes the floor whatever its
# words.
MAX_BACKCHANNEL_S = 0.9
# Seconds after the onset was detected until a client that has ducked the response gets a decision, unless the words so
# far are a backchannel.
DECISION_S = 0.4
# The reason that is reported if sound decides.
BY_SOUND = "sound"
# Speech that begins in the last RESPONSE_TAIL_S seconds of a response is a turn, not an overlap, such as "yes" to the
# question that the response asks.
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
    """The state of the speech over a response.

    - NONE: there is no such speech, or it has taken the floor, or it is over.
    - UNDECIDED: its events are held, and the client knows only that somebody speaks.
    - YIELDED: it has stopped, and the client was notified that it does not take the floor. Its words may still take it.
    - DISMISSED: it does not take the floor whatever its words, because of the client's decision or because of its
      voice.
    """

    NONE = auto()
    UNDECIDED = auto()
    YIELDED = auto()
    DISMISSED = auto()


class OverlapInput(Enum):
    """The inputs of the table.

    - BEGAN: speech starts while a response is heard.
    - AGAIN: the same speech starts again after a pause, or other speech starts.
    - WORDS: the words are not a backchannel.
    - GOES_ON, STOPPED: at the first decision, the speech still continues, or has stopped.
    - TAKEN: the speech has lasted too long for a backchannel, or the client gives it the floor.
    - COMMITTED: the client ends the turn.
    - REFUSED: the client denies the speech the floor, or its voice is not the user's.
    - OVER: the transcript of the speech is complete or has failed, or its audio was cleared.
    """

    BEGAN = auto()
    AGAIN = auto()
    WORDS = auto()
    GOES_ON = auto()
    STOPPED = auto()
    TAKEN = auto()
    COMMITTED = auto()
    REFUSED = auto()
    OVER = auto()


class OverlapReport(Enum):
    """The report to the client: that speech overlaps; that it takes the floor, followed by all held events; that it
    does not take the floor; only the held events; or nothing.
    """

    STARTED = auto()
    TAKES_FLOOR = auto()
    TAKES_NO_FLOOR = auto()
    HELD_EVENTS = auto()
    NOTHING = auto()


_NONE, _UNDECIDED = OverlapState.NONE, OverlapState.UNDECIDED
_YIELDED, _DISMISSED = OverlapState.YIELDED, OverlapState.DISMISSED
_TAKES = (_NONE, OverlapReport.TAKES_FLOOR)

# Any transition that is not listed raises LocalProtocolError. An overlap that was decided before its timeout causes no
# further reports.
TRANSITIONS: Mapping[OverlapState, Mapping[OverlapInput, tuple[OverlapState, OverlapReport]]] = MappingProxyType(
    {
        _NONE: dict.fromkeys(OverlapInput, (_NONE, OverlapReport.NOTHING))
        | {OverlapInput.BEGAN: (_UNDECIDED, OverlapReport.STARTED)},
        _UNDECIDED: {
            OverlapInput.AGAIN: _TAKES,
            OverlapInput.WORDS: _TAKES,
            OverlapInput.GOES_ON: _TAKES,
            OverlapInput.STOPPED: (_YIELDED, OverlapReport.TAKES_NO_FLOOR),
            OverlapInput.TAKEN: _TAKES,
            OverlapInput.COMMITTED: _TAKES,
            OverlapInput.REFUSED: (_DISMISSED, OverlapReport.TAKES_NO_FLOOR),
            OverlapInput.OVER: (_NONE, OverlapReport.TAKES_NO_FLOOR),
        },
        _YIELDED: {
            OverlapInput.AGAIN: _TAKES,
            OverlapInput.WORDS: _TAKES,
            OverlapInput.GOES_ON: (_YIELDED, OverlapReport.NOTHING),
            OverlapInput.STOPPED: (_YIELDED, OverlapReport.NOTHING),
            OverlapInput.TAKEN: _TAKES,
            OverlapInput.COMMITTED: _TAKES,
            OverlapInput.REFUSED: (_DISMISSED, OverlapReport.NOTHING),
            OverlapInput.OVER: (_NONE, OverlapReport.NOTHING),
        },
        _DISMISSED: {
            # Other speech begins a separate overlap.
            OverlapInput.BEGAN: (_UNDECIDED, OverlapReport.STARTED),
            OverlapInput.AGAIN: (_NONE, OverlapReport.NOTHING),
            OverlapInput.WORDS: (_DISMISSED, OverlapReport.NOTHING),
            OverlapInput.GOES_ON: (_DISMISSED, OverlapReport.NOTHING),
            OverlapInput.STOPPED: (_DISMISSED, OverlapReport.NOTHING),
            OverlapInput.TAKEN: (_DISMISSED, OverlapReport.NOTHING),
            OverlapInput.COMMITTED: (_NONE, OverlapReport.HELD_EVENTS),
            OverlapInput.REFUSED: (_DISMISSED, OverlapReport.NOTHING),
            OverlapInput.OVER: (_NONE, OverlapReport.NOTHING),
        },
    }
)


class OverlapDecider:
    """Passes transcription events on, and holds back those of a turn that overlaps a response until it is decided.

    For such a turn, OverlapStarted is reported at once, for clients that duck the response. Later, one OverlapDecided
    is reported, together with the held events if the turn takes the floor. The owner runs the timers: it calls `decide`
    after DECISION_S and `take_floor` after MAX_BACKCHANNEL_S.

    `undecided_turn` is the number of the turn whose events are held, or None. Read-only. `sounds_backchannel`: whether
    the overlap sounds like a backchannel, which counts while it has no words. Set by the owner.
    """

    def __init__(self) -> None:
        self._state = OverlapState.NONE
        # The turn whose events are held, these events, and its text so far.
        self.undecided_turn: int | None = None
        self._held_events: list[TranscriptionEvent] = []
        self._text = ""
        self.sounds_backchannel = False
        # Numbers of the turns that were dismissed and have no transcript yet.
        self._dismissed_turns: set[int] = set()

    @property
    def state(self) -> OverlapState:
        """The state of the current overlap."""
        return self._state

    def feed(self, event: TranscriptionEvent, *, overlaps: bool) -> list[TranscriptionEvent]:
        """Handle one event of the transcription, and return the events that may be reported now, in order.

        `overlaps`: whether a response is being heard that backchannels do not end. A SpeechStarted then begins an
        overlap. Words that are not a backchannel, or a second start of speech, give the overlap the floor.
        """
        if isinstance(event, TurnEvent) and event.turn in self._dismissed_turns:
            if isinstance(event, TranscriptDone | TranscriptFailed):
                self._dismissed_turns.discard(event.turn)
            return []
        if isinstance(event, SpeechStarted):
            return self._speech_started(event, overlaps=overlaps)
        if self.undecided_turn is None:
            return [event]
        if isinstance(event, TurnCleared):
            if any(isinstance(held, TurnCommitted) for held in self._held_events):
                # The turn was committed before, so the cleared audio is not part of it.
                return [event]
            return [*self._move(OverlapInput.OVER, "cleared"), event]
        if not isinstance(event, TurnEvent) or event.turn != self.undecided_turn:
            return [event]
        self._held_events.append(event)
        if isinstance(event, TranscriptPartial | TranscriptGuessed | TranscriptDone):
            self._text = event.text
            if not is_backchannel(event.text) and (taken := self._move(OverlapInput.WORDS, "words")):
                return taken
        if isinstance(event, TranscriptDone | TranscriptFailed):
            return self._move(OverlapInput.OVER, "short_ack_transcript")
        return []

    def _speech_started(self, event: SpeechStarted, *, overlaps: bool) -> list[TranscriptionEvent]:
        if self._state is OverlapState.DISMISSED and self.undecided_turn is not None:
            # This is another turn, about which nothing is known yet.
            self._dismissed_turns.add(self.undecided_turn)
        elif self._state is not OverlapState.NONE:
            # A speaker who begins again has more to say than one word.
            self._held_events.append(event)
            return self._move(OverlapInput.AGAIN, "speech_again")
        if not overlaps:
            return [*self._move(OverlapInput.AGAIN, ""), event]
        self.undecided_turn, self._held_events, self._text = event.turn, [event], ""
        self.sounds_backchannel = False
        return self._move(OverlapInput.BEGAN, "")

    def decide(self, *, speaking: bool) -> list[TranscriptionEvent]:
        """Decide the overlap DECISION_S after its start, and return the events to report. `speaking`: whether its
        speech still continues.

        Speech that continues takes the floor, unless its words so far are a backchannel, or unless it has no words and
        sounds like one. Speech that has stopped is reported as a backchannel, but may still take the floor when its
        words are known.
        """
        if not speaking:
            return self._move(OverlapInput.STOPPED, "short_ack")
        if is_backchannel(self._text) if self._text else self.sounds_backchannel:
            return []
        return self._move(OverlapInput.GOES_ON, "speech_goes_on")

    def take_floor(self, reason: str = "speech_goes_on") -> list[TranscriptionEvent]:
        """Decide that the overlap takes the floor, and return OverlapDecided with `reason` and all held events, in
        order. Returns nothing if no events are held, or if the client has dismissed the overlap.
        """
        return self._move(OverlapInput.TAKEN, reason)

    def commit(self, turn: int) -> list[TranscriptionEvent]:
        """Handle the client's commit of this turn, which makes it a turn whatever its words. Returns OverlapDecided and
        all held events, in order. If the client has dismissed the overlap, returns only the held events. Returns
        nothing for a turn without held events.
        """
        return self._move(OverlapInput.COMMITTED, "client_commit") if turn == self.undecided_turn else []

    def dismiss(self, reason: str) -> list[TranscriptionEvent]:
        """Decide that the overlap does not take the floor, whatever its words turn out to be. Returns OverlapDecided
        with `reason`, unless it was already reported as a backchannel.
        """
        return self._move(OverlapInput.REFUSED, reason)

    def _move(self, happened: OverlapInput, reason: str) -> list[TranscriptionEvent]:
        """Make a transition of the table, and return the events to report."""
        turn, held = self.undecided_turn, self._held_events
        self._state, report = transition(TRANSITIONS, self._state, happened)
        if self._state is OverlapState.NONE:
            self.undecided_turn, self._held_events = None, []
        if turn is None:
            return []
        match report:
            case OverlapReport.STARTED:
                return [OverlapStarted(turn)]
            case OverlapReport.TAKES_FLOOR:
                return [OverlapDecided(turn, True, reason), *held]
            case OverlapReport.TAKES_NO_FLOOR:
                return [OverlapDecided(turn, False, reason)]
            case OverlapReport.HELD_EVENTS:
                return held
            case OverlapReport.NOTHING:
                return []
