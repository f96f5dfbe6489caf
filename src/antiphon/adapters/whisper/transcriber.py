"""Whisper as a transcriber: live windows and whole files, with one lane and one copy of the weights.

`decoder.py` decodes a window in a worker's thread, and `files.py` a file.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from antiphon.adapters.spec import LaneModelOptions
from antiphon.adapters.whisper.decoder import WhisperDecoder
from antiphon.adapters.whisper.files import FileDecoder
from antiphon.adapters.whisper.outputs import SAMPLES_PER_FRAME
from antiphon.adapters.whisper.windows import FRAMES_PER_S, MAX_FRAMES, num_frames
from antiphon.audio import Pcm
from antiphon.contracts import (
    FileInfo,
    FileOptions,
    Hypothesis,
    TranscriberProfile,
    TranscriptSegment,
    Urgency,
    Window,
)
from antiphon.engine.lane import Lane
from antiphon.events.words import Word

# A job of the lane: a window, or another call of the model. It runs in the worker's thread.
Work = Window | Callable[[], Any]


class WhisperTranscriber:
    """A Transcriber: one CTranslate2 model, and a lane whose `workers` threads each compute on one core.

    `max_batch`: limit of windows in one call of the model. `lane` is public for statistics. The jobs of the model for
    partials run in the same lane, so that finals and partials share one queue.
    """

    def __init__(
        self,
        folder: Path,
        model_id: str,
        options: LaneModelOptions,
        *,
        partials: Path | None = None,
        max_batch: int = 1,
    ) -> None:
        """Load the model, and the model of the folder `partials`. Takes several seconds. Raises ModelError."""
        self.decoder = WhisperDecoder(folder, model_id, options, partials=partials)
        # On a CPU, a batch has one job: in a measurement, batches of 2 to 8 were not faster (docs/architecture.md).
        self.lane: Lane[Work, Any] = Lane(
            "transcriber",
            self._work,
            workers=options.workers,
            max_batch=max_batch,
            max_queue=options.max_queue,
            observe=options.observe,
        )
        self._files = FileDecoder(self.decoder.whisper, self.lane, self.decoder.align, self.decoder.tokenizer)

    @property
    def profile(self) -> TranscriberProfile:
        """The properties of the model. Finals do not keep the sent prefix, and words are aligned."""
        return self.decoder.profile

    def busy(self) -> bool:
        """Return whether any job waits in the lane, so that another job would delay it. Does not wait."""
        return self.lane.depth > 0

    def overdue(self) -> bool:
        """Return whether a final or the first words of a turn wait in the lane past their deadline. Does not wait."""
        return self.lane.overdue_s() > 0

    def close(self) -> None:
        """Close the lane: cancel queued jobs, wait for running ones, and end the threads."""
        self.lane.close()

    def open(self) -> WhisperStream:
        """Return a stream. It is stateless: every window is decoded from its start."""
        return WhisperStream(self)

    async def decode(self, window: Window) -> Hypothesis:
        """Submit a window, and wait for its hypothesis. Raises Refused if the lane is full, and ModelError.

        Partials are decoded greedily, with the probability of each word. Finals are decoded with a beam of 5, and have
        probabilities of 1.0 unless the window asks for word times or log-probabilities. A final that loops is decoded
        again with repetitions forbidden.
        """
        return await asyncio.wrap_future(self.submit(window))

    def submit(self, window: Window) -> Future[Hypothesis]:
        """Queue one window, and return its future. Does not wait. Windows of the same shape may share a batch.

        Finals and urgent partials are decoded before other partials. Raises Refused if the lane is full. The future may
        fail with ModelError.
        """
        urgency = Urgency.FINAL if window.final or window.urgent else Urgency.PARTIAL
        return self.lane.submit(window, urgency, self.decoder.key(window), deadline_s=window.deadline_s)

    def replace(self, waiting: Future[Hypothesis], window: Window) -> bool:
        """Replace a window that waits in the lane by another one. Returns False if its decode has begun."""
        return self.lane.replace(waiting, window, self.decoder.key(window))

    async def align(self, pcm: Pcm, words: Sequence[str], language: str) -> tuple[Word, ...]:
        """Return the times of words, from the decoder's cross-attention in a forced decode.

        Returns () if the audio has more than 30 s, or if there are more words than a window may have. Waits in the lane
        with the priority of a partial. Raises Refused and ModelError.
        """
        if not words or len(pcm) > MAX_FRAMES * SAMPLES_PER_FRAME:
            return ()
        found: tuple[Word, ...] = await self.lane.run(
            partial(self.decoder.align, pcm, tuple(words), language), Urgency.PARTIAL
        )
        return found

    def transcribe(
        self, slabs: AsyncIterable[Pcm], options: FileOptions
    ) -> AsyncIterator[FileInfo | TranscriptSegment]:
        """Yield the segments of a file, then one FileInfo; see `FileDecoder.transcribe`.

        Each window of 30 s is one job of the lane, after all live ones. Raises Refused and ModelError.
        """
        return self._files.transcribe(slabs, options)

    def encoded_s(self, window: Window) -> float:
        """Return the length in seconds that a window is padded to. The cost of its encoding is proportional to it."""
        return num_frames(window) / FRAMES_PER_S

    def _work(self, jobs: Sequence[Work]) -> list[Any]:
        """Do the jobs of a batch, in a worker's thread."""
        windows = [j for j in jobs if isinstance(j, Window)]
        if len(windows) == len(jobs):
            return self.decoder.decode(windows)
        return [job() for job in jobs if not isinstance(job, Window)]


class WhisperStream:
    """A stateless TranscriptionStream: each window is decoded from its start."""

    def __init__(self, model: WhisperTranscriber) -> None:
        self._model = model
        self._waiting: Future[Hypothesis] | None = None

    async def decode(self, window: Window) -> Hypothesis:
        """Decode one window; see WhisperTranscriber.decode. Waits in the lane. Raises Refused and ModelError."""
        self._waiting = self._model.submit(window)
        try:
            return await asyncio.wrap_future(self._waiting)
        finally:
            self._waiting = None

    def replace(self, window: Window) -> bool:
        """Replace the window that waits in the lane. Returns False if no window waits, or if its decode has begun."""
        return self._waiting is not None and self._model.replace(self._waiting, window)

    def close(self) -> None:
        """Do nothing: a stream holds no resources."""
