"""Qwen3-Omni prefills a turn while it continues: the result equals that of prefilling the whole turn at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from antiphon.adapters.qwen3_omni.model import Qwen3Omni
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import AudioPart, Message, SoundTrack
from antiphon.engine.api import EngineSettings
from antiphon.engine.local.engine import LocalEngine, LocalSession
from antiphon.modeling.media_rows import AudioWindow
from antiphon.modeling.omni.conversation import OmniStream
from antiphon.modeling.sound.window_encoder import MelWindow, WindowEncoder
from tests.adapters import tiny_qwen3_omni as tiny
from tests.adapters.published_qwen3_omni import OPTIONS, Whole, answer, assert_equal, clip

SYSTEM = Message("system", "Be brief.")
WINDOW = 8 * 16_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("omni"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Qwen3Omni]:
    settings = EngineSettings(kv_bytes=64 << 20)
    loaded = Qwen3Omni(folder, "omni", EngineModelOptions(settings, weights="fp32", threads=1))
    assert loaded.talker
    first, rest = loaded.talker.sampling.first, loaded.talker.sampling.rest
    loaded.talker.sampling = replace(
        loaded.talker.sampling, first=replace(first, temperature=0.0), rest=replace(rest, temperature=0.0)
    )
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def whole(folder: Path) -> Whole:
    return Whole(folder)


def said(part: AudioPart) -> list[Message]:
    return [SYSTEM, Message("user", "", parts=(part,))]


async def grow(stream: OmniStream, pcm: np.ndarray, turn: SoundTrack, ends: Sequence[int]) -> None:
    for end in ends:
        await stream.prefill(said(AudioPart(pcm[:end], turn, grows=True)))
        await settled(stream)


async def settled(stream: OmniStream) -> None:
    await stream.chat.session.settle(include_newest=True)


async def text_of(stream: OmniStream, messages: Sequence[Message]) -> list[int]:
    async with aclosing(stream.respond(messages, OPTIONS, None)) as parts:
        async for _ in parts:
            pass
    rows = stream.chat.rows
    start = max(i for i, row in enumerate(rows) if row == tiny.ID["<|im_start|>"]) + 3
    return [row for row in rows[start:] if isinstance(row, int)]


async def kv_of(model: Qwen3Omni, stream: OmniStream) -> torch.Tensor:
    """Return the KV of all rows of the conversation's session."""
    engine, session = model.thinker.engine, stream.chat.session
    assert isinstance(engine, LocalEngine)
    assert isinstance(session, LocalSession)
    await settled(stream)

    def read() -> torch.Tensor:
        lease = session.scheduled.lease
        assert lease.extent
        return engine.scheduler.cache.storage.to_host(lease.extent.handle, session.length).clone()

    return await engine.thread.call(read)


def num_media_rows(stream: OmniStream) -> int:
    return sum(not isinstance(row, int) for row in stream.chat.rows)


@pytest.mark.parametrize("seconds", [8.0, 8.04, 19.0])
def test_when_a_turn_is_taken_in_while_it_goes_on_then_kv_and_text_are_those_of_the_whole(
    model: Qwen3Omni, seconds: float
) -> None:
    pcm, turn = clip(seconds, 3).pcm, SoundTrack()
    ends = list(range(WINDOW + 1_600, len(pcm), WINDOW))

    async def run() -> None:
        model.thinker.stop_tokens = frozenset()
        at_once, growing = await model.open(), await model.open()
        expected = await text_of(at_once, said(AudioPart(pcm)))
        await grow(growing, pcm, turn, ends)
        stats = model.thinker.engine.runner.stats
        before, held, num_held = stats.rows, num_media_rows(growing), len(growing.chat.rows)
        assert await text_of(growing, said(AudioPart(pcm, turn))) == expected
        # Prefilled rows are not computed again: 104 rows for each window of 8 s.
        assert held == 104 * len(ends)
        assert stats.rows - before <= len(growing.chat.rows) - num_held + 2
        one, other = await kv_of(model, at_once), await kv_of(model, growing)
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        at_once.close()
        growing.close()

    asyncio.run(run())


@pytest.mark.slow
def test_when_a_turn_grew_then_text_and_audio_are_those_of_the_published_model(model: Qwen3Omni, whole: Whole) -> None:
    part, turn = clip(16.3, 2), SoundTrack()
    stop = whole.stop(said(part))

    async def run() -> None:
        stream = await model.open()
        assert model.talker
        stats = model.talker.engine.runner.stats
        begun = stats.rows
        await grow(stream, part.pcm, turn, [WINDOW + 1_600])
        # The talker has the window's rows too, after the four tokens that begin the turn and its sound.
        assert stats.rows - begun == 104 + 4
        made = await answer(model, stream, said(AudioPart(part.pcm, turn)), stop)
        stream.close()
        assert_equal(made, whole.generate(said(part), stop))
        # It computed only the rows after them: 108 of sound and a few tokens, then a row for each frame.
        assert stats.rows - begun - 108 < 108 + 24 + 2 * len(made.frames)

    asyncio.run(run())


