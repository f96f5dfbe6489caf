"""Which language a window is decoded in, from the probabilities of all languages. Pure."""

from __future__ import annotations

from collections.abc import Sequence

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
