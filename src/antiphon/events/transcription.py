"""Commands and events of transcription: what protocols pass to a session, and what a session reports.

Audio is mono float32 in [-1, 1] at 16 kHz (`audio.SAMPLE_RATE_HZ`); protocols convert the wire's rates and codecs.
Times are milliseconds of session audio, counted in samples. Turns are numbered from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from antiphon.audio import Pcm
from antiphon.events.words import TokenLogprob, Word

# --- configuration -------------------------------------------------------------------------------------------------


# How quickly a turn counts as ended, if a turn detector judges it.
Eagerness = Literal["low", "medium", "high", "auto"]
PrimarySpeakerMode = Literal["off", "auto", "enrolled"]


@dataclass(frozen=True, slots=True, eq=False)
class EnrolledVoice:
    """A voice that counts as the user's. Two are equal only if they are the same object.

    `vector` is a float32 [size] of length 1 from the speaker encoder that judges the session's turns. It was made from
    `speech_s` seconds of speech.
    """

    vector: Pcm
    speech_s: float


@dataclass(frozen=True, slots=True)
class ServerVad:
    """The server finds the turns by voice activity detection (VAD).

    - `threshold`: the speech probability from which a frame counts as speech.
    - `prefix_padding_ms`: audio before the speech that belongs to the turn.
    - `silence_duration_ms`: the pause that ends a turn.
    - `eagerness`: the sound and the words of a turn decide how long its pauses may last, at most `silence_duration_ms`.
      None: only the silence counts.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 200
    eagerness: Eagerness | None = None


@dataclass(frozen=True, slots=True)
class StreamTuning:
    """How a transcript is streamed. None uses the model's own measured default (`TranscriberProfile`). Values above the
    limits of the server or the model are cut to them (`contracts.tuned`).
    """

    # Seconds of new audio before the next partial, also for the first one of a turn.
    segment_duration_s: float | None = None
    # The number of tokens at the end of a hypothesis that are not sent.
    rollback_tokens: int | None = None
    # The number of partials at the head of a window that send nothing.
    unfixed_chunks: int | None = None
    # The longest forced prefix; a window with a longer one is cut.
    max_prefix_tokens: int | None = None
    # The longest window in seconds.
    max_audio_s: float | None = None
    # The most tokens that one decode may add.
    max_tokens: int | None = None
    # The model is given what was said before the pause that precedes a window, regardless of the pause's length: text
    # up to `max_prefix_tokens`, and for models that can continue from audio, audio up to `max_audio_s`. False: it is
    # given no context.
    keep_context: bool | None = None


@dataclass(frozen=True, slots=True)
class TranscriptionConfig:
    """The configuration of one transcription session."""

    # The name that the client used. It is only reported back while the session has one transcriber.
    model: str = "default"
    # The language as ISO-639-1; None: it is detected.
    language: str | None = None
    # Words and names to expect, as a hint to the model.
    prompt: str = ""
    # How the server finds turns; None: the client commits them.
    vad: ServerVad | None = None
    # TranscriptDelta and TranscriptDone carry word times, which costs an alignment for each decode.
    word_times: bool = False
    # Words are sent while a turn is open; otherwise no deltas are sent before the turn has ended.
    partials: bool = True
    # The turns are answered. TranscriptGuessed is reported in a pause that may end the turn, and a turn whose end
    # confirms its guess is done at once.
    preflight: bool = False
    # How the transcript is streamed.
    tuning: StreamTuning = field(default_factory=StreamTuning)
    # Words and phrases that are likely to be said; the model boosts them in its search if it can.
    keyterms: tuple[str, ...] = ()
    # Detection chooses one of these; empty: any language that the model knows.
    languages: tuple[str, ...] = ()
    # TranscriptDelta and TranscriptDone carry the log-probabilities of their tokens, which costs an alignment for each
    # final.
    logprobs: bool = False
    # LanguageDetected is reported.
    reports_language: bool = False
    # With a VAD, SilenceCommitted is reported after this time of audio without speech; None: never.
    idle_timeout_ms: float | None = None
    # How the user's turns are distinguished from those of other voices. `auto` learns the user's voice. `enrolled`
    # compares with `enrolled_voices`.
    primary_speaker: PrimarySpeakerMode = "off"
    # The voices of `enrolled`, at least one; empty in the other modes.
    enrolled_voices: tuple[EnrolledVoice, ...] = ()


# --- commands ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConfigureTranscription:
    """Replace the whole configuration, at the start and after each change. It applies to the audio that follows."""

    config: TranscriptionConfig


@dataclass(frozen=True, slots=True)
class AppendAudio:
    """Add audio from the client. pcm: float32 [num_samples], mono, [-1, 1], 16 kHz, of any length."""

    pcm: Pcm


@dataclass(frozen=True, slots=True)
class CommitAudio:
    """End the client's turn here. With `final` False the turn stays open, and only its transcription starts.

    `event_id` is the client's id for the message.
    """

    final: bool = True
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class ClearAudio:
    """Drop the audio since the last commit, whether or not it contains speech."""


