"""Notes on frames: how stretches of frames become lines, and which time a question is about."""

from __future__ import annotations

import pytest

from antiphon.pipelines.frame_notes import (
    MAX_NOTE_LINES,
    MAX_NOTES,
    FrameReading,
    ObservedFrame,
    asked_time,
    asks_about_whole_picture,
    notes_on,
    unseen_answer,
)
from antiphon.vision.scene import SceneFacts


def frame(number: int, *lines: str, new_scene: bool = False) -> ObservedFrame:
    scene = SceneFacts(0.1, ("red", "blue", "green"), 0.0, new_scene)
    return ObservedFrame(number, float(number), scene, FrameReading(lines))


@pytest.mark.parametrize(
    ("question", "now_s", "time_s"),
    [
        ("What did the screen say 20 s ago?", 50.0, 30.0),
        ("what was there a minute ago", 100.0, 40.0),
        ("and ten seconds ago?", 4.0, 0.0),
        ("What does it show at 1:05?", 200.0, 65.0),
        ("How many are visible at 19 seconds?", 30.0, 19.0),
        ("How many bottles are there now?", 30.0, None),
        ("Is anybody at home?", 30.0, None),
        ("Who looks at me?", 30.0, None),
    ],
)
def test_a_question_that_names_a_time_is_about_that_time(question: str, now_s: float, time_s: float | None) -> None:
    assert asked_time(question, now_s) == time_s


def test_when_frames_follow_with_the_same_text_then_they_share_a_note() -> None:
    frames = [frame(0, "EXIT"), frame(1, "EXIT", new_scene=True), frame(2, "EXIT", new_scene=True), frame(3)]
    assert notes_on(frames) == [
        'At 0.0 to 2.0 s: it says "EXIT" in a new scene; it is dark, still, mostly red and blue, 2 scene changes.',
        "At 3.0 s: there is no text; it is dark, still, mostly red and blue.",
    ]


def test_when_there_is_too_much_to_note_then_the_newest_notes_and_the_first_lines_stay() -> None:
    notes = notes_on([frame(n, str(n)) for n in range(MAX_NOTES + 2)])
    assert len(notes) == MAX_NOTES
    assert notes[0].startswith("At 2.0 s")
    assert frame(0, *(["line"] * (MAX_NOTE_LINES + 5))).text.count("line") == MAX_NOTE_LINES


@pytest.mark.parametrize(
    ("question", "expected"),
    [("Is it dark?", True), ("What colour is the picture?", True), ("What colour is the mug?", False), ("Who?", False)],
)
def test_plain_facts_answer_only_questions_about_the_whole_picture(question: str, expected: bool) -> None:
    assert asks_about_whole_picture(question) is expected


def test_when_the_notes_have_no_answer_then_what_can_be_told_is_the_answer() -> None:
    assert unseen_answer("What does it say?", frame(0, "Gate 7", "11:20")) == 'It says "Gate 7 / 11:20".'
    assert unseen_answer("Which animal?", frame(0, "Gate 7")).endswith(
        'Right now it is dark, still, mostly red and blue, and the text on it is "Gate 7".'
    )
    assert unseen_answer("What does it say?", None).endswith("Right now it is dark, and there is no text on it.")
