"""Fits how the voices of a file are found with a speaker encoder (`VoiceClustering`), on voices of the half `fit`.

Words are not transcribed: a turn is divided into words of 0.15 to 0.5 s, with errors in their times as in a transcript.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
from bench.common import table
from bench.turn_taking.dialogues import SNR_DB, Dialogue, dialogues, telephone, voices_of
from bench.turn_taking.figures import active_level_db
from bench.turn_taking.speakers import active, read_noises
from scipy.optimize import linear_sum_assignment

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts.speaker import SpeakerModel, VoiceClustering
from antiphon.loading.loaded import LoadedModels
from antiphon.turns.voices.live_speakers import LiveSpeakers
from antiphon.turns.voices.speakers import SpeakerHints, WhoSpeaks

NUM_DIRECTIONS = 4
# Seconds of each voice for the directions, and the level that they are raised to.
SPEECH_S, LEVEL_DB = 20.0, -24.0
WORD_S, WORD_ERROR_S = (0.15, 0.5), 0.04
# Seconds of a live turn that are embedded, and limits of live labels that are tried.
TURN_S = 10.0
SAME_TURNS, RANDOM_S, LEAST_TURN_S = (0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65), (0.0, 0.5, 1.0, 2.0), (0.6, 1.0, 1.5)
SAME_WINDOWS, SAME_VOICES, LEAST_VOICE_S = (0.24, 0.28, 0.32), (0.5, 0.55, 0.6), (3.0, 4.0)


async def vectors(model: SpeakerModel, pcm: Pcm, window_s: float, hop_s: float) -> Pcm:
    """Return the vectors of all windows of a recording."""
    window, hop = int(window_s * SAMPLE_RATE_HZ), int(hop_s * SAMPLE_RATE_HZ)
    starts = range(0, max(1, len(pcm) - window + 1), hop)
    return np.stack([await model.embed(pcm[start : start + window]) for start in starts])


async def directions(model: SpeakerModel, data: Path) -> Pcm:
    """Return the directions in which the mean vector of a voice changes most by noise and by a telephone's band."""
    chance, noises, changes = np.random.default_rng(0), read_noises(data), []
    for recordings in voices_of(data, "fit").values():
        pcm = np.concatenate([pcm[: 8 * SAMPLE_RATE_HZ] for pcm in recordings])[: int(SPEECH_S * SAMPLE_RATE_HZ)]
        speech = np.repeat(active(pcm), 160)
        pcm = pcm[: len(speech)][speech]
        pcm = (pcm * 10 ** ((LEVEL_DB - active_level_db(pcm)) / 20)).astype(np.float32)
        noise = np.resize(noises[int(chance.integers(len(noises)))], len(pcm))
        noise = noise * 10 ** ((LEVEL_DB - SNR_DB) / 20) / (np.sqrt((noise**2).mean()) + 1e-9)
        heard = (pcm, (pcm + noise).astype(np.float32), telephone(pcm))
        quiet, noisy, narrow = [(await vectors(model, audio, 1.6, 0.8)).mean(axis=0) for audio in heard]
        changes += [noisy - quiet, narrow - quiet, narrow - noisy]
    found = np.linalg.svd(np.array(changes), full_matrices=False)[2][:NUM_DIRECTIONS]
    return np.asarray(found, np.float32)


def words_of(dialogue: Dialogue) -> list[tuple[float, float, str, float]]:
    """Return words of a dialogue where only one voice speaks: start, end, speaker, and the length of the turn."""
    chance, out = np.random.default_rng(1), []
    for turn in dialogue.turns:
        at = turn.start_s
        while at < turn.end_s - 0.08:
            end = min(turn.end_s, at + chance.uniform(*WORD_S))
            middle = (at + end) / 2
            if not any(o is not turn and o.start_s < middle < o.end_s for o in dialogue.turns):
                start = at + chance.normal(0, WORD_ERROR_S)
                end_error = max(start + 0.02, end + chance.normal(0, WORD_ERROR_S))
                out.append((start, end_error, turn.speaker, turn.end_s - turn.start_s))
            at = end
    return sorted(out)


