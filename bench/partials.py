"""`python -m bench.partials`: many live transcriptions in virtual time, to compare ways of decoding partials.

    python -m bench.partials [--data DIR] [--streams 1,10,20] [--clips N] [--max-batch N]

The sessions and the models are the real ones; the clock is not. A decode is computed when a worker would begin it, and
its result comes after the seconds that `Cost` says (CPU times measured on the machine of docs/measured.md, one thread),
so the figures do not depend on what else the machine does. Sockets, JSON, Python and speech detection are left out but
for OVERHEAD.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import selectors
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from bench import words as wer
from bench.common import percentile, table
from bench.hearing.clips import Clip, loaded, read_manifest

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import Hypothesis, Window
from antiphon.engine.lane import DEFAULT_DUE_S, NUM_PRIORITIES, Lane
from antiphon.events.transcription import (
    AppendAudio,
    ServerVad,
    SpeechStarted,
    TranscriptDelta,
    TranscriptDone,
    TranscriptionConfig,
    TranscriptionEvent,
)
from antiphon.loading.loader import load, store_of
from antiphon.loading.selection import TRANSCRIPTION_ROLES
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.settings import load as load_settings
from antiphon.shares.fair_queue import FairQueue

WORKERS = 2
CHUNK_S, TRAIL_S = 0.1, 1.5
# The share of each core that is not the transcriber's.
OVERHEAD = 0.12


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of CPU of one model: of the encoder for each second of sound; of the decoder before its first step, for
    a batch and for each window in it; of a step, for a batch and for each hypothesis in it (a beam of 5 has five).
    """

    encode: float
    begin: float
    begin_each: float
    step: float
    step_each: float


COSTS = {
    "whisper-base": Cost(0.0110, 0.022, 0.006, 0.0040, 0.0004),
    "whisper-tiny.en": Cost(0.0048, 0.007, 0.003, 0.0019, 0.0002),
}


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer whenever nothing else is to be done."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self.now_s = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None = None) -> Any:
            if timeout:
                self.now_s += timeout
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now_s


@dataclass(slots=True, eq=False)
class Job:
    job: Any
    key: Hashable
    deadline_s: float
    owner: Hashable = None
    result: Future[Any] = field(default_factory=Future)


class VirtualLane:
    """A lane in virtual time: the order of `Lane`, the work of the lane given, the seconds of `cost_s`."""

    def __init__(self, lane: Lane[Any, Any], loop: VirtualLoop, cost_s: Any, max_batch: int) -> None:
        self._lane, self._loop, self._cost_s, self._max_batch = lane, loop, cost_s, max_batch
        self._queues = [FairQueue[Job]() for _ in range(NUM_PRIORITIES)]
        self._idle = WORKERS
        self.count: Counter[str] = Counter()
        self.busy_s: Counter[str] = Counter()

    @property
    def depth(self) -> int:
        return sum(q.num_waiting for q in self._queues)

    def submit(
        self, job: Any, priority: int = 0, key: Hashable = None, *, deadline_s: float | None = None
    ) -> Future[Any]:
        due_s = self._loop.now_s + DEFAULT_DUE_S if deadline_s is None else deadline_s
        waiting = Job(job, key, due_s)
        self._queues[priority].append(waiting)
        self._loop.call_soon(self._start)
        return waiting.result

    async def run(self, job: Any, priority: int = 0, key: Hashable = None, *, deadline_s: float | None = None) -> Any:
        return await asyncio.wrap_future(self.submit(job, priority, key, deadline_s=deadline_s))

    def replace(self, future: Future[Any], job: Any, key: Hashable = None) -> bool:
        for waiting in (w for q in self._queues for w in q):
            if waiting.result is future:
                waiting.job, waiting.key = job, key
                return True
        return False

    def _start(self) -> None:
        while self._idle and (queue := next((q for q in self._queues if q.num_waiting), None)):
            batch: list[Job] = []
            for waiting in queue.in_turns():
                if len(batch) < self._max_batch and (not batch or waiting.key == batch[0].key):
                    queue.remove(waiting)
                    if waiting.result.set_running_or_notify_cancel():
                        batch.append(waiting)
            if batch:
                self._idle -= 1
                # One at a time, so that a window's hypothesis does not depend on its batch.
                results = [self._lane.submit(w.job, key=object()).result() for w in batch]
                encode_s, decode_s = self._cost_s([w.job for w in batch], results)
                took_s = (encode_s + decode_s) / (1 - OVERHEAD)
                kind = "final" if batch[0].job.final else "first" if batch[0].job.urgent else "later"
                self.count[kind] += len(batch)
                self.busy_s["encode"] += encode_s
                self.busy_s["decode"] += decode_s
                self._loop.call_later(took_s, self._end, batch, results)

    def _end(self, batch: Sequence[Job], results: Sequence[Any]) -> None:
        self._idle += 1
        for waiting, result in zip(batch, results, strict=True):
            waiting.result.set_result(result)
        self._start()


