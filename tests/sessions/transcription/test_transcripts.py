"""The transcripts of turns, separately: windows and hypotheses in, events out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from antiphon.contracts import Hypothesis
from antiphon.events.transcription import TranscriptDelta, TranscriptDone, TranscriptPartial
from antiphon.events.words import Word
from antiphon.sessions.transcription.transcripts import Transcripts
from antiphon.turns.windows import SpeechWindow, TurnEnded, TurnSpan
from tests.scripted import PROFILE
from tests.sessions.transcription.test_stable_words import hypothesis, pieces

RATE = 16000


def window(
    id: int = 1, *spans: TurnSpan, after: int | None = None, start: int = 0, length_s: float = 3
) -> SpeechWindow:
    pcm = np.zeros(int(length_s * RATE), np.float32)
    return SpeechWindow(id, start, after, spans or (TurnSpan(0, start, True),), pcm)


def timed(text: str) -> Hypothesis:
    """Return a hypothesis in which each word takes a second."""
    words = tuple(Word(w, k, k + 1, 1.0) for k, w in enumerate(text.split()))
    return replace(hypothesis(text), words=words)


def test_when_a_window_continues_a_turn_then_its_words_are_not_the_first_of_the_turn() -> None:
    transcripts = Transcripts(PROFILE, word_times=False)
    first = transcripts.enter(window(1))
    assert transcripts.is_eager(first)
    transcripts.finish(first, hypothesis("so they"))
    on = transcripts.enter(window(2, TurnSpan(0, 3 * RATE, False), start=3 * RATE))
    assert not transcripts.is_eager(on)
    # The turn's text as if this window ended with these words.
    assert transcripts.preview(on, hypothesis("say it")) == "so they say it"
    assert transcripts.preview(on, hypothesis("hum", heard=False)) == "so they"


def test_when_turns_share_a_window_then_the_newest_is_previewed_and_each_is_completed_by_itself() -> None:
    transcripts = Transcripts(PROFILE, word_times=True)
    shared = transcripts.enter(window(1, TurnSpan(4, 0, True), TurnSpan(5, 2 * RATE, True), length_s=4))
    final = timed("so they say it")
    assert transcripts.preview(shared, final) == "say it"
    so, they, say, it = final.words
    assert transcripts.finish(shared, final) == [
        TranscriptDelta(4, "so they", (so, they)),
        TranscriptDelta(5, "say it", (say, it)),
    ]
    four, five = transcripts.complete(TurnEnded(4, 2.0)), transcripts.complete(TurnEnded(5, 2.0))
    assert four == TranscriptDone(4, "so they", "so they", final.words[:2], "en", 2.0, 0, 0)
    assert five == TranscriptDone(5, "say it", "say it", final.words[2:], "en", 2.0, 4, 4)
    assert transcripts.num_turns == 0


def test_when_a_partial_is_uncertain_then_its_words_are_not_likely() -> None:
    transcripts = Transcripts(PROFILE, word_times=False)
    shown = transcripts.enter(window())
    mixed = replace(hypothesis(""), pieces=(*pieces("so they"), *pieces("hum", 0.1)))
    assert transcripts.likely_text(shown, mixed) == TranscriptPartial(0, "so they")
    assert transcripts.likely_text(shown, hypothesis("so", heard=False)) is None
    assert transcripts.likely_text(shown, hypothesis("so", language=0.3)) is None


def test_when_windows_follow_closely_then_the_words_of_all_of_them_are_context() -> None:
    transcripts = Transcripts(PROFILE, word_times=False)
    transcripts.finish(transcripts.enter(window(1)), hypothesis("so"))
    for number, word in ((2, "they"), (3, "say")):
        begun = TurnSpan(number, number * RATE, True)
        entered = transcripts.enter(window(number, begun, after=number - 1, length_s=number + 1))
        transcripts.finish(entered, hypothesis(word))
    # The third window's prefix has the words of the first, whose audio it begins with.
    assert [p.text for p in transcripts.window_text.base] == [" so", " they"]
    assert transcripts.complete(TurnEnded(3, 1.0)).turn == 3


def test_when_a_window_begins_without_context_then_it_has_no_prefix() -> None:
    transcripts = Transcripts(PROFILE, word_times=False)
    transcripts.finish(transcripts.enter(window(1)), hypothesis("so they"))
    later = window(2, start=9 * RATE)
    assert transcripts.enter(later) is later
    assert transcripts.window_text.prefix == ()


def test_when_much_was_said_then_only_the_newest_words_are_kept_as_context() -> None:
    transcripts = Transcripts(replace(PROFILE, context_tokens=12), word_times=False)
    for number in range(1, 9):
        transcripts.finish(transcripts.enter(window(number, start=number * RATE)), hypothesis(f"so they say {number}"))
    transcripts.enter(window(9, start=9 * RATE))
    # A word of these hypotheses has two tokens.
    assert transcripts.context == " say 7 so they say 8"
    transcripts.configure(PROFILE, word_times=False)
    assert transcripts.context == ""


def test_when_a_window_begins_with_earlier_audio_then_its_context_is_what_was_said_before_that() -> None:
    """Its own prefix has the words of that audio. If they were also in the context, a model would take them for said
    twice.
    """
    transcripts = Transcripts(replace(PROFILE, context_tokens=12), word_times=False)
    transcripts.finish(transcripts.enter(window(1)), hypothesis("so"))
    transcripts.finish(transcripts.enter(window(2, start=RATE)), hypothesis("they say"))
    for number in (3, 4):
        entered = transcripts.enter(window(number, start=RATE, after=number - 1))
        assert transcripts.context == " so"
        transcripts.finish(entered, hypothesis("it"))
    transcripts.enter(window(5, start=9 * RATE))
    assert transcripts.context == " so they say it it"


def test_when_the_words_of_earlier_audio_fill_half_of_the_prefix_then_a_window_begins_without_them() -> None:
    transcripts = Transcripts(replace(PROFILE, context_tokens=12, max_prefix_tokens=7), word_times=False)
    transcripts.finish(transcripts.enter(window(1)), hypothesis("so"))
    joined = transcripts.enter(window(2, TurnSpan(1, RATE, True), after=1))
    assert (joined.start, len(transcripts.window_text.prefix)) == (0, 2)
    transcripts.finish(joined, hypothesis("they"))
    alone = transcripts.enter(window(3, TurnSpan(2, 2 * RATE, True), after=2))
    assert (alone.start, transcripts.window_text.prefix, transcripts.context) == (2 * RATE, (), " so they")
    transcripts.finish(alone, hypothesis("say"))
    # The next one also begins with its own audio.
    assert transcripts.enter(window(4, TurnSpan(3, 3 * RATE, True), after=3)).start == 2 * RATE
    assert transcripts.context == " so they"


def test_when_a_turn_is_dropped_then_the_next_of_its_number_is_a_new_one() -> None:
    transcripts = Transcripts(PROFILE, word_times=False)
    transcripts.finish(transcripts.enter(window(1)), hypothesis("so they"))
    transcripts.drop(0)
    assert transcripts.num_turns == 0
    transcripts.finish(transcripts.enter(window(2)), hypothesis("say it"))
    done = transcripts.complete(TurnEnded(0, 1.0))
    assert isinstance(done, TranscriptDone)
    assert (done.text, done.streamed) == ("say it", "say it")
