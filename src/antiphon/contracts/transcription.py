"""The contract of transcribers, which turn speech into text."""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from antiphon.audio import Pcm
from antiphon.events.transcription import StreamTuning
from antiphon.events.words import TokenLogprob, Word

TranscriptionTask = Literal["transcribe", "translate"]


@dataclass(frozen=True, slots=True)
class TuningLimits:
    """The limits up to which a session's tuning may raise a profile's values.

    - `max_audio_s`: the longest window in seconds, including the context audio before it.
    - `max_prefix_tokens`: the longest forced prefix.
    - `max_tokens`: the most tokens that one decode may add.
    - `context_tokens`: the most tokens of text before a window that the model accepts.
    - `context_audio`: whether a window may begin with the audio of the previous window, and reuse its computation.
    """

    max_audio_s: float
    max_prefix_tokens: int
    max_tokens: int
    context_tokens: int = 0
    context_audio: bool = False


@dataclass(frozen=True, slots=True)
class TranscriberProfile:
    """Facts of a transcriber. Its sessions use them to decide when to decode and what to send. Most values are
    measured.
    """

    # The model's name for clients.
    id: str
    # Languages that it transcribes, as ISO-639-1 codes.
    languages: tuple[str, ...]
    # Seconds of new audio before the next partial.
    step_s: float
    # Same as `step_s`, while no words of the turn have been sent.
    first_step_s: float
    # The audio that must arrive between a word's first appearance at its position and its sending, in seconds.
    agreement_s: float
    # Same as `agreement_s`, for the first words of a turn.
    first_agreement_s: float
    # The number of tokens at the end of a hypothesis that are neither sent nor forced as prefix of the next hypothesis.
    rollback_tokens: int
    # A word is sent only if its least likely token has at least this probability.
    min_probability: float
    # The number of partials at the beginning of a window that send no words and force no prefix.
    unfixed_chunks: int
    # Seconds of silence that end a window under server VAD.
    settle_s: float
    # Speech that begins within this time after a window uses that window's audio as context; 0: no window has context.
    context_pause_s: float
    # Seconds of silence that end a window if the client commits the turns.
    pause_s: float
    # The length from which a window counts as long and ends at shorter pauses, in seconds.
    long_window_s: float
    # Seconds of silence that end a long window.
    long_pause_s: float
    # The longest window, in seconds. A window of this length is cut between two words.
    max_window_s: float
    # The most tokens of text before the window that the model gets.
    context_tokens: int
    # The most tokens that one decode may add.
    max_tokens: int
    # The longest forced prefix, in tokens. A window with a longer one is cut.
    max_prefix_tokens: int
    # True if it can also translate into English.
    translates: bool = True
    # True if a final is decoded with the words that were sent as its prefix. False: finals have no prefix.
    final_keeps_prefix: bool = False
    # True if its word times are measured in the audio. False: they are estimated.
    aligns_words: bool = True
    # True if it boosts `Window.keyterms` in its search. For other models, sessions put the terms into `Window.prompt`.
    keyterms: bool = False
    # The first word of a turn, if it has at least this probability, is sent after two partials agree on it or a likely
    # word follows it. A less likely first word waits for `agreement_s`. None: the first word waits like the other
    # words.
    first_probability: float | None = None
    # The limits up to which a session's tuning may raise these values; None: tuning can only lower them.
    limits: TuningLimits | None = None


