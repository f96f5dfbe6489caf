"""Finds out who says each word of a recording. Pure.

The speech is cut into windows that overlap, each with the vector of a speaker encoder. Windows are clustered by average
linkage (Garcia-Romero et al. 2017, Speaker diarization using deep neural network embeddings), after the
directions in which microphones and lines differ were removed (Solomonoff et al. 2005, Nuisance attribute projection).
Then words are assigned to clusters by the Viterbi algorithm, and clusters that turn out to be one voice, or too little
speech, are given up, in turns.

Two voices at the same time are one label. A voice with little speech in the whole recording gets another one's label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from antiphon.audio import Pcm
from antiphon.contracts.speaker import VoiceClustering
from antiphon.events.transcription import KnownVoice

Numbers = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]

# Windows that are clustered together at first. The clusters of all blocks are clustered then.
BLOCK_WINDOWS = 400
# A window with a pause of PAUSE_S between two of its words may have two voices. It begins no cluster.
PAUSE_S, EDGE_S = 0.2, 0.25
# A window counts for a cluster if at least this share of its words, or of its time, is the cluster's.
PURE, SPOKEN = 0.8, 0.5
# A window shorter than this share of the usual length begins no cluster.
LONG = 0.75
# The similarity that a change of the speaker between two words costs, in seconds. It costs less at a pause: the share
# CHEAPER less at one of LONG_PAUSE_S.
CHANGE_S, CHEAPER, LONG_PAUSE_S = 0.5, 0.7, 0.5
# Words count as at least this long.
MIN_WORD_S = 0.1
# How often words and clusters are matched before clusters are compared again.
ROUNDS = 2


@dataclass(frozen=True, slots=True)
class SpeakerHints:
    """What the client knows about the speakers of a recording.

    - `known`: the speakers with references.
    - `speakers`: the number of speakers; None: it is found out.
    - `max_speakers`: the largest number of speakers; None: there is no limit.
    """

    known: tuple[KnownVoice, ...] = ()
    speakers: int | None = None
    max_speakers: int | None = None


def without_channel(vectors: Pcm, clustering: VoiceClustering) -> Numbers:
    """Return vectors, [count, size], without their part in the channel's directions, each of length 1."""
    directions = clustering.channel_directions.astype(np.float64)
    left = vectors - (vectors @ directions.T) @ directions if len(directions) else vectors.astype(np.float64)
    return np.asarray(left / np.maximum(np.linalg.norm(left, axis=1, keepdims=True), 1e-9), np.float64)


def linked(sums: Numbers, counts: Numbers, least: float, num_clusters: int = 1) -> Labels:
    """Cluster groups of vectors by average linkage, and return the number of each group's cluster.

    The similarity of two clusters is the mean scalar product of their vectors, which is the scalar product of their
    means. The most similar clusters are joined until no two have a similarity of `least`, or until `num_clusters` are
    left.

    Args:
        sums: [num_groups, size], the sum of the vectors of each group.
        counts: [num_groups], the number of vectors of each group.
        least: The smallest similarity of two clusters that are joined.
        num_clusters: The smallest number of clusters.
    """
    sums, counts = sums.copy(), counts.astype(np.float64)
    means = sums / counts[:, None]
    similar = means @ means.T
    np.fill_diagonal(similar, -np.inf)
    labels = np.arange(len(sums))
    is_left = np.ones(len(sums), bool)
    for _ in range(len(sums) - num_clusters):
        one, other = divmod(int(similar.argmax()), len(sums))
        if similar[one, other] < least:
            break
        labels[labels == other] = one
        is_left[other] = False
        sums[one] += sums[other]
        counts[one] += counts[other]
        means[one] = sums[one] / counts[one]
        similar[one] = np.where(is_left, means @ means[one], -np.inf)
        similar[one, one] = -np.inf
        similar[:, one] = similar[one]
        similar[other] = similar[:, other] = -np.inf
    return np.unique(labels, return_inverse=True)[1]


