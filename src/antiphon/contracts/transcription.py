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
    """What a session's tuning may raise a profile's values to.

    - `max_audio_s`: the longest window in seconds, the audio before it included.
    - `max_prefix_tokens`: the longest forced prefix.
    - `max_tokens`: the most tokens that one decode may add.
    - `context_tokens`: the most tokens of text before a window that the model can be given.
    - `context_audio`: a window may begin with the audio of the one before it, and goes on from what was computed.
    """

    max_audio_s: float
    max_prefix_tokens: int
    max_tokens: int
    context_tokens: int = 0
    context_audio: bool = False


@dataclass(frozen=True, slots=True)
class TranscriberProfile:
    """Facts of a transcriber, by which its sessions decide when to decode and what to send. Most are measured."""

    # Its name for clients.
    id: str
    # ISO-639-1.
    languages: tuple[str, ...]
    # Seconds of new audio before the next partial.
    step_s: float
    # The same while nothing of the turn has been sent.
    first_step_s: float
    # Seconds of audio that must come in after a word first stood at its place before it is sent.
    agreement_s: float
    # The same for the first words of a turn.
    first_agreement_s: float
    # Tokens at the end of a hypothesis that are neither sent nor forced as the next one's prefix.
    rollback_tokens: int
    # What a word's least likely token must have for the word to be sent.
    min_probability: float
    # Partials at the head of a window that send nothing and force nothing.
    unfixed_chunks: int
    # Seconds of silence that end a window under server VAD.
    settle_s: float
    # Speech that begins at most this time after a window has that window's audio as context; 0: no window has context.
    context_pause_s: float
    # Seconds of silence that end a window where the client commits.
    pause_s: float
    # A window of this length is long, and ends at shorter pauses.
    long_window_s: float
    # Seconds of silence that end a long window.
    long_pause_s: float
    # A window of this length is cut between two words.
    max_window_s: float
    # Tokens of text before the window that the model is given.
    context_tokens: int
    # The most tokens that one decode may add.
    max_tokens: int
    # A window whose forced prefix is longer is cut.
    max_prefix_tokens: int
    # It can also translate into English.
    translates: bool = True
    # A final goes on from what was sent; otherwise it is decoded without a prefix.
    final_keeps_prefix: bool = False
    # Its word times are measured in the audio, and not estimated.
    aligns_words: bool = True
    # It raises `Window.keyterms` in its search; sessions give them to other models in `Window.prompt`.
    keyterms: bool = False
    # A turn's very first word of at least this probability is sent as soon as two partials have it or a likely word
    # follows it, and a less likely one waits for `agreement_s`. None: it waits as the other first words do.
    first_probability: float | None = None
    # What a session's tuning may raise these values to; None: it can only lower them.
    limits: TuningLimits | None = None


@dataclass(frozen=True, slots=True)
class HypothesisWord:
    """One word of a hypothesis: its text as the model spelled it, with its leading space, its tokens, and the
    probability of the least likely of them. `logprobs` has one entry for each token where the window asked for them.
    """

    text: str
    tokens: tuple[int, ...]
    probability: float
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """What is to be decoded.

    - `pcm`: float32 [num_samples], mono, 16 kHz, at most the profile's longest window.
    - `prefix`: tokens that the hypothesis must begin with.
    - `context`: text spoken before the window, of at most the session's `context_tokens`. Neither it nor `prompt` can
      become a control token.
    - `prompt`: the client's hint, words and names to expect.
    - `keyterms`: words and phrases that are likely to be said; only where the profile says that the model takes them.
    - `language`: ISO-639-1; None: it is detected.
    - `languages`: detection chooses one of these; empty: one of all that the model knows. A model that cannot be
      restricted ignores them.
    - `likely_language`: detection gives this one unless the audio is clearly in another. A model that writes the
      language itself ignores it.
    - `final`: decode the whole window as well as possible; otherwise quickly.
    - `word_times`: the hypothesis has word times.
    - `logprobs`: its pieces have the log-probabilities of their tokens.
    - `max_tokens`: the most tokens to add; None: the profile's.
    - `start_sample`: where in the session the window begins: windows with the same start begin with the same audio, so
      a stream may go on from what it computed.
    - `urgent`: a partial before which nothing was sent of its turn, and which goes before other partials.
    - `deadline_s`: by when the hypothesis is wanted, in monotonic seconds. Among windows that are equally urgent, the
      earliest deadline goes first. None: soon, like that of other work without a deadline.
    """

    pcm: Pcm
    prefix: tuple[int, ...] = ()
    context: str = ""
    prompt: str = ""
    language: str | None = None
    languages: tuple[str, ...] = ()
    likely_language: str | None = None
    final: bool = False
    word_times: bool = False
    logprobs: bool = False
    max_tokens: int | None = None
    start_sample: int = 0
    keyterms: tuple[str, ...] = ()
    urgent: bool = False
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A transcriber's text for a window.

    - `pieces`: its words after the prefix, as the model spelled them.
    - `language`, `language_probability`: ISO-639-1, and how sure the model is of what it detected; 1.0 where the
      language was given or the likely one was kept.
    - `is_speech`: False where the model takes the window for noise; its words are then dropped.
    - `prompt_tokens`, `completion_tokens`: what the decode read and added.
    - `words`: with word times, one for each of the pieces, in seconds from the window's start.
    """

    pieces: tuple[HypothesisWord, ...]
    language: str
    language_probability: float
    is_speech: bool
    prompt_tokens: int
    completion_tokens: int
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class TranscriptSegment:
    """One segment of a file's transcript, with the fields of OpenAI's `verbose_json`. Times are seconds from the file's
    start; `words` is empty unless word times were asked for. `word_tokens`: the tokens of each of the words, or empty
    where the transcriber does not tell them.
    """

    id: int
    seek: int
    start_s: float
    end_s: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: tuple[Word, ...] = ()
    word_tokens: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class FileOptions:
    """How to transcribe a file. `language` is ISO-639-1, None: it is detected; `prompt` is a hint; `word_times` asks
    for word times; `task` "translate" gives English text.
    """

    language: str | None = None
    prompt: str = ""
    temperature: float = 0.0
    task: TranscriptionTask = "transcribe"
    word_times: bool = False


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What is known of a file once all of it is decoded: its language (ISO-639-1) and its length in seconds."""

    language: str
    duration_s: float