@dataclass(frozen=True, slots=True)
class HypothesisWord:
    """One word of a hypothesis.

    `text` is the word in the model's spelling, with its leading space. `probability` is the probability of the word's
    least likely token. `logprobs` has one entry for each token if the window asked for log-probabilities.
    """

    text: str
    tokens: tuple[int, ...]
    probability: float
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """The audio to decode, and how."""

    # float32 [num_samples], mono, 16 kHz, at most the profile's longest window.
    pcm: Pcm
    # Tokens that the hypothesis must begin with.
    prefix: tuple[int, ...] = ()
    # Text spoken before the window, at most the session's `context_tokens`. Neither `context` nor `prompt` can become a
    # control token.
    context: str = ""
    # The client's hint: words and names to expect.
    prompt: str = ""
    # The language as ISO-639-1; None: it is detected.
    language: str | None = None
    # The languages that detection may choose from; empty: all languages of the model. A model whose detection cannot be
    # restricted ignores them.
    languages: tuple[str, ...] = ()
    # The language that detection returns unless the audio is clearly in another one. Models that generate the language
    # as part of their output ignore it.
    likely_language: str | None = None
    # True: decode the whole window as well as possible. False: decode it quickly.
    final: bool = False
    # Whether the hypothesis has word times.
    word_times: bool = False
    # Whether the words have the log-probabilities of their tokens.
    logprobs: bool = False
    # The most tokens to add; None: the profile's value.
    max_tokens: int | None = None
    # The position in the session's audio at which the window begins, in samples. Windows with the same position begin
    # with the same audio, so a stream may reuse earlier results.
    start_sample: int = 0
    # Words and phrases that are likely to be said. Empty unless the profile has `keyterms` set.
    keyterms: tuple[str, ...] = ()
    # True for a partial of a turn of which no words have been sent yet. It is decoded before other partials.
    urgent: bool = False
    # Deadline of the hypothesis, in monotonic seconds. Among equally urgent windows the earliest deadline goes first.
    # None: the same default as other work without a deadline.
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A transcriber's text for a window."""

    # The words after the prefix, in the model's spelling.
    pieces: tuple[HypothesisWord, ...]
    # The language as ISO-639-1.
    language: str
    # The probability of the detected language; 1.0 if the language was given or the likely one was kept.
    language_probability: float
    # False if the model takes the window for noise. The words are then dropped.
    is_speech: bool
    # The number of tokens that the decode read.
    prompt_tokens: int
    # The number of tokens that the decode added.
    completion_tokens: int
    # One word for each of the pieces, with times in seconds from the window's start. Empty unless the window asked for
    # word times.
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class TranscriptSegment:
    """One segment of a file's transcript, with the fields of OpenAI's `verbose_json`. Times count from the file's
    start.
    """

    # The number of the segment, from 0.
    id: int
    # The offset of its window in the file, as in `verbose_json`.
    seek: int
    # When the segment begins.
    start_s: float
    # When the segment ends.
    end_s: float
    # The segment's text.
    text: str
    # The tokens of the text.
    tokens: tuple[int, ...]
    # The temperature that it was decoded with.
    temperature: float
    # The mean log-probability of its tokens.
    avg_logprob: float
    # The length of the text relative to its compressed length; high for repetitive text.
    compression_ratio: float
    # The probability that the segment contains no speech.
    no_speech_prob: float
    # The words of the segment; empty unless word times were requested.
    words: tuple[Word, ...] = ()
    # The tokens of each of the words; empty if the transcriber does not report them.
    word_tokens: tuple[tuple[int, ...], ...] = ()
    # Who says it: a given name, or a label such as "A"; empty if speakers are not distinguished. Transcribers leave it
    # empty.
    speaker: str = ""


def speaker_label(number: int) -> str:
    """Return the label of a speaker without a name, by its number from 0: A, B, ..., Z, AA, AB, ..."""
    label = ""
    while number >= 0:
        label = chr(ord("A") + number % 26) + label
        number = number // 26 - 1
    return label


