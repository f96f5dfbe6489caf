"""The deadlines and order of decodes, and what happens to a partial that waits while audio arrives."""

from __future__ import annotations

import anyio
import pytest

from antiphon.contracts import Hypothesis, Window
from antiphon.sessions.transcription.decoding import FINAL_DUE_S, FIRST_DUE_S, PARTIAL_DUE_S, Decoding
from tests.scripted import FRAME, WORD_SAMPLES, ScriptedTranscriber, speech, text
from tests.sessions.transcription.scripted_windows import (
    Input,
    ended,
    growing,
    joined,
    opened,
    play,
    together,
    turn_ended,
    window,
)


class Queued(ScriptedTranscriber):
    """Its partials wait until a test begins them, and can be replaced until then. `decoded`: windows in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: Window | None = None
        self.begin = anyio.Event()
        self.decoded: list[Window] = []

    async def decode(self, window: Window) -> Hypothesis:
        if not window.final:
            self.waiting, self.begin = window, anyio.Event()
            try:
                await self.begin.wait()
                window = self.waiting
            finally:
                self.waiting = None
        self.decoded.append(window)
        return await super().decode(window)

    def replace(self, window: Window) -> bool:
        if self.waiting is None or self.begin.is_set():
            return False
        self.waiting = window
        return True

    def run_waiting(self, decoding: Decoding) -> None:
        self.begin.set()


def lengths(windows: list[Window]) -> list[int]:
    return [len(w.pcm) // WORD_SAMPLES for w in windows]


def test_when_a_partial_waits_then_it_is_decoded_with_the_newest_audio_and_the_older_one_never() -> None:
    transcriber, pcm = Queued(), speech(1, 9)
    shown = [opened(window(pcm[: n * WORD_SAMPLES])) for n in range(1, 10)]
    steps = [*shown[:3], transcriber.run_waiting, *shown[3:6], transcriber.run_waiting]
    out = play(*steps, opened(None), transcriber=transcriber)
    # After 3 and 6 words, not after 1 and 4, when the decodes became due.
    assert lengths(transcriber.decoded) == [3, 6]
    # Words 1 and 2 stood from the end of word 3 to that of word 6, and not since word 1.
    assert joined(out) == text(1, 3)


def test_when_a_partial_waits_and_a_pause_begins_or_another_window_opens_then_it_keeps_its_audio() -> None:
    transcriber, pcm = Queued(), speech(1, 3)
    pause = window(speech(1, 3, 3), quiet_since=3 * WORD_SAMPLES)
    other = window(speech(4, 5), id=2, start=20 * WORD_SAMPLES, turn=1)
    for shown in (pause, other):
        run = transcriber.run_waiting
        play(opened(window(pcm)), opened(shown), run, opened(None), run, transcriber=transcriber)
        first, *_ = transcriber.decoded
        assert (first.start_sample, len(first.pcm)) == (0, len(pcm))
        transcriber.decoded.clear()


def test_when_a_final_becomes_due_then_the_partial_that_waits_is_taken_back() -> None:
    transcriber, pcm = Queued(), speech(1, 3)
    play(opened(window(pcm)), ended(window(pcm)), turn_ended(), transcriber=transcriber)
    assert [w.final for w in transcriber.decoded] == [True]


def at_times(now_s: list[float], *inputs: Input) -> list[Input]:
    """Return the inputs with times: the n-th input at n seconds."""

    def at(second: int, give: Input) -> Input:
        def play_then(decoding: Decoding) -> None:
            now_s[0] = float(second)
            give(decoding)

        return play_then

    return [at(second, give) for second, give in enumerate(inputs)]


def test_when_nothing_was_sent_of_a_turn_then_its_partials_are_urgent_and_each_decode_has_its_deadline() -> None:
    transcriber, now_s = ScriptedTranscriber(), [0.0]
    pcm = speech(1, 9)
    inputs = at_times(now_s, *growing(pcm, FRAME * 10), together(ended(window(pcm)), turn_ended()))
    play(*inputs, transcriber=transcriber, clock=lambda: now_s[0])
    *partials, final = transcriber.windows
    num_urgent = [w.urgent for w in partials].count(True)
    assert 1 < num_urgent < len(partials)
    assert [w.urgent for w in partials] == [True] * num_urgent + [False] * (len(partials) - num_urgent)
    # The number of the input that made a decode due is the second at which it was requested.
    asked_at = [(w.deadline_s or 0.0) - (FIRST_DUE_S if w.urgent else PARTIAL_DUE_S) for w in partials]
    assert asked_at == pytest.approx([(len(w.pcm) - FRAME * 10) / (FRAME * 5) for w in partials])
    assert (final.final, final.urgent, final.deadline_s) == (True, False, len(inputs) - 1 + FINAL_DUE_S)