def cost_s(
    cost: Cost, windows: Sequence[Window], results: Sequence[Hypothesis], window_s: Callable[[Window], float]
) -> tuple[float, float]:
    """Seconds of CPU of a batch, in the encoder and in the decoder. A forced prefix costs a step for each token, as new
    tokens do.
    """
    steps = max(len(w.prefix) + r.completion_tokens + 1 for w, r in zip(windows, results, strict=True))
    rows = len(windows) * (5 if windows[0].final else 1)
    begin = cost.begin + len(windows) * cost.begin_each
    return len(windows) * cost.encode * window_s(windows[0]), begin + steps * (cost.step + rows * cost.step_each)


@dataclass(slots=True)
class Played:
    """What came of one clip: seconds from its first sample, and texts."""

    clip: Clip
    zero_s: float
    deltas: list[tuple[float, str]] = field(default_factory=list)
    finals: list[tuple[float, str]] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)

    def first_s(self, language: str = "en") -> float | None:
        """Seconds from the start of speech to the first word shown that is the first of the reference, or near it."""
        spoken = wer.norm(self.clip.text, language)[:3]
        for at_s, text in self.deltas:
            if any(word in spoken for word in wer.norm(text, language)):
                return at_s - self.clip.speech_start
        return None

    def first_is_wrong(self, language: str = "en") -> bool:
        """Whether the first word shown is not among the first two of the final transcript."""
        shown = wer.norm(self.deltas[0][1], language) if self.deltas else []
        final = wer.norm(" ".join(text for _, text in self.finals), language)
        return shown[:1] != final[:1] and shown[:1] != final[1:2]


async def stream(models: Any, clips: Sequence[Clip], delay_s: float, out: list[Played], loop: VirtualLoop) -> None:
    """One session that hears clips one after another, each with silence behind it."""
    await asyncio.sleep(delay_s)
    inbox, mine, of_turn = Inbox(30.0), list[Played](), dict[int, Played]()

    async def emit(event: TranscriptionEvent) -> None:
        if isinstance(event, SpeechStarted):
            of_turn[event.turn] = mine[-1]
        heard = of_turn.get(getattr(event, "turn", -1), mine[-1])
        if isinstance(event, TranscriptDelta):
            heard.deltas.append((loop.now_s - heard.zero_s, event.text))
        elif isinstance(event, TranscriptDone):
            heard.finals.append((loop.now_s - heard.zero_s, event.text))
            heard.shown.append(event.streamed)

    async def speak() -> None:
        for clip in clips:
            mine.append(Played(clip, loop.now_s))
            pcm = np.concatenate((clip.pcm, np.zeros(int(TRAIL_S * SAMPLE_RATE_HZ), np.float32)))
            for at in range(0, len(pcm), int(CHUNK_S * SAMPLE_RATE_HZ)):
                chunk = pcm[at : at + int(CHUNK_S * SAMPLE_RATE_HZ)]
                await asyncio.sleep(len(chunk) / SAMPLE_RATE_HZ)
                await inbox.put(AppendAudio(chunk))
        await asyncio.sleep(3.0)
        inbox.close()

    config = TranscriptionConfig(language="en", vad=ServerVad(silence_duration_ms=500))
    session = TranscriptionSession(
        config, models.required_transcriber, models.required_vad, inbox, emit, clock=lambda: loop.now_s
    )
    await asyncio.gather(session.run(), speak())
    out += mine


