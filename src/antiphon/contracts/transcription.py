"""What hears: transcribers, speech detectors, judges of turns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from antiphon.audio import Pcm
from antiphon.events.words import Word

TranscriptionTask = Literal["transcribe", "translate"]


@dataclass(frozen=True, slots=True)
class TranscriberProfile:
    """Facts of a transcriber that its sessions follow. Seconds of audio, counts of tokens.

    `step_s`: new audio before the next partial. `first_step_s`: the same while nothing of a turn has been sent.
    `agreement_s`: how much audio must have come since a word first stood at its place before it is sent;
    `first_agreement_s`: the same for the first words of a turn. `rollback_tokens`: tokens at the end of a hypothesis that
    are neither sent nor forced as the next one's prefix. `min_probability`: of a word's least likely token.
    `unfixed_chunks`: partials at the head of a window that send nothing and force nothing.
    `settle_s`: a silence that ends a window under server VAD, `pause_s` where the client
    commits. `context_pause_s`: speech that comes within it after a window has that window's sound as context. `long_s` and `long_pause_s`: a window longer than the first ends at the
    second. `max_window_s`: a window is cut between two words here. `context_tokens`: text before the window given to
    the model. `max_tokens`: most one decode may add. `max_prefix_tokens`: a window whose forced prefix is longer is cut. `languages`: ISO-639-1.
    `translates`: into English too. `binds_final`: a final goes on from what was sent; else it is decoded without.
    `places_words`: its word times are the sound's, and no guess.
    """

    id: str
    languages: tuple[str, ...]
    step_s: float
    first_step_s: float
    agreement_s: float
    first_agreement_s: float
    rollback_tokens: int
    min_probability: float
    unfixed_chunks: int
    settle_s: float
    context_pause_s: float
    pause_s: float
    long_window_s: float
    long_pause_s: float
    max_window_s: float
    context_tokens: int
    max_tokens: int
    max_prefix_tokens: int
    translates: bool = True
    final_keeps_prefix: bool = False
    aligns_words: bool = True


@dataclass(frozen=True, slots=True)
class HypothesisWord:
    """One word of a hypothesis, as the model spelled it (with its leading space), and its least likely token."""

    text: str
    tokens: tuple[int, ...]
    probability: float


@dataclass(frozen=True, slots=True)
class Window:
    """What is to be decoded. pcm: float32 [num_samples], mono, 16 kHz, at most the profile's longest window.

    `start`: where in the session it begins, in samples: a window with the same start begins with the same sound. `prefix`: tokens the hypothesis must begin with. `context`: text spoken before the window. `prompt`: the user's hint.
    Neither text can become a control token. `language` None: detect. `final`: the whole window, as well as can be;
    else quickly. `words`: with word times.
    """

    pcm: Pcm
    prefix: tuple[int, ...] = ()
    context: str = ""
    prompt: str = ""
    language: str | None = None
    final: bool = False
    word_times: bool = False
    max_tokens: int | None = None
    start_sample: int = 0


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """The decoder's answer for a window: its pieces after the prefix. Times in `words` are seconds from its start.

    `heard` is False where the model takes the window for noise: the pieces are to be dropped.
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
    """One segment of a file's transcript; the fields of OpenAI's verbose_json. Times in seconds."""

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


@dataclass(frozen=True, slots=True)
class FileOptions:
    """How to transcribe a file. `language` None: detect."""

    language: str | None = None
    prompt: str = ""
    temperature: float = 0.0
    task: TranscriptionTask = "transcribe"
    word_times: bool = False


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What is known once a file's first window is decoded."""

    language: str
    duration_s: float


class TranscriptionStream(Protocol):
    """The windows of one session, decoded one at a time; a model may keep what it knows of the one it decoded last."""

    async def decode(self, window: Window) -> Hypothesis:
        """Decode one window. Waits in the model's lane. Raises Refused, ModelError."""
        ...

    def close(self) -> None:
        """No more windows."""
        ...


class Transcriber(Protocol):
    """One loaded speech-recognition model, shared by all sessions."""

    @property
    def profile(self) -> TranscriberProfile: ...

    def open(self) -> TranscriptionStream:
        """A new session's windows. Takes no room before the first."""
        ...

    async def align(self, pcm: Pcm, words: Sequence[str], language: str) -> tuple[Word, ...]:
        """Where words that are known lie in sound that is known to say them. pcm: float32 [num_samples], mono, 16 kHz.

        Empty where they are too many or too long for one window. Raises Refused, ModelError.
        """
        ...

    def busy(self) -> bool:
        """Somebody waits for a worker: work that nobody may need would delay them."""
        ...

    def transcribe(self, pcm: Pcm, options: FileOptions) -> AsyncIterator[FileInfo | TranscriptSegment]:
        """A whole file, any length: one FileInfo, then its segments in order. Raises Refused, ModelError."""
        ...
