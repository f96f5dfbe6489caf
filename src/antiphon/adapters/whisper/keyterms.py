"""Keyterms: words that a client expects, and that the decoder prefers. Pure: the decoder is a function argument.

CTranslate2 does not expose the steps of Whisper's beam search, so keyterms are applied after the search. If the best
hypothesis has words that sound like a keyterm, the decoder scores a candidate: the hypothesis with the keyterm instead
of these words, on the same audio. All candidates are scored in one call. A keyterm wins if its candidate, with a bonus
for the keyterm, is more probable than the hypothesis. The prompt is unchanged.

Words are compared by their letters; vowels are similar to each other, and so are related consonants. If no word is
similar to a keyterm, the decoder is not called.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from antiphon.contracts import HypothesisWord

# The bonus of a keyterm in nats, added to the log-probability of its candidate: BONUS_PER_TOKEN for each of its tokens,
# up to MAX_BONUS. `bench asr --sections keyterms` measures the effect.
BONUS_PER_TOKEN = 2.0
MAX_BONUS = 6.0
# Words with a lower similarity to a keyterm, from 0 to 1, are not candidates.
MIN_SIMILARITY = 0.62
# Limit of candidates that are scored for a window.
MAX_CANDIDATES = 8
# A keyterm may replace up to EXTRA_WORDS more words than it has itself.
EXTRA_WORDS = 1

_VOWELS = frozenset("aeiouy")
_VOWEL_WEIGHT, _VOWEL_SWAP, _RELATED_SWAP = 0.5, 0.2, 0.4
# Consonants that are often confused: the same place of articulation, voiced and unvoiced.
_RELATED = ("bp", "dt", "gk", "fv", "sz", "mn", "lr", "jg", "vw")
_SPELLINGS = (
    ("ph", "f"),
    ("ck", "k"),
    ("qu", "kw"),
    ("x", "ks"),
    ("ce", "se"),
    ("ci", "si"),
    ("cy", "sy"),
    ("c", "k"),
    ("q", "k"),
    ("gh", "g"),
)
_END_OF_SENTENCE = (".", "?", "!")
_MARKS = ".,?!;: "
_MIN_PROBABILITY = 1e-9

# Maps the tokens of several hypotheses to the probability of each token.
Score = Callable[[list[list[int]]], list[list[float]]]
# Maps a text to its tokens.
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A keyterm that may replace the words `first` up to, not including, `last`. `similarity` is from 0 to 1."""

    term: str
    first: int
    last: int
    similarity: float


def find_candidates(words: Sequence[str], terms: tuple[str, ...], most: int = MAX_CANDIDATES) -> list[Candidate]:
    """Return up to `most` places where keyterms may replace words of a hypothesis, most similar first.

    Words that already spell a keyterm are not replaced. For each first word, only the two most similar candidates are
    returned.
    """
    sounds = _term_sounds(terms)
    if not sounds:
        return []
    spelled = {_letters(term) for term, *_ in sounds}
    weights = np.array([w for _, _, w, _ in sounds])
    longest = np.array([n + EXTRA_WORDS for _, _, _, n in sounds])
    runs: list[tuple[int, int, str, str]] = []
    # The pairs (run, term) that may be similar, judged by their lengths.
    pairs: list[tuple[int, int]] = []
    for first in range(len(words)):
        for last in range(first + 1, min(len(words), first + int(longest.max())) + 1):
            text = " ".join(words[first:last])
            letters, sound = _letters(text), sounds_of(text)
            if not sound or letters in spelled:
                continue
            weight = _weight(sound)
            fits = np.minimum(weights, weight) >= MIN_SIMILARITY * np.maximum(weights, weight)
            # If a run already contains the keyterm, replacing it would only drop its other words.
            near = [
                t for t in np.flatnonzero(fits & (longest >= last - first)) if _letters(sounds[t][0]) not in letters
            ]
            pairs += [(len(runs), int(t)) for t in near]
            runs.append((first, last, letters, sound))
    alike = similarities([(runs[r][3], sounds[t][1]) for r, t in pairs])
    here: dict[int, list[Candidate]] = {}
    for (r, t), degree in zip(pairs, alike, strict=True):
        if degree >= MIN_SIMILARITY:
            first, last = runs[r][:2]
            here.setdefault(first, []).append(Candidate(sounds[t][0], first, last, float(degree)))
    found = [c for group in here.values() for c in sorted(group, key=lambda c: -c.similarity)[:2]]
    found.sort(key=lambda c: -c.similarity)
    return found[:most]


