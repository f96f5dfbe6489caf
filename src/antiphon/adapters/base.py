"""What a model is to a session: the contracts adapters fulfil and the Profile of facts that tells models apart.

Sessions see these types only; never a model's name or class.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, Protocol

from antiphon.audio import Pcm
from antiphon.events import Word

Task = Literal["transcribe", "translate"]


class Urgency(IntEnum):
    """What a caller waits for: the end of a turn or a first sound; a partial or sound that is soon due; a file."""

    FINAL = 0
    PARTIAL = 1
    BULK = 2


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
    long_s: float
    long_pause_s: float
    max_window_s: float
    context_tokens: int
    max_tokens: int
    max_prefix_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One word of a hypothesis, as the model spelled it (with its leading space), and its least likely token."""

    text: str
    tokens: tuple[int, ...]
    probability: float


@dataclass(frozen=True, slots=True)
class Window:
    """What is to be decoded. pcm: float32 [num_samples], mono, 16 kHz, at most the profile's longest window.

    `prefix`: tokens the hypothesis must begin with. `context`: text spoken before the window. `prompt`: the user's hint.
    Neither text can become a control token. `language` None: detect. `final`: the whole window, as well as can be;
    else quickly. `words`: with word times.
    """

    pcm: Pcm
    prefix: tuple[int, ...] = ()
    context: str = ""
    prompt: str = ""
    language: str | None = None
    final: bool = False
    words: bool = False
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """The decoder's answer for a window: its pieces after the prefix. Times in `words` are seconds from its start.

    `heard` is False where the model takes the window for noise: the pieces are to be dropped.
    """

    pieces: tuple[Piece, ...]
    language: str
    language_probability: float
    heard: bool
    prompt_tokens: int
    completion_tokens: int
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
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
    task: Task = "transcribe"
    words: bool = False


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What is known once a file's first window is decoded."""

    language: str
    duration_s: float


class Transcriber(Protocol):
    """One loaded speech-recognition model, shared by all sessions."""

    @property
    def profile(self) -> TranscriberProfile: ...

    async def decode(self, window: Window) -> Hypothesis:
        """Decode one window. Waits in the model's lane. Raises Refused, ModelError."""
        ...

    async def align(self, pcm: Pcm, words: Sequence[str], language: str) -> tuple[Word, ...]:
        """Where words that are known lie in sound that is known to say them. pcm: float32 [num_samples], mono, 16 kHz.

        Empty where they are too many or too long for one window. Raises Refused, ModelError.
        """
        ...

    def busy(self) -> bool:
        """Somebody waits for a worker: work that nobody may need would delay them."""
        ...

    def transcribe(self, pcm: Pcm, options: FileOptions) -> AsyncIterator[FileInfo | Segment]:
        """A whole file, any length: one FileInfo, then its segments in order. Raises Refused, ModelError."""
        ...


class SpeechStream(Protocol):
    """One session's speech detection. Frames are `FRAME_SAMPLES` long."""

    async def feed(self, pcm: Pcm) -> list[float]:
        """Probabilities of speech, in [0, 1], of the frames that `pcm` completes. Waits in the model's lane."""
        ...

    def reset(self) -> None:
        """Forget everything heard."""
        ...


class SpeechDetector(Protocol):
    """One loaded voice-activity model, shared by all sessions."""

    @property
    def frame_samples(self) -> int: ...

    def open(self) -> SpeechStream: ...


class TurnJudge(Protocol):
    """One loaded model that says whether a turn is complete, shared by all sessions."""

    async def complete(self, pcm: Pcm) -> float:
        """The probability that who has paused has finished. pcm: float32 [num_samples], 16 kHz: the turn, pause included; its last
        seconds count. Raises Refused, ModelError."""
        ...


# --- synthesizers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SynthesizerProfile:
    """Facts of a synthesizer. `voices`: by name, the first is the default. `languages`: ISO-639-1.

    `speeds`: the tempo it makes itself; sound is stretched for what lies outside. `word_times`: its sound says where words lie.
    `clones`: speaks with the voice of a sample. `instructed`: follows instructions on how to speak.
    """

    id: str
    sample_rate_hz: int
    voices: tuple[str, ...]
    languages: tuple[str, ...]
    speeds: tuple[float, float]
    word_times: bool
    clones: bool = False
    instructed: bool = False


@dataclass(frozen=True, slots=True)
class VoiceOptions:
    """How to speak. `speed` 1.0 is the voice's own tempo; with a `seed` the same text gives the same samples."""

    voice: str
    speed: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Sound:
    """More of a text's sound. pcm: float32 [num_samples], mono, at the profile's rate.

    `words`: words of the text that begin in sound not given before, with their places in the text's sound in seconds; of a
    profile with `word_times` each word comes before its sound or with it. `skipped`: letters of the text that the voice cannot speak.
    `num_symbols` and `num_frames`: what the model read and made for it, in its own units.
    """

    pcm: Pcm
    words: tuple[Word, ...] = ()
    skipped: str = ""
    num_symbols: int = 0
    num_frames: int = 0


