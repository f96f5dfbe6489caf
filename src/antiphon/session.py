"""One live transcription session: the only owner of its tasks. Inputs in, outputs out; no sockets, no wire, no model names.

Two tasks under one TaskGroup. *Listening* reads the inbox, asks the detector for speech and cuts the sound into turns and
windows; it never waits for the transcriber. *Decoding* runs finals first, then cuts of windows that have grown too long,
then finals begun on the chance that a pause is the end, then partials.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio
import anyio.abc

from antiphon.adapters.base import (
    Hypothesis,
    Piece,
    SpeechDetector,
    Transcriber,
    TurnJudge,
    Window,
)
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.errors import ModelError, Refused
from antiphon.events import (
    AudioAppended,
    AudioCleared,
    AudioCommitted,
    CommitRefused,
    Configured,
    Input,
    Output,
    SpeechStarted,
    SpeechStopped,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptionConfig,
    TurnCleared,
    TurnCommitted,
    Word,
)
from antiphon.inbox import Inbox
from antiphon.talk_events import TalkInput
from antiphon.transcript import WindowText, shortened, tuned, words_to_settle
from antiphon.turn.segmenter import MARGIN, OpenWindow, Segmenter, Step, TurnEnded, WindowEnded, owners

log = logging.getLogger(__name__)

# Listening may be this far ahead of decoding before it stops taking sound (a file comes faster than it is decoded).
MAX_WAITING_WINDOWS = 2
WINDOW_OVERRUN_S = 4.0
# A pause may be the end once the window has the margin of silence a final is decoded with: sooner, and the last
# consonants of the last word are cut off ("cray" for "crayfish").
SPECULATE_AFTER_S = MARGIN / SAMPLE_RATE_HZ
# What is kept of a refusal's wait, so that a full lane is asked again soon.
MAX_RETRY_S = 2.0
FINAL_ATTEMPTS = 5
BUSY_STEPS = 3
# A pause this long is judged; from this probability on what was said is complete.
JUDGE_AFTER_S, COMPLETE = 0.2, 0.5
# A client that is muted once it has heard that its turn ended sends no silence: it gets its transcript all the same.
STALLED_S = 0.6

Emit = Callable[[Output], Awaitable[None]]
Measure = Callable[[str, float], None]
Aside = Callable[[TalkInput], Awaitable[None]]


def _unmeasured(kind: str, seconds: float) -> None:
    """No measurements taken."""


@dataclass(slots=True)
class _Turn:
    """What is known of a turn's transcript so far."""

    streamed: str = ""
    text: str = ""
    language: str = ""
    words: list[Word] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failure: str = ""


@dataclass(slots=True)
class _Ended:
    """A step for decoding to do, and when listening made it (monotonic seconds)."""

    step: WindowEnded | TurnEnded
    since_s: float


@dataclass(slots=True)
class _Guess:
    """A final decoded during a pause; good if the window ends with that pause."""

    window_id: int
    speech_end: int
    hypothesis: Hypothesis


