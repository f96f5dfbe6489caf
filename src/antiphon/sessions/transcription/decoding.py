"""Decoding of one session's audio: which window is decoded next, and which of its words are sent.

Finals come first, then cuts of windows that have grown too long, then preflight transcripts (guesses: finals decoded
during a pause, in case it ends the turn), then partials. It is one task beside the listening, which hands it what has
ended and wakes it when audio came. Both use one segmenter.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import anyio

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.quiet import quietest_near
from antiphon.contracts import Hypothesis, HypothesisWord, Transcriber, Window
from antiphon.errors import ModelError, Refused
from antiphon.events.transcription import (
    GuessDropped,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptGuessed,
    TranscriptionConfig,
    TranscriptionEvent,
    TranscriptPartial,
)
from antiphon.events.words import Word
from antiphon.sessions.transcription.stable_words import (
    MIN_LANGUAGE_PROBABILITY,
    WindowText,
    goes_on,
    shortened,
    tuned,
    words_to_settle,
)
from antiphon.signals import Signal
from antiphon.turns.segmenter import OpenWindow, Segmenter, TurnEnded, WindowEnded, word_turns

log = logging.getLogger(__name__)

# Listening may be this far ahead of decoding before it stops reading audio. A file comes faster than it is decoded.
MAX_WAITING_WINDOWS = 2
WINDOW_OVERRUN_S = 4.0
# A pause may be the end once it has lasted for four frames. With 60 to 300 ms of silence behind the last word, the word
# error rates of finals lie between 8.9 and 10.5 % (97 clips) and follow no order; a shorter wait decodes more pauses
# inside turns in vain.
GUESS_AFTER_S = 0.128
# The longest wait after a refusal, whatever the lane asks for, so that it is asked again soon.
MAX_RETRY_S = 2.0
FINAL_ATTEMPTS = 5
# A model hears words in half a second of humming at a probability of 0.1, and in speech at 0.5 and more.
LIKELY_PROBABILITY = 0.4
BUSY_STEPS = 3

EmitTranscription = Callable[[TranscriptionEvent], Awaitable[None]]
Measure = Callable[[str, float], None]


@dataclass(slots=True)
class _Turn:
    """A turn's transcript so far."""

    streamed: str = ""
    text: str = ""
    language: str = ""
    words: list[Word] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failure: str = ""


@dataclass(slots=True)
class _Ended:
    """A window or turn that has ended, and when the listening found that (monotonic seconds)."""

    step: WindowEnded | TurnEnded
    since_s: float


@dataclass(slots=True)
class _Guess:
    """A final decoded during a pause of `turn`, which is used if the window ends with that pause."""

    window_id: int
    speech_end: int
    hypothesis: Hypothesis
    turn: int
    reported: bool = False


