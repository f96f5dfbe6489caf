"""The session over a scripted transcriber: order, back-pressure, failure, cancellation, hours of audio."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import anyio
import numpy as np
import pytest

from antiphon.audio import Pcm
from antiphon.contracts import Hypothesis, LearnEarly, TranscriberProfile, TuningLimits, Window
from antiphon.errors import ModelError, Refused
from antiphon.events.transcription import (
    AppendAudio,
    ClearAudio,
    CommitAudio,
    CommitRefused,
    ConfigureTranscription,
    GuessDropped,
    ServerVad,
    SilenceCommitted,
    SpeechStarted,
    SpeechStopped,
    StreamTuning,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptGuessed,
    TranscriptionCommand,
    TranscriptionConfig,
    TranscriptionEvent,
    TurnCleared,
    TurnCommitted,
)
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.turns.end_of_turn import MAX_SILENCE_MS, MIN_SILENCE_MS, semantic_vad
from tests.scripted import FRAME, WORD_SAMPLES, ScriptedDetector, ScriptedTranscriber, speech, text

VAD = ServerVad(0.5, 96, 192)


def play(
    inputs: list[TranscriptionCommand],
    turn: ServerVad | None = None,
    transcriber: ScriptedTranscriber | None = None,
    min_commit_ms: int = 0,
    answered: bool = False,
    before_end: list[TranscriptionEvent] | None = None,
    words: bool = True,
    idle_timeout_ms: float | None = None,
) -> list[TranscriptionEvent]:
    """Play all inputs, then the end; return the events. `before_end` gets the events emitted before the end."""
    out: list[TranscriptionEvent] = []

    async def main() -> None:
        async def emit(output: TranscriptionEvent) -> None:
            out.append(output)

        inbox = Inbox(3600)
        session = TranscriptionSession(
            TranscriptionConfig(vad=turn, word_times=words, preflight=answered, idle_timeout_ms=idle_timeout_ms),
            transcriber or ScriptedTranscriber(),
            ScriptedDetector(),
            inbox,
            emit,
            min_commit_ms=min_commit_ms,
        )
        async with anyio.create_task_group() as group:
            group.start_soon(session.run)
            for item in inputs:
                await inbox.put(item)
                # Let the session keep up, as with live audio.
                for _ in range(12):
                    await anyio.lowlevel.checkpoint()
            if before_end is not None:
                before_end.extend(out)
            inbox.close()

    anyio.run(main)
    return out


def chunks(pcm: Pcm, size: int = 1600) -> list[TranscriptionCommand]:
    return [AppendAudio(pcm[i : i + size]) for i in range(0, len(pcm), size)]


def done(out: list[TranscriptionEvent]) -> list[TranscriptDone]:
    return [o for o in out if isinstance(o, TranscriptDone)]


def joined(out: list[TranscriptionEvent], turn: int) -> str:
    return "".join(o.text for o in out if isinstance(o, TranscriptDelta) and o.turn == turn)


def test_when_a_turn_is_spoken_then_its_events_come_in_order() -> None:
    out = play(chunks(speech(1, 12, 30)), VAD)
    kinds = [type(o) for o in out if not isinstance(o, TranscriptDelta)]
    assert kinds == [SpeechStarted, SpeechStopped, TurnCommitted, TranscriptDone]
    (final,) = done(out)
    assert final.text == text(1, 12)
    assert final.streamed == joined(out, 0) == text(1, 12)
    first_delta = next(i for i, o in enumerate(out) if isinstance(o, TranscriptDelta))
    assert first_delta < next(i for i, o in enumerate(out) if isinstance(o, SpeechStopped))


class Bound(ScriptedTranscriber):
    """A transcriber whose finals continue the words that were sent."""

    @property
    def profile(self) -> TranscriberProfile:
        return replace(self._profile, final_keeps_prefix=True)


@pytest.mark.parametrize("answered", [False, True])
def test_when_a_final_keeps_the_prefix_then_it_goes_on_from_what_was_sent(answered: bool) -> None:
    bound = Bound()
    out = play(chunks(speech(1, 12, 30)), VAD, bound, words=False, answered=answered)
    (final,) = done(out)
    assert final.text == final.streamed == joined(out, 0) == text(1, 12)
    finals = [w for w in bound.windows if w.final]
    # The sent words are not decoded again, and all windows of the turn begin where it did.
    assert finals
    assert all(len(w.prefix) >= 8 for w in finals)
    assert len({w.start_sample for w in bound.windows}) == 1
    assert (bound.opened, bound.closed) == (1, 1)
    # If words have times, all of them are decoded.
    timed = Bound()
    (final,) = done(play(chunks(speech(1, 12, 30)), VAD, timed))
    assert [w.text for w in final.words] == text(1, 12).split()
    assert not [w for w in timed.windows if w.final and w.prefix]


def test_when_a_turn_pauses_then_its_preflight_transcript_is_reported() -> None:
    out = play(chunks(speech(1, 5, 30), 512), VAD, answered=True)
    guess = next(k for k, o in enumerate(out) if isinstance(o, TranscriptGuessed))
    assert out[guess] == TranscriptGuessed(0, text(1, 5), 1600)
    assert guess < next(k for k, o in enumerate(out) if isinstance(o, SpeechStopped))
    assert [o.text for o in done(out)] == [text(1, 5)]
    assert GuessDropped(0) not in out
    assert not any(isinstance(o, TranscriptGuessed) for o in play(chunks(speech(1, 5, 30), 512), VAD))


def test_when_speech_goes_on_then_the_preflight_transcript_is_dropped() -> None:
    pcm = np.concatenate((speech(1, 4, 5), speech(5, 4, 30)))
    out = play(chunks(pcm, 512), VAD, answered=True)
    reported = [o for o in out if isinstance(o, TranscriptGuessed | GuessDropped)]
    assert reported[:2] == [TranscriptGuessed(0, text(1, 4), 1280), GuessDropped(0)]
    assert reported[-1] == TranscriptGuessed(0, text(1, 8), 2720)
    assert [o.text for o in done(out)] == [text(1, 8)]


def test_when_a_turn_ends_with_its_preflight_transcript_then_its_window_is_not_waited_for() -> None:
    """The profile settles a window only after more silence than ends the turn.

    A turn that is to be answered is done before that silence has passed.
    """
    pcm, answered, waits = speech(1, 4, 12), list[TranscriptionEvent](), list[TranscriptionEvent]()
    transcriber = ScriptedTranscriber()
    play(chunks(pcm, 512), VAD, transcriber, answered=True, before_end=answered)
    assert [o.text for o in done(answered)] == [text(1, 4)]
    # Only the guess was decoded.
    assert sum(w.final for w in transcriber.windows) == 1
    play(chunks(pcm, 512), VAD, before_end=waits)
    assert TurnCommitted in [type(o) for o in waits]
    assert done(waits) == []


def test_a_committed_turn_keeps_its_words_when_what_follows_is_thrown_away() -> None:
    """Its window waits for more silence, or shares it with the turn that is cleared."""
    before = list[TranscriptionEvent]()
    play([*chunks(speech(1, 4, 9), 512), ClearAudio()], VAD, before_end=before)
    assert [o.text for o in done(before)] == [text(1, 4)]
    both = np.concatenate((speech(1, 4, 9), speech(7, 2)))
    out = play([*chunks(both, 512), ClearAudio(), *chunks(speech(10, 3, 40), 512)], VAD)
    assert [o.text for o in done(out)] == [text(1, 4), text(10, 3)]


def test_when_audio_was_cleared_then_it_is_not_in_the_next_commit() -> None:
    """A pause settled its window before the client cleared it."""
    inputs = [*chunks(speech(1, 4, 60)), ClearAudio(), *chunks(speech(6, 3)), CommitAudio()]
    assert [o.text for o in done(play(inputs))] == [text(6, 3)]


def test_word_times_are_those_of_the_session() -> None:
    out = play(chunks(np.concatenate((speech(1, 0, 40), speech(1, 3, 30), speech(4, 3, 30)))), VAD)
    words = [w for o in done(out) for w in o.words]
    assert [w.text for w in words] == text(1, 6).split()
    for k, word in enumerate(words):
        begin = (40 * FRAME + k * WORD_SAMPLES + (30 * FRAME if k > 2 else 0)) / 16000
        assert word.start_s == pytest.approx(begin, abs=1e-3)
        assert word.end_s == pytest.approx(begin + WORD_SAMPLES / 16000, abs=1e-3)


def test_when_turns_follow_at_once_then_they_share_a_window_and_no_word_comes_twice() -> None:
    transcriber = ScriptedTranscriber()
    pcm = np.concatenate([speech(1 + 4 * k, 4, 9) for k in range(3)] + [speech(0, 0, 40)])
    out = play(chunks(pcm), VAD, transcriber)
    assert [o.text for o in done(out)] == [text(1, 4), text(5, 4), text(9, 4)]
    assert [o.streamed for o in done(out)] == [text(1, 4), text(5, 4), text(9, 4)]
    assert any(len(w.pcm) > 9 * WORD_SAMPLES for w in transcriber.windows)


def test_each_commit_ends_a_turn() -> None:
    out = play([*chunks(speech(1, 5)), CommitAudio(), *chunks(speech(6, 5, 60)), CommitAudio(), CommitAudio()])
    assert [o.text for o in done(out)] == [text(1, 5), text(6, 5), ""]
    assert [o.turn for o in done(out)] == [0, 1, 2]


def test_when_a_commit_is_not_final_then_it_ends_nothing() -> None:
    out = play(
        [
            CommitAudio(final=False),
            *chunks(speech(1, 5)),
            CommitAudio(final=False),
            *chunks(speech(6, 5)),
            CommitAudio(),
        ]
    )
    assert [o.text for o in done(out)] == [text(1, 10)]


def test_when_there_is_too_little_audio_then_a_commit_is_refused() -> None:
    out = play([*chunks(np.zeros(1599, np.float32)), CommitAudio(event_id="mine")], min_commit_ms=100)
    assert out == [CommitRefused(99, 100, "mine")]


def test_when_the_buffer_is_cleared_then_audio_that_was_not_committed_is_dropped() -> None:
    out = play([*chunks(speech(1, 8)), ClearAudio(), *chunks(speech(9, 4, 30))], VAD)
    assert TurnCleared() in out
    assert [o.text for o in done(out)] == [text(9, 4)]


def test_an_open_turn_is_finished_when_the_inbox_closes() -> None:
    assert [o.text for o in done(play(chunks(speech(1, 6)), VAD))] == [text(1, 6)]


def test_when_there_is_only_silence_then_nothing_is_decoded() -> None:
    transcriber = ScriptedTranscriber()
    assert play(chunks(np.zeros(16000 * 60, np.float32)), VAD, transcriber) == []
    assert transcriber.windows == []


@pytest.mark.parametrize("size", [700, 16000])
def test_when_nobody_speaks_for_the_idle_timeout_then_the_silence_is_a_turn_and_the_next_loses_nothing(
    size: int,
) -> None:
    transcriber = ScriptedTranscriber()
    silence = np.zeros(16000 * 5, np.float32)
    sound = np.concatenate((silence, speech(1, 6, 30)))
    out = play([*chunks(sound, size), *chunks(silence, size)], VAD, transcriber, idle_timeout_ms=2000)
    kinds = [type(o) for o in out if not isinstance(o, TranscriptDelta)]
    idle, said = [SilenceCommitted, TurnCommitted, TranscriptDone], [SpeechStarted, SpeechStopped, TurnCommitted]
    # Two silences before the words, and two after them.
    assert kinds == [*idle, *idle, *said, TranscriptDone, *idle, *idle]
    turns = [o for o in out if isinstance(o, SilenceCommitted)]
    assert all(2000 <= o.end_ms - o.start_ms <= 2000 + size // 16 for o in turns)
    stopped = next(o.end_ms for o in out if isinstance(o, TurnCommitted) and o.turn == 2)
    assert turns[2].start_ms == stopped
    assert [o.text for o in done(out)] == ["", "", text(1, 6), "", ""]
    assert [o.turn for o in done(out)] == [0, 1, 2, 3, 4]
    # The decodes, and the start of their windows, are the same as without the timeout.
    plain = ScriptedTranscriber()
    without = play([*chunks(sound, size), *chunks(silence, size)], VAD, plain)
    starts = [[o.at_ms for o in events if isinstance(o, SpeechStarted)] for events in (out, without)]
    assert starts[0] == starts[1]
    assert [len(w.pcm) for w in transcriber.windows] == [len(w.pcm) for w in plain.windows]


def test_when_the_idle_timeout_is_set_or_the_client_commits_then_older_silence_does_not_count() -> None:
    silence = chunks(np.zeros(16000 * 3, np.float32))
    config = TranscriptionConfig(vad=VAD, idle_timeout_ms=2500)
    assert [o for o in play([*silence, ConfigureTranscription(config)], VAD) if isinstance(o, SilenceCommitted)] == []
    out = play([*silence, ConfigureTranscription(config), *silence], VAD)
    assert [(o.start_ms, o.end_ms) for o in out if isinstance(o, SilenceCommitted)] == [(3000, 5500)]
    assert play(silence, None, idle_timeout_ms=1000) == []


def test_when_speech_has_no_pause_then_it_is_cut_between_words_and_none_is_lost() -> None:
    transcriber = ScriptedTranscriber()
    out = play([*chunks(speech(1, 400)), CommitAudio()], None, transcriber)
    (final,) = done(out)
    assert final.text == final.streamed == text(1, 400)
    assert transcriber.longest_s < transcriber.profile.max_window_s + 5


def test_when_a_file_comes_faster_than_it_is_decoded_then_it_is_slowed_and_complete() -> None:
    pcm = np.concatenate([speech(1 + 20 * k, 20, 40) for k in range(20)])
    assert [o.text for o in done(play([AppendAudio(pcm)], VAD))] == [text(1 + 20 * k, 20) for k in range(20)]


def test_when_a_window_fails_then_only_its_turn_fails() -> None:
    out = play(chunks(np.concatenate([speech(1 + 4 * k, 4, 40) for k in range(3)])), VAD, ScriptedTranscriber(fail=6))
    assert [type(o) for o in out if isinstance(o, TranscriptDone | TranscriptFailed)] == [
        TranscriptDone,
        TranscriptFailed,
        TranscriptDone,
    ]
    assert [o.text for o in done(out)] == [text(1, 4), text(9, 4)]


def test_when_the_configuration_changes_then_the_session_goes_on() -> None:
    pcm = speech(1, 6, 30)
    out = play(
        [*chunks(pcm), ConfigureTranscription(TranscriptionConfig(vad=None)), *chunks(speech(7, 6)), CommitAudio()],
        VAD,
    )
    assert [o.text for o in done(out)] == [text(1, 6), text(7, 6)]


@pytest.mark.slow
def test_after_hours_a_second_costs_the_same_and_no_more_is_held() -> None:
    """Two hours in one session: the windows of the last minutes are no longer than those of the first."""
    transcriber = ScriptedTranscriber()
    sizes: list[int] = []

    async def main() -> None:
        async def emit(_: TranscriptionEvent) -> None:
            return

        inbox = Inbox(60)
        session = TranscriptionSession(TranscriptionConfig(vad=VAD), transcriber, ScriptedDetector(), inbox, emit)
        async with anyio.create_task_group() as group:
            group.start_soon(session.run)
            for minute in range(120):
                await inbox.put(AppendAudio(np.tile(speech(1, 25, 125), 5)))
                sizes.append(session.num_held)
                del minute
            inbox.close()

    anyio.run(main)
    tenth = len(transcriber.windows) // 10
    first = sum(len(w.pcm) for w in transcriber.windows[:tenth])
    last = sum(len(w.pcm) for w in transcriber.windows[-tenth:])
    assert last <= first * 1.1
    assert max(sizes) < 40 * 16000


def test_the_audio_of_a_window_counts_as_held_by_the_client() -> None:
    async def main() -> list[int]:
        async def emit(_: TranscriptionEvent) -> None:
            return

        inbox, held, given_s = Inbox(3600), list[int](), 0.0
        config = TranscriptionConfig(tuning=StreamTuning(keep_context=True, max_audio_s=300))
        limits = TuningLimits(300, 100, 100, 100, True)
        transcriber = ScriptedTranscriber(limits=limits)
        session = TranscriptionSession(config, transcriber, ScriptedDetector(), inbox, emit)
        async with anyio.create_task_group() as group:
            group.start_soon(session.run)
            for pcm in (speech(1, 100), np.zeros(400 * 16000, np.float32)):
                await inbox.put(AppendAudio(pcm))
                given_s += len(pcm) / 16000
                while session.audio_s < given_s - 1e-6:
                    await anyio.lowlevel.checkpoint()
                for _ in range(100):
                    await anyio.lowlevel.checkpoint()
                held.append(inbox.num_bytes)
            inbox.close()
        return held

    speaking, silent = anyio.run(main)
    num_bytes = speech(1, 100).nbytes
    assert num_bytes - 64000 <= speaking <= 1.4 * num_bytes
    assert silent < 5 * 64000


def test_when_a_client_sends_nothing_more_then_it_gets_its_transcript() -> None:
    """Its turn ends after 192 ms of silence; the rest of the silence that would settle the window never arrives."""

    async def main() -> str:
        got: list[TranscriptDone] = []
        arrived = anyio.Event()

        async def emit(output: TranscriptionEvent) -> None:
            if isinstance(output, TranscriptDone):
                got.append(output)
                arrived.set()

        inbox = Inbox(60)
        session = TranscriptionSession(
            TranscriptionConfig(vad=VAD), ScriptedTranscriber(), ScriptedDetector(), inbox, emit
        )
        async with anyio.create_task_group() as group:
            group.start_soon(session.run)
            for item in chunks(speech(1, 5, 7)):
                await inbox.put(item)
            with anyio.fail_after(10):
                await arrived.wait()
            inbox.close()
        return got[0].text

    assert anyio.run(main) == text(1, 5)


def test_when_a_client_vanishes_within_a_word_then_nothing_is_left() -> None:
    gates: list[anyio.Event] = []

    def gate(_: Window) -> anyio.Event:
        gates.append(anyio.Event())
        return gates[-1]

    async def main() -> weakref.ref[TranscriptionSession]:
        transcriber = ScriptedTranscriber(gate=gate)

        async def emit(_: TranscriptionEvent) -> None:
            return

        inbox = Inbox(60)
        session = TranscriptionSession(TranscriptionConfig(vad=VAD), transcriber, ScriptedDetector(), inbox, emit)
        async with anyio.create_task_group() as group:
            group.start_soon(session.run)
            await inbox.put(AppendAudio(speech(1, 3)))
            with anyio.fail_after(5):
                while not transcriber.running:
                    await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        assert transcriber.running == 0
        return weakref.ref(session)

    session = anyio.run(main)
    gc.collect()
    assert session() is None


def test_when_the_inbox_is_full_then_put_waits_or_refuses() -> None:
    async def main() -> None:
        block = Inbox(1.0)
        await block.put(AppendAudio(np.zeros(16000, np.float32)))
        with anyio.move_on_after(0.01) as scope:
            await block.put(CommitAudio())
        assert scope.cancelled_caught
        assert await block.get() is not None
        await block.put(CommitAudio())
        live = Inbox(1.0, live=True)
        await live.put(AppendAudio(np.zeros(16000, np.float32)))
        with pytest.raises(Refused):
            await live.put(CommitAudio())
        live.close()
        assert await live.get() is not None
        assert await live.get() is None

    anyio.run(main)


class Judge:
    """Judges the first pauses by its list of verdicts; records the audio it gets."""

    def __init__(self, *verdicts: float | Exception) -> None:
        self.verdicts = list(verdicts)
        self.heard: list[int] = []

    async def complete(self, pcm: Pcm) -> float:
        self.heard.append(len(pcm))
        verdict = self.verdicts.pop(0)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict


class Trailing(ScriptedTranscriber):
    """A transcriber whose text always ends in "and", inside a sentence."""

    async def decode(self, window: Window) -> Hypothesis:
        found = await super().decode(window)
        pieces = [*found.pieces[:-1], *(replace(p, text=" and") for p in found.pieces[-1:])]
        return replace(found, pieces=tuple(pieces))


def judged(judge: Judge | None, *sounds: Pcm, transcriber: ScriptedTranscriber | None = None) -> list[tuple[str, int]]:
    """Return starts and stops, in milliseconds, of audio that arrives in realistic steps under `semantic_vad`."""
    out: list[tuple[str, int]] = []

    async def main() -> None:
        async def emit(output: TranscriptionEvent) -> None:
            if isinstance(output, SpeechStarted | SpeechStopped):
                out.append((type(output).__name__, output.at_ms))

        inbox = Inbox(3600)
        vad = replace(semantic_vad("medium"), prefix_padding_ms=0)
        session = TranscriptionSession(
            TranscriptionConfig(vad=vad),
            transcriber or ScriptedTranscriber(),
            ScriptedDetector(),
            inbox,
            emit,
            turn_detector=judge,
        )
        async with anyio.create_task_group() as group:
            group.start_soon(session.run)
            whole = np.concatenate(sounds)
            for at in range(0, len(whole), FRAME):
                await inbox.put(AppendAudio(whole[at : at + FRAME]))
                for _ in range(20):
                    await anyio.lowlevel.checkpoint()
            inbox.close()

    anyio.run(main)
    return out


def quiet(frames: int) -> Pcm:
    return np.zeros(frames * FRAME, np.float32)


def waited_ms(judge: Judge | None, transcriber: ScriptedTranscriber | None = None) -> int:
    """Return the milliseconds of silence that end a turn."""
    words = speech(1, 3)
    (_, _), (_, stop) = judged(judge, words, quiet(200), transcriber=transcriber)
    return stop - len(words) // 16


def test_the_more_complete_a_turn_sounds_the_sooner_it_ends() -> None:
    sure, unsure, unfinished = (waited_ms(Judge(complete)) for complete in (0.99, 0.5, 0.02))
    assert MIN_SILENCE_MS <= sure < unsure < unfinished
    assert unfinished < MAX_SILENCE_MS["medium"]


def test_a_hesitation_ends_no_turn_and_what_follows_is_judged_anew_with_what_came_before() -> None:
    words = speech(1, 3)
    judge = Judge(0.02, 0.99)
    changes = judged(judge, words, quiet(12), words, quiet(100))
    assert [name for name, _ in changes] == ["SpeechStarted", "SpeechStopped"]
    assert judge.heard[1] > 2 * len(words)


class StatefulJudge(Judge):
    """A judge that records what its stream was given. `first`: its first judgement of each pause, if there is one."""

    def __init__(self, *answers: float | Exception, first: float | None = None) -> None:
        super().__init__(*answers)
        self.first = first
        self.followed: list[tuple[int, int]] = []
        self.completed: list[tuple[int, int]] = []

    def open(self) -> StatefulJudge:
        return self

    async def follow(self, start: int, pcm: Pcm) -> None:
        self.followed.append((start, len(pcm)))
        raise ModelError("not now")

    async def complete(  # type: ignore[override]
        self, start: int, pcm: Pcm, early: LearnEarly | None = None
    ) -> float:
        self.completed.append((start, len(pcm)))
        verdict = await super().complete(pcm)
        if early and self.first is not None:
            early(self.first)
            # The rest of the blend answers after the pause is over.
            for _ in range(5000):
                await anyio.lowlevel.checkpoint()
        return verdict


def test_a_detector_with_state_gets_a_turn_while_it_is_said_and_again_at_each_pause() -> None:
    words = speech(2, 3)
    judge = StatefulJudge(0.02, 0.99)
    (_, _), (_, stop) = judged(judge, words, quiet(12), words, quiet(100))
    assert stop
    starts = {start for start, _ in (*judge.followed, *judge.completed)}
    assert (len(starts), len(judge.completed)) == (1, 2)
    lengths = [length for _, length in judge.followed]
    assert len(lengths) >= 3
    assert lengths == sorted(set(lengths))


def test_a_first_judgement_counts_until_a_better_one_comes() -> None:
    assert waited_ms(StatefulJudge(0.02, first=0.99)) == waited_ms(Judge(0.99)) < waited_ms(Judge(0.02))


class ReadingJudge(StatefulJudge):
    """A judge that also judges the words, which it records."""

    reads = True

    def __init__(self, answer: float, read: float | None, *, hangs: bool = False) -> None:
        super().__init__(answer)
        self._answer, self._hangs, self.words = read, hangs, list[str]()

    async def read(self, words: str) -> float | None:
        self.words.append(words)
        if self._hangs:
            await anyio.sleep_forever()
        return self._answer


def test_a_judgement_by_words_takes_the_place_of_that_by_sound() -> None:
    unfinished, silent = ReadingJudge(0.99, 0.02), ReadingJudge(0.99, None)
    assert waited_ms(unfinished) > waited_ms(Judge(0.99)) + 200
    assert waited_ms(silent) == waited_ms(Judge(0.99))
    assert unfinished.words == ["w1 w2 w3"]
    # Words whose judgement does not come count alone.
    assert waited_ms(ReadingJudge(0.02, 0.99, hangs=True)) <= MAX_SILENCE_MS["medium"]


def test_words_that_go_on_make_a_turn_wait_whatever_the_turn_detector_finds() -> None:
    assert waited_ms(Judge(0.99), Trailing()) > waited_ms(Judge(0.99)) + 200


def test_without_a_judgement_the_words_and_the_silence_end_the_turn() -> None:
    known = waited_ms(None)
    assert waited_ms(Judge(Refused("full", 1.0))) == known
    assert known < MAX_SILENCE_MS["medium"]