def best_names(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the voice of each label for which most of the pairs (label, voice) agree. A voice has one label."""
    labels, voices = sorted({label for label, _ in pairs}), sorted({voice for _, voice in pairs})
    counts = np.zeros((len(labels), len(voices)))
    for label, voice in pairs:
        counts[labels.index(label), voices.index(voice)] += 1
    rows, columns = linear_sum_assignment(-counts)
    return {labels[a]: voices[b] for a, b in zip(rows, columns, strict=True)}


def wrong_of(words: Sequence[tuple[float, float, str, float]], labels: Sequence[int | str]) -> tuple[int, int]:
    """Return the number of wrong words, and of all words, in turns of a second and more."""
    best = best_names([(str(label), word[2]) for word, label in zip(words, labels, strict=True)])
    long = [best.get(str(label)) != word[2] for word, label in zip(words, labels, strict=True) if word[3] >= 1]
    return sum(long), len(long)


async def turn_vectors(model: SpeakerModel, dialogue: Dialogue) -> list[tuple[str, float, Pcm]]:
    """Return the voice, the seconds of speech and the vector of each turn of a dialogue."""
    out = []
    for turn in dialogue.turns:
        pcm = dialogue.pcm[int(turn.start_s * SAMPLE_RATE_HZ) : int(turn.end_s * SAMPLE_RATE_HZ)]
        pcm = pcm[: int(TURN_S * SAMPLE_RATE_HZ)]
        out.append((turn.speaker, len(pcm) / SAMPLE_RATE_HZ, await model.embed(pcm)))
    return out


def _windows_s(count: int, limits: VoiceClustering) -> npt.NDArray[np.float64]:
    starts = np.arange(count) * limits.hop_s
    return np.stack((starts, starts + limits.window_s), axis=1)


async def fit(models: LoadedModels, data: Path, each: int, sizes: Sequence[int]) -> None:
    """Print the directions as signed bytes, and the figures of the dialogues of the half `fit` for several limits."""
    model = models.speaker_model
    assert model is not None
    assert model.profile.clustering is not None
    found = await directions(model, data)
    scaled = np.round(found / np.abs(found).max(axis=1, keepdims=True) * 127).astype(np.int8)
    print(scaled.tobytes().hex())
    limits = replace(model.profile.clustering, channel_directions=found)
    recordings = dialogues(data, "fit", each=each, sizes=sizes)
    heard = [await vectors(model, recording.pcm, limits.window_s, limits.hop_s) for recording in recordings]
    rows = []
    for same_windows, same_voices, least_s in product(SAME_WINDOWS, SAME_VOICES, LEAST_VOICE_S):
        tried = replace(limits, same_windows=same_windows, same_voices=same_voices, least_voice_s=least_s)
        num_wrong = num_words = num_right = 0
        for recording, own in zip(recordings, heard, strict=True):
            words = words_of(recording)
            times = np.array([word[:2] for word in words])
            labels = WhoSpeaks(_windows_s(len(own), limits), own, times, tried).labels(SpeakerHints())
            wrong, count = wrong_of(words, labels)
            num_wrong, num_words = num_wrong + wrong, num_words + count
            num_right += len(set(labels)) == len(recording.speakers)
        shares = round(100 * num_wrong / num_words, 1), round(100 * num_right / len(recordings))
        rows.append((same_windows, same_voices, least_s, *shares))
    table("limits", ("same windows", "same voices", "least s", "wrong %", "number right %"), rows)
    rows = []
    turns = [await turn_vectors(model, recording) for recording in recordings]
    for same_turns, random_s, least_turn_s in product(SAME_TURNS, RANDOM_S, LEAST_TURN_S):
        tried = replace(limits, same_turns=same_turns, random_s=random_s, least_turn_s=least_turn_s)
        num_right = num_turns = 0
        for own in turns:
            speakers = LiveSpeakers(model.profile, tried)
            pairs = [(speakers.label(vector, speech_s), user) for user, speech_s, vector in own]
            best = best_names([pair for pair in pairs if pair[0]])
            long = [best.get(label) == user for (label, user), turn in zip(pairs, own, strict=True) if turn[1] >= 1]
            num_right, num_turns = num_right + sum(long), num_turns + len(long)
        rows.append((same_turns, random_s, least_turn_s, round(100 * num_right / num_turns, 1)))
    best = sorted(rows, key=lambda row: -row[-1])[:12]
    table("live, the best", ("same turns", "random s", "least turn s", "right %"), best)
