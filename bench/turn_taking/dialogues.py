"""Dialogues that are mixed from recordings of single speakers, so that it is known who says what.

A dialogue has two to six voices. Turns last 0.6 to 10 s. Pauses of up to a second are between them, or the next speaker
interrupts. A third of the dialogues is in quiet, a third in noise, and a third in a telephone's band. The voices are
split into two halves, so that nothing is measured on voices for which it was fitted.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from bench.turn_taking.figures import active_level_db
from bench.turn_taking.speakers import Voice, active, may_be_same, read_noises, read_recordings

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.line.g711 import from_ulaw, to_ulaw

# Seconds of a turn, of the pause after it, and of an interruption.
TURN_S, PAUSE_S, OVERLAP_S = (0.6, 10.0), (0.05, 1.0), (0.2, 0.8)
# Share of turns that begin before the previous one has ended.
INTERRUPTING = 0.12
# Seconds of speech that a voice needs for a dialogue, and that it has in one at most.
LEAST_S, MOST_S = 6.0, 45.0
CONDITIONS = ("quiet", "noise", "telephone")
SNR_DB = 15.0
# Levels of the voices, in dB of full scale.
LEVELS_DB = (-30.0, -20.0)
HALVES = ("fit", "test")


@dataclass(frozen=True, slots=True)
class Turn:
    """A stretch of one voice's speech in a dialogue, in seconds."""

    start_s: float
    end_s: float
    speaker: str


@dataclass(frozen=True, slots=True, eq=False)
class Dialogue:
    """A recording, float32 at 16 kHz, and who says what in it, in the order of the starts."""

    name: str
    condition: str
    pcm: Pcm
    turns: tuple[Turn, ...]

    @property
    def speakers(self) -> set[str]:
        return {turn.speaker for turn in self.turns}


