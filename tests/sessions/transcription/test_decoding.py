"""Decoding alone: partials, finals, what happens when the transcriber fails, and clearing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import anyio
import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import Hypothesis, TranscriberProfile, Window
from antiphon.errors import ModelError, Refused
from antiphon.events.transcription import (
    StreamTuning,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptionConfig,
)
from antiphon.sessions.transcription.decoding import Decoding
from antiphon.turns.windows import TurnSpan
from tests.scripted import FRAME, WORD_SAMPLES, ScriptedTranscriber, speech, text
from tests.sessions.transcription.scripted_windows import (
    Tuned,
    done,
    ended,
    growing,
    joined,
    opened,
    paused,
    play,
    together,
    turn_ended,
    window,
)


class Refusing(ScriptedTranscriber):
    """Its lane is full for a number of finals, or of partials."""

    def __init__(self, finals: int = 0, partials: int = 0) -> None:
        super().__init__()
        self._left = {True: finals, False: partials}

    async def decode(self, asked: Window) -> Hypothesis:
        if self._left[asked.final]:
            self._left[asked.final] -= 1
            self.windows.append(asked)
            raise Refused("full", 0.0)
        return await super().decode(asked)


# --- partials and finals ------------------------------------------------------------------------------------------


def test_when_a_window_grows_then_its_words_are_sent_once_and_the_newest_is_held_back() -> None:
    out = play(*growing(speech(1, 8)))
    assert all(isinstance(o, TranscriptDelta) for o in out)
    sent = joined(out).split()
    # Words stand for 0.9 s, which is three words, and the last word is not followed by another.
    assert sent == text(1, len(sent)).split()
    assert 4 <= len(sent) <= 6


def test_when_a_window_and_its_turn_have_ended_then_the_transcript_is_what_the_deltas_add_up_to() -> None:
    pcm, measured = speech(1, 8, 6), list[str]()
    out = play(*growing(speech(1, 8)), ended(window(pcm)), turn_ended(audio_s=2.5), measured=measured)
    (final,) = done(out)
    assert out[-1] == final
    assert (final.text, final.streamed, final.audio_s) == (text(1, 8), text(1, 8), 2.5)
    assert joined(out) == text(1, 8)
    assert measured == ["partial"] * measured.count("partial") + ["final"]


def test_when_little_audio_came_then_no_partial_is_decoded() -> None:
    transcriber = ScriptedTranscriber()
    play(*(opened(window(speech(1, 4)[: frames * FRAME])) for frames in range(1, 31)), transcriber=transcriber)
    ends = [len(w.pcm) / SAMPLE_RATE_HZ for w in transcriber.windows]
    # Every 0.2 s, which is seven frames, until the first word was sent.
    assert ends == [frames * FRAME / SAMPLE_RATE_HZ for frames in (7, 14, 21, 28)]


def test_when_a_window_begins_then_its_first_partial_is_not_due_by_the_audio_of_another() -> None:
    transcriber = ScriptedTranscriber()
    start = 10 * WORD_SAMPLES
    play(
        opened(window(speech(1, 2))),
        ended(window(speech(1, 2))),
        opened(window(speech(4, 1)[: 3 * FRAME], id=2, start=start)),
        transcriber=transcriber,
    )
    assert [w.start_sample for w in transcriber.windows] == [0, 0]


class Busy(ScriptedTranscriber):
    def busy(self) -> bool:
        return True


def test_when_other_sessions_wait_then_partials_come_less_often_and_no_final_is_guessed() -> None:
    idle, busy = ScriptedTranscriber(), Busy()
    sounds = growing(speech(1, 20))
    play(*sounds, opened(paused(20)), transcriber=idle)
    play(*sounds, opened(paused(20)), transcriber=busy)
    assert [w.final for w in idle.windows].count(True) == 1
    assert not any(w.final for w in busy.windows)
    steps = [len(b.pcm) - len(a.pcm) for a, b in pairwise(busy.windows)]
    assert max(steps) >= 3 * 0.3 * SAMPLE_RATE_HZ
    assert len(busy.windows) < len(idle.windows) / 2


class Overdue(Busy):
    def overdue(self) -> bool:
        return True


def test_when_work_waits_past_its_deadline_then_there_are_no_partials_and_the_final_has_all_words() -> None:
    transcriber = Overdue()
    pcm = speech(1, 20)
    out = play(*growing(pcm), ended(window(pcm)), turn_ended(), transcriber=transcriber)
    assert [w.final for w in transcriber.windows] == [True]
    assert joined(out) == text(1, 20)


def test_when_partials_are_off_then_the_words_come_with_the_final() -> None:
    pcm = speech(1, 6)
    out = play(*growing(pcm), ended(window(pcm)), turn_ended(), config=TranscriptionConfig(partials=False))
    assert [type(o) for o in out] == [TranscriptDelta, TranscriptDone]
    assert joined(out) == text(1, 6)


def test_when_a_final_becomes_due_then_the_partial_in_flight_is_cancelled() -> None:
    """The gate of the partial is never opened."""
    transcriber = ScriptedTranscriber(gate=lambda asked: None if asked.final else anyio.Event())
    pcm = speech(1, 3)
    out = play(opened(window(pcm)), ended(window(pcm)), turn_ended(), transcriber=transcriber)
    assert [w.final for w in transcriber.windows] == [False, True]
    assert [o.text for o in done(out)] == [text(1, 3)]
    assert (transcriber.running, transcriber.closed) == (0, 1)


def test_when_a_turn_without_speech_is_committed_then_its_transcript_is_empty() -> None:
    transcriber = ScriptedTranscriber()
    out = play(turn_ended(3, 0.5), transcriber=transcriber)
    assert out == [TranscriptDone(3, "", "", (), "", 0.5, 0, 0)]
    assert transcriber.windows == []


def test_when_a_turn_has_several_windows_then_it_is_one_transcript() -> None:
    second = window(speech(4, 3), id=2, start=20 * WORD_SAMPLES, spans=(TurnSpan(0, 20 * WORD_SAMPLES, False),))
    out = play(ended(window(speech(1, 3))), ended(second), turn_ended())
    (final,) = done(out)
    assert final.text == joined(out) == text(1, 6)


def test_when_turns_share_a_window_then_each_gets_its_words() -> None:
    border = 3 * WORD_SAMPLES
    shared = window(speech(1, 5), spans=(TurnSpan(0, 0, True, border), TurnSpan(1, border, True)))
    out = play(ended(shared), turn_ended(0), turn_ended(1))
    assert [(o.turn, o.text) for o in done(out)] == [(0, text(1, 3)), (1, text(4, 2))]
    # One decode cannot be divided: its tokens count for the last turn.
    assert [o.completion_tokens for o in done(out)] == [0, 5]


def test_when_word_times_are_asked_for_then_they_are_those_of_the_session() -> None:
    transcriber = ScriptedTranscriber()
    start = 7 * WORD_SAMPLES
    late = window(speech(1, 2), start=start)
    config = TranscriptionConfig(word_times=True)
    (final,) = done(play(ended(late), turn_ended(), transcriber=transcriber, config=config))
    times = [(w.text, round(w.start_s * SAMPLE_RATE_HZ), round(w.end_s * SAMPLE_RATE_HZ)) for w in final.words]
    assert times == [("w1", start, start + WORD_SAMPLES), ("w2", start + WORD_SAMPLES, start + 2 * WORD_SAMPLES)]
    assert (final.text, transcriber.windows[0].start_sample) == (text(1, 2), start)
    (plain,) = done(play(ended(late), turn_ended()))
    assert plain.words == ()


def test_when_word_times_are_asked_for_after_the_decode_then_the_turn_has_none() -> None:
    shown = paused()
    out = play(
        opened(shown),
        lambda decoding: decoding.configure(TranscriptionConfig(word_times=True)),
        ended(shown, shown.quiet_since),
        turn_ended(),
    )
    assert [(o.text, o.words) for o in done(out)] == [(text(1, 3), ())]


def test_when_the_configuration_changes_then_it_holds_from_the_next_decode_on() -> None:
    transcriber = ScriptedTranscriber()
    other = TranscriptionConfig(language="de", prompt="names", tuning=StreamTuning(max_tokens=7))
    play(
        ended(window(speech(1, 2))),
        lambda decoding: decoding.configure(other),
        opened(window(speech(3, 2), id=2, turn=1)),
        transcriber=transcriber,
    )
    before, after = transcriber.windows
    assert (before.language, before.prompt, before.max_tokens) == (None, "", None)
    assert (after.language, after.prompt, after.max_tokens) == ("de", "names", 7)


def test_when_a_final_keeps_the_prefix_then_it_goes_on_from_what_was_sent() -> None:
    pcm = speech(1, 8)
    inputs = [*growing(pcm), ended(window(pcm)), turn_ended()]
    bound, free = Tuned(final_keeps_prefix=True), ScriptedTranscriber()
    sent, again = play(*inputs, transcriber=bound), play(*inputs, transcriber=free)
    assert [o.text for o in done(sent)] == [o.text for o in done(again)] == [text(1, 8)]
    num_sent = len(bound.windows[-1].prefix)
    assert num_sent >= 4
    assert free.windows[-1].prefix == ()
    # Words with times are all decoded again.
    timed = Tuned(final_keeps_prefix=True)
    (final,) = done(play(*inputs, transcriber=timed, config=TranscriptionConfig(word_times=True)))
    assert ([w.text for w in final.words], timed.windows[-1].prefix) == (text(1, 8).split(), ())


class Silent(Tuned):
    """A transcriber that takes every final for noise."""

    async def decode(self, asked: Window) -> Hypothesis:
        found = await super().decode(asked)
        return replace(found, is_speech=False, pieces=()) if asked.final else found


def test_when_the_rest_of_a_turn_is_noise_then_what_was_sent_is_kept() -> None:
    pcm = speech(1, 8)
    out = play(*growing(pcm), ended(window(pcm)), turn_ended(), transcriber=Silent(final_keeps_prefix=True))
    (final,) = done(out)
    assert final.text == final.streamed == joined(out)
    assert final.text


def test_when_the_model_takes_context_then_it_is_given_what_was_said_before() -> None:
    second = window(speech(3, 2), id=2, turn=1, start=20 * WORD_SAMPLES)
    for tokens, context in ((20, " w1 w2"), (0, "")):
        transcriber = Tuned(context_tokens=tokens)
        play(ended(window(speech(1, 2))), turn_ended(), ended(second), transcriber=transcriber)
        assert [w.context for w in transcriber.windows] == ["", context]


# --- failures of the transcriber ----------------------------------------------------------------------------------


def test_when_a_final_fails_then_every_turn_of_its_window_fails_and_the_next_does_not() -> None:
    border = 2 * WORD_SAMPLES
    shared = window(speech(1, 4), spans=(TurnSpan(0, 0, True, border), TurnSpan(1, border, True)))
    out = play(
        *(ended(shared), turn_ended(0), turn_ended(1)),
        *(ended(window(speech(7, 2), id=2, turn=2)), turn_ended(2)),
        transcriber=ScriptedTranscriber(fail=3),
    )
    failed = [o for o in out if isinstance(o, TranscriptFailed)]
    assert failed == [TranscriptFailed(0, "scripted failure"), TranscriptFailed(1, "scripted failure")]
    assert [(o.turn, o.text) for o in done(out)] == [(2, text(7, 2))]


@pytest.mark.parametrize("given_open", [True, False])
def test_when_the_final_of_a_context_fails_then_its_audio_is_not_decoded_again(given_open: bool) -> None:
    """The second and third window begin with the audio of the previous one. Both leave out the first one's audio."""
    pcm = np.concatenate((speech(1, 3, 10), speech(4, 3, 10), speech(7, 3)))
    second, third = 3 * WORD_SAMPLES + 10 * FRAME, 6 * WORD_SAMPLES + 20 * FRAME
    one = window(pcm[: second - 5 * FRAME])
    two = window(pcm[: third - 5 * FRAME], id=2, after=1, spans=(TurnSpan(1, second, True),))
    three = window(pcm, id=3, after=2, spans=(TurnSpan(2, third, True),))
    transcriber = ScriptedTranscriber(fail=2)
    out = play(
        *(ended(one), turn_ended(0)),
        *([opened(two)] if given_open else []),
        *(ended(two), turn_ended(1)),
        *(ended(three), turn_ended(2)),
        transcriber=transcriber,
    )
    assert [(o.turn, o.text) for o in done(out)] == [(1, text(4, 3)), (2, text(7, 3))]
    assert {w.start_sample for w in transcriber.windows[1:]} == {second}
    # The second window is context of the third: its words are not repeated.
    assert transcriber.windows[-1].prefix == (4, 5, 6)


