"""The transcripts of a session's turns, put together from what its windows are decoded to. Pure: hypotheses in, events
out.

A turn may lie in several windows and a window may hold several turns. A window is finished
when its final, or the part of it before a cut, was divided among its turns; a transcript is complete when all windows
of its turn are finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import Hypothesis, HypothesisWord, TranscriberProfile
from antiphon.events.transcription import TranscriptDelta, TranscriptDone, TranscriptFailed, TranscriptPartial
from antiphon.events.words import TokenLogprob, Word, bare_word
from antiphon.sessions.transcription.spoken_language import MIN_LANGUAGE_PROBABILITY
from antiphon.sessions.transcription.stable_words import TurnPiece, WindowText
from antiphon.turns.segmenter import SpeechWindow, TurnEnded

# A model hears words in half a second of humming at a probability of 0.1, and in speech at 0.5 and more.
LIKELY_PROBABILITY = 0.4


@dataclass(slots=True)
class _TurnText:
    """A turn's transcript so far."""

    streamed: str = ""
    text: str = ""
    language: str = ""
    words: list[Word] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class _FinishedWindow:
    """The window finished last: the context of one that comes soon after. `words` are all that its audio from the
    sample `start` on says, `context` the text before that.
    """

    id: int
    start: int
    words: tuple[HypothesisWord, ...]
    context: str


# A phrase of up to so many words that comes so often in a row is given once: a model that is given a loop goes on with
# it.
LOOP_WORDS, LOOP_REPEATS = 8, 4


