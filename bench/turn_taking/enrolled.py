"""Measures whether turns of other voices are distinguished from those of an enrolled user.

    python -m bench.turn_taking.enrolled [--data DIR]

A user is enrolled with 5 and with 10 s of speech, as the server extracts it from an uploaded recording. This speech is
from other recordings than the user's turns if there are enough of them, or else from the beginning of the same
recording. The user's turns and those of all other voices are judged one by one, in quiet and in noise 10 dB below the
speech. The voices are split into two random halves. Thresholds are chosen on one half and measured on the other, in
both directions; the other voices are then those of the measured half. The thresholds of all voices together are
printed, and belong in an adapter's profile.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from bench.turn_taking.speakers import (
    FIRST_S,
    LENGTHS_S,
    LOST,
    MISTAKEN,
    NORMAL,
    SEED,
    Outcome,
    Turn,
    Voice,
    cut,
    listed,
    may_be_same,
    read_noises,
    read_recordings,
    run,
    shares,
    with_noise,
)

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import VoiceActivityDetector
from antiphon.contracts.speaker import SpeakerModel, SpeakerProfile, VoiceThreshold, shared_s
from antiphon.events.transcription import EnrolledVoice
from antiphon.loading.loaded import LoadedModels
from antiphon.turns.voices.enrolment import enrolment_takes, speech_of
from antiphon.turns.voices.primary_speaker import PrimarySpeaker, TurnSpeaker

Key = tuple[str, str, str]
# Upper limit of the threshold below which a turn counts as another voice's. In this data, all recordings of a speaker
# share microphone and room. An upload and a session do not.
HIGHEST = 0.4
# Seconds of speech with which a user is enrolled.
ENROLLED_S = (5.0, 10.0)
# Largest number of turns of each length: of a user, and of another voice.
MOST_OWN, MOST_OTHER = 12, 4
NOISES = ("quiet", "10 dB")
# A LibriVox collection with many readers, for whose recordings the data names only one speaker. For 10 s of speech, two
# recordings have similarities of 0.22 to 0.53 (once 0.79), and two parts of one recording 0.66 to 0.90. Therefore each
# recording counts as a separate voice, but no two of them count as different voices.
READERS_UNKNOWN = "Les Fleurs du mal"


@dataclass(frozen=True, slots=True)
class Speaker:
    """One voice.

    `enrolled` has the vectors of its takes, by seconds of speech. It is empty for a voice that is not a user. `apart`
    is true if the takes are from other recordings than the turns. `turns` has the turns and their vectors, by noise.
    """

    voice: Voice
    enrolled: dict[float, tuple[EnrolledVoice, ...]]
    apart: bool
    turns: dict[str, tuple[Turn, ...]]


async def heard(pcm: Pcm, detector: VoiceActivityDetector) -> Pcm:
    """Return the speech in a recording, as the server's VAD detects it."""
    stream = detector.open()
    padded = np.pad(pcm, (0, -len(pcm) % detector.frame_samples))
    return speech_of(padded, await stream.feed(padded), detector.frame_samples)


