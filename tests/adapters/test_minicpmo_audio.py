"""MiniCPM-o's audio encoder: streams that are encoded together have the embeddings of the released code."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import WhisperConfig, WhisperFeatureExtractor

from antiphon.adapters.minicpmo.audio_batch import (
    SIZES,
    AudioBatch,
    AudioPages,
    AudioPass,
    AudioStream,
    UnitAttention,
    unit_tiles,
)
from antiphon.adapters.minicpmo.audio_encoder import WHOLE_UNITS, AudioEncoder
from antiphon.adapters.minicpmo.log_mel import LogMel, first_sound, unit_sound
from antiphon.audio import Pcm
from antiphon.engine.local.attention import SegmentedAttention
from antiphon.engine.local.kernels.attention import TILE_ROWS, step_tiles
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import ModelError
from tests.adapters.reference_minicpmo_audio import ReferenceAudioStream, ReferenceLogMel
from tests.engine.local.operators import Operators

# The encoder begins again after five units (250 positions, four pages), because 52 more would reach the limit.
MOST_POSITIONS, MOST_PAGES = 302, 4


@pytest.fixture(scope="module")
def encoder() -> AudioEncoder:
    torch.manual_seed(0)
    made = AudioEncoder(
        WhisperConfig(
            d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48, num_mel_bins=80,
            max_source_positions=MOST_POSITIONS,
        ),
        width=24, pool=5, chunk_s=1.0,
    )  # fmt: skip
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    # In float64 the differences are those of the algorithms, not of rounding.
    made.filters = made.filters.double()
    return made.requires_grad_(False).double().eval()


@pytest.fixture(scope="module")
def thread() -> Iterator[ModelThread]:
    made = ModelThread("tests")
    yield made
    made.close()


@pytest.fixture
def together(encoder: AudioEncoder, thread: ModelThread) -> Callable[[int], AudioBatch]:
    def made(sessions: int) -> AudioBatch:
        batch = AudioBatch(thread, encoder, sessions)
        batch.pages = AudioPages(encoder, sessions, captures=False)
        return batch

    return made


def noise(seed: int) -> Pcm:
    """Return a second of noise whose loudness changes ten times."""
    rng = np.random.default_rng(seed)
    loudness = np.repeat(10 ** rng.uniform(-6, 0, 10), 1600)
    return (loudness * rng.standard_normal(16_000)).astype(np.float32)


def encoded(batch: AudioBatch, *requests: tuple[AudioStream, Pcm]) -> list[torch.Tensor]:
    found = list[torch.Tensor]()
    for result in batch.encode(requests):
        assert isinstance(result, torch.Tensor), result
        found.append(result)
    return found


@cache
def mel_filters() -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(WhisperFeatureExtractor(feature_size=80).mel_filters.T)).float()


def units_of(sounds: list[Pcm]) -> list[list[torch.Tensor]]:
    """Return the frames of each unit of several streams of equal length, transformed together: [80, 104] each.

    The first two frames of a stream's first unit are left out.
    """
    mel, count = LogMel(mel_filters(), torch.device("cpu")), len(sounds)
    kept, memory = [first_sound() for _ in sounds], torch.zeros(count, mel.memory_size)
    made = list[list[torch.Tensor]]()
    for number in range(len(sounds[0]) // 16_000):
        own = slice(16_000 * number, 16_000 * (number + 1))
        pairs = [unit_sound(before, sound[own]) for before, sound in zip(kept, sounds, strict=True)]
        kept = [pair[1] for pair in pairs]
        inputs = torch.from_numpy(np.stack([pair[0] for pair in pairs]))
        frames, memory = mel.unit(inputs, memory, torch.full((count,), number))
        assert number or not frames[..., :2].any()
        made.append([each if number else each[:, 2:] for each in frames])
    return [list(of_stream) for of_stream in zip(*made, strict=True)]


def test_frames_of_a_unit_are_those_of_all_held_audio_transformed_again() -> None:
    # Audio is dropped in the units 29 and 39.
    sounds = [np.concatenate([noise(100 * stream + number) for number in range(41)]) for stream in range(2)]
    for found, sound in zip(units_of(sounds), sounds, strict=True):
        reference = ReferenceLogMel(mel_filters())
        for number, frames in enumerate(found):
            expected = reference.feed(sound[16_000 * number : 16_000 * (number + 1)])
            torch.testing.assert_close(frames, expected, rtol=0, atol=1e-6, msg=f"unit {number}")


# The places where audio is dropped, and the end of what the unit 28 has heard, in samples of the stream.
@settings(max_examples=15, deadline=None)
@given(near=st.sampled_from((160_000, 320_000, 464_480)), at=st.integers(-700, 700))
@example(160_000, -50)
@example(160_000, 50)
@example(160_000, 300)
@example(320_000, 100)
@example(464_480, -60)
def test_a_click_raises_the_floor_exactly_while_a_frame_that_hears_it_is_held(near: int, at: int) -> None:
    sound = (1e-5 * np.random.default_rng(0).standard_normal(41 * 16_000)).astype(np.float32)
    sound[near - 560 + at] = 30.0
    heard, found = np.concatenate([first_sound(), sound]), units_of([sound])[0]
    reference = ReferenceLogMel(mel_filters())
    for number in (9, 28, 29, 38, 39, 40):
        start = 160_000 * ((number + 1) // 10 - 2) if number > 28 else 0
        frames = reference.frames(heard[start : 16_480 + 16_000 * number])
        torch.testing.assert_close(found[number], frames[:, -105:-1], rtol=0, atol=1e-6, msg=f"unit {number}")


def test_silence_and_units_that_are_not_scaled_yet_have_the_frames_of_the_released_code() -> None:
    sound = np.zeros(7 * 16_000, np.float32)
    sound[16_000:32_000] = noise(1)
    reference = ReferenceLogMel(mel_filters())
    for number, frames in enumerate(units_of([sound])[0]):
        expected = reference.feed(sound[16_000 * number : 16_000 * (number + 1)])
        torch.testing.assert_close(frames, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("way", ["together", "one by one"])
@pytest.mark.parametrize("seed", range(4))
def test_streams_that_come_and_go_have_the_embeddings_of_each_alone(
    encoder: AudioEncoder, together: Callable[[int], AudioBatch], thread: ModelThread, seed: int, way: str
) -> None:
    chance = random.Random(seed)
    batch = together(6) if way == "together" else AudioBatch(thread, encoder, 6)
    if batch.pages:
        # A free page may hold any finite numbers. Stored keys and values are always finite.
        batch.pages.pool.rows.fill_(1e30)
    streams: list[tuple[AudioStream, ReferenceAudioStream]] = []
    restarts = 0
    for step in range(18):
        while len(streams) < 6 and chance.random() < 0.4:
            streams.append((batch.open(), ReferenceAudioStream(encoder)))
        for each in list(streams):
            if chance.random() < 0.06:
                batch.release(each[0])
                streams.remove(each)
        present = [each for each in streams if chance.random() < 0.8]
        chance.shuffle(present)
        sounds = [noise(1000 * seed + 10 * step + i) for i in range(len(present))]
        found = encoded(batch, *((stream, pcm) for (stream, _), pcm in zip(present, sounds, strict=True)))
        for embeddings, (stream, alone), pcm in zip(found, present, sounds, strict=True):
            restarts += stream.units > 1 and stream.length == 50
            torch.testing.assert_close(embeddings, alone.feed(pcm), rtol=0, atol=1e-8)
            assert stream.length == alone.kv[0][0].shape[2]
        if batch.pages:
            batch.pages.pool.check_integrity([stream.pages for stream, _ in streams if stream.pages is not None])
    assert restarts
    for stream, _ in streams:
        batch.release(stream)
    assert all(stream.kv is None for stream, _ in streams)
    assert batch.pages is None or batch.pages.pool.free_pages == 6 * MOST_PAGES


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that gets the number of streams of each pass, and its number of rows."""
    made, run = list[tuple[int, int]](), AudioPass.run

    def counted(own: AudioPass, streams: Any, sounds: Any) -> Any:
        made.append((len(streams), len(own.numbers)))
        return run(own, streams, sounds)

    monkeypatch.setattr(AudioPass, "run", counted)
    return made


