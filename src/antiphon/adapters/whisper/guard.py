"""Detects Whisper's hallucinations: loops, repeated words without sound, and words for noise. Pure.

Works on texts, times and probabilities. `transcriber.py` decides what to do about them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

# A text with a higher compression ratio is a loop (whisper/transcribe.py).
LOOP_COMPRESSION = 2.4
# Texts with fewer bytes are never loops.
LOOP_MIN_BYTES = 80
# A "word" of at least this number of equal parts, joined by hyphens, is a stutter.
MIN_STUTTER = 6
# A word with up to this much sound was not spoken: the alignment has found no place for it.
UNSPOKEN_WORD_S = 0.04
# A frame of 20 ms is sound if it is at most SOUND_DB softer than the loudest frame of the audio, otherwise a pause.
SOUND_DB = 30.0
SOUND_FRAME = SAMPLE_RATE_HZ // 50
# Minimum number of words of a copy that is cut off by the end of the text.
MIN_CUT_OFF_COPY = 2
# Audio is noise if its probability of no speech is above NO_SPEECH_PROBABILITY (OpenAI's threshold,
# whisper/transcribe.py), and the mean log-probability of its text is below NO_SPEECH_LOGPROB.
NO_SPEECH_PROBABILITY = 0.6
NO_SPEECH_LOGPROB = -0.8
# Below these mean log-probabilities, a live window or a segment of a file is always noise. A file's segment is first
# decoded again at higher temperatures. whisper/transcribe.py uses -1.0 for both.
MIN_LOGPROB = -1.2
MIN_FILE_LOGPROB = -1.0


def is_loop(text: str) -> bool:
    """Return whether a text repeats itself, judged by its compression ratio, as in whisper/transcribe.py.

    A text of up to LOOP_MIN_BYTES is never a loop.
    """
    data = text.encode()
    return len(data) > LOOP_MIN_BYTES and len(data) / len(zlib.compress(data)) > LOOP_COMPRESSION


def is_noise(avg_logprob: float, no_speech_prob: float, min_logprob: float = MIN_LOGPROB) -> bool:
    """Return whether the audio is noise, given a decode's mean log-probability and its probability of no speech."""
    unlikely = no_speech_prob > NO_SPEECH_PROBABILITY and avg_logprob < NO_SPEECH_LOGPROB
    return unlikely or avg_logprob < min_logprob


def has_words(text: str) -> bool:
    """Return whether a text has a word with a letter or a digit that is not a stutter.

    For noise, Whisper sometimes writes only punctuation, or "W-W-W-W-W-W-W-W".
    """
    return any(any(c.isalnum() for c in word) and not _is_stutter(word) for word in text.split())


def _is_stutter(word: str) -> bool:
    parts = word.casefold().strip(",.!?-").split("-")
    return len(parts) >= MIN_STUTTER and len(set(parts)) == 1


def says_twice(texts: Sequence[str]) -> bool:
    """Return whether words are directly repeated, so that their times should be checked.

    `texts`: the words. Case and punctuation are ignored.
    """
    return next(_copies(_bare(texts)), None) is not None


def seconds_of_sound(pcm: Pcm, spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return the seconds of sound, without pauses, in each span. `spans`: start and end in seconds.

    The alignment extends the last word of a text over all audio after it, so the length of that word is meaningless.
    `pcm`: float32 [num_samples], mono, 16 kHz.
    """
    frames = pcm[: len(pcm) // SOUND_FRAME * SOUND_FRAME].reshape(-1, SOUND_FRAME)
    energy = np.square(frames, dtype=np.float64).sum(1)
    sound = energy > energy.max(initial=0.0) / 10 ** (SOUND_DB / 10)
    frame_s = SOUND_FRAME / SAMPLE_RATE_HZ
    return [float(sound[round(a / frame_s) : round(b / frame_s)].sum()) * frame_s for a, b in spans]


def unspoken_copies(texts: Sequence[str], sound_s: Sequence[float], first: int = 0) -> set[int]:
    """Return the indices of words that repeat adjacent words and have no sound.

    `sound_s`: the seconds of sound that each word is aligned with. If a word was spoken several times, each occurrence
    has sound. If the decoder hallucinated a copy, either the copy or its original has almost no sound, because the
    alignment assigns the sound to only one of them. Words before `first` are fixed, and never returned.
    """
    kept = list(range(len(texts)))
    bare = _bare(texts)
    while copy := _unspoken_copy([bare[k] for k in kept], [sound_s[k] <= UNSPOKEN_WORD_S for k in kept], first):
        del kept[copy]
    return set(range(len(texts))) - set(kept)


def _unspoken_copy(words: list[str], unspoken: list[bool], first: int) -> slice | None:
    """Return the first copy without sound. Of two equal parts, the later one is checked first."""
    for start, middle, end in _copies(words):
        for copy in (slice(middle, end), slice(start, start + end - middle)):
            if copy.start >= first and 2 * sum(unspoken[copy]) > copy.stop - copy.start:
                return copy
    return None


def _copies(words: list[str]) -> Iterator[tuple[int, int, int]]:
    """Yield (start, middle, end) if words[middle:end] repeat words[start:middle], longest first.

    A copy has the length of its original, unless it is cut off by the end of the words.
    """
    for size in range(len(words) - 1, 0, -1):
        for start in range(len(words) - size):
            middle, end = start + size, min(start + 2 * size, len(words))
            if end - middle < min(size, MIN_CUT_OFF_COPY):
                break
            if words[middle:end] == words[start : start + end - middle]:
                yield start, middle, end


def _bare(texts: Sequence[str]) -> list[str]:
    """Return the words without case and punctuation. Words of only punctuation become unique strings."""
    return ["".join(c for c in text.casefold() if c.isalnum()) or f"\0{k}" for k, text in enumerate(texts)]