TranscriptionCommand = ConfigureTranscription | AppendAudio | CommitAudio | ClearAudio


# --- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """Speech began at `at_ms`, from which the prefix padding is already subtracted. `turn` numbers turns from 0."""

    turn: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    """The turn's speech ended. `at_ms` is the end of its audio, including the silence that ended it."""

    turn: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class TurnCommitted:
    """The turn's audio, from `start_ms` to `end_ms`, is complete. Only its transcript follows.

    `speech_end_ms` is the start of the pause that ended the turn; None if no pause ended it.
    """

    turn: int
    start_ms: int
    end_ms: int
    speech_end_ms: int | None = None


@dataclass(frozen=True, slots=True)
class SilenceCommitted:
    """Nobody spoke for `idle_timeout_ms`, from `start_ms` to `end_ms`. This silence is the turn whose TurnCommitted
    follows; the turn has no words.
    """

    turn: int
    start_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class TurnCleared:
    """The audio since the last commit was dropped. An open turn ends without a transcript."""


@dataclass(frozen=True, slots=True)
class CommitRefused:
    """A commit was ignored because it found only `have_ms` of new audio, less than the dialect's `minimum_ms`.

    `event_id` is the commit's.
    """

    have_ms: int
    minimum_ms: int
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class TranscriptDelta:
    """Words of a turn that will not change. The joined deltas of a turn are `TranscriptDone.streamed`.

    - `words`: the words with times in seconds of session audio; empty unless requested.
    - `logprobs`: the log-probabilities of their tokens; empty unless requested. The first token of a turn may begin
      with a space that `text` lacks.
    """

    turn: int
    text: str
    words: tuple[Word, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TranscriptGuessed:
    """The open turn's transcript in case the pause that began at `speech_end_ms` ends it.

    It serves preemptive responses and is never sent to a client. GuessDropped or the turn's end follows.
    """

    turn: int
    text: str
    speech_end_ms: int = 0


@dataclass(frozen=True, slots=True)
class TranscriptPartial:
    """The likely text of the open turn so far; any of it may change. For overlap decisions; it is never sent to a
    client.
    """

    turn: int
    text: str


@dataclass(frozen=True, slots=True)
class GuessDropped:
    """Speech continued: the pause did not end the turn, and the last TranscriptGuessed is void."""

    turn: int


@dataclass(frozen=True, slots=True)
class TranscriptDone:
    """A turn's transcript is complete. No transcription event of the turn follows."""

    # The number of the turn.
    turn: int
    # The best transcript of the whole turn, from a decode that was not bound to the words already sent.
    text: str
    # The joined deltas. It differs from `text` if the model later preferred other words to those already sent.
    streamed: str
    # The words with times in seconds of session audio; empty unless requested.
    words: tuple[Word, ...]
    # The language as ISO-639-1, as configured or detected.
    language: str
    # The length of the turn's audio in seconds.
    audio_s: float
    # Tokens read by all decodes of the turn.
    prompt_tokens: int
    # Tokens added by all decodes of the turn.
    completion_tokens: int
    # The log-probabilities of the tokens of `text`; empty unless requested.
    logprobs: tuple[TokenLogprob, ...] = ()
    # Whose voice it was, `user` or `other`; "" if not requested or unknown.
    speaker: str = ""


@dataclass(frozen=True, slots=True)
class LanguageDetected:
    """The language in which the session is transcribed from now on, detected in the speech of `turn`.

    It is reported when it becomes known and when it changes, and never if the client set the language. `probability` is
    the model's, in [0, 1].
    """

    turn: int
    language: str
    probability: float


@dataclass(frozen=True, slots=True)
class TranscriptFailed:
    """The model failed on this turn, which has no transcript. The session continues. `message` gives the reason."""

    turn: int
    message: str


@dataclass(frozen=True, slots=True)
class SessionEnding:
    """The server ends the session, with the code `expired`, `draining` or `overflow`. No event follows."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class OverlapStarted:
    """Speech began during a response, and may be only a backchannel.

    It is reported for clients that can duck the response until an OverlapDecided for the same turn follows.
    """

    turn: int


@dataclass(frozen=True, slots=True)
class OverlapDecided:
    """Whether an overlap takes the floor, and the reason as sent to full-duplex clients.

    A turn that does not take the floor may still do so after its words are known. `turn` is None if no turn takes the
    floor, but a due answer ends the response in progress.
    """

    turn: int | None
    takes_floor: bool
    reason: str


TranscriptionEvent = (
    SpeechStarted
    | SpeechStopped
    | TurnCommitted
    | SilenceCommitted
    | TurnCleared
    | CommitRefused
    | TranscriptDelta
    | TranscriptGuessed
    | TranscriptPartial
    | GuessDropped
    | TranscriptDone
    | LanguageDetected
    | TranscriptFailed
    | SessionEnding
    | OverlapStarted
    | OverlapDecided
)
