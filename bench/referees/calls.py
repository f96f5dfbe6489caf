"""What a referee's caller says: the lines of each call, from real recordings. All servers get the same lines.

A call has a question, an interruption of its answer, a sentence with a pause of PAUSE_S inside, two sounds over the
answer that must not stop it (an acknowledgement and a sneeze), and a last question. The speakers are not those that the
end-of-turn model is fitted to.
"""

from __future__ import annotations

import itertools
import wave
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from bench.driver import WIRE_HZ, on_wire
from bench.hearing.clips import QUIETEST_DBFS, Clip, loaded, read_manifest
from bench.turn_taking.figures import at_level, voice_onset_s
from bench.turn_taking.interruptions import KINDS
from bench.turn_taking.pauses import deepest_gap, noise_like
from bench.turn_taking.replay import is_fitted
from bench.turn_taking.sounds import BACKCHANNEL_DB, SPEECH_DB, class_of

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

# What a caller expects of a line: an answer, that the answer it interrupts stops, or nothing.
Expected = Literal["respond", "stop", "ignore"]
After = Literal["session_start", "agent_speech_start", "agent_speech_end", "previous_turn_end"]
PAUSE_S = 1.2
# Milliseconds in which an answer has to begin, and in which it has to end, too.
ANSWER_MS, PATIENCE_MS = 10_000, 30_000
SHORTEST_S, LONGEST_S = 1.8, 7.0
# Seconds of a recording that are kept before and after its speech, and seconds of a sneeze that are played.
BEFORE_S, AFTER_S, SOUND_S = 0.1, 0.05, 1.0


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that the caller says or does."""

    # Its name, unique within the call.
    name: str
    # What has to follow.
    expected: Expected
    # The event after which it begins.
    after: After
    # Milliseconds after that event.
    delay_ms: int
    # Milliseconds after the last line, after which it is said although that event has not happened.
    patience_ms: int
    # The id of the recording.
    recording: str
    # Its words; empty if it is no speech.
    text: str
    # float32, mono, 16 kHz.
    pcm: Pcm = field(repr=False)

    def write(self, folder: Path) -> Path:
        """Write the line as a WAV file with PCM16 at WIRE_HZ, and return its path."""
        path = folder / f"{self.name}.wav"
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, WIRE_HZ, 0, "NONE", ""))
            file.writeframes(on_wire(self.pcm))
        return path


def sentences(data: Path) -> list[Clip]:
    """Return English sentences of speakers that no model is fitted to, each trimmed to its speech; all if too few."""
    clips = [
        clip
        for clip in read_manifest(data)
        if clip.kind in KINDS
        and clip.language == "en"
        and clip.text
        and SHORTEST_S < clip.speech_end - clip.speech_start < LONGEST_S
        and clip.active_dbfs >= QUIETEST_DBFS
    ]
    clips = [clip for clip in clips if not is_fitted(clip.speaker)] or clips
    for clip in loaded(clips):
        first, last = clip.speech_start - BEFORE_S, clip.speech_end + AFTER_S
        clip.pcm = at_level(clip.pcm[max(0, round(first * SAMPLE_RATE_HZ)) : round(last * SAMPLE_RATE_HZ)], SPEECH_DB)
    # Neighbours in the manifest are often of one speaker.
    order = np.random.default_rng(11).permutation(len(clips))
    return [clips[k] for k in order]


def with_pause(clip: Clip) -> Pcm | None:
    """Return the sentence with PAUSE_S of its own noise in its deepest gap; None if it has no gap between words."""
    at = deepest_gap(clip.pcm)
    if at is None:
        return None
    noise = noise_like(clip.pcm, round(PAUSE_S * SAMPLE_RATE_HZ), clip.id)
    return np.concatenate((clip.pcm[:at], noise, clip.pcm[at:]))


def sounds(data: Path, kind: str) -> list[tuple[str, Pcm]]:
    """Return the acknowledgements or the sneezes of a folder, at the levels of the section `sounds`."""
    found = []
    for clip in loaded(c for c in read_manifest(data) if class_of(c) == kind):
        level = BACKCHANNEL_DB if kind == "acknowledgements" else SPEECH_DB
        first = max(0, round((voice_onset_s(clip.pcm) - BEFORE_S) * SAMPLE_RATE_HZ))
        pcm = clip.pcm[first : first + round((SOUND_S + BEFORE_S) * SAMPLE_RATE_HZ)]
        found.append((clip.id, at_level(pcm, level)))
    return found


def calls(data: Path, count: int) -> list[list[Line]]:
    """Return the lines of `count` calls. Raises SystemExit if the folder has no sentence with a gap, or no sound."""
    said = sentences(data)
    paused = [(clip, pcm) for clip in said if (pcm := with_pause(clip)) is not None]
    noises = [found for kind in ("acknowledgements", "sneezes") if (found := sounds(data, kind))]
    if not paused or not noises:
        raise SystemExit(
            f"{data} has no English sentence with a gap between words, or no acknowledgement and no sneeze"
        )
    halting, held = itertools.cycle(paused[:count]), {clip.id for clip, _ in paused[:count]}
    plain = itertools.cycle([clip for clip in said if clip.id not in held] or said)
    kinds = [itertools.cycle(kind) for kind in (noises[0], noises[-1])]
    return [list(_call(plain, halting, kinds)) for _ in range(count)]


def _call(
    plain: Iterator[Clip], halting: Iterator[tuple[Clip, Pcm]], kinds: Sequence[Iterator[tuple[str, Pcm]]]
) -> Iterator[Line]:
    def say(name: str, expected: Expected, after: After, delay_ms: int) -> Line:
        clip = next(plain)
        return Line(name, expected, after, delay_ms, PATIENCE_MS, clip.id, clip.text, clip.pcm)

    yield say("question", "respond", "session_start", 1000)
    yield say("interruption", "stop", "agent_speech_start", 1500)
    clip, pcm = next(halting)
    yield Line("pause", "respond", "agent_speech_end", 1500, PATIENCE_MS, clip.id, clip.text, pcm)
    # After the two seconds in which speech is taken for the rest of the user's sentence. An answer that began in the
    # pause, and goes on, does not begin again.
    yield Line("sound-1", "ignore", "agent_speech_start", 2500, ANSWER_MS, *_sound(kinds[0]))
    yield Line("sound-2", "ignore", "previous_turn_end", 1500, PATIENCE_MS, *_sound(kinds[1]))
    yield say("last", "respond", "agent_speech_end", 1500)


def _sound(sounds: Iterator[tuple[str, Pcm]]) -> tuple[str, str, Pcm]:
    name, pcm = next(sounds)
    return name, "", pcm
