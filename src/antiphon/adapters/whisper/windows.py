"""How Whisper's windows are padded, searched and capped, and the profile that says so to sessions. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import TranscriberProfile, TuningLimits, Window

# Most tokens before a window's start: half of the decoder's positions are for its text (whisper/decoding.py).
MAX_PROMPT_TOKENS = 200
# Mel frames a second, and the most that the encoder takes: 30 s.
FRAMES_PER_S = 100
MAX_FRAMES = 3000
# Most tokens a second of speech, and besides, against endless repetition. English speech has 4 on average and 7 in fast
# passages; a cap of 7 cut the ends of long finals off. A partial of a second of audio says its two words again and
# again up to the cap.
FINAL_TOKENS_PER_S, FINAL_EXTRA_TOKENS = 12.0, 16
PARTIAL_TOKENS_PER_S, PARTIAL_EXTRA_TOKENS = 7.0, 2
# Scripts whose characters take a token or more each.
NON_LATIN_TOKENS_PER_S = 14.0


@dataclass(frozen=True, slots=True)
class Search:
    """How a window is padded and searched: to at least `min_s`, with `pad_s` of silence, in seconds."""

    min_s: float
    pad_s: float
    beam_size: int


PARTIAL = Search(min_s=5.0, pad_s=2.0, beam_size=1)
FINAL = Search(min_s=10.0, pad_s=3.0, beam_size=5)


def profile_of(model_id: str, languages: tuple[str, ...]) -> TranscriberProfile:
    """Return the facts of a model that knows these languages. Finals do not keep the prefix that was sent."""
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
        # With its predecessor's audio and words in front of it, a window costs half as much again, and a turn that
        # follows another speaker's by 0.2 to 0.9 s loses words (docs/design/turns.md).
        context_pause_s=0.0,
        pause_s=0.8,
        long_window_s=10.0,
        long_pause_s=0.3,
        max_window_s=22.0,
        context_tokens=0,
        max_tokens=224,
        max_prefix_tokens=180,
        keyterms=True,
        # A window may be 4 s over its longest when it is cut, and is decoded with FINAL.pad_s behind it (30 s).
        limits=TuningLimits(max_audio_s=23.0, max_prefix_tokens=180, max_tokens=224, context_tokens=MAX_PROMPT_TOKENS),
    )


def search_of(window: Window) -> Search:
    """Return how a window is searched: finals carefully, partials quickly."""
    return FINAL if window.final else PARTIAL


def num_frames(window: Window) -> int:
    """Return the mel frames that a window is padded to: those of whole half seconds, so that windows can share a
    batch.
    """
    search = search_of(window)
    seconds = max(search.min_s, len(window.pcm) / SAMPLE_RATE_HZ + search.pad_s)
    return min(MAX_FRAMES, math.ceil(seconds * 2) * FRAMES_PER_S // 2)


def is_aligned(window: Window) -> bool:
    """Return whether the words of a window's hypothesis are aligned with its audio, whatever they are."""
    return window.word_times or (window.final and window.logprobs)


def token_cap(window: Window, language: str, most: int) -> int:
    """Return how many tokens a window's text may have behind its prefix. `most`: the model's own limit."""
    if window.final:
        rate, spare = FINAL_TOKENS_PER_S, FINAL_EXTRA_TOKENS
    else:
        rate, spare = PARTIAL_TOKENS_PER_S, PARTIAL_EXTRA_TOKENS
    if language != "en":
        rate = max(rate, NON_LATIN_TOKENS_PER_S)
    cap = int(len(window.pcm) / SAMPLE_RATE_HZ * rate) + spare
    return min(max(1, cap - len(window.prefix)), window.max_tokens or most)


# A likely language is kept unless another one has this probability. Given the first 2 s of 81 recordings in eight
# languages, the base model's best language had it for 36, and was right for all of these; given 3 s, it was wrong for
# one of 49.
CLEAR_PROBABILITY = 0.9


def chosen_language(
    ranked: Sequence[tuple[str, float]], languages: Sequence[str], likely: str | None
) -> tuple[str, float]:
    """Return the language to decode in (ISO-639-1) and how sure the model is of it, 1.0 where it is the likely one.

    - `ranked`: all languages of the model with their probabilities, the most probable first.
    - `languages`: the choice; empty: all. The probabilities of the others are shared out among these. Those that the
      model does not know are passed over.
    - `likely`: the language that is kept unless another one is clear.
    """
    allowed = [(code, p) for code, p in ranked if code in languages] or list(ranked)
    total = sum(p for _, p in allowed) if languages else 1.0
    code, probability = allowed[0][0], allowed[0][1] / max(total, 1e-9)
    if likely and (code == likely or probability < CLEAR_PROBABILITY):
        return likely, 1.0
    return code, probability