@dataclass(frozen=True, slots=True)
class FileOptions:
    """How to transcribe a file.

    - `language`: ISO-639-1; None: it is detected.
    - `prompt`: a hint to the model.
    - `temperature`: 0 decodes the likeliest tokens.
    - `task`: "translate" gives English text.
    - `word_times`: the segments have word times.
    """

    language: str | None = None
    prompt: str = ""
    temperature: float = 0.0
    task: TranscriptionTask = "transcribe"
    word_times: bool = False


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Facts of a file that are known after decoding all of it: its language (ISO-639-1) and its length in seconds."""

    language: str
    duration_s: float


async def one_slab(pcm: Pcm) -> AsyncIterator[Pcm]:
    """Yield audio that is already in memory as the only slab for `Transcriber.transcribe`."""
    yield pcm


class TranscriptionStream(Protocol):
    """The windows of one session, decoded one at a time. A model may keep results for the last window."""

    async def decode(self, window: Window) -> Hypothesis:
        """Decode one window.

        Waits in the model's lane, where finals and urgent partials go before other partials.

        Args:
            window: The audio to decode, and how.

        Raises:
            Refused: The lane is full.
            ModelError: The model failed.
        """
        ...

    def replace(self, window: Window) -> bool:
        """Replace the window of a `decode` that still waits in the lane; its deadline stays the same. Does not wait.

        Args:
            window: The window to decode instead.

        Returns:
            False if no `decode` waits, or if it has already begun. A `decode` that has begun returns the result of its
            own window. A model that cannot replace windows always returns False.
        """
        ...

    def close(self) -> None:
        """Free the resources of the stream. No window is decoded afterwards. Does not wait."""
        ...


class Transcriber(Protocol):
    """One loaded transcriber, shared by all sessions."""

    @property
    def profile(self) -> TranscriberProfile:
        """The transcriber's facts, which do not change while it is loaded. Sessions may use a copy
        with other values.
        """
        ...

    def open(self) -> TranscriptionStream:
        """Open the stream of a new session. It uses no memory of the model before its first window."""
        ...

    async def align(self, pcm: Pcm, words: Sequence[str], language: str) -> tuple[Word, ...]:
        """Find the times of words in audio that is known to contain them.

        Waits in the model's lane.

        Args:
            pcm: float32 [num_samples], mono, 16 kHz.
            words: The words that are spoken in `pcm`, in order.
            language: Their language as ISO-639-1.

        Returns:
            The words with times in seconds from the start of `pcm`; empty if there are too many words or too much audio
            for one window.

        Raises:
            Refused: The lane is full.
            ModelError: The model failed.
        """
        ...

    def busy(self) -> bool:
        """Whether work waits for a worker, so that a speculative decode would delay it. Does not wait."""
        ...

    def overdue(self) -> bool:
        """Whether work waits past its deadline, so that callers should skip optional work. Does not wait."""
        ...

    def transcribe(
        self, slabs: AsyncIterable[Pcm], options: FileOptions
    ) -> AsyncIterator[FileInfo | TranscriptSegment]:
        """Transcribe a file of any length.

        The file's windows wait in the model's lane after those of live sessions.

        Args:
            slabs: float32 [num_samples] of any length, mono, 16 kHz. They are read as needed, so a long file is never
                in memory as a whole.
            options: How to transcribe the file.

        Returns:
            The segments in order, then one FileInfo.

        Raises:
            Refused: The lane is full.
            ModelError: The model failed.
            Exception: Anything that reading `slabs` raises.
        """
        ...


@dataclass(frozen=True, slots=True)
class TuningCaps:
    """Upper limits on the tuning that a client may request, for all models: seconds of audio, and tokens."""

    max_audio_s: float = 300.0
    max_prefix_tokens: int = 1024
    max_tokens: int = 4096


def tuned(profile: TranscriberProfile, tuning: StreamTuning) -> TranscriberProfile:
    """Return the profile with a session's own values instead of the model's defaults, cut to the model's limits.

    `long_window_s` grows in proportion if `max_window_s` is raised above the model's default.

    Args:
        profile: The profile of the model.
        tuning: The session's values; None leaves the model's default.
    """
    limits = profile.limits or TuningLimits(profile.max_window_s, profile.max_prefix_tokens, profile.max_tokens)
    changes: dict[str, float | int] = {}
    if tuning.segment_duration_s is not None:
        changes |= {"step_s": tuning.segment_duration_s, "first_step_s": tuning.segment_duration_s}
    if tuning.rollback_tokens is not None:
        changes["rollback_tokens"] = tuning.rollback_tokens
    if tuning.unfixed_chunks is not None:
        changes["unfixed_chunks"] = tuning.unfixed_chunks
    if tuning.max_audio_s is not None:
        longest = min(limits.max_audio_s, tuning.max_audio_s)
        in_proportion = profile.long_window_s * max(1.0, longest / profile.max_window_s)
        changes |= {"max_window_s": longest, "long_window_s": min(in_proportion, longest)}
    if tuning.max_prefix_tokens is not None:
        changes["max_prefix_tokens"] = min(limits.max_prefix_tokens, tuning.max_prefix_tokens)
    if tuning.max_tokens is not None:
        changes["max_tokens"] = min(limits.max_tokens, tuning.max_tokens)
    if tuning.keep_context:
        prefix_tokens = tuning.max_prefix_tokens or limits.context_tokens
        changes["context_tokens"] = min(limits.context_tokens, prefix_tokens)
        changes["context_pause_s"] = math.inf if limits.context_audio else 0.0
    elif tuning.keep_context is False:
        changes |= {"context_tokens": 0, "context_pause_s": 0.0}
    return replace(profile, **changes)  # type: ignore[arg-type]