def test_when_a_window_has_context_then_its_words_are_the_prefix() -> None:
    pcm = speech(1, 6)
    two = window(pcm, id=2, after=1, spans=(TurnSpan(1, 3 * WORD_SAMPLES, True),))
    transcriber = ScriptedTranscriber()
    out = play(
        *(ended(window(pcm[: 3 * WORD_SAMPLES])), turn_ended(0)),
        *(ended(two), turn_ended(1)),
        transcriber=transcriber,
    )
    assert [o.text for o in done(out)] == [text(1, 3), text(4, 3)]
    assert (transcriber.windows[-1].prefix, transcriber.windows[-1].start_sample) == ((1, 2, 3), 0)


@pytest.mark.parametrize(("refusals", "decodes"), [(4, 5), (5, 5)])
def test_when_the_lane_is_full_then_a_final_is_tried_five_times(refusals: int, decodes: int) -> None:
    transcriber = Refusing(finals=refusals)
    out = play(ended(window(speech(1, 2))), turn_ended(), transcriber=transcriber)
    assert len(transcriber.windows) == decodes
    assert isinstance(out[-1], TranscriptDone if refusals < decodes else TranscriptFailed)


def test_when_the_lane_is_full_then_a_partial_and_a_preflight_final_are_left_out() -> None:
    transcriber = Refusing(finals=1, partials=1)
    shown = paused()
    out = play(opened(window(speech(1, 3))), opened(shown), ended(shown, 0), turn_ended(), transcriber=transcriber)
    assert [w.final for w in transcriber.windows] == [False, True, True, True]
    assert [o.text for o in done(out)] == [text(1, 3)]