def voices_of(data: Path, half: str) -> dict[Voice, list[Pcm]]:
    """Return the recordings of the voices of one half that have enough speech, each at most MOST_S in total."""
    found: dict[Voice, list[Pcm]] = {}
    for (name, corpus, language), recordings in read_recordings(data).items():
        voice = Voice(name, corpus, language, (), ())
        long = [pcm for pcm in recordings if len(pcm) > SAMPLE_RATE_HZ // 2]
        # Meetings are measured by themselves.
        if corpus != "AMI" and half_of(voice) == half and sum(active(pcm).sum() for pcm in long) / 100 >= LEAST_S:
            found[voice] = long
    return found


def half_of(voice: Voice) -> str:
    """Return the half of a voice. Voices that may be one speaker are in the same half."""
    # Of a crowd whose speakers are not named, every voice may be the same as itself under another name.
    is_crowd = may_be_same(voice, replace(voice, name=""))
    key = f"{voice.corpus} {voice.language}".split()[0] + voice.language if is_crowd else voice.name
    return HALVES[zlib.crc32(key.encode()) % 2]


def pieces(recordings: Sequence[Pcm], chance: np.random.Generator) -> list[Pcm]:
    """Cut a voice's recordings into turns. A turn begins and ends in a soft place, with as little silence as possible.

    A third of the turns is shorter than a second and a half.
    """
    out: list[Pcm] = []
    for pcm in recordings:
        speech = active(pcm)
        smooth = np.convolve(np.abs(pcm[: len(speech) * 160]).reshape(-1, 160).mean(1), np.ones(5) / 5, "same")
        at = 0
        while True:
            ahead = np.flatnonzero(speech[at:])
            if not len(ahead):
                break
            at += int(ahead[0])
            wanted = int(100 * np.exp(chance.uniform(np.log(TURN_S[0]), np.log(TURN_S[1]))))
            end = min(len(speech), at + wanted)
            if end < len(speech):
                first = max(at + int(100 * TURN_S[0]), end - 30)
                end = first + int(smooth[first : end + 30].argmin()) if first < end + 30 else end
            last = np.flatnonzero(speech[at:end])
            length = int(last[-1]) + 1 if len(last) else 0
            if length >= 100 * TURN_S[0]:
                out.append(pcm[at * 160 : (at + length) * 160])
            at = end
    return out


def telephone(pcm: Pcm) -> Pcm:
    """Return the audio as a telephone passes it on: 300 to 3400 Hz, in G.711."""
    spectrum = np.fft.rfft(pcm)
    hz = np.fft.rfftfreq(len(pcm), 1 / SAMPLE_RATE_HZ)
    spectrum[(hz < 300) | (hz > 3400)] = 0
    narrow = np.fft.irfft(spectrum, len(pcm)).astype(np.float32)
    return from_ulaw(to_ulaw(narrow))


def mixed(
    name: str, voices: dict[Voice, list[Pcm]], condition: str, noises: Sequence[Pcm], chance: np.random.Generator
) -> Dialogue:
    """Return a dialogue of these voices, each with its own level, in which no speech occurs twice."""
    left: dict[str, list[Pcm]] = {}
    for voice, recordings in voices.items():
        level = chance.uniform(*LEVELS_DB)
        turns = pieces(recordings, chance)
        gain = 10 ** ((level - active_level_db(np.concatenate(turns))) / 20)
        kept, seconds = [], 0.0
        for turn in [turns[k] for k in chance.permutation(len(turns))]:
            if seconds < MOST_S:
                kept.append((turn * gain).astype(np.float32))
                seconds += len(turn) / SAMPLE_RATE_HZ
        left[voice.name] = kept
    placed: list[tuple[int, Pcm, str]] = []
    at, last = int(0.3 * SAMPLE_RATE_HZ), ""
    while any(left.values()):
        others = [speaker for speaker, turns in left.items() if turns and (speaker != last or len(left) == 1)]
        others = others or [speaker for speaker, turns in left.items() if turns]
        speaker = others[int(chance.integers(len(others)))]
        turn = left[speaker].pop()
        fade = np.minimum(1, np.arange(len(turn)) / 80) * np.minimum(1, np.arange(len(turn))[::-1] / 80)
        begin = at
        if placed and speaker != last and chance.random() < INTERRUPTING:
            begin -= int(min(chance.uniform(*OVERLAP_S), len(placed[-1][1]) / SAMPLE_RATE_HZ / 2) * SAMPLE_RATE_HZ)
        else:
            begin += int(chance.uniform(*PAUSE_S) * SAMPLE_RATE_HZ)
        placed.append((begin, (turn * fade).astype(np.float32), speaker))
        at, last = max(at, begin + len(turn)), speaker
    pcm = np.zeros(at + SAMPLE_RATE_HZ // 2, np.float32)
    for begin, turn, _ in placed:
        pcm[begin : begin + len(turn)] += turn
    if condition == "noise":
        noise = noises[int(chance.integers(len(noises)))]
        noise = np.tile(noise, len(pcm) // len(noise) + 1)[: len(pcm)]
        gain = 10 ** ((active_level_db(pcm) - SNR_DB) / 20) / (np.sqrt((noise**2).mean()) + 1e-9)
        pcm = pcm + (noise * gain).astype(np.float32)
    elif condition == "telephone":
        pcm = telephone(pcm)
    turns_s = [Turn(b / SAMPLE_RATE_HZ, (b + len(t)) / SAMPLE_RATE_HZ, s) for b, t, s in placed]
    return Dialogue(name, condition, pcm, tuple(sorted(turns_s, key=lambda turn: turn.start_s)))


def dialogues(
    data: Path, half: str, *, each: int = 3, sizes: Sequence[int] = (1, 2, 3, 4, 5, 6), seed: int = 7
) -> list[Dialogue]:
    """Return `each` dialogues of each size in each condition, with English voices of one half.

    A transcriber leaves out words of a second language, so a dialogue in two languages would not show who says them.
    """
    chance = np.random.default_rng(seed)
    voices = {voice: found for voice, found in voices_of(data, half).items() if voice.language == "en"}
    noises = read_noises(data)
    out = []
    for size in sizes:
        for condition in CONDITIONS:
            for number in range(each):
                chosen: list[Voice] = []
                for k in chance.permutation(len(voices)):
                    voice = list(voices)[int(k)]
                    if len(chosen) < size and not any(may_be_same(voice, other) for other in chosen):
                        chosen.append(voice)
                name = f"{half}-{size}-{condition}-{number}"
                out.append(mixed(name, {v: voices[v] for v in chosen}, condition, noises, chance))
    return out
