"""Measures whether turns of another voice are distinguished from the user's.

    python -m bench.turn_taking.speakers [--data DIR]

A session consists of one user's turns, with turns of other voices between them. It is in quiet, or in noise 10 dB below
the speech, with the same recording of noise throughout. The voices are split into two random halves. Thresholds are
chosen on one half and measured on the other, in both directions, so no voice is measured with thresholds that depend on
it. The thresholds of all voices together are printed, and belong in an adapter's profile.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
from bench.common import machine, save, table
from bench.hearing.clips import rows_of
from bench.turn_taking.figures import active_level_db, frame_levels_db

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.containers import decode_all
from antiphon.contracts.speaker import SpeakerModel, SpeakerProfile, VoiceThreshold, shared_s
from antiphon.events.transcription import EnrolledVoice
from antiphon.loading.loaded import LoadedModels
from antiphon.loading.loader import load, store_of
from antiphon.roles import ModelRole
from antiphon.settings import load as load_settings
from antiphon.turns.voices.enrolment import enrolment_takes
from antiphon.turns.voices.primary_speaker import PrimarySpeaker, TurnSpeaker

MODEL = "resemblyzer"
SPOKEN = (
    *("asr_read", "asr_speech", "asr_nonnative", "asr_multilang", "asr_short", "asr_8k_native"),
    *("command_slots", "longform", "asr_spontaneous_min", "hesitation"),
)
NOISY = ("noise", "babble", "music")
NORMAL = NormalDist()
LENGTHS_S = (0.6, 1.0, 2.0, 4.0)
# Seconds of shared speech (`shared_s` of two vectors) for which thresholds are chosen, in rising order. Few speakers of
# the data have more speech.
SHARED_S = (0.5, 0.7, 1.0, 1.4)
# Seconds of a user's first turns, in this order. These turns are learned or enrolled, and are not counted.
FIRST_S = (2.0, 1.0)
# Largest number of turns of each length in a session, both of the user and of others.
MOST_TURNS = 4
# Seconds of a recording that are read at most.
MOST_S = 60.0
SNR_DB = 10.0
# Kinds of noise: none, from the start of the session, or after its first turns.
NOISES = ("quiet", "10 dB", "10 dB later")
# Share of the user's own turns that may be lost, and share of others' turns that may be learned as the user's.
LOST, MISTAKEN = 0.02, 0.03
SEED = 7


@dataclass(frozen=True, slots=True)
class Turn:
    """A stretch of one voice's speech: `vector` in the session's noise, and `takes` with synthetic noise added."""

    length_s: float
    pcm: Pcm
    vector: Pcm = field(default_factory=lambda: np.zeros(0, np.float32))
    takes: tuple[Pcm, ...] = ()


@dataclass(frozen=True, slots=True)
class Voice:
    """One speaker: turns that do not overlap, in their original order. Their lengths alternate."""

    name: str
    corpus: str
    language: str
    first: tuple[Turn, ...]
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Session:
    """A user's turns and those of others, with their vectors.

    `order` is True for each turn of the user, and False for each of others. `voices` has the vectors of enrolment: of
    the first turns in quiet, and with synthetic noise.
    """

    user: str
    noise: str
    first: tuple[Turn, ...]
    order: tuple[tuple[bool, Turn], ...]
    voices: tuple[EnrolledVoice, ...] = ()


def active(pcm: Pcm) -> npt.NDArray[np.bool_]:
    """Return for each 10 ms of a recording whether it is at most 30 dB below the recording's loud parts."""
    level = frame_levels_db(pcm)
    return np.asarray(level > np.percentile(level, 95) - 30)


