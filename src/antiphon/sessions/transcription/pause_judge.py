"""Decides, during a pause, how long the pause has to last to end the turn. The turn's sound and its words count."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import anyio
import anyio.abc

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import StreamingTurnDetector, TurnDetector, TurnReader, TurnStream
from antiphon.errors import ModelError, Refused
from antiphon.events.transcription import ServerVad
from antiphon.signals import Signal
from antiphon.turns.end_of_turn import MIN_SILENCE_MS, EndOfTurn, PauseEvidence
from antiphon.turns.segmenter import Segmenter

log = logging.getLogger(__name__)

# Samples of silence after which the turn detector judges a pause.
JUDGE_AFTER = MIN_SILENCE_MS * SAMPLE_RATE_HZ // 1000
# Seconds for which words wait for a detector that judges them, and after which it is given up.
READ_S, READ_MOST_S = 0.05, 1.0
# Samples of a turn after which a detector with state computes what is new, so that little is left at the pause.
FOLLOW_EVERY = SAMPLE_RATE_HZ // 2


class PauseJudge:
    """Sets the segmenter's limit for each pause, and updates the limit with each new piece of evidence.

    `detector` judges the sound of a turn. Without a detector, only the words and the silence count. For one event loop.
    Evidence about a pause counts for that pause only.
    """

    def __init__(self, detector: TurnDetector | None, segmenter: Segmenter) -> None:
        self._detector = detector
        self._stream: TurnStream | None = detector.open() if isinstance(detector, StreamingTurnDetector) else None
        # The sample up to which the stream has followed the turn.
        self._followed = 0
        self._segmenter = segmenter
        self._model: EndOfTurn | None = None
        self._nothing = PauseEvidence()
        # The first samples of the pause that the evidence is about and of the pause last passed to the detector.
        self._pause: int | None = None
        self._asked: int | None = None
        self._evidence = PauseEvidence()
        # The last pause whose words are known, and the last pause that the detector has judged or failed to judge.
        self._heard: int | None = None
        self._judged: int | None = None
        self._changed = Signal()
        # The session's tasks, once there is audio.
        self._group: anyio.abc.TaskGroup | None = None

    def configure(self, vad: ServerVad | None) -> None:
        """Judge by the eagerness and the hint of `vad` from the next pause on. Without an eagerness, pauses are not
        judged.
        """
        eagerness = vad.eagerness if vad else None
        self._model = EndOfTurn(eagerness) if eagerness else None
        self._nothing = PauseEvidence(expects=vad.expects if vad else None)

    @property
    def is_on(self) -> bool:
        """Whether pauses are judged, which they are if an eagerness is configured."""
        return self._model is not None

    @property
    def undecided(self) -> bool:
        """Whether the user is in a pause whose sound or words are not judged yet."""
        if self._model is None or not self._segmenter.in_turn:
            return False
        quiet = self._segmenter.quiet_since
        return quiet is not None and not (self._heard == self._judged == quiet)

    async def decided(self) -> None:
        """Wait until no pause is undecided."""
        while self.undecided:
            await self._changed.wait()

    async def pace(self, num_heard: int, *, more: bool) -> None:
        """Wait while a pause is undecided, at most as long as the last `num_heard` samples lasted.

        A file arrives faster than real time, but its turns then end at the same pauses as in live audio. `more`:
        whether more audio has arrived already.
        """
        if more and self.undecided:
            with anyio.move_on_after(num_heard / SAMPLE_RATE_HZ):
                await self.decided()

    def follow(self, group: anyio.abc.TaskGroup, waited: int = 0) -> None:
        """Check the current pause. Call it after audio was added, or after `waited` samples of time without audio. The
        detector judges the pause in a task of `group`.
        """
        if self._model is None:
            return
        self._group = group
        quiet = self._segmenter.quiet_since
        if quiet is None and self._stream:
            self._follow_turn(group, self._stream)
        if quiet is None or quiet == self._asked or self._segmenter.now + waited - quiet < JUDGE_AFTER:
            return
        window = self._segmenter.window
        if window is None:
            return
        self._asked = quiet
        self._learn(quiet)
        if self._detector:
            group.start_soon(self._judge, self._detector, quiet, window.start, window.pcm)
        else:
            self._judged = quiet

    def _follow_turn(self, group: anyio.abc.TaskGroup, stream: TurnStream) -> None:
        """Let the detector compute the turn so far, if FOLLOW_EVERY samples are new."""
        if self._segmenter.now - self._followed < FOLLOW_EVERY:
            return
        self._followed = self._segmenter.now
        if window := self._segmenter.window:
            group.start_soon(self._follow, stream, window.start, window.pcm)

    async def _follow(self, stream: TurnStream, start: int, pcm: Pcm) -> None:
        try:
            await stream.follow(start, pcm)
        except (ModelError, Refused) as error:
            log.debug("a turn was not followed: %s", error)

    def heard(self, pause: int, text: str, language: str | None) -> bool:
        """Use the words of the turn, `text`, up to the pause that began at the sample `pause`. Returns False if that
        pause is over.
        """
        if self._group and isinstance(self._stream, TurnReader) and self._stream.reads:
            if pause != self._segmenter.quiet_since:
                return False
            self._group.start_soon(self._read, self._stream, pause, text, language)
            return True
        return self._learn_words(pause, text=text, language=language)

    async def _read(self, stream: TurnReader, pause: int, text: str, language: str | None) -> None:
        """Use the words together with their judgement, or alone after READ_S without it."""
        known: dict[str, object] = {"text": text, "language": language}

        async def without() -> None:
            await anyio.sleep(READ_S)
            self._learn_words(pause, **known)

        async with anyio.create_task_group() as group:
            group.start_soon(without)
            complete = None
            with anyio.move_on_after(READ_MOST_S):
                # The judgement by sound comes first, because that by words takes its place.
                while pause == self._segmenter.quiet_since and self._judged != pause:
                    await self._changed.wait()
                complete = await stream.read(text)
            group.cancel_scope.cancel()
        self._learn_words(pause, **known, **({} if complete is None else {"complete": complete}))

    def _learn_words(self, pause: int, **known: object) -> bool:
        self._heard = max(pause, self._heard or 0)
        self._changed.notify()
        return self._learn(pause, **known)

    def _learn(self, pause: int, **known: object) -> bool:
        """Add evidence about a pause, and update its limit. Returns False if the pause is over."""
        if self._model is None or pause != self._segmenter.quiet_since:
            return False
        if pause != self._pause:
            self._pause, self._evidence = pause, self._nothing
        self._evidence = replace(self._evidence, **known)  # type: ignore[arg-type]
        return self._segmenter.end_after(pause, self._model.silence_ms(self._evidence, self._segmenter.speaker_pauses))

    def _learn_sound(self, pause: int, complete: float) -> None:
        self._learn(pause, complete=complete)

    async def _judge(self, detector: TurnDetector, pause: int, start: int, pcm: Pcm) -> None:
        try:
            if self._stream:
                early = partial(self._learn_sound, pause)
                complete = await self._stream.complete(start, pcm, early)
            else:
                complete = await detector.complete(pcm)
        except (ModelError, Refused) as error:
            # The blend of detectors has logged it once.
            log.debug("a pause was not judged: %s", error)
        else:
            self._learn_sound(pause, complete)
        self._judged = max(pause, self._judged or 0)
        self._changed.notify()