def test_more_streams_than_a_pass_takes_are_encoded_in_several(
    together: Callable[[int], AudioBatch], passes: list[tuple[int, int]]
) -> None:
    batch, count = together(SIZES[-1] + 2), SIZES[-1] + 2
    streams, pcm = [batch.open() for _ in range(count)], noise(0)
    found = encoded(batch, *((stream, pcm) for stream in streams))
    assert passes == [(SIZES[-1], SIZES[-1]), (2, 4)]
    for embeddings in found:
        torch.testing.assert_close(embeddings, found[0], rtol=0, atol=1e-8)


def fed(batch: AudioBatch, disturb: Callable[[int, list[Any]], Any] = lambda *_: None) -> list[torch.Tensor]:
    """Return the embeddings of two streams over seven units. `disturb` may add to the requests of a unit."""
    streams, found = [batch.open() for _ in range(2)], list[torch.Tensor]()
    for number in range(7):
        requests: list[Any] = [(stream, noise(10 * number + i)) for i, stream in enumerate(streams)]
        disturb(number, requests)
        results = batch.encode(requests)
        for stream in streams:
            own = results[[each[0] for each in requests].index(stream)]
            assert isinstance(own, torch.Tensor), own
            found.append(own)
    return found


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_when_no_page_is_free_then_only_the_stream_that_needs_one_fails(together: Callable[[int], AudioBatch]) -> None:
    batch, errors = together(2), list[str]()
    third = batch.open()

    def disturb(number: int, requests: list[Any]) -> None:
        # In the unit 2, each of the three streams needs its third page, but there are eight.
        if number == 3:
            (error,) = batch.encode([(third, noise(99))])
            errors.append(str(error))
            batch.release(third)
        elif number < 3:
            requests.append((third, noise(99)))

    assert_equal(fed(batch, disturb), fed(together(2)))
    assert errors == ["the audio encoder has no free page for another second of this stream"]


