"""The state of a transcription session from which another session continues it, at another host. Pure.

The state has no audio. The client sends the audio again from the sample `settled` on, and the other session hears it
without dividing it again, up to the sample at which the state was taken. Then it restores the state: the turns, windows
and words that the client has been sent are as they were. Everything later is decided here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from antiphon.events.transcription import (
    LanguageDetected,
    SilenceCommitted,
    SpeechStarted,
    SpeechStopped,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptionEvent,
    TurnCleared,
    TurnCommitted,
)
from antiphon.events.words import TokenLogprob, Word
from antiphon.turns.windows import SegmenterState, TurnEnded, TurnSpan


@dataclass(frozen=True, slots=True)
class EndedWindow:
    """A window that has ended and whose final is not known yet. Positions are samples from the session's start."""

    # The number of the window.
    id: int
    # Its first sample, without context audio.
    start: int
    # The sample after its last.
    end: int
    # The turns in it.
    spans: tuple[TurnSpan, ...]
    # The sample at which its last pause began; None without a pause.
    quiet_since: int | None
    # The sample after its last speech.
    speech_end: int


@dataclass(frozen=True, slots=True)
class Ended:
    """An ended window that waits for its final, or an ended turn that waits for its windows. The other is None."""

    window: EndedWindow | None = None
    turn: TurnEnded | None = None


@dataclass(frozen=True, slots=True)
class UnreadTurn:
    """A turn that has words and no transcript yet. `since` is the id of its first window."""

    turn: int
    since: int


class SentWord(NamedTuple):
    """A word of the window that is being decoded, which was sent as a part of `turn`. HypothesisWord explains the other
    fields. It is stored after each event, so it is short.
    """

    turn: int
    text: str
    tokens: tuple[int, ...]
    probability: float
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnPart:
    """What a finished window has added to the transcript of a turn that was not complete then."""

    # The id of the window.
    window: int
    # The number of the turn.
    turn: int
    # The text of the window's final.
    text: str
    # The text of the window's deltas.
    streamed: str
    # The language of the final.
    language: str
    # The words of the final with times, if the client asked for times.
    words: tuple[Word, ...]
    # The log probabilities of the final's tokens, if the client asked for them.
    logprobs: tuple[TokenLogprob, ...]
    # Tokens of all prompts of the turn so far.
    prompt_tokens: int
    # Tokens that were generated for the turn so far.
    completion_tokens: int
    # The error, if the window failed.
    failure: str


@dataclass(frozen=True, slots=True)
class Unreported:
    """An event that the session has decided on and not emitted yet. All other fields are None."""

    # Speech began.
    started: SpeechStarted | None = None
    # Speech ended.
    stopped: SpeechStopped | None = None
    # The user was silent for the idle timeout.
    silence: SilenceCommitted | None = None
    # A turn was committed.
    committed: TurnCommitted | None = None
    # The audio since the last commit was dropped.
    cleared: TurnCleared | None = None
    # Words were found.
    delta: TranscriptDelta | None = None
    # A transcript is complete.
    done: TranscriptDone | None = None
    # A transcript failed.
    failed: TranscriptFailed | None = None
    # A language was detected.
    language: LanguageDetected | None = None

    @property
    def event(self) -> TranscriptionEvent:
        """The event that is set."""
        found: TranscriptionEvent = next(
            event for name in _EVENTS.values() if (event := getattr(self, name)) is not None
        )
        return found


_EVENTS: dict[type, str] = {
    SpeechStarted: "started",
    SpeechStopped: "stopped",
    SilenceCommitted: "silence",
    TurnCommitted: "committed",
    TurnCleared: "cleared",
    TranscriptDelta: "delta",
    TranscriptDone: "done",
    TranscriptFailed: "failed",
    LanguageDetected: "language",
}
assert set(_EVENTS.values()) == {field.name for field in fields(Unreported)}


def unreported(events: Iterable[object]) -> tuple[Unreported, ...]:
    """Return the events, in order. Skips objects that are no events for a client."""
    return tuple(Unreported(**{_EVENTS[type(event)]: event}) for event in events if type(event) in _EVENTS)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class TranscriptionState:
    """The state of a transcription session, without the finished parts of its open turns (TurnPart)."""

    # The id of the transcriber. Only a session with the same transcriber can continue.
    model: str
    # The first sample of audio that the other session needs.
    settled: int
    # The turns and windows.
    segmenter: SegmenterState
    # Windows and turns that have ended, in order.
    ended: tuple[Ended, ...]
    # Events that were not emitted yet, in order.
    unreported: tuple[Unreported, ...]
    # Turns that have words and no transcript yet.
    unread: tuple[UnreadTurn, ...]
    # The id of the window that is being decoded.
    window: int
    # The words of that window that were sent, in order.
    sent: tuple[SentWord, ...]
    # The number of labels that voices have.
    num_labels: int = 0
    # The sample after the audio in which these words were found. Partials are decoded later.
    sent_until: int = 0


@dataclass(frozen=True, slots=True)
class ContinuedTranscription:
    """What a session needs to continue another one: its state, and the finished parts of its open turns.

    `from_sample` is the position, in the session's audio, of the first sample that the client sends again.
    """

    state: TranscriptionState
    parts: Sequence[TurnPart]
    from_sample: int

    @property
    def valid_parts(self) -> list[TurnPart]:
        """The parts of turns that are still unread, from windows that are finished according to the state."""
        unfinished = [ended.window.id for ended in self.state.ended if ended.window]
        if self.state.segmenter.window_start is not None:
            unfinished.append(self.state.segmenter.windows)
        before = min(unfinished, default=self.state.segmenter.windows + 1)
        since = {unread.turn: unread.since for unread in self.state.unread}
        return [p for p in self.parts if p.turn in since and since[p.turn] <= p.window < before]
