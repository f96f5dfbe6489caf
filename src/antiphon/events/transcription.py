"""The commands that protocols pass to a transcription session, and the events that the session reports.

Audio is mono float32 in [-1, 1] at 16 kHz (`audio.SAMPLE_RATE_HZ`). Protocols convert the wire's rates and codecs.
Times are milliseconds of session audio, counted in samples. Turns are numbered from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from antiphon.audio import Pcm
from antiphon.events.words import TokenLogprob, Word

# --- configuration -------------------------------------------------------------------------------------------------


# How quickly a turn detector considers a turn to be ended.
Eagerness = Literal["low", "medium", "high", "auto"]
# What an application expects the user to say next: a number or a spelling, yes or no, or a longer answer.
Expects = Literal["digits", "yes_no", "open"]
PrimarySpeakerMode = Literal["off", "auto", "enrolled"]


@dataclass(frozen=True, slots=True, eq=False)
class EnrolledVoice:
    """A voice that counts as the user's. Two EnrolledVoices are equal only if they are the same object.

    `vector` is a float32 [size] with norm 1. It was made from `speech_s` seconds of speech, by the same speaker encoder
    that compares the session's turns.
    """

    vector: Pcm
    speech_s: float


@dataclass(frozen=True, slots=True, eq=False)
class KnownVoice:
    """A speaker whose voice is known, so that turns and words have the speaker's name. Two KnownVoices are equal only
    if they are the same object.

    - `name`: the speaker's name.
    - `vector`: float32 [size] with norm 1, from the speaker encoder with which it is compared.
    - `speech_s`: the seconds of speech from which it was made.
    """

    name: str
    vector: Pcm
    speech_s: float


@dataclass(frozen=True, slots=True)
class ServerVad:
    """The server detects turns by voice activity detection (VAD).

    - `threshold`: the speech probability from which a frame counts as speech.
    - `prefix_padding_ms`: the duration of audio before the speech that is added to the turn.
    - `silence_duration_ms`: the pause that ends a turn.
    - `eagerness`: if set, a turn's sound and words decide how long its pauses may last, up to `silence_duration_ms`.
      If None, only the duration of the pause counts.
    - `expects`: what the application expects the user to say, which counts with `eagerness` only.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 200
    eagerness: Eagerness | None = None
    expects: Expects | None = None


@dataclass(frozen=True, slots=True)
class StreamTuning:
    """How a transcript is streamed. None selects the model's default, which was measured (`TranscriberProfile`). Values
    above the limits of the server or the model are reduced to these limits (`contracts.tuned`).
    """

    # Duration of new audio before the next partial, in seconds. It also applies to the first partial of a turn.
    segment_duration_s: float | None = None
    # Number of tokens at the end of a hypothesis that are held back.
    rollback_tokens: int | None = None
    # Number of partials at the start of a window that send nothing.
    unfixed_chunks: int | None = None
    # Maximum length of the forced prefix, in tokens. A window with a longer prefix is cut.
    max_prefix_tokens: int | None = None
    # Maximum length of a window, in seconds.
    max_audio_s: float | None = None
    # Maximum number of new tokens in one decode.
    max_tokens: int | None = None
    # Whether the model gets the speech from before the pause that precedes a window, however long the pause is: text up
    # to `max_prefix_tokens` and, for models that can continue from audio, audio up to `max_audio_s`. If False, it gets
    # no context.
    keep_context: bool | None = None


@dataclass(frozen=True, slots=True)
class TranscriptionConfig:
    """The configuration of one transcription session."""

    # The model's name as the client spells it. It is only reported back, because a session has one transcriber.
    model: str = "default"
    # ISO-639-1 code of the language; None to detect it.
    language: str | None = None
    # Words and names that the audio is likely to contain, as a hint for the model.
    prompt: str = ""
    # How the server detects turns. If None, the client ends turns by committing its audio.
    vad: ServerVad | None = None
    # Whether TranscriptDelta and TranscriptDone have word times. They require an alignment for each decode.
    word_times: bool = False
    # Whether deltas are sent while a turn is open. If not, they are sent after the turn has ended.
    partials: bool = True
    # Whether the session responds to turns. If so, TranscriptGuessed is reported in a pause that may end the turn. If
    # the turn then ends as guessed, its transcript is done at once.
    preflight: bool = False
    # How the transcript is streamed.
    tuning: StreamTuning = field(default_factory=StreamTuning)
    # Words and phrases that are likely to be said. If the model can, it boosts them in its search.
    keyterms: tuple[str, ...] = ()
    # The languages among which detection chooses; empty for all languages that the model knows.
    languages: tuple[str, ...] = ()
    # Whether TranscriptDelta and TranscriptDone have the log-probabilities of their tokens. They require an alignment
    # for each final.
    logprobs: bool = False
    # Whether LanguageDetected is reported.
    reports_language: bool = False
    # With a VAD: duration of silence after which SilenceCommitted is reported, in milliseconds; None for never.
    idle_timeout_ms: float | None = None
    # How the user's turns are distinguished from turns of other speakers. `auto` learns the user's voice. `enrolled`
    # compares voices with `enrolled_voices`.
    primary_speaker: PrimarySpeakerMode = "off"
    # The voices for `enrolled`, at least one; empty in the other modes.
    enrolled_voices: tuple[EnrolledVoice, ...] = ()
    # Whether TranscriptDone has a label of the turn's voice.
    speaker_labels: bool = False
    # The speakers whose turns have their names as labels.
    known_voices: tuple[KnownVoice, ...] = ()