class AtOnce:
    """A lane whose work takes no virtual time."""

    def __init__(self, lane: Lane[Any, Any]) -> None:
        self._lane = lane

    async def run(self, job: Any) -> Any:
        return self._lane.submit(job).result()


def word_errors(pairs: Sequence[tuple[Clip, str]]) -> float:
    scores = [wer.score(clip.text, text, clip.language) for clip, text in pairs]
    return 100 * sum(e for e, _ in scores) / max(1, sum(n for _, n in scores))


def play(models: Any, clips: Sequence[Clip], num_streams: int, max_batch: int) -> dict[str, float]:
    """So many streams at once, each with its part of the clips."""
    loop, transcriber = VirtualLoop(), models.required_transcriber
    cost, real = COSTS[transcriber.profile.id], transcriber.lane
    lane = VirtualLane(real, loop, lambda w, r: cost_s(cost, w, r, transcriber.encoded_s), max_batch)
    detector = models.required_vad
    transcriber.lane, vad_lane, detector.lane = lane, detector.lane, AtOnce(detector.lane)
    out: list[Played] = []
    order = random.Random(num_streams).sample(list(clips), len(clips))

    async def main() -> None:
        await asyncio.gather(
            *(stream(models, order[i::num_streams], i * 2.0 / num_streams, out, loop) for i in range(num_streams))
        )

    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())
    finally:
        transcriber.lane, detector.lane = real, vad_lane
    first = [s for p in out if (s := p.first_s()) is not None]
    final = [p.finals[-1][0] - p.clip.speech_end for p in out if p.finals]
    return {
        "clips": len(out),
        "first_p50": percentile(first, 50),
        "first_p95": percentile(first, 95),
        "final_p50": percentile(final, 50),
        "final_p95": percentile(final, 95),
        "live": word_errors([(p.clip, " ".join(t for _, t in p.finals)) for p in out]),
        "shown": word_errors([(p.clip, " ".join(p.shown)) for p in out]),
        "first_wrong": 100 * sum(p.first_is_wrong() for p in out) / len(out),
        "first_jobs": lane.count["first"] / len(out),
        "later_jobs": lane.count["later"] / len(out),
        "final_jobs": lane.count["final"] / len(out),
        "encoder": lane.busy_s["encode"] / loop.now_s / WORKERS,
        "decoder": lane.busy_s["decode"] / loop.now_s / WORKERS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.partials", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent.parent / "tests" / "data")
    parser.add_argument("--streams", default="1,10,20")
    parser.add_argument("--clips", type=int, default=40)
    parser.add_argument("--max-batch", type=int, default=1)
    args = parser.parse_args()
    english = [c for c in read_manifest(args.data) if c.language == "en" and c.text and c.seconds < 25]
    read = sorted((c for c in english if c.kind in ("asr_read", "asr_nonnative", "asr_speech")), key=lambda c: c.id)
    clips = loaded(read[:: max(1, len(read) // args.clips)][: args.clips])
    settings = load_settings({}, os.environ)
    models = load(settings, store_of(settings.models), roles=TRANSCRIPTION_ROLES)
    rows = {n: play(models, clips, int(n), args.max_batch) for n in args.streams.split(",")}
    models.close()
    keys = list(next(iter(rows.values())))
    table("streams at once, in virtual time", ("streams", *keys), [(n, *r.values()) for n, r in rows.items()])


if __name__ == "__main__":
    main()
