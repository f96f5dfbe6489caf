"""Scripted models: the same audio always means the same words, and the same words always become the same audio.

The audio of a user carries its words. While a word is spoken, the value of a sample is a hundredth of the word's index
in VOCABULARY. In silence it is 0. A model's steps take odd times, so that no two steps end at the same time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Sequence
from dataclasses import replace

import numpy as np

from antiphon.contracts import (
    FileInfo,
    FileOptions,
    Hypothesis,
    HypothesisWord,
    LanguageLoad,
    LanguageProfile,
    ListenStep,
    Message,
    NativeLoad,
    NativeOptions,
    NativeProfile,
    NativeStep,
    Reply,
    ReplyDone,
    ReplyOptions,
    SpeakStep,
    SpeechChunk,
    SynthesizerProfile,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    TranscriberProfile,
    TranscriptSegment,
    Unit,
    Urgency,
    VoiceOptions,
    Window,
)
from antiphon.errors import ModelError, RemoteProtocolError
from antiphon.events.tools import Tool
from antiphon.events.words import TokenLogprob, Word
from antiphon.vision.images import EncodedImage

HEARD_HZ, SPOKEN_HZ = 16_000, 24_000
VOCABULARY = (
    *("", "hello", "what", "is", "the", "time", "tell", "me", "a", "story", "weather", "stop"),
    *("mm-hm", "yes", "and", "now", "please", "fail"),
    *("story.", "now.", "Mm-hm.", "hello.", "time?"),
)
WORD_S = 0.32
FRAME = 512
LOUD = 0.005
STORY = (
    "Once upon a time there was a king. He had seven sons. The eldest sailed to the north. The second sailed to the "
    "south. The others stayed at home and kept the garden."
)


def said(text: str, silence_s: float = 0.0, rate_hz: int = HEARD_HZ) -> np.ndarray:
    """Return the audio of these words, 320 ms each, then silence. float32 [num_samples]."""
    values = [VOCABULARY.index(word) / 100 for word in text.split()]
    spoken = np.repeat(np.asarray(values, np.float32), round(WORD_S * rate_hz))
    return np.concatenate((spoken, np.zeros(round(silence_s * rate_hz), np.float32)))


def heard(pcm: np.ndarray) -> list[tuple[str, float, float]]:
    """Return the words in audio at 16 kHz, with their start and end in seconds. Less than half a word is not heard."""
    numbers = np.rint(pcm * 100).astype(int)
    edges = np.flatnonzero(np.diff(numbers)) + 1
    spans = zip([0, *edges], [*edges, len(numbers)], strict=True)
    least = WORD_S * HEARD_HZ / 2
    return [
        (VOCABULARY[numbers[a]], round(int(a) / HEARD_HZ, 2), round(int(b) / HEARD_HZ, 2))
        for a, b in spans
        if b - a >= least and 0 < numbers[a] < len(VOCABULARY)
    ]


class Ears:
    """A transcriber. The word "fail" makes it raise an error."""

    def __init__(self) -> None:
        self.profile = TranscriberProfile(
            id="ears",
            languages=("en", "de"),
            step_s=0.3,
            first_step_s=0.2,
            agreement_s=0.9,
            first_agreement_s=0.6,
            rollback_tokens=1,
            min_probability=0.3,
            unfixed_chunks=0,
            settle_s=0.5,
            context_pause_s=1.5,
            pause_s=0.8,
            long_window_s=9,
            long_pause_s=0.3,
            max_window_s=20,
            context_tokens=64,
            max_tokens=100,
            max_prefix_tokens=80,
        )

    def open(self) -> Ears:
        return self

    def busy(self) -> bool:
        return False

    def overdue(self) -> bool:
        return False

    def close(self) -> None:
        return

    def replace(self, window: Window) -> bool:
        return False

    async def decode(self, window: Window) -> Hypothesis:
        await asyncio.sleep(0.0313 if window.final else 0.0217)
        words = heard(window.pcm)
        if "fail" in [w for w, *_ in words]:
            raise ModelError("scripted failure")
        new = words[len(window.prefix) :]
        pieces = tuple(HypothesisWord(f" {w}", (VOCABULARY.index(w),), 1.0) for w, *_ in new)
        if window.logprobs:
            pieces = tuple(replace(p, logprobs=(TokenLogprob(p.text.encode(), 0.0),)) for p in pieces)
        places = tuple(Word(w, a, b, 1.0) for w, a, b in new) if window.word_times else ()
        return Hypothesis(pieces, window.language or "en", 1.0, True, 4, len(pieces), places)

    async def align(self, pcm: np.ndarray, words: Sequence[str], language: str) -> tuple[Word, ...]:
        await asyncio.sleep(0.0113)
        each = len(pcm) / HEARD_HZ / max(1, len(words))
        return tuple(Word(w, round(i * each, 3), round((i + 1) * each, 3), 1.0) for i, w in enumerate(words))

    async def transcribe(
        self, slabs: AsyncIterable[np.ndarray], options: FileOptions
    ) -> AsyncIterator[FileInfo | TranscriptSegment]:
        pcm = np.concatenate([slab async for slab in slabs])
        words = heard(pcm)
        if "fail" in [w for w, *_ in words]:
            raise ModelError("scripted failure")
        for number, at in enumerate(range(0, len(words), 3)):
            part = words[at : at + 3]
            await asyncio.sleep(0.0371)
            places = tuple(Word(w, a, b, 0.5) for w, a, b in part) if options.word_times else ()
            text = "".join(f" {w}" for w, *_ in part)
            tokens = tuple(VOCABULARY.index(w) for w, *_ in part)
            yield TranscriptSegment(number, 0, part[0][1], part[-1][2], text, tokens, 0.0, -0.25, 1.0, 0.125, places)
        yield FileInfo(options.language or "en", len(pcm) / HEARD_HZ)


class Detector:
    """A voice activity detector that takes every loud frame for speech."""

    frame_samples = FRAME

    def open(self) -> DetectorStream:
        return DetectorStream()


class DetectorStream:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.rest = np.zeros(0, np.float32)

    async def feed(self, pcm: np.ndarray) -> list[float]:
        pcm = np.concatenate((self.rest, pcm))
        whole = len(pcm) // FRAME * FRAME
        self.rest = pcm[whole:]
        await asyncio.sleep(0)
        return [0.9 if np.abs(f).mean() > LOUD else 0.1 for f in pcm[:whole].reshape(-1, FRAME)]


class Judge:
    """A turn detector that takes a turn for unfinished if it ends with "and"."""

    async def complete(self, pcm: np.ndarray) -> float:
        await asyncio.sleep(0.0127)
        words = heard(pcm)
        return 0.1 if words and words[-1][0] == "and" else 0.9


class Writer:
    """A language model. The user's words decide its answer; see `answer`."""

    def __init__(self) -> None:
        self.profile = LanguageProfile("writer", 4096)

    async def open(self, owner: object = None) -> Dialogue:
        return Dialogue()

    def load(self) -> LanguageLoad:
        return LanguageLoad(0, 0, 0, 0, 1 << 20, 0)

    def close(self) -> None:
        return


