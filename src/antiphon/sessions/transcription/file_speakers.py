"""Finds out who says what in a file: takes the vectors of its speech, and divides its segments among the speakers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import TranscriptSegment, VoiceActivityDetector, speaker_label
from antiphon.contracts.speaker import SpeakerModel, VoiceClustering
from antiphon.events.transcription import KnownVoice
from antiphon.sessions.transcription.file_speech import divided
from antiphon.shares.threads import FILE_THREADS, in_thread
from antiphon.turns.speech_stretches import SURE
from antiphon.turns.voices.enrolment import speech_of
from antiphon.turns.voices.speakers import SpeakerHints, WhoSpeaks, without_channel

# The least speech of a reference, in seconds.
MIN_REFERENCE_S = 1.0
# The two halves of a reference with less similarity than this, and with HALF_S of speech each, are two voices.
SAME_REFERENCE, HALF_S = 0.2, 1.5


class FileVoices:
    """The vectors of one file's speech, and its speakers at the end.

    - `model`: the speaker encoder. Its profile must have a `clustering`.
    - `hints`: what the client knows about the speakers.
    """

    def __init__(self, model: SpeakerModel, clustering: VoiceClustering, hints: SpeakerHints) -> None:
        self._model, self._clustering, self._hints = model, clustering, hints
        self._window = int(clustering.window_s * SAMPLE_RATE_HZ)
        self._hop = int(clustering.hop_s * SAMPLE_RATE_HZ)
        # The audio from the next window's first sample on, and the number of that sample in the file.
        self._held, self._start = np.zeros(0, np.float32), 0
        # Whether this stretch of speech has a window already.
        self._has_window = False
        self._windows_s: list[tuple[float, float]] = []
        self._vectors: list[Pcm] = []

    async def hear(self, sample: int, pcm: Pcm) -> None:
        """Add a piece of speech that begins at `sample` of the file. Pieces come in order, and may follow each other.

        Waits for the encoder. Raises Refused, ModelError.
        """
        if sample != self._start + len(self._held):
            await self._end_stretch()
            self._start = sample
        self._held = np.concatenate((self._held, pcm))
        while len(self._held) >= self._window:
            await self._embed(self._held[: self._window])
            self._has_window = True
            self._held, self._start = self._held[self._hop :], self._start + self._hop

    async def heard(self, slabs: AsyncIterable[Pcm]) -> AsyncGenerator[Pcm, None]:
        """Yield a file's audio unchanged, and hear all of it."""
        sample = 0
        async for slab in slabs:
            await self.hear(sample, slab)
            sample += len(slab)
            yield slab

    async def labelled(self, segments: Sequence[TranscriptSegment]) -> list[TranscriptSegment]:
        """Return all segments of the file with their speakers. A segment in which the speaker changes is divided.

        Unknown speakers are A, B, and so on, in the order in which they are first heard, without the names of known
        ones. Segments need word times; one without words counts as one word. Call it once, at the end of the file.
        """
        await self._end_stretch()
        spans = [(word.start_s, word.end_s) for s in segments for word in (s.words or (s,))]
        if not spans:
            return []
        if not self._vectors:
            names: list[int | str] = [0] * len(spans)
        else:
            names = await in_thread(self._who, np.array(spans, np.float64), places=FILE_THREADS)
        taken = {voice.name for voice in self._hints.known}
        labels = [label for label in map(speaker_label, range(len(spans) + len(taken))) if label not in taken]
        said = iter(labels[name] if isinstance(name, int) else name for name in names)
        out: list[TranscriptSegment] = []
        for segment in segments:
            speakers = [next(said) for _ in segment.words or (None,)]
            changes = [k for k, (before, after) in enumerate(pairwise(speakers), 1) if before != after]
            at = 0
            for part in divided(segment, changes):
                own = speakers[at : at + max(1, len(part.words))]
                at += len(own)
                # A part has several speakers if a word is not found in the text.
                out.append(replace(part, id=len(out), speaker=max(own, key=own.count)))
        return out

    def _who(self, spans: npt.NDArray[np.float64]) -> list[int | str]:
        windows_s, vectors = np.array(self._windows_s), np.stack(self._vectors)
        return WhoSpeaks(windows_s, vectors, spans, self._clustering).labels(self._hints)

    async def _end_stretch(self) -> None:
        """Embed a stretch of speech that is shorter than a window."""
        if len(self._held) and not self._has_window:
            await self._embed(self._held)
        self._held, self._has_window = self._held[:0], False

    async def _embed(self, pcm: Pcm) -> None:
        start_s = self._start / SAMPLE_RATE_HZ
        self._windows_s.append((start_s, start_s + len(pcm) / SAMPLE_RATE_HZ))
        self._vectors.append(await self._model.embed(pcm))


class UnfitReference(ValueError):
    """A reference that cannot be used; the message says why, and goes on after the speaker's name."""


async def known_voice(
    name: str,
    pcm: Pcm,
    model: SpeakerModel,
    clustering: VoiceClustering,
    detector: VoiceActivityDetector,
    least_s: float = MIN_REFERENCE_S,
) -> KnownVoice:
    """Return a known speaker by a reference of a few seconds, float32 [num_samples], mono, 16 kHz.

    Raises UnfitReference for a reference with less speech than `least_s` or with two voices, and Refused, ModelError.
    """
    stream, probabilities = detector.open(), list[float]()
    padded = np.pad(pcm, (0, -len(pcm) % detector.frame_samples))
    for start in range(0, len(padded), SAMPLE_RATE_HZ):
        probabilities += await stream.feed(padded[start : start + SAMPLE_RATE_HZ])
    speech = speech_of(padded, probabilities, detector.frame_samples)
    seconds = len(speech) / SAMPLE_RATE_HZ
    if probabilities and max(probabilities) < SURE:
        raise UnfitReference("has no clear speech")
    if seconds < least_s:
        raise UnfitReference(f"has {seconds:.1f} s of speech; {least_s:.0f} s are needed")
    if seconds >= 2 * HALF_S:
        halves = [await model.embed(half) for half in np.array_split(speech, 2)]
        one, other = without_channel(np.stack(halves), clustering)
        if one @ other < SAME_REFERENCE:
            raise UnfitReference("has two voices")
    return KnownVoice(name, await model.embed(speech), seconds)