class FailingPartials(ScriptedTranscriber):
    async def decode(self, asked: Window) -> Hypothesis:
        if not asked.final:
            raise ModelError("scripted failure")
        return await super().decode(asked)


def test_when_partials_fail_then_the_turn_still_has_its_transcript() -> None:
    pcm = speech(1, 4)
    out = play(*growing(pcm), ended(window(pcm)), turn_ended(), transcriber=FailingPartials())
    assert [type(o) for o in out] == [TranscriptDelta, TranscriptDone]


# --- clearing, and the limit of listening ahead -----------------------------------------------------------------------


def test_when_a_turn_is_cleared_then_its_partial_is_cancelled_and_nothing_is_reported() -> None:
    transcriber = ScriptedTranscriber(gate=lambda _: anyio.Event())
    out = play(opened(window(speech(1, 4))), lambda decoding: decoding.clear(0), transcriber=transcriber)
    assert (out, transcriber.running) == ([], 0)


def test_when_a_turn_is_cleared_then_windows_of_it_that_wait_have_no_words() -> None:
    """The next turn has the number of the cleared one."""
    gates = [anyio.Event()]
    transcriber = ScriptedTranscriber(gate=lambda _: gates[0])
    out = play(
        ended(window(speech(1, 3))),
        lambda decoding: decoding.clear(0),
        lambda _: gates[0].set(),
        *(ended(window(speech(7, 3), id=2)), turn_ended(0)),
        transcriber=transcriber,
    )
    assert [o.text for o in done(out)] == [text(7, 3)]
    assert joined(out) == text(7, 3)