class Dialogue:
    def __init__(self) -> None:
        # As if another session had computed the first rows of the prompt already.
        self.known = 2

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        return

    def answer(self, last: Message, options: ReplyOptions) -> str | dict[str, str]:
        """Return the answer's text, or the arguments of a call of the first tool."""
        text = last.text
        if last.role == "tool":
            return f"It says {text}."
        if "read it" in text:
            return "4228 bytes is what it says. 4228 bytes again, and that is all there is to read."
        if "fail" in text:
            raise ModelError("scripted failure")
        if "weather" in text and options.tools and options.tool_choice != "none":
            return {"city": "Paris"}
        if "story" in text:
            return STORY
        if options.schema is not None:
            return '{"heard": true}'
        return f"You said: {text}."

    async def reply(self, messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        num_prompt = sum(len(m.text.split()) + 3 for m in messages)
        cached, self.known = min(self.known, num_prompt), num_prompt
        await asyncio.sleep(0.0419)
        answer = self.answer(messages[-1], options)
        if isinstance(answer, dict):
            yield ToolCallStarted("call_a", options.tools[0].name)
            pieces = json.dumps(answer).partition(":")
            for piece in pieces:
                await asyncio.sleep(0.0173)
                yield ToolCallDelta(piece)
            yield ReplyDone("tool_calls", num_prompt, cached, 3)
            return
        tokens = answer.split()
        most = len(tokens) if options.max_tokens is None else options.max_tokens
        for number, token in enumerate(tokens[:most]):
            await asyncio.sleep(0.0173)
            yield TextDelta(f" {token}" if number else token)
        self.known += min(most, len(tokens))
        yield ReplyDone("stop" if most >= len(tokens) else "length", num_prompt, cached, min(most, len(tokens)))

    def close(self, *, keep: bool = False) -> None:
        return


def tone(number: int, seconds: float, rate_hz: int = SPOKEN_HZ) -> np.ndarray:
    """Return a triangle wave of whole 16-bit values. `number` selects its period. float32 [num_samples]."""
    period = 40 + 2 * (number % 30)
    at = np.arange(round(seconds * rate_hz)) % period
    return ((np.abs(at - period // 2) * 200 - 4000) / 32768).astype(np.float32)


class Voice:
    """A synthesizer whose words take 300 ms each. "bad" makes it raise an error; "foreign" cannot be spoken."""

    def __init__(self) -> None:
        self.profile = SynthesizerProfile(
            "voice", SPOKEN_HZ, ("one", "two"), ("en",), (0.5, 2.0), word_times=True, clones_voices=False
        )

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        await asyncio.sleep(0.0291)
        if "foreign" in text:
            raise RemoteProtocolError("unsupported_text", "none of this text can be spoken")
        at_s, lasts_s = 0.0, 0.3 / options.speed
        for word in text.split():
            urgency()
            await asyncio.sleep(0.0233)
            if "bad" in word:
                raise ModelError("scripted failure")
            number = sum(map(ord, word)) + (7 if options.voice == "two" else 0)
            place = Word(word, round(at_s, 3), round(at_s + lasts_s, 3), 1.0)
            yield SpeechChunk(tone(number, lasts_s), (place,), num_symbols=len(word), num_frames=3)
            at_s += lasts_s


class Reader:
    """An image reader that returns the number of bytes of each image as its text."""

    async def read(self, image: EncodedImage) -> tuple[str, ...]:
        await asyncio.sleep(0.0531)
        return (f"{len(image.data)} bytes",)


class Native:
    """A model that takes turns by itself, in units of 200 ms. It answers after speech and a pause."""

    def __init__(self, *, voice: bool = True) -> None:
        self.profile = NativeProfile(
            "native", 0.2, SPOKEN_HZ if voice else 0, ("one",) if voice else (), 2, 1, (100, 50)
        )

    async def open(self, options: NativeOptions) -> NativeTalk:
        return NativeTalk(options, bool(self.profile.voices))

    def load(self) -> NativeLoad:
        return NativeLoad(0, 100)

    def close(self) -> None:
        return


class NativeTalk:
    def __init__(self, options: NativeOptions, speaks: bool) -> None:
        self.options = options
        self.speaks = speaks
        self.was_spoken_to = False
        self.saying: list[str] = []
        self.forced = options.listen_only_units or 0

    async def append(self, unit: Unit) -> None:
        await asyncio.sleep(0.0047)
        loud = float(np.abs(unit.pcm).mean()) > LOUD
        if not loud and self.was_spoken_to and not self.forced:
            shown = f" I see {len(unit.frames)} images." if unit.frames else ""
            self.saying = f"I heard you.{shown} Go on, and tell me more of it.".split()
        self.was_spoken_to = loud
        self.forced = max(0, self.forced - 1)

    async def step(self, *, must_speak: bool = False) -> NativeStep:
        await asyncio.sleep(0.0611)
        if must_speak and not self.saying:
            self.saying = ["You", "asked", "me."]
        if not self.saying:
            return ListenStep()
        word = self.saying.pop(0)
        pcm = tone(sum(map(ord, word)), 0.2) if self.speaks else np.zeros(0, np.float32)
        return SpeakStep(word if word == "I" else f" {word}", pcm, not self.saying)

    def interrupt(self) -> None:
        self.saying = []

    def close(self) -> None:
        return