def cut(recordings: Sequence[Pcm], most: int = MOST_TURNS) -> list[Turn]:
    """Cut turns out of a voice's recordings: those of FIRST_S, then always the rarest length, up to `most` of each.

    The last turn of a recording may be shorter. A turn starts with speech, and at least 70 % of it is speech.
    """
    out = list[Turn]()
    for pcm in recordings:
        if len(pcm) < SAMPLE_RATE_HZ // 2:
            continue
        speech, at = active(pcm), 0
        while at < len(pcm):
            counts = Counter(turn.length_s for turn in out[len(FIRST_S) :])
            left = [s for s in LENGTHS_S if counts[s] < most and at + int(s * SAMPLE_RATE_HZ) <= len(pcm)]
            # Of equally rare lengths, takes the longest one for which the recording is long enough.
            length_s = (
                FIRST_S[len(out)] if len(out) < len(FIRST_S) else min(left, key=lambda s: (counts[s], -s), default=0)
            )
            end = at + int(length_s * SAMPLE_RATE_HZ)
            if not length_s or end > len(pcm):
                break
            frames = speech[at // 160 : end // 160]
            if not frames[:3].all():
                at += 160
            elif frames.mean() < 0.7:
                at += 1600
            else:
                out.append(Turn(length_s, pcm[at:end]))
                at = end
    return out


def alone(rttm: Sequence[tuple[float, float, str]], speaker: str) -> list[tuple[float, float]]:
    """Return the stretches, in seconds, of a meeting in which only this speaker speaks."""
    parts = [(start, end) for start, end, name in rttm if name == speaker]
    for start, end, name in rttm:
        if name != speaker:
            parts = [piece for a, b in parts for piece in ((a, min(b, start)), (max(a, end), b)) if piece[1] > piece[0]]
    return parts


def read_recordings(data: Path) -> dict[tuple[str, str, str], list[Pcm]]:
    """Return the recordings of a folder with a manifest.jsonl, by speaker, corpus and language.

    Each recording of a nameless crowd counts as a separate speaker.
    """
    found: dict[tuple[str, str, str], list[Pcm]] = defaultdict(list)
    for row in rows_of(data):
        corpus, kind = row.get("corpus") or "", row["kind"]
        if kind == "conversation_rttm":
            pcm = decode_all(str(data / row["path"]))
            for speaker in {name for _, _, name in row["rttm"]}:
                for start, end in alone(row["rttm"], speaker):
                    part = pcm[int(start * SAMPLE_RATE_HZ) : int(end * SAMPLE_RATE_HZ)]
                    # A name such as A or B is a speaker only within one meeting.
                    name = speaker if speaker[0] in "MF" and len(speaker) > 3 else f"{row['id']}-{speaker}"
                    found[name, corpus, row["language"]].append(part)
        # The data does not say that each voice of tau2 is a single speaker.
        elif kind in SPOKEN and not corpus.startswith("tau2"):
            name = row["id"] if row["speaker"].startswith("unknown") else row["speaker"]
            pcm = decode_all(str(data / row["path"]))[: int(MOST_S * SAMPLE_RATE_HZ)]
            found[name, corpus, row["language"]].append(pcm)
    return dict(sorted(found.items(), key=lambda item: item[0]))


def read_noises(data: Path) -> list[Pcm]:
    """Return the recordings without the speech of a single voice, for use as noise."""
    return [decode_all(str(data / row["path"])) for row in rows_of(data) if row["kind"] in NOISY]


def read_voices(data: Path) -> list[Voice]:
    """Return the voices of a folder with a manifest.jsonl."""
    voices = []
    for (name, corpus, language), recordings in read_recordings(data).items():
        turns = cut(recordings)
        count = len(FIRST_S)
        # A recording that is too short for a user may still serve as another voice.
        voices.append(Voice(name, corpus, language, tuple(turns[:count]), tuple(turns[count:] or turns)))
    return [voice for voice in voices if voice.turns]


def may_be_same(one: Voice, other: Voice) -> bool:
    """Return whether two voices of the data may be the same speaker, as in crowds whose speakers are not named."""
    if one.name == other.name:
        return True
    if one.corpus != other.corpus:
        return False
    if one.corpus in ("FLEURS", "Common Voice ja"):
        return one.language == other.language
    return one.corpus.startswith("Picovoice")


def plan(half: Sequence[Voice], chance: np.random.Generator) -> list[Session]:
    """Return a session for each voice with enough turns, with others of the same half, and without vectors.

    If possible, half of the others are of the same corpus, so that their microphones are similar.
    """
    sessions = []
    for user in half:
        if len(user.first) < len(FIRST_S) or user.turns[0] is user.first[0]:
            continue
        others = [voice for voice in half if not may_be_same(user, voice)]
        near = [voice for voice in others if voice.corpus == user.corpus]
        order = [(True, turn) for turn in user.turns]
        for length_s in LENGTHS_S:
            for number in range(MOST_TURNS):
                pool = near if near and number % 2 else others
                there = [t for voice in pool for t in voice.turns if t.length_s == length_s]
                there = there or [t for voice in others for t in voice.turns if t.length_s == length_s]
                if there:
                    order.append((False, there[chance.integers(len(there))]))
        order = [order[k] for k in chance.permutation(len(order))]
        sessions.append(Session(user.name, "", user.first, tuple(order)))
    return sessions


def with_noise(pcm: Pcm, noise: Pcm, chance: np.random.Generator) -> Pcm:
    """Return the speech with a stretch of the noise added, SNR_DB below the speech."""
    repeated = np.tile(noise, len(pcm) // len(noise) + 2)
    start = int(chance.integers(len(noise)))
    part = repeated[start : start + len(pcm)]
    part_db = 10 * np.log10((part**2).mean() + 1e-12)
    return np.asarray(pcm + part * 10 ** ((active_level_db(pcm) - SNR_DB - part_db) / 20), np.float32)


async def embed(
    encoder: SpeakerModel, session: Session, noise: tuple[str, Pcm] | None, chance: np.random.Generator
) -> Session:
    """Return the session with the vectors of its turns, in noise or in quiet."""

    async def one(turn: Turn, *, first: bool = False) -> Turn:
        pcm = with_noise(turn.pcm, noise[1], chance) if noise else turn.pcm
        takes = [await encoder.embed(take) for take in enrolment_takes(pcm)[1:]] if first else []
        return replace(turn, vector=await encoder.embed(pcm), takes=tuple(takes))

    takes = enrolment_takes(np.concatenate([turn.pcm for turn in session.first]))
    return Session(
        session.user,
        noise[0] if noise else "",
        tuple([await one(turn, first=True) for turn in session.first]),
        tuple([(own, await one(turn)) for own, turn in session.order]),
        tuple([EnrolledVoice(await encoder.embed(take), sum(FIRST_S)) for take in takes]),
    )


def calibrated(sessions: Sequence[Session]) -> tuple[VoiceThreshold, ...]:
    """Return two thresholds: the share LOST of own turns is below the first, MISTAKEN of others' above the second.

    Each turn is compared with the mean of the user's first turn, of the user's first two turns, and so on.
    """
    own: dict[float, list[float]] = defaultdict(list)
    others: dict[float, list[float]] = defaultdict(list)
    for session in sessions:
        first, *known = [*session.first, *(turn for is_own, turn in session.order if is_own)]
        total, known_s, learned = first.length_s * first.vector, first.length_s, [first]
        while True:
            for is_own, turn in [*((True, turn) for turn in session.first), *session.order]:
                if not any(turn is one for one in learned):
                    similarity = float(turn.vector @ total / np.linalg.norm(total))
                    seconds = shared_s(turn.length_s, known_s)
                    bin_s = min(SHARED_S, key=lambda s: abs(math.log(s / seconds)))
                    (own if is_own else others)[bin_s].append(similarity)
            if not known:
                break
            turn = known.pop(0)
            total, known_s = total + turn.length_s * turn.vector, known_s + turn.length_s
            learned.append(turn)
    out = []
    for seconds in SHARED_S:
        # Quantiles of normal distributions, because those of a few turns are uncertain. The threshold for own turns is
        # the lower of both quantiles, because it is worse to lose a turn than to accept another's.
        normal = np.mean(own[seconds]) + NORMAL.inv_cdf(LOST) * np.std(own[seconds])
        other = round(float(min(normal, np.quantile(own[seconds], LOST))), 3)
        same = round(float(np.mean(others[seconds]) - NORMAL.inv_cdf(MISTAKEN) * np.std(others[seconds])), 3)
        out.append(VoiceThreshold(seconds, other, max(other, same)))
    return tuple(out)


@dataclass(frozen=True, slots=True)
class Outcome:
    # The user of the session.
    user: str
    # The noise of the session, of NOISES.
    noise: str
    # The mode of `primary_speaker`.
    mode: str
    # Length of the turn, in seconds.
    length_s: float
    # Whether the turn is the user's own.
    own: bool
    # Whether the session judged it to be another speaker's.
    other: bool


def played(session: Session, profile: SpeakerProfile, mode: str, noise: str) -> list[Outcome]:
    """Return the decisions about the counted turns of a session, in order. The session learns as it goes."""
    speaker = (
        PrimarySpeaker("enrolled", profile, session.voices) if mode == "enrolled" else PrimarySpeaker("auto", profile)
    )
    for turn in session.first:
        speaker.heard(turn.vector, turn.length_s, turn.takes)
    out = []
    for own, turn in session.order:
        other = speaker.heard(turn.vector, turn.length_s).speaker is TurnSpeaker.OTHER
        out.append(Outcome(session.user, noise, mode, turn.length_s, own, other))
    return out


def interval(outcomes: Sequence[Outcome], wanted: Callable[[Outcome], bool]) -> list[float]:
    """Return the 95 % interval of a share in percent, by resampling users.

    For a share of 0 or 1, it is the interval of independent turns, one for each user.
    """
    by_user: dict[str, list[int]] = defaultdict(list)
    for outcome in outcomes:
        by_user[outcome.user].append(wanted(outcome))
    sums = np.array([(sum(found), len(found)) for found in by_user.values()])
    edge = round(100 * (1 - 0.025 ** (1 / len(sums))), 1)
    if sums[:, 0].sum() == 0:
        return [0.0, edge]
    if sums[:, 0].sum() == sums[:, 1].sum():
        return [100 - edge, 100.0]
    chance = np.random.default_rng(SEED)
    drawn = sums[chance.integers(len(sums), size=(2000, len(sums)))].sum(1)
    return [round(float(q), 1) for q in np.percentile(100 * drawn[:, 0] / drawn[:, 1], (2.5, 97.5))]


def shares(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the share of own turns that are lost, and the share of others' turns that are ignored, in percent."""
    own, others = [o for o in outcomes if o.own], [o for o in outcomes if not o.own]
    return {
        "own_turns": len(own),
        "own_lost_percent": round(100 * sum(o.other for o in own) / len(own), 1),
        "own_lost_interval": interval(own, lambda o: o.other),
        "other_turns": len(others),
        "other_ignored_percent": round(100 * sum(o.other for o in others) / len(others), 1),
        "other_ignored_interval": interval(others, lambda o: o.other),
    }


def figures(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return one row for each mode, noise and length."""
    rows = []
    for mode, noise, length_s in itertools.product(("auto", "enrolled"), NOISES, LENGTHS_S):
        part = [o for o in outcomes if (o.mode, o.noise, o.length_s) == (mode, noise, length_s)]
        if {o.own for o in part} == {True, False}:
            users = len({o.user for o in part if o.own})
            rows.append({"mode": mode, "noise": noise, "length_s": length_s, "users": users} | shares(part))
    return rows


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print rows of figures."""
    table(title, tuple(rows[0]), [tuple(row.values()) for row in rows])


async def recorded(encoder: SpeakerModel, data: Path) -> tuple[list[list[Session]], dict[str, Any]]:
    """Return the sessions of both halves, in quiet and in noise, and the seconds to compute their vectors."""
    chance = np.random.default_rng(SEED)
    voices = read_voices(data)
    noises = [("noise", pcm) for pcm in read_noises(data)]
    order = chance.permutation(len(voices))
    audio_s, took_s, sessions = 0.0, 0.0, list[list[Session]]()
    for number in (0, 1):
        sessions.append([])
        half = [voices[k] for k in sorted(order[number::2])]
        for planned in plan(half, chance):
            for noise in (None, noises[chance.integers(len(noises))]):
                began_s = time.perf_counter()
                sessions[-1].append(await embed(encoder, planned, noise, chance))
                took_s += time.perf_counter() - began_s
                audio_s += sum(turn.length_s for turn in (*planned.first, *(turn for _, turn in planned.order)))
                audio_s += 3 * sum(FIRST_S)
                audio_s += sum(voice.speech_s for voice in sessions[-1][-1].voices)
    facts = {
        "voices": len(voices),
        "sessions": sum(map(len, sessions)),
        "embedding_ms_per_s": round(1000 * took_s / audio_s, 1),
        "embedded_s": round(audio_s),
    }
    return sessions, facts


def judged(sessions: Sequence[Sequence[Session]], profile: SpeakerProfile) -> dict[str, Any]:
    """Return all figures, and the thresholds: those of each half, and those of all voices."""
    outcomes = list[Outcome]()
    thresholds = [calibrated(half) for half in sessions]
    for half, chosen in zip(sessions, reversed(thresholds), strict=True):
        calibrated_profile = replace(profile, thresholds=chosen, enrolled=())
        quiet = {session.user: session for session in half if not session.noise}
        for session in half:
            noise = NOISES[1] if session.noise else NOISES[0]
            outcomes += played(session, calibrated_profile, "auto", noise)
            outcomes += played(session, calibrated_profile, "enrolled", noise)
            if session.noise:
                later = replace(session, first=quiet[session.user].first)
                outcomes += played(later, calibrated_profile, "auto", NOISES[2])
    return {
        "rows": figures(outcomes),
        "thresholds": listed(calibrated([session for half in sessions for session in half])),
        "thresholds_by_half": [listed(half) for half in thresholds],
    }


def listed(thresholds: Sequence[VoiceThreshold]) -> list[list[float]]:
    return [[one.shared_s, one.other, one.same] for one in thresholds]


async def measure(models: LoadedModels, data: Path) -> dict[str, Any]:
    """Return all figures, and the seconds of computing per second of audio."""
    sessions, facts = await recorded(models.speaker_model, data)
    return facts | judged(sessions, models.speaker_model.profile)


def run(
    name: str,
    title: str,
    roles: Sequence[ModelRole],
    measure: Callable[[LoadedModels, Path], Awaitable[dict[str, Any]]],
) -> None:
    """Load the models, measure them, print the rows, and write bench/results/turns-NAME.json. For another encoder than
    MODEL, the file's name ends with the encoder's.
    """
    parser = argparse.ArgumentParser(prog=f"python -m bench.turn_taking.{name}", description=title)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "tests" / "data")
    parser.add_argument("--speaker-model", default=MODEL, help="the speaker encoder [%(default)s]")
    args = parser.parse_args()
    settings = load_settings({"speaker_model": args.speaker_model}, os.environ)
    models = load(settings, store_of(settings.models), roles=roles)
    try:
        found = asyncio.run(measure(models, args.data))
    finally:
        models.close()
    show(title, found["rows"])
    print({key: value for key, value in found.items() if key not in ("rows", "thresholds_by_half")})
    kind = "" if args.speaker_model == MODEL else f"-{args.speaker_model}"
    save(f"turns-{name}{kind}", {"machine": machine(), name: found})


if __name__ == "__main__":
    title = "Turns of the user that are lost, and of other voices that are ignored"
    run("speakers", title, ("speaker",), measure)