class WhoSpeaks:
    """The voices of one recording, and who says each of its words.

    Args of the constructor:
        windows_s: [num_windows, 2], the start and end of each window in seconds, ascending. A window at the end of a
            stretch of speech may be shorter than the others.
        vectors: float32 [num_windows, size], the vector of each window. At least one.
        words_s: [num_words, 2], the start and end of each word in seconds. At least one.
    """

    def __init__(self, windows_s: Numbers, vectors: Pcm, words_s: Numbers, clustering: VoiceClustering) -> None:
        self._clustering = clustering
        spoken = _spoken(windows_s, words_s)
        if not spoken.any():
            spoken[:] = True
        self._windows = windows_s[spoken]
        self._centres = self._windows.mean(axis=1)
        self._vectors = without_channel(vectors[spoken], clustering)
        self._words = words_s
        self._middles = np.maximum.accumulate(words_s.mean(axis=1))
        self._lengths = np.maximum(MIN_WORD_S, words_s[:, 1] - words_s[:, 0])
        self._clean = self._without_pause()
        # The windows around each word's middle, [num_words, most], and their weights, which add up to 1. The nearer the
        # middle of a window, the more it counts.
        most = int(np.ceil(clustering.window_s / clustering.hop_s)) + 1
        first = np.searchsorted(self._centres, self._middles - clustering.window_s / 2)
        self._around = np.clip(first[:, None] + np.arange(most), 0, len(self._centres) - 1)
        away = np.abs(self._centres[self._around] - self._middles[:, None]) / (clustering.window_s / 2)
        weights = np.maximum(0, 1 - away) ** 2
        weights[first[:, None] + np.arange(most) >= len(self._centres)] = 0
        # A word without a window has the nearest one.
        weights[weights.sum(axis=1) == 0, away[weights.sum(axis=1) == 0].argmin(axis=1)] = 1
        self._weights = weights / weights.sum(axis=1, keepdims=True)

    def labels(self, hints: SpeakerHints) -> list[int | str]:
        """Return who says each word: the name of a known speaker, or the number of another one.

        Numbers count from 0, in the order in which the speakers are first heard.
        """
        wanted = hints.speakers or 1
        most = hints.speakers or hints.max_speakers or len(self._vectors)
        means = self._begun(wanted)
        while True:
            for _ in range(ROUNDS):
                labels = self._assigned(means)
                means, seconds = self._means(labels, len(means))
            joined = self._fewer(means, seconds, wanted, most)
            if joined is None:
                break
            means = joined
        names = self._names(means, hints.known)
        order: dict[int | str, int | str] = {}
        out: list[int | str] = []
        for label in self._assigned(means):
            name = names[int(label)]
            if name not in order:
                order[name] = name if isinstance(name, str) else sum(isinstance(n, int) for n in order)
            out.append(order[name])
        return out

    def _without_pause(self) -> npt.NDArray[np.bool_]:
        """Return which windows are long and without a pause between words, if there are enough; otherwise all."""
        half = self._clustering.window_s / 2 - EDGE_S
        ends, starts = self._words[:-1, 1], self._words[1:, 0]
        pauses = np.flatnonzero(starts - ends >= PAUSE_S)
        # A pause is inside if the word before it ends, and the word after it begins, inside of the window.
        first = np.searchsorted(self._centres, starts[pauses] - half, "right")
        behind = np.searchsorted(self._centres, ends[pauses] + half)
        clean = self._windows[:, 1] - self._windows[:, 0] >= LONG * self._clustering.window_s
        for a, b in zip(first, behind, strict=True):
            clean[a:b] = False
        return clean if clean.sum() >= min(len(clean), 4) else np.ones(len(clean), bool)

    def _begun(self, wanted: int) -> Numbers:
        """Return the means of the first clusters, [num_clusters, size], of clean windows."""
        vectors = self._vectors[self._clean]
        limits = self._clustering
        sums, counts = list[Numbers](), list[float]()
        for block in np.array_split(vectors, max(1, round(len(vectors) / BLOCK_WINDOWS))):
            labels = linked(block, np.ones(len(block)), limits.same_windows, min(wanted, len(block)))
            for label in range(labels.max() + 1):
                sums.append(block[labels == label].sum(axis=0))
                counts.append(float((labels == label).sum()))
        of_blocks = np.array(counts)
        labels = linked(np.stack(sums), of_blocks, limits.same_windows, min(wanted, len(sums)))
        seconds = np.bincount(labels, of_blocks) * limits.hop_s
        kept = np.flatnonzero(seconds >= limits.least_voice_s / 2)
        if len(kept) < wanted:
            kept = np.argsort(-seconds)[:wanted]
        means = np.stack([np.sum([s for s, k in zip(sums, labels, strict=True) if k == c], axis=0) for c in kept])
        return _unit(means)

    def _assigned(self, means: Numbers) -> Labels:
        """Return the number of each word's voice: the most likely sequence."""
        similar = (self._vectors @ means.T)[self._around]
        scores = (similar * self._weights[:, :, None]).sum(axis=1) * self._lengths[:, None]
        pauses = np.clip((self._words[1:, 0] - self._words[:-1, 1]) / LONG_PAUSE_S, 0, 1)
        costs = CHANGE_S * (1 - CHEAPER * pauses)
        best = scores[0]
        came_from = np.tile(np.arange(len(means)), (len(scores), 1))
        for word in range(1, len(scores)):
            winner = int(best.argmax())
            changes = best[winner] - costs[word - 1] > best
            came_from[word][changes] = winner
            best = np.where(changes, best[winner] - costs[word - 1], best) + scores[word]
        path = np.zeros(len(scores), np.int64)
        path[-1] = best.argmax()
        for word in range(len(scores) - 1, 0, -1):
            path[word - 1] = came_from[word][path[word]]
        return path

    def _means(self, labels: Labels, num_clusters: int) -> tuple[Numbers, Numbers]:
        """Return the means of the voices that have words and windows, and the seconds of their words."""
        reach = 0.9 * self._clustering.window_s / 2
        first = np.searchsorted(self._middles, self._centres - reach)
        behind = np.searchsorted(self._middles, self._centres + reach)
        own = np.zeros((len(labels) + 1, num_clusters))
        own[np.arange(1, len(labels) + 1), labels] = 1
        own = np.cumsum(own, axis=0)
        counts = own[behind] - own[first]
        total = counts.sum(axis=1)
        pure = self._clean & (total > 0) & (counts.max(axis=1) >= PURE * total)
        voice = counts.argmax(axis=1)
        seconds = np.bincount(labels, self._lengths, num_clusters).astype(np.float64)
        kept = [k for k in range(num_clusters) if (pure & (voice == k)).any()]
        if not kept:
            # The words are too few for a window of their own.
            kept, pure, voice = (
                [int(seconds.argmax())],
                np.ones(len(voice), bool),
                np.full_like(voice, seconds.argmax()),
            )
        return _unit(np.stack([self._vectors[pure & (voice == k)].sum(axis=0) for k in kept])), seconds[kept]

    def _fewer(self, means: Numbers, seconds: Numbers, wanted: int, most: int) -> Numbers | None:
        """Return the voices after the two most similar are joined or the shortest is given up. None: all stay."""
        if len(means) <= wanted:
            return None
        similar = means @ means.T
        np.fill_diagonal(similar, -np.inf)
        one, other = divmod(int(similar.argmax()), len(means))
        shortest = int(seconds.argmin())
        if similar[one, other] >= self._clustering.same_voices:
            both = seconds[one] * means[one] + seconds[other] * means[other]
            return _unit(np.concatenate((np.delete(means, [one, other], axis=0), both[None])))
        if seconds[shortest] < self._clustering.least_voice_s:
            return np.delete(means, shortest, axis=0)
        if len(means) > most:
            both = seconds[one] * means[one] + seconds[other] * means[other]
            return _unit(np.concatenate((np.delete(means, [one, other], axis=0), both[None])))
        return None

    def _names(self, means: Numbers, known: Sequence[KnownVoice]) -> list[int | str]:
        """Return the name of each voice, or its number. A known speaker has at most one voice."""
        names: list[int | str] = list(range(len(means)))
        if not known:
            return names
        vectors = without_channel(np.stack([voice.vector for voice in known]), self._clustering)
        similar = means @ vectors.T
        while similar.max() >= self._clustering.same_as_known:
            voice, who = divmod(int(similar.argmax()), len(known))
            names[voice] = known[who].name
            similar[voice] = similar[:, who] = -np.inf
        return names


def _unit(vectors: Numbers) -> Numbers:
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9), np.float64)


def _spoken(windows_s: Numbers, words_s: Numbers) -> npt.NDArray[np.bool_]:
    """Return which windows have words in at least SPOKEN of their time."""
    edges = np.concatenate(([0.0], np.cumsum(words_s[:, 1] - words_s[:, 0])))

    def until(times: Numbers) -> Numbers:
        """Return the seconds of words before each time."""
        word = np.searchsorted(words_s[:, 0], times, "right")
        last = np.maximum(word - 1, 0)
        inside = np.clip(times - words_s[last, 0], 0, words_s[last, 1] - words_s[last, 0])
        return np.where(word > 0, edges[last] + inside, 0.0)

    lengths = windows_s[:, 1] - windows_s[:, 0]
    return np.asarray(until(windows_s[:, 1]) - until(windows_s[:, 0]) >= SPOKEN * lengths)