async def one_slab(pcm: Pcm) -> AsyncIterator[Pcm]:
    """Give audio that is held whole to `Transcriber.transcribe`, as its only slab."""
    yield pcm


class TranscriptionStream(Protocol):
    """The windows of one session, decoded one at a time. A model may keep what it computed for the window it decoded
    last.
    """

    async def decode(self, window: Window) -> Hypothesis:
        """Decode one window. Waits in the model's lane, finals and urgent partials before other partials. Raises
        Refused where the lane is full, ModelError.
        """
        ...

    def replace(self, window: Window) -> bool:
        """Have the `decode` that waits in the lane decode this window in place of its own, at the same deadline.

        Returns False where none waits or it has begun, so that its result is that of the window it was called with. A
        model that cannot do so always returns False. Does not wait.
        """
        ...

    def close(self) -> None:
        """Give back what the stream keeps. No window is decoded afterwards. Does not wait."""
        ...


class Transcriber(Protocol):
    """One loaded transcriber, shared by all sessions."""

    @property
    def profile(self) -> TranscriberProfile:
        """The transcriber's facts, which do not change while it is loaded. A session may follow a copy with its own
        tuning.
        """
        ...

    def open(self) -> TranscriptionStream:
        """Open the stream of a new session. It takes no memory of the model before its first window."""
        ...

    async def align(self, pcm: Pcm, words: Sequence[str], language: str) -> tuple[Word, ...]:
        """Find where `words` lie in audio that is known to say them, as words with times in seconds from the start of
        `pcm`.

        pcm: float32 [num_samples], mono, 16 kHz. Returns nothing where the words are too many or the audio too long for
        one window. Waits in the model's lane. Raises Refused, ModelError.
        """
        ...

    def busy(self) -> bool:
        """Whether work waits for a worker, so that a decode that may turn out to be useless would delay it. Does not
        wait.
        """
        ...

    def overdue(self) -> bool:
        """Whether work waits for a worker past its deadline: what can be left out should not be asked for. Does not
        wait.
        """
        ...

    def transcribe(
        self, slabs: AsyncIterable[Pcm], options: FileOptions
    ) -> AsyncIterator[FileInfo | TranscriptSegment]:
        """Transcribe a file of any length: yields its segments in order, then one FileInfo.

        slabs: float32 [num_samples] of any length, mono, 16 kHz, read as they are needed, so that a long file is never
        held whole. The file's windows wait in the model's lane behind those of live sessions. Raises Refused,
        ModelError, and what reading `slabs` raises.
        """
        ...


@dataclass(frozen=True, slots=True)
class TuningCaps:
    """The most that a client of this server may ask for, whatever the model: seconds of audio, and tokens."""

    max_audio_s: float = 300.0
    max_prefix_tokens: int = 1024
    max_tokens: int = 4096


def tuned(profile: TranscriberProfile, tuning: StreamTuning) -> TranscriberProfile:
    """Return the profile with the session's own values in place of the model's defaults, cut to the model's limits.

    A window that may be longer than the model's default is also called long later, in proportion.
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
