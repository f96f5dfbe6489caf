"""Commands and events of transcription: what protocols hand to a session, and what a session reports.

Audio is mono float32 in [-1, 1] at 16 kHz (`audio.SAMPLE_RATE_HZ`): the wire's rates and codecs end at the protocol.
Times are milliseconds of session audio, counted in samples. Turns are numbered from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from antiphon.audio import Pcm
from antiphon.events.words import TokenLogprob, Word

# --- configuration -------------------------------------------------------------------------------------------------


# How soon a turn is taken to be over, where that is judged.
Eagerness = Literal["low", "medium", "high", "auto"]
PrimarySpeakerMode = Literal["off", "auto", "enrolled"]


@dataclass(frozen=True, slots=True, eq=False)
class EnrolledVoice:
    """A voice that counts as the user: `vector` float32 [size], of length 1, of the speaker encoder that judges the
    session's turns, made of `speech_s` seconds of speech. Two are equal only if they are the same object.
    """

    vector: Pcm
    speech_s: float


@dataclass(frozen=True, slots=True)
class ServerVad:
    """The server finds the turns by voice activity detection (VAD).

    - `threshold`: the speech probability from which a frame is speech.
    - `prefix_padding_ms`: audio before the speech that still belongs to the turn.
    - `silence_duration_ms`: the pause that ends a turn.
    - `eagerness`: with it, how a turn sounds and what was said decide how long its pauses may last, at most
      `silence_duration_ms`. None: nothing but the silence counts.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 200
    eagerness: Eagerness | None = None


@dataclass(frozen=True, slots=True)
class StreamTuning:
    """How a transcript is streamed. None leaves the model's own measured default (`TranscriberProfile`).

    What is asked for above what the server allows or the model can do is cut to it (`contracts.tuned`).

    - `segment_duration_s`: new audio before the next partial, also for the first of a turn.
    - `rollback_tokens`: tokens at the end of a hypothesis that are not sent.
    - `unfixed_chunks`: partials at the head of a window that send nothing.
    - `max_prefix_tokens`: the longest forced prefix; a window with a longer one is cut.
    - `max_audio_s`: the longest window.
    - `max_tokens`: the most tokens that one decode may add.
    - `keep_context`: the model is given what was said before a window's pause, however long that was: text, to
      `max_prefix_tokens`, and for a model that goes on from it, audio, to `max_audio_s`. False: nothing of it.
    """

    segment_duration_s: float | None = None
    rollback_tokens: int | None = None
    unfixed_chunks: int | None = None
    max_prefix_tokens: int | None = None
    max_audio_s: float | None = None
    max_tokens: int | None = None
    keep_context: bool | None = None


@dataclass(frozen=True, slots=True)
class TranscriptionConfig:
    """The configuration of one transcription session.

    - `model`: the name that the client used; reported back, while the session has one transcriber.
    - `language`: ISO-639-1; None: it is detected.
    - `languages`: where it is detected, it is one of these; empty: any that the model knows.
    - `prompt`: words and names to expect, as a hint to the model.
    - `keyterms`: words and phrases that are likely to be said; the model raises them in its search if it can.
    - `vad`: how the server finds turns; None: the client commits them.
    - `word_times`: TranscriptDelta and TranscriptDone carry word times, which costs an alignment for each decode.
    - `logprobs`: they carry the log-probabilities of their tokens, which costs an alignment for each final.
    - `reports_language`: LanguageDetected is reported.
    - `idle_timeout_ms`: with a VAD, after so much audio without speech a SilenceCommitted is reported; None: never.
    - `partials`: words are sent while a turn is open; without it there are no deltas before the turn has ended.
    - `preflight`: the turns are answered. TranscriptGuessed is reported in a pause that may end the turn, and a turn
      whose end confirms its guess is done at once.
    - `tuning`: how the transcript is streamed.
    - `primary_speaker`: turns of other voices than the user's are told from the user's: `auto` learns who the user is,
      `enrolled` compares with `enrolled_voices`, of which there is at least one then, and else none.
    """

    model: str = "default"
    language: str | None = None
    prompt: str = ""
    vad: ServerVad | None = None
    word_times: bool = False
    partials: bool = True
    preflight: bool = False
    tuning: StreamTuning = field(default_factory=StreamTuning)
    keyterms: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    logprobs: bool = False
    reports_language: bool = False
    idle_timeout_ms: float | None = None
    primary_speaker: PrimarySpeakerMode = "off"
    enrolled_voices: tuple[EnrolledVoice, ...] = ()


# --- commands ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConfigureTranscription:
    """Set the session's configuration as a whole, at the start and after each change. It holds from the audio that
    follows.
    """

    config: TranscriptionConfig


@dataclass(frozen=True, slots=True)
class AppendAudio:
    """Add audio from the client. pcm: float32 [num_samples], mono, [-1, 1], 16 kHz, of any length."""

    pcm: Pcm


