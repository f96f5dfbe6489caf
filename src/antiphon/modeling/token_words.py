"""Joins the tokens of a transcript into words, with the model's spelling, probabilities and estimated times.

Pure: instead of the tokenizer, it gets a function that decodes tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from antiphon.audio import Pcm
from antiphon.audio.quiet import spread_over_sound
from antiphon.contracts import HypothesisWord
from antiphon.events.words import TokenLogprob, Word

# Scripts without spaces between words (faster_whisper/tokenizer.py, split_to_word_tokens).
UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})


def characters(ids: Sequence[int], decode: Callable[[list[int]], str]) -> tuple[list[str], list[list[int]]]:
    """Return the texts of the tokens and, for each text, its tokens: one, or several that form one character.

    `decode`: the tokenizer's function. An incomplete character at the end is in neither list.
    """
    texts, groups, held = list[str](), list[list[int]](), list[int]()
    for token in ids:
        held.append(token)
        text = decode(held)
        if text and not text.endswith("\ufffd"):
            texts.append(text)
            groups.append(held)
            held = []
    return texts, groups


def words(
    texts: Sequence[str], groups: Sequence[Sequence[int]], probabilities: Sequence[float], language: str
) -> list[HypothesisWord]:
    """Join the texts that `characters` returns into words.

    A word begins at a leading space, or at each character of a script without spaces. Punctuation joins the word before
    it. `probabilities`: one for each token. The probability of a word is that of its least likely token. `language`: an
    ISO 639 code.
    """
    pieces: list[HypothesisWord] = []
    at = 0
    for text, group in zip(texts, groups, strict=True):
        probability = min(probabilities[at : at + len(group)], default=0.0)
        at += len(group)
        joins = pieces and not text.startswith(" ") and (language not in UNSPACED or not text.strip().isalnum())
        if joins:
            last = pieces.pop()
            pieces.append(
                HypothesisWord(last.text + text, last.tokens + tuple(group), min(last.probability, probability))
            )
        else:
            pieces.append(HypothesisWord(text, tuple(group), probability))
    return pieces


def with_logprobs(
    pieces: Sequence[HypothesisWord], logprobs: Sequence[float], token_text: Callable[[int], str | None]
) -> list[HypothesisWord]:
    """Return the words with the log-probability of each of their tokens.

    `logprobs`: one for each token of the words, in order; excess values are ignored. `token_text`: returns a token in
    the spelling of a byte-level BPE vocabulary.
    """
    out, at = list[HypothesisWord](), 0
    for piece in pieces:
        own = logprobs[at : at + len(piece.tokens)]
        at += len(piece.tokens)
        tokens = zip(piece.tokens, own, strict=True)
        out.append(replace(piece, logprobs=tuple(TokenLogprob(token_bytes(token_text(i) or ""), p) for i, p in tokens)))
    return out


def token_bytes(spelling: str) -> bytes:
    """Return the bytes of a token in the spelling of a byte-level BPE vocabulary: one character for each byte.

    Skips characters that do not stand for a byte. Control tokens may contain such characters.
    """
    table = _bytes_of_characters()
    return bytes(table[c] for c in spelling if c in table)


@cache
def _bytes_of_characters() -> dict[str, int]:
    # Printable Latin-1 characters stand for themselves, the other bytes for the characters from 256 on, in order.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def spread(pieces: Sequence[HypothesisWord], pcm: Pcm) -> list[Word]:
    """Return the words with estimated times, in seconds from the start of `pcm`. For models that do not align words.

    Words share the frames of 20 ms that are at most 30 dB below the loudest one, in proportion to their numbers of
    letters. The times are only exact enough to assign a word to one of two turns.
    """
    times = spread_over_sound([max(1, len(p.text.strip())) for p in pieces], pcm)
    return [
        Word(p.text.strip(), start_s, end_s, p.probability)
        for p, start_s, end_s in zip(pieces, times[:-1], times[1:], strict=True)
    ]