class SpokenContext:
    """The words of finished windows, the newest ones, of at most `max_tokens` tokens. With 0 it is empty."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._words: deque[HypothesisWord] = deque()
        self._num_tokens = 0

    @property
    def text(self) -> str:
        """The words as the model spelled them."""
        return "".join(w.text for w in self._words)

    def limit(self, max_tokens: int) -> None:
        """Keep at most so many tokens from now on."""
        self._max_tokens = max_tokens
        self._trim()

    def add(self, words: Iterable[HypothesisWord]) -> None:
        """Add words that were said behind those that are there."""
        for word in words:
            self._words.append(word)
            self._num_tokens += _size(word)
            self._fold_loop()
        self._trim()

    def _fold_loop(self) -> None:
        """Leave one of the phrases that the words end with, where they are the same LOOP_REPEATS times."""
        words = [bare_word(w.text) for w in self._words][-LOOP_WORDS * LOOP_REPEATS :]
        for size in range(1, len(words) // LOOP_REPEATS + 1):
            tail = words[-size * LOOP_REPEATS :]
            if tail == tail[:size] * LOOP_REPEATS:
                for _ in range(size * (LOOP_REPEATS - 1)):
                    self._num_tokens -= _size(self._words.pop())
                return

    def _trim(self) -> None:
        while self._num_tokens > self._max_tokens:
            self._num_tokens -= _size(self._words.popleft())


def _size(word: HypothesisWord) -> int:
    return max(1, len(word.tokens))


class Transcripts:
    """The transcripts of one session that are not complete, and the words of the window that is being decoded.

    A window is entered before anything else is done with it, and every other method takes it as `enter` returned it.
    `word_times`: deltas and complete transcripts have word times, and so must the hypotheses.
    """

    def __init__(self, profile: TranscriberProfile, *, word_times: bool) -> None:
        self._profile = profile
        self._word_times = word_times
        self._turns: dict[int, _TurnText] = {}
        self._finished: _FinishedWindow | None = None
        self._window_id = 0
        self._window_start = 0
        # The words of the window that was entered last.
        self.window_text = WindowText(profile)
        self._context = ""
        self._said = SpokenContext(profile.context_tokens)

    @property
    def num_turns(self) -> int:
        """The number of turns that were begun and are neither complete nor dropped."""
        return len(self._turns)

    @property
    def context(self) -> str:
        """What was said before the audio of the window that was entered last; empty for models without text context."""
        return self._context if self._profile.context_tokens else ""

    def configure(self, profile: TranscriberProfile, *, word_times: bool) -> None:
        """Apply a changed profile, which holds for the text of windows that are not entered yet."""
        self._profile, self._word_times = profile, word_times
        self._said.limit(profile.context_tokens)

    def enter(self, window: SpeechWindow) -> SpeechWindow:
        """Begin the text of a window that was not entered yet, and return the part of the window that is to be decoded.

        That is the window without audio whose words are not known: if the final of its context failed, the words of
        the context would be transcribed again, as words of this window. It is without the context, too, where the words
        of that take more than half of the prefix, so that the window is not cut as soon as it has words of its own.
        """
        if self._window_id != window.id:
            self._window_id, self._window_start = window.id, window.start
            words: tuple[HypothesisWord, ...] = ()
            self._context = self._said.text
            if self._finished and self._finished.id == window.after and self._leaves_room(self._finished.words):
                self._window_start, words = self._finished.start, self._finished.words
                self._context = self._finished.context
            elif window.after is not None:
                self._window_start = window.spans[0].start
            self.window_text = WindowText(self._profile, words)
        return window.from_sample(self._window_start)

    def is_eager(self, window: SpeechWindow) -> bool:
        """Whether no word of the window's newest turn was sent yet, so that its first words are to come soon."""
        return window.spans[-1].first and self.window_text.untouched(window.spans[-1].turn)

    def offer(self, window: SpeechWindow, partial: Hypothesis) -> list[TranscriptDelta]:
        """Take a partial of the window, and return the words of it that may be sent now, often none."""
        turns, end_s = window.word_turns(partial), window.end / SAMPLE_RATE_HZ
        sent = self.window_text.offer(partial, end_s, turns, self.is_eager(window))
        return self._deltas(sent, self._placed(window, partial))

    def likely_text(self, window: SpeechWindow, partial: Hypothesis) -> TranscriptPartial | None:
        """What the window's newest turn likely says: what was sent of it, and the likely words of a partial that is
        not offered yet. None where the partial has no speech or its language is uncertain.
        """
        if not partial.is_speech or partial.language_probability < MIN_LANGUAGE_PROBABILITY:
            return None
        turn = window.spans[-1].turn
        words = [p.text for t, p in self.window_text.sent if t == turn]
        for number, piece in zip(window.word_turns(partial), partial.pieces, strict=True):
            if number == turn and piece.probability >= LIKELY_PROBABILITY:
                words.append(piece.text)
        return TranscriptPartial(turn, "".join(words).strip())

    def preview(self, window: SpeechWindow, final: Hypothesis) -> str:
        """What the whole transcript of the window's newest turn is if the window is finished with `final`."""
        turn = window.spans[-1].turn
        known = self._turns[turn].text if turn in self._turns else ""
        turn_pieces = zip(window.word_turns(final), final.pieces, strict=True) if final.is_speech else ()
        return (known + "".join(p.text for t, p in turn_pieces if t == turn)).strip()

    def finish(self, window: SpeechWindow, final: Hypothesis) -> list[TranscriptDelta]:
        """Divide a window's final among its turns, and return the last deltas. A final without word times, decoded
        before the client asked for them, leaves its words without.
        """
        text = self.window_text
        sent, pieces = text.finish(final, window.word_turns(final))
        words = self._placed(window, final)
        # Counted with the window's last turn, because one decode cannot be divided.
        last = self._turn(window.spans[-1].turn)
        last.prompt_tokens += final.prompt_tokens
        last.completion_tokens += final.completion_tokens
        for number, piece in pieces:
            turn = self._turn(number)
            turn.text += piece.text
            turn.language = final.language
            turn.logprobs += piece.logprobs
            turn.words += words.get(id(piece), ())
        new = [p for _, p in pieces]
        self._finished = _FinishedWindow(window.id, window.start, (*text.base, *new), self._context)
        self._said.add(new)
        return self._deltas(sent, words)

    def fail(self, window: SpeechWindow, error: Exception) -> None:
        """Note that a part of the window's turns has no words. Each of them ends with TranscriptFailed."""
        for span in window.spans:
            self._turn(span.turn).failure = str(error)

    def complete(self, ended: TurnEnded) -> TranscriptDone | TranscriptFailed:
        """Return the transcript of a turn whose windows are all finished, and forget it. A turn without a window has an
        empty one.
        """
        turn = self._turns.pop(ended.turn, _TurnText())
        if turn.failure:
            return TranscriptFailed(ended.turn, turn.failure)
        return TranscriptDone(
            ended.turn,
            turn.text.strip(),
            turn.streamed,
            tuple(turn.words),
            turn.language,
            ended.audio_s,
            turn.prompt_tokens,
            turn.completion_tokens,
            tuple(turn.logprobs),
        )

    def drop(self, turn: int) -> None:
        """Forget what is known of a turn, which the client has cleared."""
        self._turns.pop(turn, None)

    def _leaves_room(self, words: Sequence[HypothesisWord]) -> bool:
        """Whether a window whose prefix begins with these words may have as many again."""
        return 2 * sum(len(w.tokens) for w in words) <= self._profile.max_prefix_tokens

    def _turn(self, number: int) -> _TurnText:
        return self._turns.setdefault(number, _TurnText())

    def _placed(self, window: SpeechWindow, hypothesis: Hypothesis) -> dict[int, tuple[Word]]:
        """The words of a hypothesis by the ids of its pieces, because equal pieces lie in different places. Times are
        seconds of session audio. Empty where word times are not asked for, or the hypothesis has none.
        """
        if not self._word_times or len(hypothesis.words) != len(hypothesis.pieces):
            return {}
        shift_s = window.start / SAMPLE_RATE_HZ
        return {
            id(piece): (replace(w, start_s=w.start_s + shift_s, end_s=w.end_s + shift_s),)
            for piece, w in zip(hypothesis.pieces, hypothesis.words, strict=True)
        }

    def _deltas(self, sent: Sequence[TurnPiece], words: dict[int, tuple[Word]]) -> list[TranscriptDelta]:
        """The deltas that bring these pieces, one for each of their turns, with the places that are known of them."""
        deltas = []
        for number, group in groupby(sent, key=itemgetter(0)):
            pieces = [piece for _, piece in group]
            turn = self._turn(number)
            text = "".join(p.text for p in pieces)
            if not turn.streamed:
                text = text.lstrip()
            if text:
                turn.streamed += text
                timed = tuple(w for p in pieces for w in words.get(id(p), ()))
                deltas.append(TranscriptDelta(number, text, timed, tuple(t for p in pieces for t in p.logprobs)))
        return deltas