# --- commands ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConfigureTranscription:
    """Replace the whole configuration, at the start and after each change. It applies to later audio."""

    config: TranscriptionConfig


@dataclass(frozen=True, slots=True)
class AppendAudio:
    """Add audio from the client. `pcm`: float32 [num_samples] in [-1, 1], mono, 16 kHz, of any length."""

    pcm: Pcm


@dataclass(frozen=True, slots=True)
class CommitAudio:
    """End the client's turn here. If `final` is False, the turn stays open, and only its transcription starts.

    `event_id` is the id that the client gave to the message.
    """

    final: bool = True
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class ClearAudio:
    """Drop the audio since the last commit, even if it contains speech."""


TranscriptionCommand = ConfigureTranscription | AppendAudio | CommitAudio | ClearAudio


# --- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """Speech began. `at_ms` is its start, minus the prefix padding. `turn` numbers turns from 0."""

    turn: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    """The turn's speech ended. `at_ms` is the end of the turn's audio, including the silence that ended it."""

    turn: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class TurnCommitted:
    """The turn's audio is complete. It lasts from `start_ms` to `end_ms`. Only its transcript follows.

    `speech_end_ms` is the start of the pause that ended the turn; None if no pause ended it.
    """

    turn: int
    start_ms: int
    end_ms: int
    speech_end_ms: int | None = None


@dataclass(frozen=True, slots=True)
class SilenceCommitted:
    """The user was silent for `idle_timeout_ms`, from `start_ms` to `end_ms`. This silence counts as a turn without
    words, whose TurnCommitted follows.
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

    `event_id` is that of the commit.
    """

    have_ms: int
    minimum_ms: int
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class TranscriptDelta:
    """Words of a turn that will not change any further. `TranscriptDone.streamed` is the joined deltas of a turn.

    - `words`: the words, with times in seconds of session audio; empty unless requested.
    - `logprobs`: the log-probabilities of the tokens; empty unless requested. The first token of a turn may begin
      with a space that is not in `text`.
    """

    turn: int
    text: str
    words: tuple[Word, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TranscriptGuessed:
    """The transcript that the open turn will have if the pause that began at `speech_end_ms` ends the turn.

    It is used for preemptive responses and is never sent to a client. GuessDropped or the end of the turn follows.
    """

    turn: int
    text: str
    speech_end_ms: int = 0


@dataclass(frozen=True, slots=True)
class TranscriptPartial:
    """The likely text of the open turn so far. Any part of it may change. It is used for overlap decisions, and never
    sent to a client.
    """

    turn: int
    text: str


@dataclass(frozen=True, slots=True)
class GuessDropped:
    """Speech continued, so the pause did not end the turn, and the last TranscriptGuessed is invalid."""

    turn: int


@dataclass(frozen=True, slots=True)
class TranscriptDone:
    """A turn's transcript is complete. No transcription event of the turn follows."""

    # The number of the turn.
    turn: int
    # The best transcript of the whole turn, from a decode without the words already sent as a forced prefix.
    text: str
    # The joined deltas. They differ from `text` if the model later preferred other words than those already sent.
    streamed: str
    # The words, with times in seconds of session audio; empty unless requested.
    words: tuple[Word, ...]
    # ISO-639-1 code of the configured or detected language.
    language: str
    # Duration of the turn's audio, in seconds.
    audio_s: float
    # Number of prompt tokens in all decodes of the turn.
    prompt_tokens: int
    # Number of generated tokens in all decodes of the turn.
    completion_tokens: int
    # The log-probabilities of the tokens of `text`; empty unless requested.
    logprobs: tuple[TokenLogprob, ...] = ()
    # The speaker, `user` or `other`; "" if not requested or unknown.
    speaker: str = ""
    # The label of the turn's voice: a known speaker's name, or A, B, … in the order in which voices are first heard; ""
    # if not requested, or if the turn is too short.
    speaker_label: str = ""


@dataclass(frozen=True, slots=True)
class LanguageDetected:
    """The language in which the session is transcribed from now on. It was detected in the speech of `turn`.

    It is reported when it becomes known and when it changes, but never if the client has set the language.
    `probability` is the model's probability of the language, in [0, 1].
    """

    turn: int
    language: str
    probability: float


@dataclass(frozen=True, slots=True)
class TranscriptFailed:
    """The model failed on this turn, so the turn has no transcript. The session continues. `message` has the reason."""

    turn: int
    message: str


@dataclass(frozen=True, slots=True)
class SessionEnding:
    """The server ends the session. The code is `expired`, `draining` or `overflow`. No event follows."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class OverlapStarted:
    """Speech began during a response. It may be only a backchannel.

    It is reported for clients that can duck the response until an OverlapDecided for the same turn.
    """

    turn: int


@dataclass(frozen=True, slots=True)
class OverlapDecided:
    """The decision whether an overlap takes the floor, and the reason that full-duplex clients receive.

    A turn that does not take the floor may still do so when its words are known. `turn` is None if the response in
    progress is ended by another response that is due, not by a turn.
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
