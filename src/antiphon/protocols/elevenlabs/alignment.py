"""When each character of a text is spoken, from the times of its words. Also the forms in which answers have it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec

from antiphon.events.words import Word


@dataclass(frozen=True, slots=True)
class CharTimes:
    """The characters of a text, and the time from which each is spoken, in seconds. `end_s`: the end of the last."""

    chars: str
    starts_s: list[float]
    end_s: float

    @property
    def ends_s(self) -> list[float]:
        """The end of each character, which is the start of the next one."""
        return [*self.starts_s[1:], self.end_s] if self.chars else []


class StreamAlignment(msgspec.Struct):
    """Characters with times, as messages of WebSockets have them: whole milliseconds from the start of a sentence."""

    # The characters of the text.
    chars: list[str]
    # Start of each character.
    charStartTimesMs: list[int]
    # Duration of each character.
    charDurationsMs: list[int]


class FileAlignment(msgspec.Struct):
    """Characters with times, as answers over HTTP have them: seconds from the start of the audio."""

    # The characters of the text.
    characters: list[str]
    # Start of each character.
    character_start_times_seconds: list[float]
    # End of each character.
    character_end_times_seconds: list[float]


class AgentAlignment(msgspec.Struct):
    """Characters with times, in messages of agents: whole milliseconds from the start of a piece of audio."""

    # The characters of the words, with a space after each word.
    chars: list[str]
    # Start of each character.
    char_start_times_ms: list[int]
    # Duration of each character.
    char_durations_ms: list[int]


def char_times(text: str, words: Iterable[Word], end_s: float) -> CharTimes:
    """Spread the times of words evenly over their characters, and the gaps between words over the other characters.

    `text` was spoken in audio that ends at `end_s`, in seconds. Words that are not found in the text are left out.
    Without words, all characters are spread evenly.
    """
    # Times at which the positions of some characters are known, in ascending order of both.
    known: list[tuple[int, float]] = [(0, 0.0)]
    for word in words:
        at = text.find(word.text, known[-1][0])
        if at < 0 or not word.text:
            continue
        start_s = min(max(word.start_s, known[-1][1]), end_s)
        known += [(at, start_s), (at + len(word.text), min(max(word.end_s, start_s), end_s))]
    known.append((len(text), end_s))
    starts_s = list[float]()
    for (first, from_s), (last, until_s) in pairwise(known):
        step_s = (until_s - from_s) / max(1, last - first)
        starts_s += [from_s + step_s * number for number in range(last - first)]
    return CharTimes(text, starts_s, end_s)


def stream_alignment(times: CharTimes) -> StreamAlignment:
    """Return the form for WebSockets. The durations add up to the end, so that clients may add them."""
    starts = [_ms(start_s) for start_s in times.starts_s]
    durations = [end - start for start, end in zip(starts, map(_ms, times.ends_s), strict=True)]
    return StreamAlignment(list(times.chars), starts, durations)


def agent_alignment(words: Sequence[Word], from_s: float, until_s: float) -> AgentAlignment:
    """Return the form for agents. The piece is that `from_s` to `until_s` of an answer, and `words` begin in it."""
    moved = [replace(word, start_s=word.start_s - from_s, end_s=word.end_s - from_s) for word in words]
    text = "".join(f"{word.text} " for word in moved)
    found = stream_alignment(char_times(text, moved, max(until_s - from_s, moved[-1].end_s)))
    return AgentAlignment(found.chars, found.charStartTimesMs, found.charDurationsMs)


def file_alignment(times: CharTimes) -> FileAlignment:
    """Return the form for HTTP, in seconds rounded to milliseconds."""
    return FileAlignment(list(times.chars), _rounded(times.starts_s), _rounded(times.ends_s))


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _rounded(times_s: Sequence[float]) -> list[float]:
    return [round(time_s, 3) for time_s in times_s]
