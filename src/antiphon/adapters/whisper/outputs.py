"""Turns outputs of CTranslate2's Whisper into words with probabilities and times. Stateless."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ctranslate2
import numpy as np
from faster_whisper.tokenizer import Tokenizer

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import HypothesisWord, TranscriptSegment
from antiphon.events.words import Word
from antiphon.modeling import token_words

# Seconds per position of the decoder's cross-attention, and samples per mel frame.
POSITION_S = 0.02
SAMPLES_PER_FRAME = 160
# A word after a pause is at most twice as long as MEDIAN_WORD_S or as the median word, whichever is shorter.
MEDIAN_WORD_S = 0.7
PAUSE_MARKS = tuple(".,?!;:。，？！、")

# Start and end of a token in seconds, and its probability.
TokenSpan = tuple[float, float, float]


def without_control_tokens(text: str) -> str:
    """Return the text with a space in every `<|`, so that it cannot contain control tokens."""
    return text.replace("<|", "< |")


def token_probabilities(output: Any, count: int) -> list[float]:
    """Return the softmax probability of each of the last `count` text tokens of a greedy output.

    `output`: a WhisperGenerationResult with logits. Tokens without logits have the probability 0.
    """
    ids = output.sequences_ids[0]
    rows = output.logits[0]
    # One row for each generated token. The end token has a row only if the decoder reached it.
    first = len(ids) - count if len(rows) >= len(ids) else 0
    probabilities = []
    for token, row in zip(ids[len(ids) - count :], rows[first:], strict=False):
        logits = np.asarray(row, np.float32).reshape(-1)
        probabilities.append(float(1.0 / np.exp(logits - logits[token]).sum()))
    return probabilities + [0.0] * (count - len(probabilities))


def hypothesis_words(
    tokenizer: Tokenizer, ids: list[int], probabilities: list[float], language: str
) -> tuple[HypothesisWord, ...]:
    """Return the words of text tokens. A last word that ends within a character is incomplete, and left out."""
    texts, groups = tokenizer.split_tokens_on_unicode(ids) if ids else ([], [])
    pieces = token_words.words(texts, groups, probabilities, language)
    if pieces and "\ufffd" in pieces[-1].text:
        pieces.pop()
    return tuple(pieces)


def token_starts(alignments: Sequence[tuple[int, int]], count: int) -> list[float]:
    """Return the start of each of `count` tokens and the end of the last one, in seconds, in ascending order.

    `alignments`: CTranslate2's pairs of a token's index and a position of the cross-attention. A token without a pair
    has the same start as the previous token.
    """
    starts: dict[int, int] = {}
    last = 0
    for token, position in alignments:
        starts.setdefault(token, position)
        last = max(last, position + 1)
    times, now = [], 0
    for k in range(count + 1):
        now = max(now, starts.get(k, last if k == count else now))
        times.append(now * POSITION_S)
    return times


def aligned_words(pieces: Sequence[HypothesisWord], spans: Sequence[TokenSpan]) -> list[Word]:
    """Return the words with times and probabilities. `spans`: the spans of all tokens of the words."""
    out, at = list[Word](), 0
    for piece in pieces:
        own = spans[at : at + len(piece.tokens)]
        at += len(piece.tokens)
        out.append(Word(piece.text.strip(), own[0][0], own[-1][1], min(s[2] for s in own)))
    return out


def without_pauses(words: Sequence[Word]) -> tuple[Word, ...]:
    """Return aligned words without the pauses before them.

    The silence before a word is aligned with the word. So a word that follows a pause mark, and is much longer than the
    others, is shortened at its start to the length of a long word (add_word_timestamps in timing.py of openai/whisper).
    """
    out = list(words)
    lengths = sorted(w.end_s - w.start_s for w in out if w.end_s > w.start_s)
    longest = 2 * min(MEDIAN_WORD_S, lengths[len(lengths) // 2]) if lengths else math.inf
    for k, word in enumerate(out):
        after_pause = k == 0 or out[k - 1].text[-1:] in PAUSE_MARKS
        if after_pause and word.end_s - word.start_s > longest:
            out[k] = replace(word, start_s=word.end_s - longest)
    return tuple(out)


def file_segment(number: int, raw: Any, start_sample: int) -> TranscriptSegment:
    """Convert a segment of faster-whisper. `start_sample`: the first sample, in the file, of the segment's part."""
    shift_s = start_sample / SAMPLE_RATE_HZ
    timed = tuple(
        Word(w.word.strip(), float(w.start) + shift_s, float(w.end) + shift_s, float(w.probability))
        for w in raw.words or ()
    )
    return TranscriptSegment(
        id=number,
        seek=int(raw.seek) + start_sample // SAMPLES_PER_FRAME,
        start_s=float(raw.start) + shift_s,
        end_s=float(raw.end) + shift_s,
        text=raw.text,
        tokens=tuple(raw.tokens),
        temperature=float(raw.temperature or 0.0),
        avg_logprob=float(raw.avg_logprob),
        compression_ratio=float(raw.compression_ratio),
        no_speech_prob=float(raw.no_speech_prob),
        words=timed,
    )


def one_of(encoded: Any, index: int) -> Any:
    """Return the encoded window with this index, of those that were encoded together."""
    if encoded.shape[0] == 1:
        return encoded
    return ctranslate2.StorageView.from_array(np.asarray(encoded)[index, None])
