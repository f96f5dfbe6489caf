"""A scripted transcriber and a scripted detector, for real sessions without a model. Both are exact to the sample.

The audio itself carries the script. A sample's value is the number of the spoken word times 0.001, or 0 in silence. The
transcript is derived from the window's audio, so lost, repeated or misplaced audio becomes wrong words.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import replace

import anyio
import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import (
    FileInfo,
    FileOptions,
    Hypothesis,
    HypothesisWord,
    SpeakerProfile,
    TranscriberProfile,
    TranscriptSegment,
    TuningLimits,
    VoiceThreshold,
    Window,
)
from antiphon.contracts.speaker import VoiceClustering
from antiphon.errors import ModelError
from antiphon.events.words import Word

FRAME = 512
WORD_SAMPLES = 10 * FRAME
PROFILE = TranscriberProfile(
    id="t",
    languages=("en",),
    step_s=0.3,
    first_step_s=0.2,
    agreement_s=0.9,
    first_agreement_s=0.9,
    rollback_tokens=1,
    min_probability=0.3,
    unfixed_chunks=0,
    settle_s=0.5,
    context_pause_s=1.5,
    pause_s=0.8,
    long_window_s=9,
    long_pause_s=0.3,
    max_window_s=22,
    context_tokens=0,
    max_tokens=224,
    max_prefix_tokens=180,
)


def speech(first: int, count: int, silence_frames: int = 0) -> Pcm:
    """Return words from number `first` on, 320 ms each, then silence."""
    words = np.repeat(np.arange(first, first + count), WORD_SAMPLES).astype(np.float32) * 0.001
    return np.concatenate((words, np.zeros(silence_frames * FRAME, np.float32)))


def text(first: int, count: int) -> str:
    return " ".join(f"w{n}" for n in range(first, first + count))


def heard(pcm: Pcm) -> list[tuple[int, int, int]]:
    """Return (word, first sample, end) of each word in a window."""
    numbers = np.rint(pcm * 1000).astype(int)
    edges = np.flatnonzero(np.diff(numbers)) + 1
    spans = zip([0, *edges], [*edges, len(numbers)], strict=True)
    return [(int(numbers[a]), int(a), int(b)) for a, b in spans if b > a and numbers[a]]


class ScriptedTranscriber:
    """Transcribes the words that the audio encodes.

    It raises an error for a window that contains the word `fail`. If `gate` is set, it awaits the gate before each
    decode. `limits` are the limits of its tuning.
    """

    def __init__(
        self,
        fail: int | None = None,
        gate: Callable[[Window], object] | None = None,
        limits: TuningLimits | None = None,
    ) -> None:
        self.fail = fail
        self.gate = gate
        self.windows: list[Window] = []
        self.longest_s = 0.0
        self.opened = self.closed = 0
        self.running = 0
        self._profile = replace(PROFILE, first_agreement_s=0.6, limits=limits)

    @property
    def profile(self) -> TranscriberProfile:
        return self._profile

    def busy(self) -> bool:
        return False

    def overdue(self) -> bool:
        return False

    def open(self) -> ScriptedTranscriber:
        self.opened += 1
        return self

    def close(self) -> None:
        self.closed += 1

    async def decode(self, window: Window) -> Hypothesis:
        self.windows.append(window)
        self.longest_s = max(self.longest_s, len(window.pcm) / SAMPLE_RATE_HZ)
        self.running += 1
        try:
            if self.gate:
                result = self.gate(window)
                if isinstance(result, anyio.Event):
                    await result.wait()
            await anyio.lowlevel.checkpoint()
        finally:
            self.running -= 1
        spans = heard(window.pcm)
        if self.fail in [n for n, *_ in spans]:
            raise ModelError("scripted failure")
        # As with a real model, a word is not recognized if less than half of it is in the window.
        whole = [s for s in spans if s[2] - s[1] >= WORD_SAMPLES // 2]
        new = [s for s in whole if s[0] not in window.prefix]
        pieces = tuple(HypothesisWord(f" w{n}", (n,), 1.0) for n, *_ in new)
        words = (
            tuple(Word(f"w{n}", a / SAMPLE_RATE_HZ, b / SAMPLE_RATE_HZ, 1.0) for n, a, b in new)
            if window.word_times
            else ()
        )
        return Hypothesis(pieces, "en", 1.0, True, 4, len(pieces), words)

    def replace(self, window: Window) -> bool:
        return False

    async def transcribe(
        self, slabs: AsyncIterable[Pcm], options: FileOptions
    ) -> AsyncIterator[FileInfo | TranscriptSegment]:
        pcm = np.concatenate([slab async for slab in slabs])
        spans = heard(pcm)
        if self.fail in [n for n, *_ in spans]:
            raise ModelError("scripted failure")
        text = "".join(f" w{n}" for n, *_ in spans)
        end_s = len(pcm) / SAMPLE_RATE_HZ
        timed = [Word(f"w{n}", a / SAMPLE_RATE_HZ, b / SAMPLE_RATE_HZ, 1.0) for n, a, b in spans]
        words = tuple(timed) if options.word_times else ()
        yield TranscriptSegment(0, 0, 0.0, end_s, text, tuple(n for n, *_ in spans), 0.0, 0.0, 1.0, 0.0, words)
        yield FileInfo("en", end_s)


class ScriptedStream:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._rest = np.zeros(0, np.float32)

    async def feed(self, pcm: Pcm) -> list[float]:
        pcm = np.concatenate((self._rest, pcm))
        whole = len(pcm) // FRAME * FRAME
        self._rest = pcm[whole:]
        await anyio.lowlevel.checkpoint()
        return [0.9 if f.any() else 0.0 for f in pcm[:whole].reshape(-1, FRAME)]


class ScriptedDetector:
    frame_samples = FRAME

    def open(self) -> ScriptedStream:
        return ScriptedStream()


# Words with numbers below OTHERS belong to one voice, all others to another voice.
OTHERS = 200


class ScriptedVoices:
    """Recognizes speakers by the numbers of their words. It raises an error if `fails` is set."""

    profile = SpeakerProfile(
        "scripted",
        2,
        0.5,
        (VoiceThreshold(0.1, 0.4, 0.6),),
        clustering=VoiceClustering(1.6, 0.4, 0.3, 0.6, 0.6, 4.0, 0.5, 1.0, 0.5, np.zeros((0, 2), np.float32)),
    )

    def __init__(self) -> None:
        self.fails = False
        # If set, awaited before each vector.
        self.gate: anyio.Event | None = None
        self.num_embedded = 0

    async def embed(self, pcm: Pcm) -> Pcm:
        self.num_embedded += 1
        if self.gate:
            await self.gate.wait()
        if self.fails:
            raise ModelError("broken")
        is_other = np.median(pcm[np.abs(pcm) > 1e-4]) >= OTHERS * 0.001 - 0.0005
        return np.asarray([0, 1] if is_other else [1, 0], np.float32)

    def close(self) -> None:
        pass
