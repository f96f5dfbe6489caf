"""Assembles the transcripts of a session's turns from the hypotheses of its windows. Pure: gets hypotheses, returns
events.

A turn may lie in several windows, and a window may hold several turns. A window is finished when the words of its final
have been divided among its turns. If the window is cut, only the words before the cut count. A transcript is complete
when all windows of its turn are finished.
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
from antiphon.sessions.transcription.state import SentWord, TurnPart, UnreadTurn
from antiphon.turns.windows import SpeechWindow, TurnEnded

# Minimum probability of a word in a `TranscriptPartial`. The words that a model makes up for half a second of humming
# have a probability of 0.1, words in speech 0.5 and more.
LIKELY_PROBABILITY = 0.4


@dataclass(slots=True)
class _TurnText:
    """A turn's transcript so far."""

    # Text of the deltas that were emitted.
    streamed: str = ""
    # Text of the finals.
    text: str = ""
    # The language of the latest final.
    language: str = ""
    # The finals' words with times, if the client asked for times.
    words: list[Word] = field(default_factory=list)
    # Log probabilities of the finals' tokens.
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # Tokens of the finals' prompts.
    prompt_tokens: int = 0
    # Tokens that the finals generated.
    completion_tokens: int = 0
    # The error of a window that failed, "" if none did.
    failure: str = ""
    # The id of its first window.
    since: int = 0
    # The lengths of `streamed`, `text`, `words` and `logprobs` that are in a TurnPart.
    noted: tuple[int, int, int, int] = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class _FinishedWindow:
    """The window that was finished last. It is the context of a window that follows shortly. `words` are all words of
    its audio from the sample `start` on, and `context` is the text before them.
    """

    id: int
    start: int
    words: tuple[HypothesisWord, ...]
    context: str


# A phrase of up to LOOP_WORDS words that is repeated LOOP_REPEATS times in a row is kept only once, because a model
# continues a loop that it finds in its context.
LOOP_WORDS, LOOP_REPEATS = 8, 4