def test_when_a_turn_is_cleared_then_what_was_sent_of_it_is_forgotten() -> None:
    out = play(
        *growing(speech(1, 6)),
        lambda decoding: decoding.clear(0),
        *(ended(window(speech(7, 3), id=2)), turn_ended(0)),
    )
    (final,) = done(out)
    assert (final.text, final.streamed) == (text(7, 3), text(7, 3))


def test_when_windows_wait_then_the_listening_is_to_wait() -> None:
    seen = list[tuple[bool, bool, int]]()

    def look(decoding: Decoding) -> None:
        seen.append((decoding.behind, decoding.idle, decoding.num_held))

    long = window(speech(1, 82))
    one, two = ended(window(speech(1, 2))), ended(window(speech(3, 2), id=2))
    play(
        look,
        together(one, look, two, look),
        look,
        turn_ended(),
        look,
        together(opened(replace(long, id=3)), look, opened(None), look),
    )
    assert [behind for behind, *_ in seen] == [False, False, True, False, False, True, False]
    assert [idle for _, idle, _ in seen] == [True, True, True, False, True, True, True]
    assert [held for *_, held in seen] == [0, 1, 2, 1, 0, 0, 0]


def test_when_it_is_ended_then_what_was_handed_over_is_decoded_and_the_stream_closed() -> None:
    transcriber = ScriptedTranscriber()
    out = play(
        together(ended(window(speech(1, 2))), turn_ended(), lambda decoding: decoding.end()), transcriber=transcriber
    )
    assert [o.text for o in done(out)] == [text(1, 2)]
    assert (transcriber.opened, transcriber.closed) == (1, 1)


def test_profile_has_the_tuning_of_the_session() -> None:
    profiles = list[TranscriberProfile]()
    config = TranscriptionConfig(tuning=StreamTuning(max_audio_s=5.0))
    play(
        lambda decoding: profiles.append(decoding.profile),
        lambda decoding: decoding.configure(TranscriptionConfig()),
        lambda decoding: profiles.append(decoding.profile),
        config=config,
    )
    assert [p.max_window_s for p in profiles] == [5.0, ScriptedTranscriber().profile.max_window_s]
