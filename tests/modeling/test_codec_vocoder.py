"""Streams that are vocoded together, compared with each stream alone."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from transformers import Qwen3OmniMoeConfig

from antiphon.adapters.qwen3_omni.code2wav import Code2Wav
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import ModelError
from antiphon.modeling.codec.vocoder import CodecVocoder, StreamVocoder, VocoderConfig, VocoderState
from antiphon.modeling.codec.vocoder_batch import VocoderBatch, VocoderSlots
from tests.engine.local.operators import Operators

BOOKS, SIZE, WINDOW = 4, 16, 6


def qwen3_tts() -> StreamVocoder:
    return CodecVocoder(
        VocoderConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            sliding_window=WINDOW, latent_dim=12, num_quantizers=BOOKS, codebook_size=SIZE, codebook_dim=8,
            decoder_dim=16, upsample_rates=(3, 2), upsampling_ratios=(2,),
        )
    )  # fmt: skip


def qwen3_omni() -> StreamVocoder:
    config = Qwen3OmniMoeConfig().code2wav_config
    changes = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 4,
        "num_key_value_heads": 2, "sliding_window": WINDOW, "num_quantizers": BOOKS, "codebook_size": SIZE,
        "decoder_dim": 16, "upsample_rates": [3, 2], "upsampling_ratios": [2],
    }  # fmt: skip
    for name, value in changes.items():
        setattr(config, name, value)
    return Code2Wav(config)


@pytest.fixture(scope="module", params=[qwen3_tts, qwen3_omni])
def vocoder(request: pytest.FixtureRequest) -> StreamVocoder:
    torch.manual_seed(0)
    made: StreamVocoder = request.param()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.double().eval()


def some_frames(chance: random.Random, count: int) -> list[list[int]]:
    return [[chance.randrange(SIZE) for _ in range(BOOKS)] for _ in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_the_audio_does_not_depend_on_how_the_frames_are_cut_into_chunks(vocoder: StreamVocoder, seed: int) -> None:
    chance = random.Random(seed)
    frames, state = some_frames(chance, 4 * WINDOW), VocoderState()
    whole, made, at = vocoder([frames], [VocoderState()])[0], list[torch.Tensor](), 0
    while at < len(frames):
        size = chance.choice((1, 2, WINDOW + 2))
        made.append(vocoder([frames[at : at + size]], [state])[0])
        at += size
    torch.testing.assert_close(torch.cat(made), whole, rtol=0, atol=1e-8)


@pytest.mark.parametrize("way", ["gathered", "slots", "few slots"])
@pytest.mark.parametrize("seed", range(12))
def test_streams_that_join_and_leave_have_the_audio_of_each_alone(vocoder: StreamVocoder, seed: int, way: str) -> None:
    chance = random.Random(seed)
    slots = VocoderSlots(vocoder, 64 if way == "slots" else 5, captures=False) if way != "gathered" else None
    if slots:
        # A free slot may hold any values.
        slots.table.fill_(torch.nan)
    # For each stream: its state if vocoded alone, and its state if vocoded together.
    streams: list[tuple[VocoderState, VocoderState]] = []
    for _ in range(12):
        for _ in range(chance.choice((0, 0, 1, 3))):
            streams.append((VocoderState(), VocoderState()))
        if streams and chance.random() < 0.2:
            streams.pop(chance.randrange(len(streams)))
        if streams and chance.random() < 0.2:
            # The state of a voice may be continued by several streams.
            alone, together = chance.choice(streams)
            streams.append((alone.copy(), together.copy()))
        count, begins = chance.choice((1, 2, 8)), chance.random() < 0.5
        present = [s for s in streams if (s[0].frames == 0) == begins and chance.random() < 0.9]
        chance.shuffle(present)
        if not present:
            continue
        frames = [some_frames(chance, count) for _ in present]
        several = [together for _, together in present]
        made = slots.vocode(frames, several) if slots and not (begins and vocoder.trims_start) else None
        assert made is not None or way != "slots" or (begins and vocoder.trims_start)
        if made is None:
            made = vocoder(frames, several)
        for own, (alone, together), audio in zip(frames, present, made, strict=True):
            torch.testing.assert_close(audio, vocoder([own], [alone])[0], rtol=0, atol=1e-8)
            assert together.frames == alone.frames


def test_a_call_has_as_many_operators_for_64_streams_as_for_two_and_reads_once(vocoder: StreamVocoder) -> None:
    chance, lists = random.Random(1), list[list[str]]()
    for count in (2, 64):
        states = [VocoderState() for _ in range(count)]
        for frames in (3, 1):
            vocoder([some_frames(chance, frames)] * count, states)
        # The streams have other ages and another order.
        vocoder([some_frames(chance, 2)], states[:1])
        states.reverse()
        with Operators() as operators:
            vocoder([some_frames(chance, 1)] * count, states)
        lists.append(operators.names)
    assert lists[0] == lists[1]
    again = vocoder.state_dict()
    with Operators() as operators:
        vocoder([some_frames(chance, 1)] * 64, states)
    # These are the streams of the previous call, so their rows are not gathered.
    assert len(operators.names) < len(lists[1])
    assert again.keys() == vocoder.state_dict().keys()


def test_with_slots_a_call_has_as_many_operators_for_64_streams_as_for_one_whatever_joins(
    vocoder: StreamVocoder,
) -> None:
    chance, lists = random.Random(1), list[list[str]]()
    for count in (1, 64):
        slots = VocoderSlots(vocoder, 64, captures=False)
        states = [VocoderState() for _ in range(count)]
        for _ in range(3):
            with Operators() as operators:
                # A chunk of two pieces.
                slots.vocode([some_frames(chance, 5)] * count, states)
            lists.append(operators.names)
            # New streams replace half of the streams.
            states[::2] = [VocoderState() for _ in states[::2]]
    # The first call of a size creates its tensors.
    assert lists[1] == lists[2] == lists[4] == lists[5]


def test_a_slot_is_free_again_when_its_stream_is_gone(vocoder: StreamVocoder) -> None:
    chance, slots = random.Random(1), VocoderSlots(vocoder, 2, captures=False)
    for _ in range(6):
        one, other = VocoderState(), VocoderState()
        assert slots.vocode([some_frames(chance, 1)] * 2, [one, other]) is not None
        assert slots.vocode([some_frames(chance, 1)], [VocoderState()]) is None
        # The copy needs a separate slot when one of the two streams continues.
        copied = one.copy()
        assert slots.vocode([some_frames(chance, 1)], [copied]) is None
        del other
        assert slots.vocode([some_frames(chance, 1)], [copied]) is not None
        del one, copied


def test_requests_that_come_before_a_step_are_served_together_and_one_that_fails_fails_alone(
    vocoder: StreamVocoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []
    run = vocoder.forward

    def noted(frames: Any, states: Any) -> torch.Tensor:
        calls.append((len(frames), len(frames[0])))
        return run(frames, states)

    monkeypatch.setattr(vocoder, "forward", noted)
    chance = random.Random(2)
    one, two = some_frames(chance, 1), some_frames(chance, 2)
    wrong = [[SIZE * BOOKS * 9] * BOOKS] * 3

    async def act(*, together: bool) -> list[Any]:
        thread = ModelThread("vocoder")
        batch = VocoderBatch(thread, vocoder)
        assert not batch.together
        batch.together = together
        begun = VocoderState()
        await batch.audio(two, begun)
        calls.clear()
        states = [*(VocoderState() for _ in range(5)), begun]
        requests = [batch.audio(frames, s) for frames, s in zip((one, two, wrong, one, one, one), states, strict=True)]
        # All requests arrive while the thread is blocked.
        gate = asyncio.Event()
        loop = asyncio.get_running_loop()
        held = asyncio.ensure_future(thread.call(lambda: asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()))
        waiting = asyncio.gather(*requests, return_exceptions=True)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gate.set()
        await held
        found = await waiting
        thread.close()
        return found

    single = asyncio.run(act(together=False))
    assert calls == [(1, 1), (1, 2), (1, 3), (1, 1), (1, 1), (1, 1)]
    joint = asyncio.run(act(together=True))
    # Streams at their start are batched with other streams, unless their first chunk is trimmed.
    assert calls == ([(3, 1), (1, 2), (1, 3), (1, 1)] if vocoder.trims_start else [(4, 1), (1, 2), (1, 3)])
    for found in (single, joint):
        assert isinstance(found[2], ModelError)
    for i in (0, 1, 3, 4, 5):
        assert torch.allclose(torch.tensor(single[i]), torch.tensor(joint[i]), atol=1e-6)