@dataclass(frozen=True, slots=True)
class CommitAudio:
    """End the client's turn here. With `final` False the turn's audio goes on, and its transcription is only to be
    started. `event_id`: the client's name for the message.
    """

    final: bool = True
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class ClearAudio:
    """Drop the audio that was sent since the last commit, whether or not there is speech in it."""


TranscriptionCommand = ConfigureTranscription | AppendAudio | CommitAudio | ClearAudio


# --- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """Speech began, at `at_ms`, from which the prefix padding is already taken off. `turn` numbers turns from 0."""

    turn: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    """The turn's speech ended. `at_ms` is the end of its audio, the silence that decided it included."""

    turn: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class TurnCommitted:
    """The turn's audio, from `start_ms` to `end_ms`, is complete; what follows for the turn is its transcript.
    `speech_end_ms` is where the pause began that ended it; None where it ended in no pause.
    """

    turn: int
    start_ms: int
    end_ms: int
    speech_end_ms: int | None = None


@dataclass(frozen=True, slots=True)
class SilenceCommitted:
    """Nobody spoke for `idle_timeout_ms`, from `start_ms` to `end_ms`: that is the turn whose TurnCommitted follows,
    and it has no words.
    """

    turn: int
    start_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class TurnCleared:
    """The audio since the last commit was dropped; a turn that was open ends without a transcript."""


@dataclass(frozen=True, slots=True)
class CommitRefused:
    """A commit found only `have_ms` of new audio, less than the `minimum_ms` that the dialect asks for, and did
    nothing. `event_id`: as the commit has it.
    """

    have_ms: int
    minimum_ms: int
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class TranscriptDelta:
    """Words of a turn that will not change any more. Joined, a turn's deltas are `TranscriptDone.streamed`.

    `words`: their times in seconds of session audio. `logprobs`: of their tokens; the first token of a turn may begin
    with a space that `text` lacks. Both are empty unless they were asked for.
    """

    turn: int
    text: str
    words: tuple[Word, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TranscriptGuessed:
    """What the open turn's transcript will be if the pause that began at `speech_end_ms` ends it. It is for the
    response that may be begun early, never for a client. A GuessDropped or the turn's end follows.
    """

    turn: int
    text: str
    speech_end_ms: int = 0


@dataclass(frozen=True, slots=True)
class TranscriptPartial:
    """What the open turn likely says so far; any of it may change. It is for the decision about an overlap, never for a
    client.
    """

    turn: int
    text: str


@dataclass(frozen=True, slots=True)
class GuessDropped:
    """Speech went on: the pause did not end the turn, and the last TranscriptGuessed is void."""

    turn: int


@dataclass(frozen=True, slots=True)
class TranscriptDone:
    """A turn's transcript is complete.

    - `text`: the best reading of the whole turn, from a decode that was not bound to what had been sent.
    - `streamed`: what the deltas add up to. It differs from `text` where the model later preferred another word to one
      that had already been sent.
    - `words`: word times in seconds of session audio; empty unless they were asked for.
    - `language`: ISO-639-1, as asked for or detected.
    - `audio_s`: the length of the turn's audio in seconds.
    - `prompt_tokens`, `completion_tokens`: the tokens of all decodes of the turn.
    - `logprobs`: of the tokens of `text`; empty unless they were asked for.
    - `speaker`: whose voice it was, `user` or `other`; "" where that was not asked for, or nobody can say.
    """

    turn: int
    text: str
    streamed: str
    words: tuple[Word, ...]
    language: str
    audio_s: float
    prompt_tokens: int
    completion_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    speaker: str = ""


@dataclass(frozen=True, slots=True)
class LanguageDetected:
    """The language that the session is transcribed in from now on, found in the speech of `turn`: reported when it
    becomes known and when it changes, and never where the client has named the language. `probability` is how sure
    the model is, in [0, 1].
    """

    turn: int
    language: str
    probability: float


@dataclass(frozen=True, slots=True)
class TranscriptFailed:
    """The model failed on this turn, which has no transcript; the session goes on. `message` says why."""

    turn: int
    message: str


@dataclass(frozen=True, slots=True)
class SessionEnding:
    """The server ends the session, with the code `expired`, `draining` or `overflow`. Nothing follows."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class OverlapStarted:
    """Speech began during a response and may be no more than a backchannel. It is reported for clients that can duck
    the response until an OverlapDecided for the same turn follows.
    """

    turn: int


@dataclass(frozen=True, slots=True)
class OverlapDecided:
    """Whether an overlap takes the floor, and the reason, as a word that full-duplex clients are given. A turn that
    does not take the floor may still turn out to, when its words are known. `turn`: None where no one turn takes it,
    because an answer that is due ends the response under way.
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
