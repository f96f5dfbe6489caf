"""Padding, search and token limits of Whisper's windows, and the profile that describes the model to sessions. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import TranscriberProfile, TuningLimits, Window

# Maximum number of tokens before a window's start token. Half of the decoder's positions are for the text after that
# token (whisper/decoding.py).
MAX_PROMPT_TOKENS = 200
# Number of mel frames per second, and the maximum number of mel frames that the encoder accepts (30 s).
FRAMES_PER_S = 100
MAX_FRAMES = 3000
# Limits on the number of tokens, against endless repetition: tokens per second of audio, plus extra tokens. English
# speech has 4 tokens a second on average, and 7 in fast passages. With a rate of 7, the ends of long finals were cut
# off. On the other hand, a partial of a second of audio may repeat its two words up to the limit.
FINAL_TOKENS_PER_S, FINAL_EXTRA_TOKENS = 12.0, 16
PARTIAL_TOKENS_PER_S, PARTIAL_EXTRA_TOKENS = 7.0, 2
# The rate for scripts with a token or more per character.
NON_LATIN_TOKENS_PER_S = 14.0


@dataclass(frozen=True, slots=True)
class Search:
    """How a window is padded and searched. It is padded to at least `min_s`, with at least `pad_s` of silence."""

    min_s: float
    pad_s: float
    beam_size: int


PARTIAL = Search(min_s=5.0, pad_s=2.0, beam_size=1)
FINAL = Search(min_s=10.0, pad_s=3.0, beam_size=5)


def profile_of(model_id: str, languages: tuple[str, ...]) -> TranscriberProfile:
    """Return the profile of a model with these languages. Finals do not keep the sent prefix."""
    return TranscriberProfile(
        id=model_id,
        languages=languages,
        step_s=0.3,
        first_step_s=0.1,
        agreement_s=0.9,
        first_agreement_s=0.2,
        first_probability=0.4,
        rollback_tokens=1,
        min_probability=0.3,
        unfixed_chunks=0,
        settle_s=0.5,
        # Context from the previous window would increase a window's cost by half. It would also lose words of a turn
        # that begins 0.2 to 0.9 s after another speaker's turn (docs/design/turns.md).
        context_pause_s=0.0,
        pause_s=0.8,
        long_window_s=10.0,
        long_pause_s=0.3,
        max_window_s=22.0,
        context_tokens=0,
        max_tokens=224,
        max_prefix_tokens=180,
        keyterms=True,
        # A window may exceed max_audio_s by 4 s when it is cut, and is padded by FINAL.pad_s: 30 s in total.
        limits=TuningLimits(max_audio_s=23.0, max_prefix_tokens=180, max_tokens=224, context_tokens=MAX_PROMPT_TOKENS),
    )


def search_of(window: Window) -> Search:
    """Return the search of a window: FINAL or PARTIAL."""
    return FINAL if window.final else PARTIAL


def num_frames(window: Window) -> int:
    """Return the mel frames that a window is padded to: whole half seconds, so that windows can share a batch."""
    search = search_of(window)
    seconds = max(search.min_s, len(window.pcm) / SAMPLE_RATE_HZ + search.pad_s)
    return min(MAX_FRAMES, math.ceil(seconds * 2) * FRAMES_PER_S // 2)


def is_aligned(window: Window) -> bool:
    """Return whether the words of a window's hypothesis are always aligned with its audio."""
    return window.word_times or (window.final and window.logprobs)


def token_cap(window: Window, language: str, most: int) -> int:
    """Return the limit of tokens of a window's text after its prefix. `most`: the model's own limit."""
    if window.final:
        rate, spare = FINAL_TOKENS_PER_S, FINAL_EXTRA_TOKENS
    else:
        rate, spare = PARTIAL_TOKENS_PER_S, PARTIAL_EXTRA_TOKENS
    if language != "en":
        rate = max(rate, NON_LATIN_TOKENS_PER_S)
    cap = int(len(window.pcm) / SAMPLE_RATE_HZ * rate) + spare
    return min(max(1, cap - len(window.prefix)), window.max_tokens or most)


# The likely language is kept unless another one has at least CLEAR_PROBABILITY. This was measured with the base model
# on 81 recordings in eight languages. After the first 2 s, the best language had this probability in 36 recordings, and
# was right in all of them. After 3 s, it had it in 49 recordings, and was wrong in one.
CLEAR_PROBABILITY = 0.9


def next_language(
    ranked: Sequence[tuple[str, float]], languages: Sequence[str], first: str | None
) -> tuple[str, float] | None:
    """Return the most probable of the allowed languages except `first`, with its probability; None if there is none.

    See `chosen_language`.
    """
    return next(((code, p) for code, p in ranked if code != first and code in (languages or (code,))), None)


def chosen_language(
    ranked: Sequence[tuple[str, float]], languages: Sequence[str], likely: str | None
) -> tuple[str, float]:
    """Return the language to decode in (ISO-639-1) and its probability, which is 1.0 for the likely one.

    - `ranked`: all languages of the model with their probabilities, most probable first.
    - `languages`: the allowed languages; empty: all. Probabilities are normalized over the allowed languages. Languages
      that the model does not know are ignored.
    - `likely`: the language that is kept unless another one reaches CLEAR_PROBABILITY.
    """
    allowed = [(code, p) for code, p in ranked if code in languages] or list(ranked)
    total = sum(p for _, p in allowed) if languages else 1.0
    code, probability = allowed[0][0], allowed[0][1] / max(total, 1e-9)
    if likely and (code == likely or probability < CLEAR_PROBABILITY):
        return likely, 1.0
    return code, probability