class TranscriptionSession:
    """Run with `run()`; feed with `put()`; `inbox.close()` lets it finish what it has and return.

    `emit` is awaited for every output and may hold the session back. `min_commit_ms`: a client's commit with less new
    audio is refused. `aside` gets, in its place among the sound, what is not about sound. `measure(kind, seconds)` gets "partial", "final" (end of turn decided to transcript) and "vad".
    """

    def __init__(
        self,
        config: TranscriptionConfig,
        transcriber: Transcriber,
        detector: SpeechDetector,
        inbox: Inbox,
        emit: Emit,
        *,
        min_commit_ms: int = 0,
        measure: Measure = _unmeasured,
        aside: Aside | None = None,
        judge: TurnJudge | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.inbox = inbox
        self.audio_s = 0.0
        self._transcriber = transcriber
        self._speech = detector.open()
        self._emit = emit
        self._min_commit_ms = min_commit_ms
        self._measure = measure
        self._aside = aside
        self._judge = judge
        # The pause that was judged last, by the sample it began at.
        self._judged: int | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._clock = clock
        self._profile = tuned(transcriber.profile, config.tuning)
        self._segmenter = Segmenter(self._profile, config.turn, detector.frame_samples)
        # Bound: MAX_WAITING_WINDOWS; listening waits when it is reached.
        self._ended: deque[_Ended] = deque()
        self._changed = anyio.Event()
        self._partial_scope: anyio.CancelScope | None = None
        self._listening = True
        self._turns: dict[int, _Turn] = {}
        self._text: WindowText | None = None
        self._text_window = 0
        # The window settled last, and all its words: the context of one that comes soon after.
        self._settled: tuple[int | None, tuple[Piece, ...]] = (None, ())
        self._context = ""
        self._partial_at = 0
        self._guess: _Guess | None = None

    async def put(self, item: Input) -> None:
        """Hand the session one input; see Inbox.put."""
        await self.inbox.put(item)

    async def run(self) -> None:
        """Until the inbox is closed and all it held is transcribed."""
        async with anyio.create_task_group() as group:
            self._group = group
            group.start_soon(self._decode)
            await self._listen()
            if self._segmenter.window or self._turns:
                # The inbox closed inside a turn: what was heard of it is still a transcript.
                await self._take(self._segmenter.commit())
            self._listening = False
            self._notify()

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
                case AudioAppended(pcm):
                    for start in range(0, len(pcm), SAMPLE_RATE_HZ):
                        await self._hear(pcm[start : start + SAMPLE_RATE_HZ])
                case AudioCommitted(final=True):
                    await self._commit()
                case AudioCommitted(final=False):
                    pass
                case AudioCleared():
                    self._clear()
                    await self._emit(TurnCleared())
                case Configured(config):
                    await self._configure(config)
                case other:
                    assert self._aside
                    assert not isinstance(other, AudioCommitted)
                    await self._aside(other)

    async def _hear(self, pcm: Pcm) -> None:
        while len(self._ended) >= MAX_WAITING_WINDOWS or self._overrun():
            await self._changed.wait()
        started = self._clock()
        probabilities = await self._speech.feed(pcm)
        if probabilities:
            self._measure("vad", self._clock() - started)
        self.audio_s += len(pcm) / SAMPLE_RATE_HZ
        await self._take(self._segmenter.feed(pcm, probabilities))
        self._consider()

    def _consider(self) -> None:
        """A pause of a turn that ends by its meaning is judged once, beside the listening."""
        vad, window, quiet = self.config.turn, self._segmenter.window, self._segmenter.quiet_since
        if self._judge is None or vad is None or vad.patience_ms is None or window is None or quiet is None:
            return
        if quiet == self._judged or self._segmenter.now - quiet < JUDGE_AFTER_S * SAMPLE_RATE_HZ:
            return
        self._judged = quiet
        assert self._group
        self._group.start_soon(self._decide, self._judge, quiet, self._segmenter.sound(window.start))

    async def _decide(self, judge: TurnJudge, quiet: int, pcm: Pcm) -> None:
        try:
            complete = await judge.complete(pcm) >= COMPLETE
        except (ModelError, Refused) as error:
            # Without a judgement the turn ends as one that is complete does.
            log.warning("a pause was not judged: %s", error)
            complete = True
        if complete and self._segmenter.quiet_since == quiet:
            self._segmenter.hasten()

    def _overrun(self) -> bool:
        return self._segmenter.window_s > self._profile.max_window_s + WINDOW_OVERRUN_S

    async def _commit(self) -> None:
        have_ms = self._segmenter.uncommitted_ms
        if have_ms < self._min_commit_ms:
            await self._emit(CommitRefused(have_ms, self._min_commit_ms))
            return
        await self._take(self._segmenter.commit())

    def _clear(self) -> None:
        self._segmenter.clear()
        self._speech.reset()
        self._cancel_partial()
        self._guess = None

    async def _configure(self, config: TranscriptionConfig) -> None:
        self.config = config
        self._profile = tuned(self._transcriber.profile, config.tuning)
        await self._take(self._segmenter.retune(self._profile, config.turn))

    async def _take(self, steps: list[Step]) -> None:
        for step in steps:
            match step:
                case WindowEnded() | TurnEnded():
                    self._ended.append(_Ended(step, self._clock()))
                    self._cancel_partial()
                case SpeechStarted() | SpeechStopped() | TurnCommitted():
                    await self._emit(step)
        self._notify()

    def _cancel_partial(self) -> None:
        if self._partial_scope:
            self._partial_scope.cancel()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # --- decoding ------------------------------------------------------------------------------------------------

    async def _decode(self) -> None:
        while True:
            if self._ended:
                await self._finish(self._ended[0])
                self._ended.popleft()
                self._notify()
            elif not self._listening:
                return
            elif self._window_is_full():
                await self._cut_window()
            elif self._may_guess():
                await self._guess_final()
            elif self._partial_due():
                await self._partial()
            else:
                await self._changed.wait()

    def _window_is_full(self) -> bool:
        window = self._segmenter.window
        if window is None:
            return False
        prefix = len(self._text.prefix) if self._text and self._text_window == window.id else 0
        return self._segmenter.window_s > self._profile.max_window_s or prefix > self._profile.max_prefix_tokens

    def _turn(self, number: int) -> _Turn:
        return self._turns.setdefault(number, _Turn())

    def _text_of(self, window: OpenWindow) -> WindowText:
        """The text of this window, begun when it is first asked for."""
        if self._text is None or self._text_window != window.id:
            settled, pieces = self._settled
            if settled != window.after:
                pieces = ()
                if window.after is not None:
                    # The final of that window failed: its sound without its words would be transcribed again.
                    window.start, window.after = window.spans[0].start, None
            self._text = WindowText(self._profile, pieces)
            self._text_window = window.id
            self._partial_at = window.spans[0].start
        return self._text

    async def _finish(self, ended: _Ended) -> None:
        if isinstance(ended.step, WindowEnded):
            await self._finish_window(ended.step)
            return
        turn = self._turns.pop(ended.step.turn, _Turn())
        self._measure("final", self._clock() - ended.since_s)
        if turn.failure:
            await self._emit(TranscriptFailed(ended.step.turn, turn.failure))
            return
        await self._emit(
            TranscriptDone(
                ended.step.turn,
                turn.text.strip(),
                turn.streamed,
                tuple(turn.words),
                turn.language,
                ended.step.audio_s,
                turn.prompt_tokens,
                turn.completion_tokens,
            )
        )

    async def _finish_window(self, ended: WindowEnded) -> None:
        window = ended.window
        text = self._text_of(window)
        guess, self._guess = self._guess, None
        try:
            if guess and guess.window_id == window.id and guess.speech_end == ended.speech_end:
                final = guess.hypothesis
            else:
                final = await self._decode_final(self._window(window, ended.pcm, final=True))
        except (ModelError, Refused) as error:
            log.error("transcript failed: %s", error)
            self._fail(window, error)
            return
        await self._settle(window, text, final)

    def _fail(self, window: OpenWindow, error: Exception) -> None:
        for span in window.spans:
            self._turn(span.turn).failure = str(error)

    async def _settle(self, window: OpenWindow, text: WindowText, final: Hypothesis) -> None:
        """Take a window's final: the last deltas, and each turn's words."""
        deltas, pieces = text.finish(final, owners(window, final))
        # Counted with the window's last turn: a decode is not to be divided.
        last = self._turn(window.spans[-1].turn)
        last.prompt_tokens += final.prompt_tokens
        last.completion_tokens += final.completion_tokens
        for number, piece in pieces:
            turn = self._turn(number)
            turn.text += piece.text
            turn.language = final.language
        shift_s = window.start / SAMPLE_RATE_HZ
        if self.config.words and pieces:
            for (number, _), w in zip(pieces, final.words, strict=True):
                word = Word(w.text, w.start_s + shift_s, w.end_s + shift_s, w.probability)
                self._turn(number).words.append(word)
        self._settled = (window.id, (*text.base, *(p for _, p in pieces)))
        # Bound: the adapter takes the last `context_tokens` of this; a token has at most a dozen characters.
        whole = "".join(p.text for _, p in pieces)
        self._context = (self._context + whole)[-12 * max(1, self._profile.context_tokens) :]
        for number, delta in deltas:
            await self._send(number, delta)

    async def _send(self, turn_number: int, delta: str) -> None:
        turn = self._turn(turn_number)
        if not turn.streamed:
            delta = delta.lstrip()
        if delta:
            turn.streamed += delta
            await self._emit(TranscriptDelta(turn_number, delta))

    async def _decode_final(self, window: Window) -> Hypothesis:
        """A final is worth waiting for: a full lane is asked again."""
        for _ in range(FINAL_ATTEMPTS - 1):
            try:
                return await self._transcriber.decode(window)
            except Refused as refusal:
                await anyio.sleep(min(MAX_RETRY_S, refusal.retry_after_s))
        return await self._transcriber.decode(window)

    def _window(self, window: OpenWindow, pcm: Pcm, *, final: bool, words: bool = False) -> Window:
        text = self._text_of(window)
        return Window(
            pcm,
            prefix=text.base_tokens if final else text.prefix,
            context=self._context if self._profile.context_tokens else "",
            prompt=self.config.prompt,
            language=self.config.language,
            final=final,
            words=words or len(window.spans) > 1 or (final and self.config.words),
            max_tokens=None if final else self._profile.max_tokens,
        )

    def _may_guess(self) -> bool:
        window, quiet = self._segmenter.window, self._segmenter.quiet_since
        if window is None or quiet is None or self._transcriber.busy():
            return False
        done = self._guess and (self._guess.window_id, self._guess.speech_end) == (window.id, quiet)
        return not done and self._segmenter.now - quiet >= SPECULATE_AFTER_S * SAMPLE_RATE_HZ

    async def _guess_final(self) -> None:
        window, quiet = self._segmenter.window, self._segmenter.quiet_since
        assert window is not None
        assert quiet is not None
        pcm = self._segmenter.sound(window.start)
        try:
            final = await self._transcriber.decode(self._window(window, pcm, final=True))
        except (ModelError, Refused):
            return
        self._guess = _Guess(window.id, quiet, final)

    def _eager(self, window: OpenWindow) -> bool:
        """The first words of a turn are awaited."""
        return window.spans[-1].first and self._text_of(window).untouched(window.spans[-1].turn)

    def _partial_due(self) -> bool:
        window = self._segmenter.window
        if window is None or self._segmenter.quiet_since is not None or not self.config.partials:
            return False
        self._text_of(window)
        if self._eager(window):
            step_s = self._profile.first_step_s
        else:
            # Where others wait, partials come less often, so that finals stay on time.
            step_s = self._profile.step_s * (BUSY_STEPS if self._transcriber.busy() else 1)
        return self._segmenter.now - self._partial_at >= step_s * SAMPLE_RATE_HZ

    async def _partial(self) -> None:
        window = self._segmenter.window
        assert window is not None
        text = self._text_of(window)
        now = self._partial_at = self._segmenter.now
        started = self._clock()
        with anyio.CancelScope() as self._partial_scope:
            try:
                hypothesis = await self._transcriber.decode(
                    self._window(window, self._segmenter.sound(window.start), final=False)
                )
            except Refused as refusal:
                await anyio.sleep(min(MAX_RETRY_S, refusal.retry_after_s))
                return
            except ModelError as error:
                # The final of the same sound will say it, if it is not this one decode.
                log.warning("partial failed: %s", error)
                return
            finally:
                self._partial_scope = None
            self._measure("partial", self._clock() - started)
            mine = owners(window, hypothesis)
            for turn, delta in text.offer(hypothesis, now / SAMPLE_RATE_HZ, mine, self._eager(window)):
                await self._send(turn, delta)

    async def _cut_window(self) -> None:
        """A window without a pause is as long as the model takes: settle it up to a gap between words."""
        window = self._segmenter.window
        assert window is not None
        text = self._text_of(window)
        pcm = self._segmenter.sound(window.start)
        try:
            final = await self._decode_final(self._window(window, pcm, final=True, words=True))
        except (ModelError, Refused) as error:
            self._fail(window, error)
            final = None
        if self._segmenter.window is not window:
            return
        keep = words_to_settle(final, len(text.sent), len(pcm) / SAMPLE_RATE_HZ) if final else 0
        if final is None or not keep:
            self._segmenter.cut(window.start + len(pcm))
            return
        cut_s = (
            (final.words[keep - 1].end_s + final.words[keep].start_s) / 2
            if keep < len(final.words)
            else len(pcm) / SAMPLE_RATE_HZ
        )
        await self._settle(window, text, shortened(final, keep))
        if self._segmenter.window is window:
            self._segmenter.cut(window.start + int(cut_s * SAMPLE_RATE_HZ))