async def parted(recordings: Sequence[Pcm], detector: VoiceActivityDetector) -> tuple[Pcm, list[Pcm], bool]:
    """Return speech to enrol a user with, the rest for the turns, and whether the two are from different recordings.

    The speech is at most as long as the longest of ENROLLED_S. If there are several recordings, it takes at most half
    of them.
    """
    most, least = (int(seconds * SAMPLE_RATE_HZ) for seconds in (ENROLLED_S[-1], ENROLLED_S[0]))
    speech, num_used = np.zeros(0, np.float32), 0
    while num_used < len(recordings) // 2 and len(speech) < most:
        speech = np.concatenate((speech, await heard(recordings[num_used], detector)))
        num_used += 1
    if len(speech) >= least:
        return speech[:most], list(recordings[num_used:]), True
    whole = np.concatenate(recordings)
    for end in range(least, len(whole) // 2, SAMPLE_RATE_HZ // 2):
        speech = await heard(whole[:end], detector)
        if len(speech) >= most:
            break
    rest = whole[len(whole) // 2 if len(speech) < most else end :]
    return (speech[:most], [rest], False) if len(speech) >= least else (speech[:0], list(recordings), False)


def by_reader(found: Mapping[Key, list[Pcm]]) -> Iterator[tuple[Key, list[Pcm]]]:
    """Return the recordings of each speaker. Each recording of READERS_UNKNOWN counts as a separate speaker."""
    for (name, corpus, language), recordings in found.items():
        if corpus == READERS_UNKNOWN:
            yield from (((f"{name}-{k}", corpus, language), [pcm]) for k, pcm in enumerate(recordings))
        else:
            yield (name, corpus, language), recordings


async def read_speakers(encoder: SpeakerModel, detector: VoiceActivityDetector, data: Path) -> list[Speaker]:
    """Return all voices of the data with their vectors. Takes minutes."""
    chance, found = np.random.default_rng(SEED), list[Speaker]()
    noises = read_noises(data)
    for (name, corpus, language), recordings in by_reader(read_recordings(data)):
        whole = [pcm for pcm in recordings if len(pcm) >= SAMPLE_RATE_HZ // 2]
        if not whole:
            continue
        speech, rest, apart = await parted(whole, detector)
        turns = cut(rest, MOST_OWN if len(speech) else MOST_OTHER)
        # The server would learn from none of these turns.
        turns = turns[len(FIRST_S) :] or turns
        noise = noises[chance.integers(len(noises))]
        noisy = [replace(turn, pcm=with_noise(turn.pcm, noise, chance)) for turn in turns]
        by_noise = {
            name: tuple([replace(turn, vector=await encoder.embed(turn.pcm)) for turn in those])
            for name, those in zip(NOISES, (turns, noisy), strict=True)
        }
        enrolled = {
            seconds: tuple([EnrolledVoice(await encoder.embed(take), seconds) for take in enrolment_takes(part)])
            for seconds in ENROLLED_S
            if turns and len(part := speech[: int(seconds * SAMPLE_RATE_HZ)]) == int(seconds * SAMPLE_RATE_HZ)
        }
        found.append(Speaker(Voice(name, corpus, language, (), tuple(turns)), enrolled, apart, by_noise))
    return found


def others_of(user: Speaker, half: Sequence[Speaker]) -> list[Speaker]:
    """Return the voices that certainly belong to another speaker."""
    unknown = user.voice.corpus == READERS_UNKNOWN
    others = [other for other in half if not may_be_same(user.voice, other.voice)]
    return [other for other in others if not (unknown and other.voice.corpus == READERS_UNKNOWN)]


def least_of_each(speaker: Speaker, noise: str) -> list[Turn]:
    """Return the turns of another voice that are counted: at most MOST_OTHER of each length."""
    by_length = defaultdict[float, list[Turn]](list)
    for turn in speaker.turns[noise]:
        by_length[turn.length_s].append(turn)
    return [turn for turns in by_length.values() for turn in turns[:MOST_OTHER]]


def calibrated(half: Sequence[Speaker]) -> tuple[VoiceThreshold, ...]:
    """Return two thresholds of the similarity to the nearest take, for each length of a turn.

    The share LOST of the users' own turns is below the first one. The share MISTAKEN of others' turns is above the
    second one. Turns in quiet and in noise count together.
    """
    own, others = defaultdict[float, list[float]](list), defaultdict[float, list[float]](list)
    shared = defaultdict[float, list[float]](list)
    for user in half:
        for seconds, takes in user.enrolled.items():
            vectors = np.stack([take.vector for take in takes])
            for noise in NOISES:
                for turn in user.turns[noise]:
                    own[turn.length_s].append(float((vectors @ turn.vector).max()))
                    shared[turn.length_s].append(shared_s(turn.length_s, seconds))
                for other in others_of(user, half):
                    for turn in least_of_each(other, noise):
                        others[turn.length_s].append(float((vectors @ turn.vector).max()))
    out = list[VoiceThreshold]()
    for length_s in LENGTHS_S:
        normal = np.mean(own[length_s]) + NORMAL.inv_cdf(LOST) * np.std(own[length_s])
        other = round(float(min(normal, np.quantile(own[length_s], LOST), HIGHEST)), 3)
        same = round(float(np.quantile(others[length_s], 1 - MISTAKEN)), 3)
        out.append(VoiceThreshold(round(float(np.mean(shared[length_s])), 2), other, max(other, same)))
    return tuple(out)


def judged(half: Sequence[Speaker], profile: SpeakerProfile) -> list[tuple[bool, Outcome]]:
    """Return the decision about each turn, and whether its user was enrolled from different recordings."""
    out = list[tuple[bool, Outcome]]()
    for user in half:
        for seconds, takes in user.enrolled.items():
            speaker = PrimarySpeaker("enrolled", profile, takes)
            for noise in NOISES:
                turns = [(True, turn) for turn in user.turns[noise]]
                turns += [(False, turn) for other in others_of(user, half) for turn in least_of_each(other, noise)]
                for is_own, turn in turns:
                    is_other = speaker.judge(turn.vector, turn.length_s).speaker is TurnSpeaker.OTHER
                    facts = (user.voice.name, noise, f"{seconds:.0f} s", turn.length_s, is_own, is_other)
                    out.append((user.apart, Outcome(*facts)))
    return out


def figures(outcomes: Sequence[tuple[bool, Outcome]]) -> list[dict[str, Any]]:
    """Return a row for each reference, noise and length."""
    rows = list[dict[str, Any]]()
    enrolled = [f"{seconds:.0f} s" for seconds in ENROLLED_S]
    recordings = {"other": (True,), "any": (True, False)}
    for mode, (kind, kinds), noise, length_s in itertools.product(enrolled, recordings.items(), NOISES, LENGTHS_S):
        wanted = (mode, noise, length_s)
        part = [o for apart, o in outcomes if apart in kinds and (o.mode, o.noise, o.length_s) == wanted]
        row = {"enrolled": mode, "recordings": kind, "noise": noise, "length_s": length_s}
        rows.append(row | {"users": len({o.user for o in part if o.own})} | shares(part))
    return rows


async def measure(models: LoadedModels, data: Path) -> dict[str, Any]:
    """Return all figures, and the thresholds of each half and of all voices."""
    speakers = await read_speakers(models.speaker_model, models.required_vad, data)
    order = np.random.default_rng(SEED).permutation(len(speakers))
    halves = [[speakers[k] for k in sorted(order[number::2])] for number in (0, 1)]
    thresholds, outcomes = [calibrated(half) for half in halves], list[tuple[bool, Outcome]]()
    for half, chosen in zip(halves, reversed(thresholds), strict=True):
        outcomes += judged(half, replace(models.speaker_model.profile, enrolled=chosen))
    return {
        "voices": len(speakers),
        "rows": figures(outcomes),
        "thresholds": listed(calibrated(speakers)),
        "thresholds_by_half": [listed(half) for half in thresholds],
    }


if __name__ == "__main__":
    title = "Turns of an enrolled user that are lost, and of other voices that are ignored"
    run("enrolled", title, ("speaker", "vad"), measure)
