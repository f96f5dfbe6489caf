"""Decoding alone, of a window that is still open: preflight finals, and windows that are too long."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import anyio
import numpy as np

from antiphon.audio import Pcm
from antiphon.contracts import Hypothesis, Window
from antiphon.events.transcription import (
    GuessDropped,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptGuessed,
    TranscriptionConfig,
    TranscriptPartial,
)
from antiphon.sessions.transcription.decoding import Cut, Decoding, HeardBefore, Settle, WindowCommand
from antiphon.turns.windows import SpeechWindow, TurnEnded, TurnSpan, WindowEnded
from tests.scripted import WORD_SAMPLES, ScriptedTranscriber, speech, text
from tests.sessions.transcription.scripted_windows import (
    Answer,
    Input,
    Tuned,
    done,
    ended,
    growing,
    joined,
    opened,
    paused,
    play,
    turn_ended,
    window,
)

PREFLIGHT = TranscriptionConfig(preflight=True)


# --- preflight finals ---------------------------------------------------------------------------------------------


def test_when_a_window_pauses_then_its_final_is_decoded_ahead_and_used() -> None:
    transcriber = ScriptedTranscriber()
    shown = paused()
    short, long = opened(paused(frames=1)), opened(shown)
    out = play(short, long, long, ended(shown, shown.quiet_since), turn_ended(), transcriber=transcriber)
    assert [(w.final, len(w.pcm)) for w in transcriber.windows] == [(True, len(shown.pcm))]
    assert [o.text for o in done(out)] == [text(1, 3)]
    assert not any(isinstance(o, TranscriptGuessed) for o in out)


def test_when_the_window_ends_elsewhere_then_its_final_is_decoded_again() -> None:
    transcriber = ScriptedTranscriber()
    out = play(opened(paused()), ended(window(speech(1, 5))), turn_ended(), transcriber=transcriber)
    assert [w.final for w in transcriber.windows] == [True, True]
    assert [o.text for o in done(out)] == [text(1, 5)]


def test_when_turns_are_answered_then_the_preflight_transcript_is_reported_until_speech_goes_on() -> None:
    on = window(speech(1, 4))
    out = play(
        opened(paused()),
        lambda decoding: decoding.retract_guess(),
        opened(on),
        lambda decoding: decoding.retract_guess(),
        lambda decoding: decoding.retract_guess(),
        config=PREFLIGHT,
    )
    reported = [o for o in out if isinstance(o, TranscriptGuessed | GuessDropped)]
    assert reported == [TranscriptGuessed(0, text(1, 3), 960), GuessDropped(0)]


def test_when_the_pause_is_over_before_its_final_is_decoded_then_nothing_is_reported() -> None:
    gates = list[anyio.Event]()

    def gate(asked: Window) -> anyio.Event | None:
        gates.extend([anyio.Event()] if asked.final else [])
        return gates[-1] if asked.final else None

    out = play(
        opened(paused()),
        opened(window(speech(1, 4))),
        lambda _: gates[0].set(),
        lambda decoding: decoding.retract_guess(),
        transcriber=ScriptedTranscriber(gate=gate),
        config=PREFLIGHT,
    )
    assert not any(isinstance(o, TranscriptGuessed | GuessDropped) for o in out)


def test_when_turns_are_answered_then_the_words_so_far_are_reported_with_each_partial() -> None:
    out = play(*growing(speech(1, 4)), config=PREFLIGHT)
    partials = [o.text for o in out if isinstance(o, TranscriptPartial)]
    # Each has all words of the window, including those that were sent.
    assert partials[-1] == text(1, 4)
    assert joined(out)
    assert all(b.startswith(a) for a, b in pairwise(partials))


def test_when_a_turn_ends_with_its_preflight_transcript_then_its_window_is_settled_at_once() -> None:
    shown = paused()
    assert shown.quiet_since is not None

    def settle(decoding: Decoding, command: WindowCommand) -> bool:
        if not isinstance(command, Settle):
            return True
        decoding.add(WindowEnded(shown, 3 * WORD_SAMPLES))
        decoding.add(TurnEnded(0, 1.0))
        return True

    out = play(opened(shown), opened(shown, settling=True), config=PREFLIGHT, answer=settle)
    assert [type(o) for o in out] == [HeardBefore, TranscriptGuessed, Settle, TranscriptDelta, TranscriptDone]
    assert out[2] == Settle(shown.quiet_since)
    # Without a response that waits for the words, the next turn may still join the window.
    assert [type(o) for o in play(opened(shown), opened(shown, settling=True))] == [HeardBefore]


def test_when_the_listening_does_not_settle_then_it_is_asked_once_for_each_window_that_it_gives() -> None:
    shown = paused()
    again = opened(shown, settling=True)
    out = play(opened(shown), again, again, config=PREFLIGHT)
    assert [type(o) for o in out] == [HeardBefore, TranscriptGuessed, Settle, Settle]


def test_when_a_final_is_decoded_in_a_pause_then_the_listening_is_told_its_words() -> None:
    (reported,) = play(opened(paused()))
    assert isinstance(reported, HeardBefore)
    assert (reported.pause, reported.language) == (3 * WORD_SAMPLES, "en")
    assert reported.text


# --- windows that are too long ------------------------------------------------------------------------------------


def cutting(pcm: Pcm) -> tuple[Answer, list[Input]]:
    """Return a listener over continuous speech, which cuts windows and passes the rest as the next window."""
    first = 0
    number = 1

    def give(decoding: Decoding) -> None:
        decoding.update_window(rest(), settling=False)

    def rest() -> SpeechWindow:
        return window(pcm[first:], id=number, start=first, spans=(TurnSpan(0, 0, number == 1),))

    def cut(decoding: Decoding, command: WindowCommand) -> bool:
        nonlocal first, number
        assert isinstance(command, Cut)
        assert command.window == number
        first, number = command.sample, number + 1
        give(decoding)
        return True

    return cut, [give, lambda decoding: decoding.add(WindowEnded(rest(), len(pcm))), turn_ended()]


def test_when_a_window_is_too_long_then_it_is_cut_between_two_words_and_none_is_lost() -> None:
    transcriber = ScriptedTranscriber()
    answer, inputs = cutting(speech(1, 72))
    out = play(*inputs, transcriber=transcriber, answer=answer)
    (cut,) = [o for o in out if isinstance(o, Cut)]
    assert cut.sample % WORD_SAMPLES == 0
    # In the second half, and not in the last second, whose words may be incomplete.
    assert 0.6 * 72 * WORD_SAMPLES <= cut.sample <= 71 * WORD_SAMPLES
    (final,) = done(out)
    assert final.text == final.streamed == joined(out) == text(1, 72)
    # The words before the cut are sent at once.
    assert out.index(cut) < next(k for k, o in enumerate(out) if isinstance(o, TranscriptDelta))


def test_when_words_are_not_aligned_then_a_window_is_cut_in_the_quietest_place_nearby() -> None:
    """The estimated times place the gap between two words half a second too early."""
    pcm = np.concatenate((speech(1, 50), np.zeros(3200, np.float32), speech(51, 22)))

    class Estimating(Tuned):
        async def decode(self, asked: Window) -> Hypothesis:
            found = await super().decode(asked)
            words = tuple(replace(w, start_s=w.start_s - 0.5, end_s=w.end_s - 0.5) for w in found.words)
            return replace(found, words=words)

    answer, inputs = cutting(pcm)
    out = play(*inputs, transcriber=Estimating(aligns_words=False), answer=answer)
    (cut,) = [o for o in out if isinstance(o, Cut)]
    assert 50 * WORD_SAMPLES <= cut.sample <= 50 * WORD_SAMPLES + 3200
    assert [o.text for o in done(out)] == [text(1, 72)]


def test_when_the_forced_prefix_is_too_long_then_the_window_is_cut() -> None:
    # Eight words were sent by then, each of one token.
    out = play(*growing(speech(1, 16)), transcriber=Tuned(max_prefix_tokens=8))
    assert [o.window for o in out if isinstance(o, Cut)][:1] == [1]
    assert not any(isinstance(o, Cut) for o in play(*growing(speech(1, 16))))


def test_when_the_window_ends_during_the_decode_then_it_is_not_cut() -> None:
    pcm, gates = speech(1, 72), [anyio.Event()]
    transcriber = ScriptedTranscriber(gate=lambda _: gates[0])
    out = play(
        opened(window(pcm)),
        ended(window(pcm)),
        turn_ended(),
        lambda _: gates[0].set(),
        transcriber=transcriber,
    )
    assert [type(o) for o in out] == [TranscriptDelta, TranscriptDone]
    assert [o.text for o in done(out)] == [text(1, 72)]


def test_when_the_listening_knows_the_window_to_be_over_then_nothing_is_sent_for_the_cut() -> None:
    """The command arrives too late: the window is passed as ended, and all of it is decoded."""
    pcm = speech(1, 72)
    transcriber = ScriptedTranscriber()
    out = play(opened(window(pcm)), ended(window(pcm)), turn_ended(), transcriber=transcriber)
    assert [type(o) for o in out] == [Cut, TranscriptDelta, TranscriptDone]
    assert [o.text for o in done(out)] == [text(1, 72)]
    assert len(transcriber.windows) == 2


def test_when_the_decode_of_a_cut_fails_then_the_window_is_cut_at_its_end_and_the_turn_fails() -> None:
    answer, inputs = cutting(speech(1, 72))
    out = play(*inputs, transcriber=ScriptedTranscriber(fail=5), answer=answer)
    assert out[0] == Cut(1, 72 * WORD_SAMPLES)
    assert isinstance(out[-1], TranscriptFailed)
    assert done(out) == []