class Decoding:
    """The decoding task of a session. `run()` it; `end()` lets it finish what it was handed and return.

    It owns the segmenter, which the listening feeds, and opens the transcriber's stream. `emit` is awaited for every
    event; `measure` gets the seconds of each "partial", and of each "final" from the end of its turn.
    """

    def __init__(
        self,
        config: TranscriptionConfig,
        transcriber: Transcriber,
        frame_samples: int,
        emit: EmitTranscription,
        measure: Measure,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.profile = tuned(transcriber.profile, config.tuning)
        self.segmenter = Segmenter(self.profile, config.vad, frame_samples)
        self._transcriber = transcriber
        self._stream = transcriber.open()
        self._emit = emit
        self._measure = measure
        self._clock = clock
        # Bound: MAX_WAITING_WINDOWS; listening waits when it is reached.
        self._ended: deque[_Ended] = deque()
        self._changed = Signal()
        self._partial_scope: anyio.CancelScope | None = None
        self._listening = True
        self._turns: dict[int, _Turn] = {}
        self._text: WindowText | None = None
        self._text_window = 0
        # The window settled last, and all its words: the context of one that comes soon after.
        self._settled: tuple[int | None, tuple[HypothesisWord, ...]] = (None, ())
        self._context = ""
        self._partial_at = 0
        self._guess: _Guess | None = None
        # The listening is still sending what it found.
        self.is_emitting = False
        # The first sample of a pause that follows an incomplete sentence.
        self.unfinished: int | None = None

    # --- for the listening --------------------------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """Whether the listening has to wait, since two windows or turns wait or the open window is 4 s too long."""
        overrun = self.segmenter.window_s > self.profile.max_window_s + WINDOW_OVERRUN_S
        return overrun or len(self._ended) >= MAX_WAITING_WINDOWS

    @property
    def idle(self) -> bool:
        """Whether no turn that decoding has begun still lacks its transcript."""
        return not self._turns

    @property
    def num_held(self) -> int:
        """How many turns and ended windows it holds, which is bounded however long the session runs."""
        return len(self._turns) + len(self._ended)

    async def changed(self) -> None:
        """Wait for the next decode or the next audio, after which `behind` may differ. Check it in a loop."""
        await self._changed.wait()

    def wake(self) -> None:
        """Let the task look again for work, because audio came or the open window changed. Does not wait."""
        self._changed.notify()

    def add(self, step: WindowEnded | TurnEnded) -> None:
        """Queue a window or turn that has ended, and cancel the partial in progress. Does not wait for the decode."""
        self._ended.append(_Ended(step, self._clock()))
        self._cancel_partial()
        self.wake()

    def configure(self, config: TranscriptionConfig) -> None:
        """Apply a changed configuration from the next decode on. The segmenter is left to the caller."""
        self.config = config
        self.profile = tuned(self._transcriber.profile, config.tuning)

    def clear(self) -> None:
        """Drop the open turn and its windows, of which no transcript follows. Has to be called before the segmenter is
        cleared, because it asks the segmenter for the open turn.
        """
        self._cancel_partial()
        self._guess = None
        turn = self.segmenter.turn
        self._turns.pop(turn, None)
        for ended in self._ended:
            if isinstance(ended.step, WindowEnded) and all(s.turn == turn for s in ended.step.window.spans):
                ended.step.window.dropped = True

    async def retract_guess(self) -> None:
        """Emit GuessDropped if the pause has ended of which a preflight transcript was emitted. Call it after audio."""
        guess, window = self._guess, self.segmenter.window
        if not (guess and guess.reported and window):
            return
        if (window.id, self.segmenter.quiet_since) != (guess.window_id, guess.speech_end):
            guess.reported = False
            await self._emit(GuessDropped(guess.turn))

    def end(self) -> None:
        """Let `run` return once everything that was handed over is decoded. Does not wait for that itself."""
        self._listening = False
        self.wake()

    def _cancel_partial(self) -> None:
        if self._partial_scope:
            self._partial_scope.cancel()

    # --- what to decode next ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Decode until `end` was called and everything handed over is done, then close the transcriber's stream. A
        decode that fails raises nothing: its turns end with TranscriptFailed.
        """
        try:
            await self._run()
        finally:
            self._stream.close()

    async def _run(self) -> None:
        while True:
            if self._ended:
                await self._finish(self._ended[0])
                self._ended.popleft()
                self.wake()
            elif not self._listening:
                return
            elif self._known_already():
                for step in self.segmenter.settle():
                    assert isinstance(step, WindowEnded | TurnEnded)
                    self.add(step)
            elif self._window_is_full():
                await self._cut_window()
            elif self._may_guess():
                await self._guess_final()
            elif self._partial_due():
                await self._partial()
            else:
                await self._changed.wait()

    def _known_already(self) -> bool:
        """Whether the turn has ended, a response waits for it, and its words were decoded during its last pause."""
        window, guess = self.segmenter.window, self._guess
        if self.is_emitting or not (self.config.preflight and self.segmenter.settling and window and guess):
            return False
        return (guess.window_id, guess.speech_end) == (window.id, self.segmenter.quiet_since)

    def _window_is_full(self) -> bool:
        window = self.segmenter.window
        if window is None:
            return False
        prefix = len(self._text.prefix) if self._text and self._text_window == window.id else 0
        return self.segmenter.window_s > self.profile.max_window_s or prefix > self.profile.max_prefix_tokens

    def _turn(self, number: int) -> _Turn:
        return self._turns.setdefault(number, _Turn())

    def _text_of(self, window: OpenWindow) -> WindowText:
        """The text of this window, begun when it is first asked for."""
        if self._text is None or self._text_window != window.id:
            settled, pieces = self._settled
            if settled != window.after:
                pieces = ()
                if window.after is not None:
                    # The final of that window failed: without its words, its audio would be transcribed again.
                    window.start, window.after = window.spans[0].start, None
            self._text = WindowText(self.profile, pieces)
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
                final = await self._final(window, ended.pcm, patient=True)
        except (ModelError, Refused) as error:
            log.error("transcript failed: %s", error)
            self._fail(window, error)
            return
        if not window.dropped:
            await self._settle(window, text, final)

    def _fail(self, window: OpenWindow, error: Exception) -> None:
        for span in window.spans:
            self._turn(span.turn).failure = str(error)

    async def _settle(self, window: OpenWindow, text: WindowText, final: Hypothesis) -> None:
        """Divide a window's final among its turns, and send the last deltas."""
        deltas, pieces = text.finish(final, word_turns(window, final))
        # Counted with the window's last turn, because one decode cannot be divided.
        last = self._turn(window.spans[-1].turn)
        last.prompt_tokens += final.prompt_tokens
        last.completion_tokens += final.completion_tokens
        for number, piece in pieces:
            turn = self._turn(number)
            turn.text += piece.text
            turn.language = final.language
        shift_s = window.start / SAMPLE_RATE_HZ
        if self.config.word_times and pieces:
            for (number, _), w in zip(pieces, final.words, strict=True):
                word = Word(w.text, w.start_s + shift_s, w.end_s + shift_s, w.probability)
                self._turn(number).words.append(word)
        self._settled = (window.id, (*text.base, *(p for _, p in pieces)))
        # Bound: the adapter takes the last `context_tokens` of this; a token has at most a dozen characters.
        whole = "".join(p.text for _, p in pieces)
        self._context = (self._context + whole)[-12 * max(1, self.profile.context_tokens) :]
        for number, delta in deltas:
            await self._send(number, delta)

    async def _send(self, turn_number: int, delta: str) -> None:
        turn = self._turn(turn_number)
        if not turn.streamed:
            delta = delta.lstrip()
        if delta:
            turn.streamed += delta
            await self._emit(TranscriptDelta(turn_number, delta))

    async def _final(self, window: OpenWindow, pcm: Pcm, *, patient: bool, words: bool = False) -> Hypothesis:
        """Decode all words of a window. With `patient`, a full lane is asked up to FINAL_ATTEMPTS times."""
        text, asked = self._text_of(window), self._window(window, pcm, final=True, words=words)
        # Where words need times, those that were sent need them too, so they are decoded again.
        bound = self.profile.final_keeps_prefix and not asked.word_times
        if bound:
            asked = replace(asked, prefix=text.prefix)
        sent = tuple(p for _, p in text.sent) if bound else ()
        final = await (self._patiently(asked) if patient else self._stream.decode(asked))
        return replace(final, pieces=(*sent, *final.pieces), is_speech=final.is_speech or bool(sent))

    async def _patiently(self, window: Window) -> Hypothesis:
        for _ in range(FINAL_ATTEMPTS - 1):
            try:
                return await self._stream.decode(window)
            except Refused as refusal:
                await anyio.sleep(min(MAX_RETRY_S, refusal.retry_after_s))
        return await self._stream.decode(window)

    def _window(self, window: OpenWindow, pcm: Pcm, *, final: bool, words: bool = False) -> Window:
        text = self._text_of(window)
        return Window(
            pcm,
            start_sample=window.start,
            prefix=text.base_tokens if final else text.prefix,
            context=self._context if self.profile.context_tokens else "",
            prompt=self.config.prompt,
            language=self.config.language,
            final=final,
            word_times=words or len(window.spans) > 1 or (final and self.config.word_times),
            max_tokens=None if final else self.profile.max_tokens,
        )

    def _may_guess(self) -> bool:
        window, quiet = self.segmenter.window, self.segmenter.quiet_since
        if window is None or quiet is None or self._transcriber.busy():
            return False
        done = self._guess and (self._guess.window_id, self._guess.speech_end) == (window.id, quiet)
        return not done and self.segmenter.now - quiet >= GUESS_AFTER_S * SAMPLE_RATE_HZ

    async def _guess_final(self) -> None:
        window, quiet = self.segmenter.window, self.segmenter.quiet_since
        assert window is not None
        assert quiet is not None
        pcm = self.segmenter.audio(window.start)
        try:
            final = await self._final(window, pcm, patient=False)
        except (ModelError, Refused) as error:
            # Nothing is lost: the turn's final is decoded when the turn has ended.
            log.info("a final was not decoded ahead: %s", error)
            return
        turn = window.spans[-1].turn
        self._guess = _Guess(window.id, quiet, final, turn)
        if final.is_speech and final.pieces and goes_on(final.pieces[-1].text):
            # The words say that the sentence goes on, whatever the turn detector heard in the melody.
            self.unfinished = quiet
            if self.segmenter.quiet_since == quiet:
                self.segmenter.linger()
        if self.config.preflight and self.segmenter.window is window and self.segmenter.quiet_since == quiet:
            turn_pieces = zip(word_turns(window, final), final.pieces, strict=True) if final.is_speech else ()
            known = self._turns[turn].text if turn in self._turns else ""
            self._guess.reported = True
            text = (known + "".join(p.text for t, p in turn_pieces if t == turn)).strip()
            await self._emit(TranscriptGuessed(turn, text, quiet * 1000 // SAMPLE_RATE_HZ))

    def _eager(self, window: OpenWindow) -> bool:
        """Whether none of the turn's words was sent yet."""
        return window.spans[-1].first and self._text_of(window).untouched(window.spans[-1].turn)

    def _partial_due(self) -> bool:
        window = self.segmenter.window
        if window is None or self.segmenter.quiet_since is not None or not self.config.partials:
            return False
        self._text_of(window)
        if self._eager(window):
            step_s = self.profile.first_step_s
        else:
            # Where other sessions wait, partials come less often, so that finals stay on time.
            step_s = self.profile.step_s * (BUSY_STEPS if self._transcriber.busy() else 1)
        return self.segmenter.now - self._partial_at >= step_s * SAMPLE_RATE_HZ

    async def _partial(self) -> None:
        window = self.segmenter.window
        assert window is not None
        text = self._text_of(window)
        now = self._partial_at = self.segmenter.now
        started = self._clock()
        with anyio.CancelScope() as self._partial_scope:
            try:
                hypothesis = await self._stream.decode(
                    self._window(window, self.segmenter.audio(window.start), final=False)
                )
            except Refused as refusal:
                await anyio.sleep(min(MAX_RETRY_S, refusal.retry_after_s))
                return
            except ModelError as error:
                # If it is not only this decode that fails, the final of the same audio reports it.
                log.warning("partial failed: %s", error)
                return
            finally:
                self._partial_scope = None
            self._measure("partial", self._clock() - started)
            turns = word_turns(window, hypothesis)
            if (
                self.config.preflight
                and hypothesis.is_speech
                and hypothesis.language_probability >= MIN_LANGUAGE_PROBABILITY
            ):
                turn = window.spans[-1].turn
                before = [p.text for t, p in text.sent if t == turn]
                likely = [
                    p.text
                    for t, p in zip(turns, hypothesis.pieces, strict=True)
                    if t == turn and p.probability >= LIKELY_PROBABILITY
                ]
                await self._emit(TranscriptPartial(turn, "".join([*before, *likely]).strip()))
            for turn, delta in text.offer(hypothesis, now / SAMPLE_RATE_HZ, turns, self._eager(window)):
                await self._send(turn, delta)

    async def _cut_window(self) -> None:
        """Settle a window that is as long as the model allows and has no pause, up to a gap between words."""
        window = self.segmenter.window
        assert window is not None
        text = self._text_of(window)
        pcm = self.segmenter.audio(window.start)
        try:
            final = await self._final(window, pcm, patient=True, words=True)
        except (ModelError, Refused) as error:
            log.error("transcript failed: %s", error)
            self._fail(window, error)
            final = None
        if self.segmenter.window is not window:
            return
        keep = words_to_settle(final, len(text.sent), len(pcm) / SAMPLE_RATE_HZ) if final else 0
        if final is None or not keep:
            self.segmenter.cut(window.start + len(pcm))
            return
        cut_s = (
            (final.words[keep - 1].end_s + final.words[keep].start_s) / 2
            if keep < len(final.words)
            else len(pcm) / SAMPLE_RATE_HZ
        )
        if not self.profile.aligns_words:
            cut_s = quietest_near(pcm, cut_s)
        # Cut before anything is sent: a turn that ends during the sending then ends the new window.
        self.segmenter.cut(window.start + int(cut_s * SAMPLE_RATE_HZ))
        await self._settle(window, text, shortened(final, keep))
