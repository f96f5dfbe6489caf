"""What a real language model holds after a false start, and after a response that was given back."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any, Self

import anyio
import numpy as np
import pytest

from antiphon.adapters.causal_lm.model import CausalLm
from antiphon.adapters.espeak_ng.synthesizer import Espeak
from antiphon.adapters.spec import EngineModelOptions, LaneModelOptions
from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import ConversationStream, Message, ReplyOptions
from antiphon.engine.api import EngineSettings, Row
from antiphon.events.conversation import ResponseAudioDelta, ResponseDone
from antiphon.loading.loader import prepare, store_of
from antiphon.loading.selection import LANGUAGE_ROLES, selected_models
from antiphon.pipelines.cascade import Cascade
from antiphon.settings import load as load_settings
from tests.conftest import SMALL
from tests.sessions.conversation.scripted import Scene, play
from tests.sessions.conversation.test_given_back import MEANING

# A model computes for more than a minute.
pytestmark = [pytest.mark.slow, pytest.mark.heavy]


@pytest.fixture(scope="module")
def language() -> Iterator[CausalLm]:
    settings = load_settings({"language_model": SMALL}, os.environ)
    (source,) = selected_models(settings, LANGUAGE_ROLES)
    folder = prepare(settings, store_of(settings.models), source)
    loaded = CausalLm(folder, source.id, EngineModelOptions(EngineSettings(kv_bytes=256 << 20)))
    yield loaded
    loaded.close()


class Opening(Cascade):
    """A cascade that tells when its stream was opened."""

    opened: anyio.Event

    async def open(self, owner: Hashable | None = None) -> ConversationStream:
        stream = await super().open(owner)
        self.opened.set()
        return stream


@pytest.fixture
def cascade(language: CausalLm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opening]:
    """A model that always gives the same answer to the same rows."""
    monkeypatch.setattr(
        "antiphon.sessions.conversation.responses.generation.ReplyOptions", partial(ReplyOptions, temperature=0.0)
    )
    voice = Espeak(LaneModelOptions())
    yield Opening(language, voice)
    voice.lane.close()


async def held_rows(model: CausalLm) -> list[Row]:
    """Return the rows of the engine's only session."""
    (session,) = await model.engine.thread.call(lambda: list(model.engine.scheduler.sessions))
    return list(session.rows.ids)


def answers(room: Scene) -> list[str]:
    return [o.response.output[0].text for o in room.out if isinstance(o, ResponseDone) and o.response.output]


class Spoken(Scene):
    """A conversation with a clock of its own, whose responses have at most 24 tokens."""

    def __init__(self, model: Opening) -> None:
        self.now_s = 0.0
        self.opening: Any = model
        model.opened = anyio.Event()
        super().__init__(vad=MEANING, model=self.opening, clock=lambda: self.now_s, max_tokens=24)

    async def until(self, kind: type, count: int = 1, most_s: float = 600) -> None:
        """Wait as the base class does, but longer, because a model computes."""
        await super().until(kind, count, most_s)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        # The model opens a stream in its thread.
        await self.opening.opened.wait()
        await self.settle()
        return self


def test_after_a_false_start_the_model_holds_what_it_holds_after_the_sentence_without_a_pause(
    cascade: Opening, language: CausalLm
) -> None:
    async def main(parts: list[str]) -> tuple[list[Row], str]:
        async with Spoken(cascade) as room:
            for number, part in enumerate(parts):
                if number:
                    await room.until(ResponseAudioDelta)
                await room.say(part, 1000 * number)
            await room.until(ResponseDone, len(parts))
            return await held_rows(language), answers(room)[-1]

    whole = play(main(["Please name the largest city of France."]))
    assert play(main(["Please name the largest", "city of France."])) == whole
    prompt = language.encode([Message("user", "Please name the largest city of France.")], (), answer=True)
    assert whole[0][: len(prompt)] == prompt


@pytest.mark.parametrize("heard_s", [0.2, 0.7, 1.3])
def test_after_a_response_was_given_back_the_model_holds_what_it_holds_without_the_sound(
    cascade: Opening, language: CausalLm, heard_s: float
) -> None:
    async def main(nods: bool) -> list[Row]:
        async with Spoken(cascade) as room:
            await room.say("Please name the largest city of France.")
            await room.until(ResponseAudioDelta)
            if nods:
                # Two seconds later, it is no false start.
                await room.append(np.zeros(3 * SAMPLE_RATE_HZ, np.float32))
                room.now_s = heard_s
                await room.start_turn(3000)
                await room.claim_floor()
                await room.transcribe(await room.end_turn(3300), "Mm-hm.")
            await room.until(ResponseDone, 1 + nods)
            room.now_s += 60
            await room.say("And of Italy?", 60_000)
            await room.until(ResponseDone, 2 + nods)
            return await held_rows(language)

    assert play(main(True)) == play(main(False))