def search(
    pieces: Sequence[HypothesisWord], terms: tuple[str, ...], encode: Encode, score: Score
) -> tuple[HypothesisWord, ...]:
    """Return the words of a hypothesis after replacing words by the keyterms that win.

    `score` is called at most once, and not at all if no words sound like a keyterm. Its first row has the tokens of the
    hypothesis, and each other row those of a candidate. Winning candidates are applied in the order of their gain, and
    skipped if they overlap an earlier one. A keyterm keeps its spelling, but is capitalized at the beginning of a
    sentence.
    """
    candidates = find_candidates([p.text for p in pieces], terms)
    if not candidates:
        return tuple(pieces)
    placed = [_placed(pieces, c, encode) for c in candidates]
    rows = [[t for p in pieces for t in p.tokens]]
    for candidate, piece in zip(candidates, placed, strict=True):
        words = [*pieces[: candidate.first], piece, *pieces[candidate.last :]]
        rows.append([t for p in words for t in p.tokens])
    probabilities = score(rows)
    logprobs = [float(np.log(np.maximum(row, _MIN_PROBABILITY)).sum()) for row in probabilities]
    gains = [
        logprob - logprobs[0] + min(MAX_BONUS, BONUS_PER_TOKEN * len(piece.tokens)) * candidate.similarity
        for logprob, piece, candidate in zip(logprobs[1:], placed, candidates, strict=True)
    ]
    won: list[int] = []
    for i in sorted(range(len(gains)), key=lambda i: -gains[i]):
        clear = all(candidates[i].last <= candidates[j].first or candidates[j].last <= candidates[i].first for j in won)
        if gains[i] > 0 and clear:
            won.append(i)
    out = list(pieces)
    for i in sorted(won, key=lambda i: -candidates[i].first):
        first = candidates[i].first
        start = sum(len(p.tokens) for p in pieces[:first])
        own = probabilities[i + 1][start : start + len(placed[i].tokens)]
        out[first : candidates[i].last] = [replace(placed[i], probability=min(own))]
    return tuple(out)


def _placed(pieces: Sequence[HypothesisWord], candidate: Candidate, encode: Encode) -> HypothesisWord:
    """Return the keyterm as one word, with the leading space and the trailing punctuation of the replaced words."""
    old = "".join(p.text for p in pieces[candidate.first : candidate.last])
    before = "".join(p.text for p in pieces[: candidate.first]).rstrip()
    term = candidate.term
    if not before or before.endswith(_END_OF_SENTENCE):
        term = term[:1].upper() + term[1:]
    leading = old[: len(old) - len(old.lstrip())]
    marks = old[len(old.rstrip(_MARKS)) :]
    text = leading + term + marks
    return HypothesisWord(text, tuple(encode(text)), 0.0)


def sounds_of(text: str) -> str:
    """Return a text's letters and digits for comparison: no accents, no doubled letters, one letter for each sound."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    letters = _letters(plain)
    for spelled, sound in _SPELLINGS:
        letters = letters.replace(spelled, sound)
    letters = "".join(c for i, c in enumerate(letters) if i == 0 or (c != letters[i - 1] and c != "h"))
    return letters


@lru_cache(4096)
def _letters(text: str) -> str:
    return "".join(c for c in text.casefold() if c.isalnum())


def similarities(pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    """Return the similarities of pairs of results of `sounds_of`: from 0 to 1, float64 [pairs].

    The similarity is 1 minus the weighted edit distance, divided by the weight of the heavier one. The computation is
    vectorized over the pairs.
    """
    symbols = {c: i for i, c in enumerate(sorted({c for pair in pairs for text in pair for c in text}), start=1)}
    weight = np.array([0.0, *(_weight(c) for c in symbols)])
    swap = np.ones((len(weight), len(weight)))
    swap[1:, 1:] = [[_swap(a, b) for b in symbols] for a in symbols]

    def coded(texts: list[str]) -> np.ndarray:
        """Return the symbols of the texts, [longest, texts], padded with 0. The weight of symbol 0 is 0."""
        codes = np.zeros((max(map(len, texts), default=0), len(texts)), np.intp)
        for i, text in enumerate(texts):
            codes[: len(text), i] = [symbols[c] for c in text]
        return codes

    ones, others = coded([a for a, _ in pairs]), coded([b for _, b in pairs])
    # The row of the dynamic program: distances of the prefixes of `others` to a prefix of `ones`,
    # [longest other + 1, pairs].
    row = np.concatenate((np.zeros((1, len(pairs))), np.cumsum(weight[others], axis=0)))
    for symbol in ones:
        above, row = row, row + weight[symbol]
        for j, other in enumerate(others):
            np.minimum(row[j + 1], np.where(symbol > 0, above[j] + swap[symbol, other], np.inf), out=row[j + 1])
            np.minimum(row[j + 1], row[j] + weight[other], out=row[j + 1])
    heavier = np.maximum(weight[ones].sum(axis=0), weight[others].sum(axis=0))
    return np.asarray(1.0 - row[-1] / np.maximum(heavier, 1e-9))


def similarity(one: str, other: str) -> float:
    """Return the similarity of two results of `sounds_of`, from 0 to 1."""
    return float(similarities([(one, other)])[0])


def _weight(sound: str) -> float:
    return sum(_VOWEL_WEIGHT if c in _VOWELS else 1.0 for c in sound)


def _swap(a: str, b: str) -> float:
    if a == b:
        return 0.0
    if a in _VOWELS and b in _VOWELS:
        return _VOWEL_SWAP
    return _RELATED_SWAP if any(a in pair and b in pair for pair in _RELATED) else 1.0


@lru_cache(64)
def _term_sounds(terms: tuple[str, ...]) -> tuple[tuple[str, str, float, int], ...]:
    """Return for each keyterm: the term, its sound, the weight of the sound, and its number of words."""
    sounds = ((t, sounds_of(t), len(t.split())) for t in terms)
    return tuple((t, s, _weight(s), n) for t, s, n in sounds if s)
