"""A blend of turn detectors goes on without those that do not answer, and says so once."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence

import numpy as np
import pytest

from antiphon.audio import Pcm
from antiphon.contracts import TurnDetector
from antiphon.errors import ModelError, ModelLost, Refused
from antiphon.pipelines import turn_blend
from antiphon.pipelines.turn_blend import BlendPart, TurnBlend, logit

TURN = np.zeros(16000, np.float32)


class Says:
    """A detector with one answer, or one error."""

    def __init__(self, answer: float | Exception, languages: Sequence[str] = ()) -> None:
        self.answer, self.languages = answer, frozenset(languages)

    async def complete(self, pcm: Pcm) -> float:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Hangs:
    """A detector that answers after `may_answer` is set."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def complete(self, pcm: Pcm) -> float:
        await self.may_answer.wait()
        return 0.7


def blended(*detectors: TurnDetector, weights: Sequence[float] = ()) -> TurnBlend:
    given = weights or [1.0] * len(detectors)
    return TurnBlend([BlendPart(f"d{i}", d, w) for i, (d, w) in enumerate(zip(detectors, given, strict=True))])


def test_a_blend_is_the_weighted_mean_of_the_logits() -> None:
    blend = blended(Says(0.9), Says(0.2), weights=(3, 1))
    assert logit(asyncio.run(blend.complete(TURN))) == pytest.approx((3 * logit(0.9) + logit(0.2)) / 4)
    assert asyncio.run(blended(Says(0.123)).complete(TURN)) == 0.123
    assert not blend.failures.counts


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (math.nan, "not_a_number"),
        (1.5, "not_a_number"),
        (ModelError("broken"), "error"),
        (ModelLost("its thread ended"), "error"),
        (Refused("full", 1.0), "error"),
    ],
)
def test_without_a_detector_that_fails_the_others_judge_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture, bad: float | Exception, reason: str
) -> None:
    blend = blended(Says(0.8), Says(bad))
    with caplog.at_level(logging.WARNING):
        assert [asyncio.run(blend.complete(TURN)) for _ in range(3)] == [0.8] * 3
    assert blend.failures.counts == {("d1", reason): 3}
    assert [r.getMessage().startswith("turns are decided without d1") for r in caplog.records] == [True]
    with pytest.raises(ModelError, match="no turn detector"):
        asyncio.run(blended(Says(bad)).complete(TURN))


def test_a_late_detector_does_not_hold_the_others_and_alone_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_blend, "LATE_S", 0.0)

    async def main() -> None:
        late = Hangs()
        blend = blended(late, Says(0.8))
        assert await blend.complete(TURN) == 0.8
        assert blend.failures.counts == {("d0", "late"): 1}
        alone = blended(late)
        task = asyncio.create_task(alone.complete(TURN))
        while not alone.failures.counts:  # noqa: ASYNC110
            await asyncio.sleep(0)
        late.may_answer.set()
        assert await task == 0.7

    asyncio.run(main())


def test_a_late_answer_replaces_the_first_judgement_unless_it_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_blend, "LATE_S", 0.0)

    async def main() -> None:
        late, first = Hangs(), list[float]()

        def learn(complete: float) -> None:
            first.append(complete)
            late.may_answer.set()

        blend = blended(late, Says(0.8))
        both = await blend.open().complete(0, TURN, learn)
        assert (first, logit(both)) == ([0.8], pytest.approx((logit(0.7) + logit(0.8)) / 2))
        late.may_answer.clear()
        monkeypatch.setattr(turn_blend, "GIVEN_UP_S", 0.0)
        assert await blend.open().complete(0, TURN, first.append) == 0.8

    asyncio.run(main())


def test_a_blend_of_models_without_a_common_language_is_refused_and_of_differing_ones_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ModelError, match=r"d0 \(en\) and d1 \(de, fr\)"):
        blended(Says(0.5, ["en"]), Says(0.5, ["de", "fr"]))
    assert not caplog.records
    blended(Says(0.5, ["en", "de"]), Says(0.5, ["en"]), Says(0.5))
    assert "outside en, d1 guesses" in caplog.text
