"""The vocabulary inside: what protocols hand to a session (Input) and what a session hands back (Output).

Sound is mono float32 in [-1, 1] at 16 kHz (`audio.SAMPLE_RATE_HZ`): the wire's rates and codecs end at the protocol. Times
are milliseconds of session audio, counted in samples. Nothing here knows a wire dialect, a model or a socket.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from antiphon.audio import Pcm, SpeechFormat

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
    somebody waits to answer the turns; they are told TranscriptGuess, and a turn whose end confirms its guess is done at once.
    """

    model: str = "default"
    language: str | None = None
    prompt: str = ""
    turn: ServerVad | None = None
    words: bool = False
    partials: bool = True
    answered: bool = False
    tuning: StreamTuning = field(default_factory=StreamTuning)


Granularity = Literal["sentence", "clause", "none"]


@dataclass(frozen=True, slots=True)
class VoiceSample:
    """A voice to speak with. `sound`: a sound file, `text` what it says, where that is known; or the voice as numbers, in `embedding`."""

    sound: bytes = b""
    text: str = ""
    embedding: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SpeechConfig:
    """How text is to be spoken. `voice` None: the default one. `granularity`: the units text is cut into.

    `stream`: PCM as it is made instead of one file a unit. `words`: with the time of every word. The rest is for who has a use for it: the language
    (None: found out), how to speak, whose voice to speak with, and frames of the model: at most, and of the first chunk.
    """

    voice: str | None = None
    granularity: Granularity = "sentence"
    format: SpeechFormat = "wav"
    speed: float = 1.0
    seed: int | None = None
    stream: bool = False
    words: bool = False
    language: str | None = None
    instructions: str = ""
    sample: VoiceSample | None = None
    max_frames: int | None = None
    first_frames: int | None = None


# --- Input ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Configured:
    """The session's configuration as a whole, at the start and after each change."""

    config: TranscriptionConfig


@dataclass(frozen=True, slots=True)
class AudioAppended:
    """Sound from the client. pcm: float32 [num_samples], mono, [-1, 1], 16 kHz."""

    pcm: Pcm


@dataclass(frozen=True, slots=True)
class AudioCommitted:
    """The client ends its turn (`final` False: the turn's audio goes on; only start to transcribe)."""

    final: bool = True


@dataclass(frozen=True, slots=True)
class AudioCleared:
    """The client throws away what it sent since the last commit."""


Input = Configured | AudioAppended | AudioCommitted | AudioCleared


@dataclass(frozen=True, slots=True)
class SpeechConfigured:
    """How what is said from now on is to be spoken."""

    config: SpeechConfig


@dataclass(frozen=True, slots=True)
class TextAppended:
    """More of the utterance's text; it may end anywhere."""

    text: str


@dataclass(frozen=True, slots=True)
class TextFlushed:
    """The utterance's text is complete."""


@dataclass(frozen=True, slots=True)
class SpeechCancelled:
    """Nothing more of what was said so far is to be heard."""


SpeechInput = SpeechConfigured | TextAppended | TextFlushed | SpeechCancelled


# --- Output --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Word:
    """One word with its place in the session's audio, in seconds, and the model's probability in [0, 1]."""

    text: str
    start_s: float
    end_s: float
    probability: float


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
class TranscriptGuess:
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
    """The pause did not end the turn: the last TranscriptGuess is void."""

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
class OverlapBegan:
    """Speech over an answer, which may be no more than an acknowledgement. For a client that can duck the answer's sound."""

    turn: int


@dataclass(frozen=True, slots=True)
class OverlapDecided:
    """It takes the floor or does not. One that does not may turn out to, when its words are known."""

    turn: int
    takes_floor: bool
    reason: str


Output = (
    SpeechStarted
    | SpeechStopped
    | TurnCommitted
    | TurnCleared
    | CommitRefused
    | TranscriptDelta
    | TranscriptGuess
    | TranscriptPartial
    | GuessDropped
    | TranscriptDone
    | TranscriptFailed
    | SessionEnding
    | OverlapBegan
    | OverlapDecided
)


@dataclass(frozen=True, slots=True)
class UnitStarted:
    """A unit of an utterance begins to be spoken. `rate_hz` is that of its sound. Both are counted from 0."""

    utterance: int
    unit: int
    text: str
    config: SpeechConfig
    rate_hz: int


@dataclass(frozen=True, slots=True)
class UnitSound:
    """More of a unit: `data` in its format, which is sound from `start_s` to `end_s` of the unit."""

    utterance: int
    unit: int
    data: bytes
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class UnitDone:
    """The unit's sound is complete, or failed for the reason of `error`. `words`: in seconds from the unit's start.

    `skipped`: letters of its text that the voice cannot speak.
    """

    utterance: int
    unit: int
    words: tuple[Word, ...] = ()
    skipped: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class UtteranceDone:
    """Nothing more comes of the utterance: all `units` were spoken, or it was cancelled."""

    utterance: int
    units: int
    cancelled: bool = False


SpeechOutput = UnitStarted | UnitSound | UnitDone | UtteranceDone
