"""Decodes the audio of one session, and decides which window is decoded next, and when.

The inputs are the open window, passed as a value after each change (`update_window`), windows and turns that have ended
(`add`), changes of the configuration (`configure`), and turns that the client clears (`clear`). The outputs are events,
through `emit`, and commands to the listening task, through `command`. Only the listening task cuts audio into windows.

Finals have the highest priority, followed by cuts of windows that are too long, preflight transcripts, and partials. A
preflight transcript, or guess, is a final that is decoded during a pause, in case the pause ends the turn. One task
does all of this, one decode at a time.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

import anyio

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.quiet import quietest_near
from antiphon.contracts import Hypothesis, Transcriber, Window, tuned
from antiphon.errors import ModelError, Refused
from antiphon.events.transcription import (
    GuessDropped,
    LanguageDetected,
    TranscriptGuessed,
    TranscriptionConfig,
    TranscriptionEvent,
)
from antiphon.sessions.transcription.spoken_language import SpokenLanguage
from antiphon.sessions.transcription.stable_words import shortened, words_before_cut
from antiphon.sessions.transcription.transcripts import Transcripts
from antiphon.signals import Signal
from antiphon.turns.windows import SpeechWindow, TurnEnded, WindowEnded

log = logging.getLogger(__name__)

# Maximum number of ended windows that wait to be decoded. Beyond it no audio is read, because a file arrives faster
# than it can be decoded.
MAX_WAITING_WINDOWS = 2
WINDOW_OVERRUN_S = 4.0
# Seconds of pause (two frames) after which a guess is decoded. With 60 to 300 ms of silence after the last word, the
# word error rates of finals lie between 8.9 and 10.5 % (97 clips), without a trend. With a shorter wait, more guesses
# are decoded in vain, during pauses that do not end the turn.
GUESS_AFTER_S = 0.064
# Maximum seconds before a refused final is retried, even if the lane suggests a longer wait.
MAX_RETRY_S = 2.0
FINAL_ATTEMPTS = 5
BUSY_STEPS = 3
# Deadlines of decodes, in seconds: of a final, counted from the end of its turn, and of partials (for first words and
# for later words), counted from the time at which they became due.
# Finals and first words share a queue, in which a final waits only for first words that became due 0.7 s or more before
# the end of its turn (docs/design/partials.md).
FINAL_DUE_S, FIRST_DUE_S, PARTIAL_DUE_S = 0.3, 1.0, 0.3


@dataclass(frozen=True, slots=True)
class Cut:
    """Restart the open window with the id `window` at `sample`, because the final of all audio before `sample` is
    known. The new window is passed to `update_window` before the command returns.
    """

    window: int
    sample: int


@dataclass(frozen=True, slots=True)
class Settle:
    """End the settling window now, because the words of its last turn are known. That turn ended with the pause that
    began at the sample `pause`. The window and its turns are passed to `add` before the command returns.
    """

    pause: int


@dataclass(frozen=True, slots=True)
class HeardBefore:
    """The words of the turn up to the pause that began at the sample `pause`: `text`, in `language`."""

    pause: int
    text: str
    language: str


WindowCommand = Cut | Settle | HeardBefore
EmitTranscription = Callable[[TranscriptionEvent], Awaitable[None]]
CommandWindow = Callable[[WindowCommand], bool]
Measure = Callable[[str, float], None]


@dataclass(slots=True)
class _Ended:
    """A window or turn that has ended, with the time at which the listening task found its end, in monotonic seconds.
    The words of a `dropped` window are discarded. When it is `finished`, its words are in the transcripts of its turns.
    """

    step: WindowEnded | TurnEnded
    since_s: float
    dropped: bool = False
    finished: bool = False


@dataclass(slots=True)
class _Guess:
    """A final that was decoded during a pause of `turn`. It is used if the window ends with that pause. `reported` is
    true while an emitted TranscriptGuessed is still valid.
    """

    window: int
    pause: int
    turn: int
    final: Hypothesis
    reported: bool = False

    def is_of(self, window: SpeechWindow | None) -> bool:
        """Whether the window is in the pause during which the guess was decoded."""
        return window is not None and (self.window, self.pause) == (window.id, window.quiet_since)


class Decoding:
    """The decoding task of a session. Run `run()` as a task. `end()` lets it finish its input and return.

    It opens the transcriber's stream. `profile` is the transcriber's profile with the session's tuning.

    - `emit`: awaited for every event. Decoding waits until it returns.
    - `command`: applies a command before it returns. If the window or pause of the command is over, it does nothing and
      returns False, and `update_window` is called shortly with the changed window.
    - `measure`: gets the seconds that each "partial" took, and the seconds from the end of a turn to its "final".
    - `clock`: returns monotonic seconds.
    """

    def __init__(
        self,
        config: TranscriptionConfig,
        transcriber: Transcriber,
        emit: EmitTranscription,
        command: CommandWindow,
        measure: Measure,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.profile = tuned(transcriber.profile, config.tuning)
        self._config = config
        self._transcriber = transcriber
        self._stream = transcriber.open()
        self._emit = emit
        self._command = command
        self._measure = measure
        self._clock = clock
        # The transcripts of the turns that have begun.
        self.transcripts = Transcripts(self.profile, word_times=config.word_times)
        self._language = SpokenLanguage(config.language, config.languages)
        # The open window, as the listening task last passed it, and whether this window is settling.
        self._window: SpeechWindow | None = None
        self._settling = False
        # Bound: MAX_WAITING_WINDOWS. When it is reached, listening waits.
        self._ended: deque[_Ended] = deque()
        # Events that are about to be emitted.
        self.to_emit: deque[TranscriptionEvent] = deque()
        self._changed = Signal()
        self._ending = False
        self._guess: _Guess | None = None
        self._partial_scope: anyio.CancelScope | None = None
        # The window that is decoded for a partial. While it waits in the lane, newer audio replaces it.
        self._partial_window: SpeechWindow | None = None
        # The window of the last partial, and the sample after its audio. A continued session sets it.
        self.partial_at = (0, 0)

    # --- inputs -------------------------------------------------------------------------------------------------------

    def update_window(self, window: SpeechWindow | None, *, settling: bool) -> None:
        """Set the current open window and wake the task, without waiting for it. Call `add` first for everything that
        ended before this window. `settling`: the ends of all its turns were emitted, and the window waits for the
        silence that ends it.
        """
        self._window, self._settling = window, settling
        self._renew_partial()
        self._changed.notify()

    def add(self, step: WindowEnded | TurnEnded) -> None:
        """Queue a window or turn that has ended, and cancel the partial in progress. Does not wait for the decode."""
        if isinstance(step, WindowEnded):
            self._window = None
        self._ended.append(_Ended(step, self._clock()))
        self._cancel_partial()
        self._changed.notify()

    def configure(self, config: TranscriptionConfig) -> None:
        """Apply a changed configuration from the next decode on."""
        self._config = config
        self.profile = tuned(self._transcriber.profile, config.tuning)
        self.transcripts.configure(self.profile, word_times=config.word_times)
        self._language.configure(config.language, config.languages)

    def clear(self, turn: int) -> None:
        """Drop the open turn, whose number is `turn`, and its windows. No transcript of it follows."""
        self._cancel_partial()
        self._guess = None
        self._window = None
        self.transcripts.drop(turn)
        for ended in self._ended:
            if isinstance(ended.step, WindowEnded) and all(s.turn == turn for s in ended.step.window.spans):
                ended.dropped = True

    async def retract_guess(self) -> None:
        """Emit GuessDropped if the pause of an emitted preflight transcript has ended. Call it after each piece of
        audio.
        """
        guess = self._guess
        if guess and guess.reported and self._window and not guess.is_of(self._window):
            guess.reported = False
            await self._emit(GuessDropped(guess.turn))

    def end(self) -> None:
        """Let `run` return after all its input is decoded. Returns at once."""
        self._ending = True
        self._changed.notify()

    @property
    def unfinished(self) -> list[WindowEnded | TurnEnded]:
        """The windows and turns that have ended and whose words are not known yet, in order."""
        return [ended.step for ended in self._ended if not (ended.finished or ended.dropped)]

    def _renew_partial(self) -> None:
        """Extend a partial that waits in the lane by the audio that has arrived since it was queued."""
        waiting, window = self._partial_window, self._window
        if waiting is None or window is None or waiting.id != window.id or window.quiet_since is not None:
            return
        window = window.from_sample(waiting.start)
        if self._stream.replace(self._partial_request(window)):
            self._partial_window, self.partial_at = window, (window.id, window.end)

    def _cancel_partial(self) -> None:
        if self._partial_scope:
            self._partial_scope.cancel()

    # --- for the listening task, which must not get too far ahead -----------------------------------------------------

    @property
    def behind(self) -> bool:
        """Whether the listening task has to wait, because two windows or turns wait for decoding, or because the open
        window is 4 s longer than allowed.
        """
        overrun = self._window and self._window.length_s > self.profile.max_window_s + WINDOW_OVERRUN_S
        return bool(overrun) or len(self._ended) >= MAX_WAITING_WINDOWS

    @property
    def idle(self) -> bool:
        """Whether every turn that decoding has begun has its transcript."""
        return not self.transcripts.num_turns

    @property
    def num_held(self) -> int:
        """Number of turns and ended windows in memory. Bounded for sessions of any length."""
        return self.transcripts.num_turns + len(self._ended)

    async def changed(self) -> None:
        """Wait for the next decode or the next window, after which `behind` may have changed. Call it in a loop that
        checks `behind`.
        """
        await self._changed.wait()

    # --- what to decode next ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Decode until `end` was called and all input is decoded, then close the transcriber's stream. Does not raise
        if a decode fails: the turns of its window then end with TranscriptFailed.
        """
        try:
            while self._ended or not self._ending:
                if not await self._decode_next():
                    await self._changed.wait()
        finally:
            self._stream.close()

    async def _decode_next(self) -> bool:
        """Do the most urgent task. Returns whether there was anything to do."""
        if self._ended:
            await self._finish(self._ended[0])
            self._ended.popleft()
            self._changed.notify()
            return True
        if self._window is None:
            return False
        window = self.transcripts.enter(self._window)
        if self._is_known(window):
            self._settle_window(window)
        elif self._is_full(window):
            await self._cut_window(window)
        elif self._guess_is_due(window):
            await self._guess_final(window)
        elif self._partial_is_due(window):
            await self._partial(window)
        else:
            return False
        return True

    def _is_known(self, window: SpeechWindow) -> bool:
        """Whether the turn has ended, a response waits for it, and its words were decoded during its last pause."""
        return self._config.preflight and self._settling and self._guess is not None and self._guess.is_of(window)

    def _is_full(self, window: SpeechWindow) -> bool:
        num_tokens = len(self.transcripts.window_text.prefix)
        return window.length_s > self.profile.max_window_s or num_tokens > self.profile.max_prefix_tokens

    def _guess_is_due(self, window: SpeechWindow) -> bool:
        if window.quiet_since is None or self._transcriber.busy() or (self._guess and self._guess.is_of(window)):
            return False
        return window.end - window.quiet_since >= GUESS_AFTER_S * SAMPLE_RATE_HZ

    def _partial_is_due(self, window: SpeechWindow) -> bool:
        if window.quiet_since is not None or not self._config.partials or self._transcriber.overdue():
            return False
        step_s = self.profile.first_step_s if self.transcripts.is_eager(window) else self.profile.step_s
        if self._transcriber.busy():
            # If other sessions wait, partials are less frequent, so that finals stay on time.
            step_s *= BUSY_STEPS
        window_id, sample = self.partial_at
        since = sample if window_id == window.id else window.spans[0].start
        return window.end - since >= step_s * SAMPLE_RATE_HZ

    # --- finals -------------------------------------------------------------------------------------------------------

    async def _finish(self, ended: _Ended) -> None:
        if isinstance(ended.step, WindowEnded):
            await self._finish_window(ended, ended.step)
        else:
            done = self.transcripts.complete(ended.step)
            ended.finished = True
            self._measure("final", self._clock() - ended.since_s)
            await self._emit(done)

    async def _finish_window(self, ended: _Ended, step: WindowEnded) -> None:
        window = self.transcripts.enter(step.window)
        guess, self._guess = self._guess, None
        if guess and (guess.window, guess.pause) == (window.id, step.speech_end):
            final: Hypothesis | None = guess.final
        else:
            final = await self._decode_final_patiently(window, due_s=ended.since_s + FINAL_DUE_S)
        if final and not ended.dropped:
            await self._emit_all(self._language_of(window, final))
            if not ended.dropped:
                ended.finished = True
                await self._emit_all(self.transcripts.finish(window, final))

    async def _decode_final_patiently(
        self, window: SpeechWindow, *, word_times: bool = False, due_s: float | None = None
    ) -> Hypothesis | None:
        """Decode all words of a window. If the lane is full, tries again, up to FINAL_ATTEMPTS times in total. Returns
        None if the decode failed.
        """
        try:
            for _ in range(FINAL_ATTEMPTS - 1):
                try:
                    return await self._decode_final(window, word_times=word_times, due_s=due_s)
                except Refused as refusal:
                    await anyio.sleep(min(MAX_RETRY_S, refusal.retry_after_s))
            return await self._decode_final(window, word_times=word_times, due_s=due_s)
        except (ModelError, Refused) as error:
            log.error("transcript failed: %s", error)
            self.transcripts.fail(window, error)
            return None

    async def _decode_final(
        self, window: SpeechWindow, *, word_times: bool = False, due_s: float | None = None
    ) -> Hypothesis:
        """Decode all words of a window, without a retry."""
        text = self.transcripts.window_text
        word_times = word_times or len(window.spans) > 1 or self._config.word_times
        # With word times, the final has to decode the words that were sent again, to get their times too.
        keeps_sent = self.profile.final_keeps_prefix and not word_times
        prefix = text.prefix if keeps_sent else text.base_tokens
        sent = tuple(p for _, p in text.sent) if keeps_sent else ()
        request = self._request(window, prefix, final=True, word_times=word_times)
        final = await self._stream.decode(replace(request, deadline_s=due_s))
        return replace(final, pieces=(*sent, *final.pieces), is_speech=final.is_speech or bool(sent))

    def _request(self, window: SpeechWindow, prefix: tuple[int, ...], *, final: bool, word_times: bool) -> Window:
        terms, prompt = self._config.keyterms, self._config.prompt
        if terms and not self.profile.keyterms:
            prompt, terms = " ".join(filter(None, [prompt, ", ".join(terms)])), ()
        spoken = self._language.request(window.id, window.speech_s)
        return Window(
            window.pcm,
            start_sample=window.start,
            prefix=prefix,
            context=self.transcripts.context,
            prompt=prompt,
            keyterms=terms,
            language=spoken.language,
            languages=spoken.languages,
            likely_language=spoken.likely_language,
            final=final,
            word_times=word_times,
            logprobs=self._config.logprobs,
            max_tokens=None if final else self.profile.max_tokens,
        )

    def _language_of(self, window: SpeechWindow, heard: Hypothesis) -> list[TranscriptionEvent]:
        """Update the session's language from a hypothesis of the window. Returns the event of a new language."""
        if not heard.is_speech:
            return []
        is_new = self._language.offer(window.id, window.speech_s, heard.language, heard.language_probability)
        if not (is_new and self._config.reports_language):
            return []
        return [LanguageDetected(window.spans[-1].turn, heard.language, heard.language_probability)]

    async def _emit_all(self, events: Iterable[TranscriptionEvent]) -> None:
        self.to_emit.extend(events)
        while self.to_emit:
            await self._emit(self.to_emit.popleft())

    # --- windows that are open ----------------------------------------------------------------------------------------

    def _settle_window(self, window: SpeechWindow) -> None:
        assert window.quiet_since is not None
        if not self._command(Settle(window.quiet_since)):
            self._window = None

    async def _cut_window(self, window: SpeechWindow) -> None:
        """Finish a window that has reached the model's maximum length without a pause, up to a gap between words."""
        final = await self._decode_final_patiently(window, word_times=True)
        if self._window is None or self._window.id != window.id:
            return
        num_sent = len(self.transcripts.window_text.sent)
        keep = words_before_cut(final, num_sent, window.length_s) if final else 0
        sample = self._end_of_word(window, final, keep) if final and keep else window.end
        # The cut comes before the events, so that a turn that ends while they are emitted ends the new window.
        if not self._command(Cut(window.id, sample)):
            self._window = None
        elif final and keep:
            language = self._language_of(window, final)
            await self._emit_all([*language, *self.transcripts.finish(window, shortened(final, keep))])

    def _end_of_word(self, window: SpeechWindow, final: Hypothesis, num_words: int) -> int:
        """Return the sample at which to cut the window after the first `num_words` words of its final."""
        cut_s = window.length_s
        if num_words < len(final.words):
            cut_s = (final.words[num_words - 1].end_s + final.words[num_words].start_s) / 2
        if not self.profile.aligns_words:
            cut_s = quietest_near(window.pcm, cut_s)
        return window.start + int(cut_s * SAMPLE_RATE_HZ)

    async def _guess_final(self, window: SpeechWindow) -> None:
        """Decode the final of a window that is in a pause, and report it if a preemptive response may begin from it."""
        assert window.quiet_since is not None
        try:
            final = await self._decode_final(window)
        except (ModelError, Refused) as error:
            # Nothing is lost, because the final is decoded again when the turn has ended.
            log.info("a final was not decoded ahead: %s", error)
            return
        turn = window.spans[-1].turn
        self._guess = guess = _Guess(window.id, window.quiet_since, turn, final)
        text = self.transcripts.preview(window, final)
        self._command(HeardBefore(window.quiet_since, text, final.language))
        if self._config.preflight and guess.is_of(self._window):
            guess.reported = True
            await self._emit(TranscriptGuessed(turn, text, window.quiet_since * 1000 // SAMPLE_RATE_HZ))

    async def _partial(self, window: SpeechWindow) -> None:
        self._partial_window, self.partial_at = window, (window.id, window.end)
        started = self._clock()
        partial = await self._decode_partial(window)
        window, self._partial_window = self._partial_window, None
        if partial is None:
            return
        self._measure("partial", self._clock() - started)
        await self._emit_all(self._language_of(window, partial))
        likely = self.transcripts.likely_text(window, partial) if self._config.preflight else None
        if likely:
            await self._emit(likely)
        await self._emit_all(self.transcripts.offer(window, partial))

    def _partial_request(self, window: SpeechWindow) -> Window:
        prefix = self.transcripts.window_text.prefix
        word_times = len(window.spans) > 1 or self._config.word_times
        request = self._request(window, prefix, final=False, word_times=word_times)
        urgent = self.transcripts.is_eager(window)
        due_s = self._clock() + (FIRST_DUE_S if urgent else PARTIAL_DUE_S)
        return replace(request, urgent=urgent, deadline_s=due_s)

    async def _decode_partial(self, window: SpeechWindow) -> Hypothesis | None:
        """Decode a partial of the window. Returns None if that failed, or if a final became due meanwhile."""
        request = self._partial_request(window)
        with anyio.CancelScope() as self._partial_scope:
            try:
                return await self._stream.decode(request)
            except Refused as refusal:
                await anyio.sleep(min(MAX_RETRY_S, refusal.retry_after_s))
            except ModelError as error:
                # If the failure is not limited to this decode, the final of the same audio reports it.
                log.warning("partial failed: %s", error)
            finally:
                self._partial_scope = None
        return None