class Synthesizer(Protocol):
    """One loaded speech synthesizer, shared by all sessions."""

    @property
    def profile(self) -> SynthesizerProfile: ...

    def speak(self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]) -> AsyncGenerator[Sound, None]:
        """The sound of a text of any length, in chunks. `urgency` is asked before each chunk. Waits in the model's lane.

        Closing the generator ends it within a chunk. Raises RemoteProtocolError where nothing of the text can be spoken,
        Refused, ModelError.
        """
        ...


# --- language models ---------------------------------------------------------------------------------------------------


Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function the model wants called. `arguments`: JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `tool_call_id` and `name` belong to a tool's answer."""

    role: Role
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. `parameters`: JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How to answer. None: as the model's own settings say; `max_tokens` None: as the context allows.

    `tool_choice`: "auto", "none", "required" or a tool's name. `schema`: the whole text must be JSON of this schema. `truncation`: where the
    conversation has outgrown the context, "auto" lets its oldest rows leave, "disabled" refuses to answer, and a share of the context is what the newest
    messages are cut back to at once, so that the next answers find their KV.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    truncation: Literal["auto", "disabled"] | float = "auto"
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """The model calls a tool; its arguments follow."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the arguments' JSON text of the call started last."""

    arguments: str


@dataclass(frozen=True, slots=True)
class ReplyDone:
    """The end of an answer. Counts of tokens; `cached_tokens` of the prompt's were not computed for it."""

    reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


Reply = TextDelta | ToolCallStarted | ToolCallDelta | ReplyDone


@dataclass(frozen=True, slots=True)
class LanguageProfile:
    """Facts of a language model. `context_tokens`: most a conversation may have before its oldest turns are cut."""

    id: str
    context_tokens: int


@dataclass(frozen=True, slots=True)
class LanguageLoad:
    """How full a language model is: conversations, those being answered, those parked; bytes of KV held, in all, and parked."""

    conversations: int
    answering: int
    parked: int
    kv_bytes: int
    kv_total_bytes: int
    parked_bytes: int


class Dialogue(Protocol):
    """One conversation with a language model, over one KV that is appended to and rolled back, never rebuilt."""

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Bring the KV to these messages, before it is known how they go on. Does not wait for it. Raises ModelError."""
        ...

    def reply(self, messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        """Answer the last message. Only what differs from the last call is computed.

        Closing the generator ends the answer within a step. Raises Refused, ModelError.
        """
        ...

    def close(self, *, keep: bool = False) -> None:
        """End it. `keep`: a later conversation that begins alike may go on from its KV."""
        ...


class LanguageModel(Protocol):
    """One loaded language model, shared by all sessions."""

    @property
    def profile(self) -> LanguageProfile: ...

    async def open(self) -> Dialogue:
        """A new conversation. Raises Refused where there is no room for its KV."""
        ...

    def load(self) -> LanguageLoad:
        """How full it is, as of its last step. Does not wait."""
        ...

    def close(self) -> None:
        """Stop its workers."""
        ...


# --- readers --------------------------------------------------------------------------------------------------------------


class Reader(Protocol):
    """Reads the text on images, shared by all sessions."""

    async def read(self, image: bytes) -> tuple[str, ...]:
        """The lines of text on an encoded image, from the top; empty where there is none.

        Raises MediaError for what is no image, Refused, ModelError.
        """
        ...


# --- partners: whoever answers in a conversation -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartnerProfile:
    """Facts of a conversation partner. `voices`: the first is the default; empty: it does not speak."""

    id: str
    sample_rate_hz: int
    voices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Speaking:
    """More of the answer's sound. pcm: float32 [num_samples], mono, at the profile's rate.

    `words`: words that begin in it, with their places in the answer's sound so far, in seconds.
    """

    pcm: Pcm
    words: tuple[Word, ...] = ()


Answer = TextDelta | ToolCallStarted | ToolCallDelta | Speaking | ReplyDone


class Talk(Protocol):
    """One conversation with a partner."""

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Make ready to answer these messages, which may still go on. Does not wait for it. Raises ModelError."""
        ...

    def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[Answer, None]:
        """Answer the last message: text as it is made, its sound as soon as there is a clause of it. `voice` None: in text only.

        All of the text comes as TextDelta, and all that is spoken of it as Speaking; ReplyDone is last. Closing the generator ends it
        within a step: that is barge-in. Raises Refused, ModelError, RemoteProtocolError.
        """
        ...

    def close(self) -> None:
        """End it."""
        ...


class Partner(Protocol):
    """Whoever answers, shared by all sessions: a cascade of models, or one that hears and speaks by itself."""

    @property
    def profile(self) -> PartnerProfile: ...

    async def open(self) -> Talk:
        """A new conversation. Raises Refused where there is no room."""
        ...
