"""What keyterms do to a session's words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench import words as wer
from bench.common import Server, show
from bench.hearing.client import Heard
from bench.hearing.clips import Clip
from bench.hearing.figures import cells, difference
from bench.hearing.quality import hear

ENGLISH = {"language": "en"}


def text_errors(clip: Clip, heard: Heard) -> tuple[int, int]:
    """(errors, words) of the finals."""
    return wer.score(clip.text, heard.text, clip.language)


def term_errors(clip: Clip, heard: Heard) -> tuple[int, int]:
    """(words of the clip's terms that the finals lack, words of its terms)."""
    words = Counter(w for term in clip.terms for w in wer.norm(term))
    return (words - Counter(wer.norm(heard.text))).total(), words.total()


def compared(errors: Sequence[tuple[int, int]], plain: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """The error rate of some clips in percent, and its difference from the same clips' without the option."""
    num_words = [n for _, n in plain]
    change = difference([(a, b) for (a, _), (b, _) in zip(errors, plain, strict=True)], num_words)
    rate = 100 * sum(e for e, _ in errors) / sum(num_words)
    return {"clips": len(errors), "errors": rate, "change": (change.points, change.low, change.high)}


def show_changes(title: str, rows: dict[str, dict[str, Any]]) -> None:
    show(title, {name: cells(row) for name, row in rows.items()})


async def keyterms(srv: Server, orders: list[Clip], others: list[Clip], *, speed: float) -> dict[str, Any]:
    """Errors in the terms of orders, and in sentences that have nothing to do with them, without and with keyterms."""
    terms = sorted({term for clip in orders for term in clip.terms})
    rows = {}
    for name, clips, errors_of in (("terms", orders, term_errors), ("other words", others, text_errors)):
        plain: list[tuple[int, int]] = []
        for option in ({}, {"keywords": terms}):
            heard = await hear(srv, clips, speed=speed, session={"transcription": ENGLISH | option})
            errors = [errors_of(c, heard[c.id]) for c in clips]
            plain = plain or errors
            rows[f"{name} {'with' if option else 'without'}"] = compared(errors, plain)
    show_changes(f"{len(terms)} keyterms: errors in %, and their change", rows)
    return {"speed": speed, "terms": terms, "rows": rows}
