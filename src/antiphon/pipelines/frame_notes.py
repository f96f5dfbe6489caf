"""Makes notes on frames for a language model that cannot see: the text on a frame, and plain facts. Pure.

Also finds the time that a question asks about.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.vision.scene import SceneFacts

# Maximum number of notes for one question (the newest), and of lines of text in a note.
MAX_NOTES = 24
MAX_NOTE_LINES = 20

PROMPT = (
    "You answer questions about what a camera or a screen shows, in one or two short sentences. You cannot see "
    "pictures. You only have notes: the text that was read on the picture, what was said, brightness, main colours and "
    "motion, each with the seconds at which it was so."
)
# The answer if the notes do not have one, with the current look of the picture.
UNSEEN = "I cannot see that: I only read text and notice motion, light and colours. Right now it is {look}, and {text}."
# Matches questions about text. If the language model's answer does not use the text, the text itself is the answer.
TEXT_QUESTION = re.compile(r"\b(read|reads|say|says|written|writing|text|words)\b", re.I)
# Matches questions that the plain facts can answer if the question is about the whole picture.
PLAIN_QUESTION = re.compile(
    r"\b(bright|brightness|dark|light|lit|motion|moving|moves?|still|chang\w*|scenes?|colou?rs?)\b", re.I
)
WHOLE_PICTURE = re.compile(
    r"\b(screen|picture|scene|image|background|frame|it|overall|camera|anything|something|everything)\b", re.I
)
# The first pattern matches "20 s ago" and "a minute ago", the second "at 1:05" and "at 19 seconds".
TIME_AGO = re.compile(
    r"\b(\d+(?:\.\d+)?|an?|one|two|three|five|ten|twenty|thirty)\s*(s|sec|secs|seconds?|m|min|mins|minutes?)\s+ago\b",
    re.I,
)
TIME_AT = re.compile(r"\bat\s+(?:(\d+):(\d{2})|(?:second\s+)?(\d+(?:\.\d+)?)\s*(?:s|sec|secs|seconds?)?)\b", re.I)
NUMBERS = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "five": 5, "ten": 10, "twenty": 20, "thirty": 30}


@dataclass(slots=True, eq=False)
class FrameReading:
    """The text of a frame. Later frames that look the same share this object.

    `lines` are in order from the top of the picture. None if they are not read yet, empty if the frame has no text.
    """

    lines: tuple[str, ...] | None = None


@dataclass(slots=True, eq=False)
class ObservedFrame:
    """The facts about one kept frame. `number` and `at_s` are those of its VideoFrame."""

    number: int
    at_s: float
    scene: SceneFacts
    reading: FrameReading

    def facts(self) -> str:
        """Return the light, the motion and the two main colours as words for the middle of a sentence."""
        colours = " and ".join(self.scene.colours[:2] or ("mixed colours",))
        return f"{self.scene.light_level}, {self.scene.motion_level}, mostly {colours}"

    @property
    def text(self) -> str:
        """The first MAX_NOTE_LINES lines of text, separated by slashes. Empty if the frame has no text or is unread."""
        return " / ".join((self.reading.lines or ())[:MAX_NOTE_LINES])

    def note(self) -> str:
        """Return the text and the facts for the language model, without the time.

        Small models repeat notes word for word in spoken answers, so the notes must read well.
        """
        text = f'it says "{self.text}"' if self.text else "there is no text"
        return f"{text}{' in a new scene' if self.scene.new_scene else ''}; it is {self.facts()}"


def notes_on(frames: Sequence[ObservedFrame]) -> list[str]:
    """Return a note with its time for each stretch of frames with the same text. Only the last MAX_NOTES are returned.

    The facts in a note are those at the end of its stretch.
    """
    stretches: list[list[ObservedFrame]] = []
    for frame in frames:
        if stretches and stretches[-1][-1].text == frame.text:
            stretches[-1].append(frame)
        else:
            stretches.append([frame])
    notes = []
    for stretch in stretches[-MAX_NOTES:]:
        num_cuts = sum(frame.scene.new_scene for frame in stretch)
        cuts = f", {num_cuts} scene changes" if num_cuts > 1 else ""
        notes.append(f"At {_time_span(stretch)}: {stretch[-1].note()}{cuts}.")
    return notes


def _time_span(stretch: Sequence[ObservedFrame]) -> str:
    first_s, last_s = stretch[0].at_s, stretch[-1].at_s
    return f"{first_s:.1f} s" if last_s - first_s < 0.5 else f"{first_s:.1f} to {last_s:.1f} s"


def asks_about_whole_picture(question: str) -> bool:
    """Whether a question asks for the brightness, colours or motion of the whole picture, not of a thing in it."""
    return bool(PLAIN_QUESTION.search(question) and WHOLE_PICTURE.search(question))


def unseen_answer(question: str, last: ObservedFrame | None) -> str:
    """Return the answer to use if the notes do not have one: the facts of the last frame, or only the text on it.

    `last` is None if no frame is known.
    """
    lines = (last.reading.lines or ()) if last else ()
    if lines and TEXT_QUESTION.search(question):
        return f'It says "{" / ".join(lines[:MAX_NOTE_LINES])}".'
    text = f'the text on it is "{" / ".join(lines[:3])}"' if lines else "there is no text on it"
    return UNSEEN.format(look=last.facts() if last else "dark", text=text)


def asked_time(question: str, now_s: float) -> float | None:
    """Return the time that a question asks about, in seconds since the session began, or None if it names no time.

    `now_s` is the time at which the question was asked. A time before the session began becomes 0.
    """
    if found := TIME_AGO.search(question):
        word = found[1].lower()
        amount = float(NUMBERS[word]) if word in NUMBERS else float(word)
        return max(0.0, now_s - amount * (60 if found[2].lower().startswith("m") else 1))
    if found := TIME_AT.search(question):
        return int(found[1]) * 60 + int(found[2]) if found[1] else float(found[3])
    return None