def test_when_a_streams_pages_run_out_midway_then_it_is_as_before_and_continues_with_a_free_page(
    encoder: AudioEncoder, together: Callable[[int], AudioBatch]
) -> None:
    batch, alone = together(1), ReferenceAudioStream(encoder)
    stream, others = batch.open(), [batch.open() for _ in range(MOST_PAGES - 1)]
    encoded(batch, *((other, noise(1)) for other in others))
    torch.testing.assert_close(encoded(batch, (stream, noise(2)))[0], alone.feed(noise(2)), rtol=0, atol=1e-8)
    assert isinstance(batch.encode([(stream, noise(3))])[0], ModelError)
    batch.release(others[0])
    torch.testing.assert_close(encoded(batch, (stream, noise(3)))[0], alone.feed(noise(3)), rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("pcm", "says"),
    [
        (noise(5)[:-1], r"not \[15999\]"),
        (np.zeros((1, 16_000), np.float32), "a unit is 16000 finite samples"),
        (np.full(16_000, np.nan, np.float32), "a unit is 16000 finite samples"),
        (np.full(16_000, np.inf, np.float32), "a unit is 16000 finite samples"),
    ],
)
def test_when_a_streams_audio_is_invalid_then_only_that_stream_fails(
    together: Callable[[int], AudioBatch], pcm: Pcm, says: str
) -> None:
    batch = together(2)
    stream = batch.open()

    def disturb(number: int, requests: list[Any]) -> None:
        requests.insert(1, (stream, pcm))

    assert_equal(fed(batch, disturb), fed(together(2)))
    (error,) = batch.encode([(stream, pcm)])
    with pytest.raises(ModelError, match=says):
        raise error  # type: ignore[misc]
    assert stream.units == stream.length == 0


def test_when_a_streams_positions_are_not_numbers_then_its_pages_do_not_harm_the_next_holder(
    encoder: AudioEncoder, together: Callable[[int], AudioBatch]
) -> None:
    batch = together(1)
    stream = batch.open()
    encoded(batch, (stream, noise(0)))
    stream.memory = torch.full_like(stream.memory, torch.nan)
    assert encoded(batch, (stream, noise(1)))[0].isnan().any()
    batch.release(stream)
    stream, alone = batch.open(), ReferenceAudioStream(encoder)
    for number in range(3):
        torch.testing.assert_close(
            encoded(batch, (stream, noise(number)))[0], alone.feed(noise(number)), rtol=0, atol=1e-8
        )


def test_a_closed_stream_takes_no_unit_and_may_be_closed_again(together: Callable[[int], AudioBatch]) -> None:
    batch = together(1)
    assert batch.pages

    async def main() -> None:
        stream = batch.open()
        await batch.feed(stream, noise(0))
        batch.close(stream)
        batch.close(stream)
        with pytest.raises(ModelError, match="the audio stream is closed"):
            await batch.feed(stream, noise(1))

    asyncio.run(main())
    assert batch.pages.pool.free_pages == MOST_PAGES