class SpokenContext:
    """The newest words of finished windows, up to `max_tokens` tokens. It stays empty if `max_tokens` is 0."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._words: deque[HypothesisWord] = deque()
        self._num_tokens = 0

    @property
    def text(self) -> str:
        """The words as one text, as the model wrote them."""
        return "".join(w.text for w in self._words)

    def limit(self, max_tokens: int) -> None:
        """Keep at most `max_tokens` tokens from now on."""
        self._max_tokens = max_tokens
        self._trim()

    def add(self, words: Iterable[HypothesisWord]) -> None:
        """Append words that were said after those already in the context."""
        for word in words:
            self._words.append(word)
            self._num_tokens += _size(word)
            self._fold_loop()
        self._trim()

    def _fold_loop(self) -> None:
        """If the words end with LOOP_REPEATS equal phrases, keep only one of them."""
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


def _lengths(turn: _TurnText) -> tuple[int, int, int, int]:
    return len(turn.streamed), len(turn.text), len(turn.words), len(turn.logprobs)


def _size(word: HypothesisWord) -> int:
    return max(1, len(word.tokens))


class Transcripts:
    """The incomplete transcripts of one session, and the words of the window that is being decoded.

    Call `enter` first for each window, and pass the window that it returns to the other methods. With `word_times`,
    deltas and complete transcripts have word times, and the hypotheses must have them too.
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
        # Whether that window is finished or has failed.
        self._window_is_over = False
        self._context = ""
        self._said = SpokenContext(profile.context_tokens)
        # What finished windows have added to turns, oldest first, until the caller takes it; None if no caller does.
        self.parts: list[TurnPart] | None = None

    @property
    def num_turns(self) -> int:
        """Number of turns that have begun and are neither complete nor dropped."""
        return len(self._turns)

    @property
    def context(self) -> str:
        """The text before the audio of the window that was entered last. Empty for a model that takes no text as
        context.
        """
        return self._context if self._profile.context_tokens else ""

    def configure(self, profile: TranscriberProfile, *, word_times: bool) -> None:
        """Apply a changed profile. The window that was entered last keeps the old one."""
        self._profile, self._word_times = profile, word_times
        self._said.limit(profile.context_tokens)

    def enter(self, window: SpeechWindow) -> SpeechWindow:
        """Begin the text of a window if the window is new, and return the part of the window to decode.

        That part has no context in two cases. If the final of the context failed, its words are unknown and would be
        transcribed again, as words of this window. If the words of the context take more than half of the prefix, the
        window would be cut as soon as it has words of its own.
        """
        if self._window_id != window.id:
            self._window_id, self._window_start, self._window_is_over = window.id, window.start, False
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
        """Whether no word of the window's newest turn was sent yet, which makes its first words urgent."""
        return window.spans[-1].first and self.window_text.untouched(window.spans[-1].turn)

    def offer(self, window: SpeechWindow, partial: Hypothesis) -> list[TranscriptDelta]:
        """Process a partial of the window, and return deltas of the words that may now be sent, if any."""
        turns, end_s = window.word_turns(partial), window.end / SAMPLE_RATE_HZ
        sent = self.window_text.offer(partial, end_s, turns, self.is_eager(window))
        return self._deltas(sent, self._placed(window, partial))

    def likely_text(self, window: SpeechWindow, partial: Hypothesis) -> TranscriptPartial | None:
        """Return the likely text of the window's newest turn: its sent words, followed by the likely words of a partial
        that was not passed to `offer` yet. None if the partial has no speech or if its language is uncertain.
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
        """Return the whole transcript of the window's newest turn as if the window were finished with `final`."""
        turn = window.spans[-1].turn
        known = self._turns[turn].text if turn in self._turns else ""
        turn_pieces = zip(window.word_turns(final), final.pieces, strict=True) if final.is_speech else ()
        return (known + "".join(p.text for t, p in turn_pieces if t == turn)).strip()

    def finish(self, window: SpeechWindow, final: Hypothesis) -> list[TranscriptDelta]:
        """Divide a window's final among its turns, and return the last deltas. A final that was decoded before the
        client asked for word times yields words without times.
        """
        text = self.window_text
        sent, pieces = text.finish(final, window.word_turns(final))
        words = self._placed(window, final)
        # The tokens count for the window's last turn, because those of one decode cannot be divided.
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
        deltas = self._deltas(sent, words)
        self._over(window)
        return deltas

    def fail(self, window: SpeechWindow, error: Exception) -> None:
        """Record that a window failed. The transcript of each of its turns ends with TranscriptFailed."""
        for span in window.spans:
            self._turn(span.turn).failure = str(error)
        self._over(window)

    def complete(self, ended: TurnEnded) -> TranscriptDone | TranscriptFailed:
        """Remove and return the transcript of a turn whose windows are all finished. The transcript of a turn without
        windows is empty.
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
        """Forget the transcript of a turn that the client has cleared."""
        self._turns.pop(turn, None)

    # --- for another session that continues this one ------------------------------------------------------------------

    @property
    def unread(self) -> tuple[UnreadTurn, ...]:
        """The turns that have words and no transcript yet."""
        return tuple(UnreadTurn(number, turn.since) for number, turn in self._turns.items())

    @property
    def sent(self) -> tuple[int, tuple[SentWord, ...]]:
        """The id of the window that was entered last, and its words that were sent, if it is not finished."""
        words = () if self._window_is_over else self.window_text.sent
        return self._window_id, tuple(
            SentWord(turn, word.text, word.tokens, word.probability, word.logprobs) for turn, word in words
        )

    def restore(self, parts: Iterable[TurnPart], window_id: int, sent: Iterable[SentWord]) -> None:
        """Continue with the finished parts of open turns, and with the sent words of the window `window_id`."""
        for part in parts:
            turn = self._turn(part.turn, part.window)
            turn.streamed, turn.text = turn.streamed + part.streamed, turn.text + part.text
            turn.words += part.words
            turn.logprobs += part.logprobs
            turn.language, turn.failure = part.language, part.failure or turn.failure
            turn.prompt_tokens, turn.completion_tokens = part.prompt_tokens, part.completion_tokens
            turn.noted = _lengths(turn)
        self._window_id = window_id
        pieces = [(w.turn, HypothesisWord(w.text, w.tokens, w.probability, w.logprobs)) for w in sent]
        self.window_text.restore(pieces)
        self._deltas(pieces, {})

    def _over(self, window: SpeechWindow) -> None:
        """Note that a window is finished or has failed, and what it has added to turns."""
        self._window_is_over = window.id == self._window_id
        for number, turn in self._turns.items() if self.parts is not None else ():
            assert self.parts is not None
            streamed, text, words, logprobs = turn.noted
            turn.noted = _lengths(turn)
            part = TurnPart(
                window.id,
                number,
                turn.text[text:],
                turn.streamed[streamed:],
                turn.language,
                tuple(turn.words[words:]),
                tuple(turn.logprobs[logprobs:]),
                turn.prompt_tokens,
                turn.completion_tokens,
                turn.failure,
            )
            self.parts.append(part)

    def _leaves_room(self, words: Sequence[HypothesisWord]) -> bool:
        """Whether these words take at most half of a window's prefix."""
        return 2 * sum(len(w.tokens) for w in words) <= self._profile.max_prefix_tokens

    def _turn(self, number: int, since: int | None = None) -> _TurnText:
        return self._turns.setdefault(number, _TurnText(since=self._window_id if since is None else since))

    def _placed(self, window: SpeechWindow, hypothesis: Hypothesis) -> dict[int, tuple[Word]]:
        """Return the timed words of a hypothesis, in a map whose key is the `id()` of each piece: equal pieces have
        different times. Times are seconds of session audio. The map is empty without word times.
        """
        if not self._word_times or len(hypothesis.words) != len(hypothesis.pieces):
            return {}
        shift_s = window.start / SAMPLE_RATE_HZ
        return {
            id(piece): (replace(w, start_s=w.start_s + shift_s, end_s=w.end_s + shift_s),)
            for piece, w in zip(hypothesis.pieces, hypothesis.words, strict=True)
        }

    def _deltas(self, sent: Sequence[TurnPiece], words: dict[int, tuple[Word]]) -> list[TranscriptDelta]:
        """Return the deltas for these pieces, one for each turn, with those word times that are known."""
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
