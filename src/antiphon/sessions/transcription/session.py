"""One live transcription session: the only owner of its tasks. Inputs in, outputs out; no sockets, no wire, no model names.

Two tasks under one TaskGroup. *Listening*, here, reads the inbox, asks the detector for speech and cuts the sound into turns and
windows; it never waits for the transcriber. *Decoding* (decoding.py) makes their text.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc
import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import Transcriber, TurnDetector, VoiceActivityDetector
from antiphon.errors import ModelError, Refused
from antiphon.events.conversation import ConversationCommand
from antiphon.events.transcription import (
    AppendAudio,
    ClearAudio,
    CommitAudio,
    CommitRefused,
    ConfigureTranscription,
    SpeechStarted,
    SpeechStopped,
    TranscriptionCommand,
    TranscriptionConfig,
    TranscriptionEvent,
    TurnCleared,
    TurnCommitted,
)
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.decoding import Decoding
from antiphon.turns.echo import EchoGuard
from antiphon.turns.segmenter import SegmenterEvent, TurnEnded, WindowEnded

log = logging.getLogger(__name__)

# A pause this long is judged; from this probability on what was said is complete.
JUDGE_AFTER_S, COMPLETE = 0.2, 0.5
# Sound is live if it came no faster than it is spoken over so many seconds, but for a burst after a stall of the network.
PACE_S, BURST_S = 2.0, 0.5
# A client that is muted once it has heard that its turn ended sends no silence: it gets its transcript all the same.
STALLED_S = 0.6

EmitTranscription = Callable[[TranscriptionEvent], Awaitable[None]]
Measure = Callable[[str, float], None]
Aside = Callable[[ConversationCommand], Awaitable[None]]


def _unmeasured(kind: str, seconds: float) -> None:
    """No measurements taken."""


class TranscriptionSession:
    """Run with `run()`; feed with `put()`; `inbox.close()` lets it finish what it has and return.

    `emit` is awaited for every output and may hold the session back. `min_commit_ms`: a client's commit with less new
    audio is refused. `echo` knows what the server says aloud: it is not speech. `tap` gets all sound as it is heard, and may hold it back. `aside` gets, in its place among the sound, what is not about sound. `measure(kind, seconds)` gets "partial", "final" (end of turn decided to transcript) and "vad".
    """

    def __init__(
        self,
        config: TranscriptionConfig,
        transcriber: Transcriber,
        detector: VoiceActivityDetector,
        inbox: Inbox,
        emit: EmitTranscription,
        *,
        min_commit_ms: int = 0,
        measure: Measure = _unmeasured,
        aside: Aside | None = None,
        judge: TurnDetector | None = None,
        echo: EchoGuard | None = None,
        tap: Callable[[Pcm], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.inbox = inbox
        self.audio_s = 0.0
        self._speech = detector.open()
        self._frame = detector.frame_samples
        self._emit = emit
        self._min_commit_ms = min_commit_ms
        self._measure = measure
        self._aside = aside
        self._judge = judge
        self._echo = echo
        self._tap = tap
        # Sound whose frame is not complete, for the echo guard.
        self._rest: Pcm = np.zeros(0, np.float32)
        # When how much had been heard, over the last PACE_S.
        self._pace: deque[tuple[float, int]] = deque()
        # The pause that was judged last, by the sample it began at.
        self._judged: int | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._clock = clock
        self._decoding = Decoding(config, transcriber, detector.frame_samples, emit, measure, clock)
        self._segmenter = self._decoding.segmenter

    @property
    def now(self) -> int:
        """Samples that have come, those that wait to be heard included."""
        return self._segmenter.now + int(self.inbox.backlog_s * SAMPLE_RATE_HZ)

    @property
    def speaking(self) -> bool:
        """Somebody speaks now: a turn is open, and not in a pause."""
        return self._segmenter.window is not None and self._segmenter.quiet_since is None

    @property
    def spoken_ms(self) -> int:
        """How long the open turn has been spoken, without the pause it is in; 0 without one."""
        window, quiet = self._segmenter.window, self._segmenter.quiet_since
        end = self._segmenter.now if quiet is None else quiet
        return (end - window.start) * 1000 // SAMPLE_RATE_HZ if window else 0

    async def put(self, item: TranscriptionCommand) -> None:
        """Hand the session one input; see Inbox.put."""
        await self.inbox.put(item)

    async def run(self) -> None:
        """Until the inbox is closed and all it held is transcribed."""
        async with anyio.create_task_group() as group:
            self._group = group
            group.start_soon(self._decoding.run)
            await self._listen()
            if self._segmenter.window or not self._decoding.idle:
                # The inbox closed inside a turn: what was heard of it is still a transcript.
                await self._take(self._segmenter.commit())
            self._decoding.end()

    # --- listening -----------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while True:
            with anyio.move_on_after(STALLED_S if self._segmenter.settling else math.inf) as waiting:
                item = await self.inbox.get()
            if waiting.cancelled_caught:
                await self._take(self._segmenter.settle())
                continue
            match item:
                case None:
                    return
                case AppendAudio(pcm):
                    for start in range(0, len(pcm), SAMPLE_RATE_HZ):
                        await self._hear(pcm[start : start + SAMPLE_RATE_HZ])
                case CommitAudio(final=True):
                    await self._commit()
                case CommitAudio(final=False):
                    pass
                case ClearAudio():
                    await self._clear()
                    await self._emit(TurnCleared())
                case ConfigureTranscription(config):
                    await self.configure(config)
                case other:
                    assert self._aside
                    assert not isinstance(other, CommitAudio)
                    await self._aside(other)

    async def _hear(self, pcm: Pcm) -> None:
        while self._decoding.behind:
            await self._decoding.changed()
        if self._tap:
            await self._tap(pcm)
        started = self._clock()
        probabilities = await self._speech.feed(pcm)
        if probabilities:
            self._measure("vad", self._clock() - started)
        self.audio_s += len(pcm) / SAMPLE_RATE_HZ
        if self._echo and self.config.vad:
            probabilities = self._own(self._echo, pcm, probabilities)
        await self._take(self._segmenter.feed(pcm, probabilities))
        await self._decoding.check_guess()
        self._consider()

    def _own(self, echo: EchoGuard, pcm: Pcm, probabilities: list[float]) -> list[float]:
        """The probabilities, without what is the echo of an answer."""
        begin = self._segmenter.now - len(self._rest)
        sound = np.concatenate((self._rest, pcm))
        size = self._frame * len(probabilities)
        self._rest = sound[size:]
        if not self._live():
            return probabilities
        return echo.judge(sound[:size].reshape(-1, self._frame), probabilities, begin)

    def _live(self) -> bool:
        """Sound comes as fast as it is spoken. What comes faster was not recorded beside a loudspeaker."""
        now_s = self._clock()
        self._pace.append((now_s, self._segmenter.now))
        while self._pace[0][0] < now_s - PACE_S:
            self._pace.popleft()
        since_s, since = self._pace[0]
        return (self._segmenter.now - since) / SAMPLE_RATE_HZ <= 1.5 * (now_s - since_s) + BURST_S

    def _consider(self) -> None:
        """A pause of a turn that ends by its meaning is judged once, beside the listening."""
        vad, window, quiet = self.config.vad, self._segmenter.window, self._segmenter.quiet_since
        if self._judge is None or vad is None or vad.patience_ms is None or window is None or quiet is None:
            return
        if quiet == self._judged or self._segmenter.now - quiet < JUDGE_AFTER_S * SAMPLE_RATE_HZ:
            return
        self._judged = quiet
        assert self._group
        self._group.start_soon(self._decide, self._judge, quiet, self._segmenter.audio(window.start))

    async def _decide(self, judge: TurnDetector, quiet: int, pcm: Pcm) -> None:
        try:
            complete = await judge.complete(pcm) >= COMPLETE
        except (ModelError, Refused) as error:
            # Without a judgement the turn ends as one that is complete does.
            log.warning("a pause was not judged: %s", error)
            complete = True
        if complete and self._segmenter.quiet_since == quiet and self._decoding.unfinished != quiet:
            self._segmenter.hasten()

    async def _commit(self) -> None:
        have_ms = self._segmenter.uncommitted_ms
        if have_ms < self._min_commit_ms:
            await self._emit(CommitRefused(have_ms, self._min_commit_ms))
            return
        await self._take(self._segmenter.commit())

    async def _clear(self) -> None:
        self._decoding.clear()
        await self._take(self._segmenter.clear())
        self._speech.reset()
        self._rest = self._rest[:0]

    async def configure(self, config: TranscriptionConfig) -> None:
        """Take a changed configuration now. Only on the listening's own task: as an input, or from `aside`."""
        self.config = config
        self._decoding.configure(config)
        await self._take(self._segmenter.apply(self._decoding.profile, config.vad))

    async def _take(self, steps: list[SegmenterEvent]) -> None:
        # A turn is not to be done before its end is told.
        self._decoding.telling = True
        for step in steps:
            match step:
                case WindowEnded() | TurnEnded():
                    self._decoding.take(step)
                case SpeechStarted() | SpeechStopped() | TurnCommitted():
                    await self._emit(step)
        self._decoding.telling = False
        self._decoding.wake()
