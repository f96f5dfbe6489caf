"""Keyterms: the words that a client expects, raised in the decoder's search. Pure; the decoder is a function argument.

CTranslate2 gives no access to the steps of Whisper's beam search, so the search is biased after it. Where the best
hypothesis has words that sound like a keyterm, the hypothesis with the keyterm in their place is scored by the decoder
on the same audio, all such candidates in one call. A keyterm wins where its candidate, with a bonus for the keyterm,
is more probable than the hypothesis. The prompt is left as it is.

Words are compared by their letters, with vowels and related consonants close to each other. A hypothesis without such
words costs no call of the decoder.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from antiphon.contracts import HypothesisWord

# What a keyterm adds to the log-probability of a candidate that has it, in nats: for each of its tokens, at most so
# many. `bench asr --sections keyterms` says what they change.
BONUS_PER_TOKEN = 2.0
MAX_BONUS = 6.0
# Words that are less like a keyterm, from 0 to 1, are not its candidates; the most candidates scored for a window; and
# the most words that one keyterm may replace beyond its own number.
MIN_SIMILARITY = 0.62
MAX_CANDIDATES = 8
EXTRA_WORDS = 1

_VOWELS = frozenset("aeiouy")
_VOWEL_WEIGHT, _VOWEL_SWAP, _RELATED_SWAP = 0.5, 0.2, 0.4
# Consonants that are taken for each other: the same place of articulation, voiced and unvoiced.
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

# From several hypotheses' tokens to the probability of each of those tokens; and from a text to its tokens.
Score = Callable[[list[list[int]]], list[list[float]]]
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A keyterm in place of the words `first` up to, not including, `last`; `similarity` is from 0 to 1."""

    term: str
    first: int
    last: int
    similarity: float


def find_candidates(words: Sequence[str], terms: tuple[str, ...], most: int = MAX_CANDIDATES) -> list[Candidate]:
    """Return where keyterms may stand in place of a hypothesis's words, the most alike first, at most `most`.

    Words that already spell a keyterm are not replaced. Of one place only the two most alike keyterms are returned.
    """
    sounds = _term_sounds(terms)
    if not sounds:
        return []
    spelled = {_letters(term) for term, *_ in sounds}
    weights = np.array([w for _, _, w, _ in sounds])
    longest = np.array([n + EXTRA_WORDS for _, _, _, n in sounds])
    runs: list[tuple[int, int, str, str]] = []
    # (run, term) of all that may be alike by their lengths.
    pairs: list[tuple[int, int]] = []
    for first in range(len(words)):
        for last in range(first + 1, min(len(words), first + int(longest.max())) + 1):
            text = " ".join(words[first:last])
            letters, sound = _letters(text), sounds_of(text)
            if not sound or letters in spelled:
                continue
            weight = _weight(sound)
            fits = np.minimum(weights, weight) >= MIN_SIMILARITY * np.maximum(weights, weight)
            # A run with the keyterm inside it would only lose its other words.
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
    """Return the words of a hypothesis with the keyterms that win their place, or the hypothesis as it was.

    `score` is called at most once, with the hypothesis's tokens first and a candidate's in each row behind, and not
    at all where nothing sounds like a keyterm. Candidates that win are taken in the order of what they win; none
    overlaps another. A keyterm is spelled as it was given, but for a capital at the beginning of a sentence.
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
    """The keyterm as one word in its place: with the space before it and the marks behind it that were there."""
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
    """Return a text's letters and digits as they are compared: no accents, no doubled letters, one letter a sound."""
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
    """Return how alike two results of `sounds_of` are, for each pair: from 0 to 1, float64 [pairs].

    1 less their weighted edit distance over the heavier one's weight. The pairs are compared side by side.
    """
    symbols = {c: i for i, c in enumerate(sorted({c for pair in pairs for text in pair for c in text}), start=1)}
    weight = np.array([0.0, *(_weight(c) for c in symbols)])
    swap = np.ones((len(weight), len(weight)))
    swap[1:, 1:] = [[_swap(a, b) for b in symbols] for a in symbols]

    def coded(texts: list[str]) -> np.ndarray:
        """The symbols of the texts, [longest, texts]; 0 behind the end of a text, which weighs nothing."""
        codes = np.zeros((max(map(len, texts), default=0), len(texts)), np.intp)
        for i, text in enumerate(texts):
            codes[: len(text), i] = [symbols[c] for c in text]
        return codes

    ones, others = coded([a for a, _ in pairs]), coded([b for _, b in pairs])
    # Of the other's beginnings, their distances to the beginning of one: [longest other + 1, pairs].
    row = np.concatenate((np.zeros((1, len(pairs))), np.cumsum(weight[others], axis=0)))
    for symbol in ones:
        above, row = row, row + weight[symbol]
        for j, other in enumerate(others):
            np.minimum(row[j + 1], np.where(symbol > 0, above[j] + swap[symbol, other], np.inf), out=row[j + 1])
            np.minimum(row[j + 1], row[j] + weight[other], out=row[j + 1])
    heavier = np.maximum(weight[ones].sum(axis=0), weight[others].sum(axis=0))
    return np.asarray(1.0 - row[-1] / np.maximum(heavier, 1e-9))


def similarity(one: str, other: str) -> float:
    """Return how alike two results of `sounds_of` are, from 0 to 1."""
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
    """Of each keyterm: itself, its sound, that sound's weight, and its number of words."""
    sounds = ((t, sounds_of(t), len(t.split())) for t in terms)
    return tuple((t, s, _weight(s), n) for t, s, n in sounds if s)
