"""The vocabulary inside: what protocols hand to a session (Input) and what a session hands back (Output).

Sound is mono float32 in [-1, 1] at 16 kHz (`audio.SAMPLE_RATE_HZ`): the wire's rates and codecs end at the protocol. Times
are milliseconds of session audio, counted in samples. Nothing here knows a wire dialect, a model or a socket.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from antiphon.audio import Pcm
from antiphon.events.words import Word

# --- what a client may ask for -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerVad:
    """The server finds the turns. `threshold` is a speech probability, the rest is milliseconds.

    With `patience_ms`, a pause of `silence_duration_ms` ends a turn only if what was said is judged to be complete; any other
    pause ends it after `patience_ms`.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 200
    patience_ms: int | None = None


@dataclass(frozen=True, slots=True)
class StreamTuning:
    """How a transcript is streamed; None leaves the model's own measured default (adapters/base/hearing.py, TranscriberProfile)."""

    segment_duration_s: float | None = None
    rollback_tokens: int | None = None
    unfixed_chunks: int | None = None
    max_prefix_tokens: int | None = None
    max_audio_s: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TranscriptionConfig:
    """One transcription session. `turn` None: the client commits. `language` is ISO-639-1, None: detect it.

    `words` asks for word times in TranscriptDone; without `partials` there are no deltas before a turn has ended. `answered`:
    somebody waits to answer the turns; they are told TranscriptGuessed, and a turn whose end confirms its guess is done at once.
    """

    model: str = "default"
    language: str | None = None
    prompt: str = ""
    vad: ServerVad | None = None
    word_times: bool = False
    partials: bool = True
    preflight: bool = False
    tuning: StreamTuning = field(default_factory=StreamTuning)


# --- Input ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConfigureTranscription:
    """The session's configuration as a whole, at the start and after each change."""

    config: TranscriptionConfig


@dataclass(frozen=True, slots=True)
class AppendAudio:
    """Sound from the client. pcm: float32 [num_samples], mono, [-1, 1], 16 kHz."""

    pcm: Pcm


@dataclass(frozen=True, slots=True)
class CommitAudio:
    """The client ends its turn (`final` False: the turn's audio goes on; only start to transcribe)."""

    final: bool = True


@dataclass(frozen=True, slots=True)
class ClearAudio:
    """The client throws away what it sent since the last commit."""


TranscriptionCommand = ConfigureTranscription | AppendAudio | CommitAudio | ClearAudio


# --- Output --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """Speech was found; `at_ms` already has the prefix padding taken off. `turn` numbers turns from 0."""

    turn: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    turn: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class TurnCommitted:
    """The turn's audio is complete: what follows for it is its transcript. `speech_end_ms`: where the pause began that ended it; None: it ended in none."""

    turn: int
    start_ms: int
    end_ms: int
    speech_end_ms: int | None = None


@dataclass(frozen=True, slots=True)
class TurnCleared:
    """The audio since the last commit was thrown away; an open turn ends without a transcript."""


@dataclass(frozen=True, slots=True)
class CommitRefused:
    """A commit found less than `minimum_ms` of new audio."""

    have_ms: int
    minimum_ms: int


@dataclass(frozen=True, slots=True)
class TranscriptDelta:
    """Words of a turn that will not change. Joined, a turn's deltas are `TranscriptDone.streamed`."""

    turn: int
    text: str


@dataclass(frozen=True, slots=True)
class TranscriptGuessed:
    """What the open turn's transcript will be if the pause that has begun ends it. Never for a client. `speech_end_ms`: where that pause began."""

    turn: int
    text: str
    speech_end_ms: int = 0


@dataclass(frozen=True, slots=True)
class TranscriptPartial:
    """What the open turn likely says so far; any of it may change. Never for a client."""

    turn: int
    text: str


@dataclass(frozen=True, slots=True)
class GuessDropped:
    """The pause did not end the turn: the last TranscriptGuessed is void."""

    turn: int


@dataclass(frozen=True, slots=True)
class TranscriptDone:
    """A turn's transcript.

    `streamed` is what the deltas add up to; `text` is the best reading of the whole turn, from a decode that was not
    bound to what had been sent. They differ where the model thought better of a word it had already let go.
    """

    turn: int
    text: str
    streamed: str
    words: tuple[Word, ...]
    language: str
    audio_s: float
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class TranscriptFailed:
    """The model failed on this turn; the session goes on."""

    turn: int
    message: str


@dataclass(frozen=True, slots=True)
class SessionEnding:
    """The server ends the session: `expired`, `draining` or `overflow`. Nothing follows."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class OverlapStarted:
    """Speech over an answer, which may be no more than an acknowledgement. For a client that can duck the answer's sound."""

    turn: int


@dataclass(frozen=True, slots=True)
class OverlapDecided:
    """It takes the floor or does not. One that does not may turn out to, when its words are known."""

    turn: int
    takes_floor: bool
    reason: str


TranscriptionEvent = (
    SpeechStarted
    | SpeechStopped
    | TurnCommitted
    | TurnCleared
    | CommitRefused
    | TranscriptDelta
    | TranscriptGuessed
    | TranscriptPartial
    | GuessDropped
    | TranscriptDone
    | TranscriptFailed
    | SessionEnding
    | OverlapStarted
    | OverlapDecided
)
