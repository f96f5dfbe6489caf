"""What Whisper writes that was not said: loops, copies of words without sound of their own, words of noise. Pure.

Knows texts, times and probabilities. What the decoder does about it is in `transcriber.py`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

# A text that compresses better than this is a loop (whisper/transcribe.py).
LOOP_COMPRESSION = 2.4
# Shorter texts, in bytes, are never called a loop.
LOOP_MIN_BYTES = 80
# So many equal parts, joined by hyphens, are no word.
MIN_STUTTER = 6
# A word with so many seconds of sound was not spoken: the alignment has found no place for it.
UNSPOKEN_WORD_S = 0.04
# Sound is what is at most so much softer than the loudest 20 ms of the audio; the rest is a pause.
SOUND_DB = 30.0
SOUND_FRAME = SAMPLE_RATE_HZ // 50
# Words of a copy that the end of the text cuts off, from which on it counts as one.
MIN_CUT_OFF_COPY = 2
# Audio counts as noise above this probability of no speech and below this mean log-probability of the text; the first
# is OpenAI's threshold (whisper/transcribe.py).
NO_SPEECH_PROBABILITY = 0.6
NO_SPEECH_LOGPROB = -0.8
# Below this mean log-probability a live window is noise in any case, and so is a segment of a file, for which decoding
# at higher temperatures was tried too (whisper/transcribe.py uses -1.0 for both).
MIN_LOGPROB = -1.2
MIN_FILE_LOGPROB = -1.0


def is_loop(text: str) -> bool:
    """Return whether a text says the same over and over: whether it compresses too well.

    This is the measure of whisper/transcribe.py. A text of less than LOOP_MIN_BYTES is never a loop.
    """
    data = text.encode()
    return len(data) > LOOP_MIN_BYTES and len(data) / len(zlib.compress(data)) > LOOP_COMPRESSION


def is_noise(avg_logprob: float, no_speech_prob: float, min_logprob: float = MIN_LOGPROB) -> bool:
    """Return whether a decode's mean log-probability and its probability of no speech say that nothing was said."""
    unlikely = no_speech_prob > NO_SPEECH_PROBABILITY and avg_logprob < NO_SPEECH_LOGPROB
    return unlikely or avg_logprob < min_logprob


def has_words(text: str) -> bool:
    """Return whether a text has a word with a letter or a digit that is no stutter.

    For noise Whisper also writes lone punctuation, and "W-W-W-W-W-W-W-W".
    """
    return any(any(c.isalnum() for c in word) and not _is_stutter(word) for word in text.split())


def _is_stutter(word: str) -> bool:
    parts = word.casefold().strip(",.!?-").split("-")
    return len(parts) >= MIN_STUTTER and len(set(parts)) == 1


def says_twice(texts: Sequence[str]) -> bool:
    """Return whether words are followed by the same words, so that their times should be looked at.

    `texts`: the words, of which case and punctuation do not count.
    """
    return next(_copies(_bare(texts)), None) is not None


def seconds_of_sound(pcm: Pcm, spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return how many seconds of each span, given by its start and end in seconds, are sound and no pause.

    The last word of a text is aligned with all that follows it, so that its length says nothing. pcm: float32
    [num_samples], mono, 16 kHz.
    """
    frames = pcm[: len(pcm) // SOUND_FRAME * SOUND_FRAME].reshape(-1, SOUND_FRAME)
    energy = np.square(frames, dtype=np.float64).sum(1)
    sound = energy > energy.max(initial=0.0) / 10 ** (SOUND_DB / 10)
    frame_s = SOUND_FRAME / SAMPLE_RATE_HZ
    return [float(sound[round(a / frame_s) : round(b / frame_s)].sum()) * frame_s for a, b in spans]


def unspoken_copies(texts: Sequence[str], sound_s: Sequence[float], first: int = 0) -> set[int]:
    """Return the numbers of the words that repeat the words next to them and have no sound of their own.

    `sound_s`: the seconds of sound that each word is aligned with. A word that is said several times has its own each
    time; a copy that the decoder made up has next to none, or its original has, since the alignment must give the sound
    to one of the two. Words before `first` are never returned: they are given, and cannot be cut.
    """
    kept = list(range(len(texts)))
    bare = _bare(texts)
    while copy := _unspoken_copy([bare[k] for k in kept], [sound_s[k] <= UNSPOKEN_WORD_S for k in kept], first):
        del kept[copy]
    return set(range(len(texts))) - set(kept)


def _unspoken_copy(words: list[str], unspoken: list[bool], first: int) -> slice | None:
    """The first copy without sound of its own, the one behind before the one in front."""
    for start, middle, end in _copies(words):
        for copy in (slice(middle, end), slice(start, start + end - middle)):
            if copy.start >= first and 2 * sum(unspoken[copy]) > copy.stop - copy.start:
                return copy
    return None


def _copies(words: list[str]) -> Iterator[tuple[int, int, int]]:
    """Yield (start, middle, end) of words[start:middle] that words[middle:end] repeat, the longest first.

    A copy is as long as its original, or is cut off by the end of the words.
    """
    for size in range(len(words) - 1, 0, -1):
        for start in range(len(words) - size):
            middle, end = start + size, min(start + 2 * size, len(words))
            if end - middle < min(size, MIN_CUT_OFF_COPY):
                break
            if words[middle:end] == words[start : start + end - middle]:
                yield start, middle, end


def _bare(texts: Sequence[str]) -> list[str]:
    """The words without case and punctuation; each of those that are only punctuation is unlike any other."""
    return ["".join(c for c in text.casefold() if c.isalnum()) or f"\0{k}" for k, text in enumerate(texts)]