def test_when_a_pass_fails_then_its_streams_fail_and_can_be_fed_again(
    encoder: AudioEncoder, together: Callable[[int], AudioBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, alone = together(1), ReferenceAudioStream(encoder)
    stream = batch.open()

    def broken(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(encoder, "units", broken)
        (error,) = batch.encode([(stream, noise(0))])
        assert isinstance(error, ModelError)
    torch.testing.assert_close(encoded(batch, (stream, noise(0)))[0], alone.feed(noise(0)), rtol=0, atol=1e-8)


def test_units_that_wait_for_the_thread_are_one_pass(
    together: Callable[[int], AudioBatch], thread: ModelThread, passes: list[tuple[int, int]]
) -> None:
    batch, release = together(5), threading.Event()

    async def main() -> None:
        thread.post(lambda: release.wait(10) and None)
        streams = [batch.open() for _ in range(5)]
        feeds = [asyncio.create_task(batch.feed(stream, noise(0))) for stream in streams]
        await asyncio.sleep(0)
        release.set()
        for embeddings in await asyncio.gather(*feeds):
            assert embeddings.shape == (10, 24)

    asyncio.run(main())
    assert passes == [(5, 16)]


def test_a_pass_has_as_many_operators_for_many_streams_as_for_one_and_reads_nothing(encoder: AudioEncoder) -> None:
    # Tensors on the meta device have no values, so reading them on the host raises.
    pages = AudioPages(copy.deepcopy(encoder).to("meta"), 9, captures=False)
    lists = list[list[str]]()
    for count in (1, 16):
        made = AudioPass(pages, count)
        with torch.inference_mode(), Operators() as operators:
            embeddings, memory = made.compute()
        assert embeddings.shape == (count, 10, 24)
        assert memory.shape == (count, pages.mel.memory_size)
        lists.append(operators.names)
    assert lists[0] == lists[1]
    assert len(lists[0]) < 150


def test_one_more_stream_adds_no_operator_outside_the_pass(
    together: Callable[[int], AudioBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, counts = together(16), list[int]()
    streams = [batch.open() for _ in range(16)]
    encoded(batch, *((stream, noise(0)) for stream in streams))
    made = torch.zeros(16, 10, 24), torch.zeros(16, streams[0].memory.numel())
    monkeypatch.setattr(AudioPass, "compute", lambda _: made)
    for count in (5, 16):
        with Operators() as operators:
            encoded(batch, *((stream, noise(1)) for stream in streams[:count]))
        counts.append(len(operators.names))
    assert counts[0] == counts[1] < 8


@pytest.mark.parametrize("start", [0, 50, 200])
def test_units_attend_as_a_range_of_rows_that_all_see_each_other(encoder: AudioEncoder, start: int) -> None:
    pool, generator = AudioPages(encoder, 2, captures=False).pool, torch.Generator().manual_seed(start)
    pool.rows.copy_(torch.randn(pool.rows.shape, generator=generator))
    tables = [pool.extend(None, length + 50, 0, shared=False) for length in (start, 100)]
    ranges = [
        SimpleNamespace(handle=table, start=first, stop=first + 50, count=50)
        for table, first in zip(tables, (start, 100), strict=True)
    ]
    query, keys, values = torch.randn(3, 100, 4, 8, generator=generator, dtype=torch.float64)
    expected = SegmentedAttention(ranges, pool.step(ranges)).attend(1, query, keys, values, WHOLE_UNITS)
    stored = pool.rows.clone()
    padded = np.zeros((2, MOST_PAGES), np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table.pages)] = table.pages
    slots = torch.from_numpy(np.concatenate([r.handle.rows(r.start, r.stop) for r in ranges]))
    attention = UnitAttention(pool, torch.tensor([start, 100]), torch.from_numpy(padded), slots)
    found = attention.attend(1, query, keys, values, WHOLE_UNITS)
    assert torch.equal(stored, pool.rows)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_when_kernels_attend_then_a_unit_is_a_tile(encoder: AudioEncoder) -> None:
    pool = AudioPages(encoder, 2, captures=False).pool
    ranges = [
        SimpleNamespace(handle=pool.extend(None, start + 50, 0, shared=False), start=start, stop=start + 50, count=50)
        for start in (100, 0)
    ]
    expected = step_tiles(ranges, 1, torch.device("cpu"))
    found = unit_tiles(torch.tensor([100, 0]), expected.table.long(), expected.slots)
    for one in fields(expected):
        assert_type_and_value(getattr(found, one.name), getattr(expected, one.name), one.name)


def assert_type_and_value(found: Any, expected: Any, name: str) -> None:
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, msg=name)
    elif isinstance(expected, bool):
        assert found == expected
    else:
        # A tile of the step may have more rows.
        assert 50 <= found <= expected == TILE_ROWS