@pytest.mark.slow
def test_when_the_instructions_change_after_a_prefill_then_the_audio_is_that_of_the_new_ones(
    model: Qwen3Omni, whole: Whole
) -> None:
    part, turn = clip(9.3, 4), SoundTrack()
    changed = [Message("system", "Answer at length, please."), Message("user", "", parts=(part,))]
    stop = whole.stop(changed)

    async def run() -> None:
        stream = await model.open()
        await grow(stream, part.pcm, turn, [WINDOW + 1_600])
        given = Message("user", "", parts=(AudioPart(part.pcm, turn),))
        made = await answer(model, stream, [changed[0], given], stop)
        stream.close()
        assert_equal(made, whole.generate(changed, stop))

    asyncio.run(run())


@pytest.mark.slow
def test_when_a_response_begins_during_a_prefill_then_its_audio_is_that_of_the_whole_turn(
    model: Qwen3Omni, whole: Whole
) -> None:
    part, turn = clip(16.3, 2), SoundTrack()
    messages = said(part)
    stop = whole.stop(messages)
    expected = whole.generate(messages, stop)

    async def run(steps: int) -> None:
        stream = await model.open()
        grown = said(AudioPart(part.pcm[: WINDOW + 1_600], turn, grows=True))
        ahead = asyncio.create_task(stream.prefill(grown))
        for _ in range(steps):
            await asyncio.sleep(0.002)
        made = await answer(model, stream, said(AudioPart(part.pcm, turn)), stop)
        await ahead
        stream.close()
        assert_equal(made, expected)

    for steps in (0, 4, 16):
        asyncio.run(run(steps))


def test_when_later_audio_is_louder_then_the_windows_that_it_changes_are_computed_again(model: Qwen3Omni) -> None:
    pcm, turn = clip(18.0, 5).pcm.copy(), SoundTrack()
    # This audio is so quiet that later loud audio raises its floor.
    pcm[: WINDOW // 2] *= 1e-5
    pcm[: 2 * WINDOW] *= 0.01

    async def run() -> None:
        model.thinker.stop_tokens = frozenset()
        at_once, growing = await model.open(), await model.open()
        expected = await text_of(at_once, said(AudioPart(pcm)))
        await grow(growing, pcm, turn, [WINDOW + 1_600])
        early = next(piece for piece in growing.chat.media_rows if isinstance(piece, AudioWindow))
        assert await text_of(growing, said(AudioPart(pcm, turn))) == expected
        used = [row[0] for row in growing.chat.rows if not isinstance(row, int)]
        assert early not in used
        torch.testing.assert_close(await kv_of(model, at_once), await kv_of(model, growing), rtol=1e-4, atol=1e-4)
        at_once.close()
        growing.close()

    asyncio.run(run())


def test_when_a_turn_is_dropped_then_its_audio_leaves_the_kv(model: Qwen3Omni) -> None:
    pcm, earlier = clip(17.0, 6).pcm, [SYSTEM, Message("user", "Hello."), Message("assistant", "Yes.")]

    async def run() -> None:
        model.thinker.stop_tokens = frozenset()
        stream = await model.open()
        await stream.prefill(earlier)
        before, kv = list(stream.chat.rows), await kv_of(model, stream)
        part = AudioPart(pcm, SoundTrack(), grows=True)
        await stream.prefill([*earlier, Message("user", "", parts=(part,))])
        assert num_media_rows(stream) == 208
        await stream.prefill(earlier)
        assert stream.chat.rows == before
        assert stream.chat.session.length == len(before)
        torch.testing.assert_close(await kv_of(model, stream), kv, rtol=1e-4, atol=1e-4)
        stream.close()
        assert model.thinker.media_budget.num_bytes == 0

    asyncio.run(run())


def test_when_the_turn_ends_while_a_window_is_encoded_then_the_window_is_encoded_once(
    model: Qwen3Omni, monkeypatch: pytest.MonkeyPatch
) -> None:
    pcm, turn = clip(9.0, 7).pcm, SoundTrack()

    async def run() -> None:
        model.thinker.stop_tokens = frozenset()
        encoded: list[int] = []
        encode = WindowEncoder.encode

        def noted(encoder: WindowEncoder, windows: Sequence[MelWindow]) -> list[torch.Tensor]:
            encoded.extend(window.num_frames for window in windows)
            return encode(encoder, windows)

        monkeypatch.setattr(WindowEncoder, "encode", noted)
        stream = await model.open()
        ahead = asyncio.create_task(stream.prefill(said(AudioPart(pcm[: WINDOW + 1_600], turn, grows=True))))
        await asyncio.sleep(0)
        await text_of(stream, said(AudioPart(pcm, turn)))
        await ahead
        stream.close()
        assert sorted(encoded) == [100, 800]

    asyncio.run(run())
