"""Calls of token2wav: windows of any length share a pass, and each has the audio that it has alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from antiphon.adapters.minicpmo.token2wav.calls import SoundPass, WindowCalls
from antiphon.adapters.minicpmo.token2wav.flow import CodeWindow, FlowSlots
from antiphon.adapters.minicpmo.token2wav.hift import load_hift
from antiphon.adapters.minicpmo.token2wav.token2wav import read_flow
from antiphon.adapters.minicpmo.token2wav.vocoder import HiftSlots
from tests.adapters import tiny_hift, tiny_token2wav
from tests.engine.local.operators import Operators

CPU = torch.device("cpu")
KINDS = ("causal", "overlapping")
# The numbers of codes in the windows of turns. The last of each turn ends it.
TURNS = ((28, 28, 28, 11, 3), (9, 28, 28, 5), (28, 28, 8, 4), (1,), (28, 7), (8, 28, 28, 28, 3))


class Voice(NamedTuple):
    codes: torch.Tensor
    embedding: torch.Tensor
    mel: torch.Tensor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_token2wav.write(tmp_path_factory.mktemp("token2wav"))


def calls(folder: Path, kind: str, slots: int, *, together: bool) -> WindowCalls:
    """Return calls in float64. `together`: as on a GPU."""
    flow = FlowSlots(read_flow(folder, CPU).double(), slots, num_steps=1, max_prompt=30)
    fields = tiny_hift.CAUSAL_FIELDS if kind == "causal" else tiny_hift.FIELDS
    fields = fields | {"f0_predictor": {"cond_channels": tiny_hift.F0_WIDTH}}
    weights = tiny_hift.weights(json.loads(str(np.load(tiny_hift.GOLDEN)["names"]))[kind])
    hift = load_hift(weights, fields, CPU, causal=kind == "causal", dtype=torch.float64)
    made = WindowCalls(flow, HiftSlots(hift, slots))
    made.together = together
    return made


@torch.inference_mode()
def spoil(made: WindowCalls) -> None:
    """Fill the tables with NaN. What no stream has written must not matter."""
    flow = made.flow
    for table in (*(row for slot in range(flow.spare + 1) for row in flow.rows(slot)), made.vocoder.table):
        table.fill_(torch.nan)


def voice(number: int) -> Voice:
    drawn = torch.Generator().manual_seed(number)
    codes = torch.randint(98, (12 + 5 * number,), generator=drawn)
    return Voice(codes, torch.randn(192, generator=drawn), torch.randn(2 * len(codes), 80, generator=drawn))


def turn(number: int) -> list[CodeWindow]:
    drawn, sizes = torch.Generator().manual_seed(100 + number), TURNS[number]
    return [
        CodeWindow(torch.randint(98, (size,), generator=drawn).tolist(), at == len(sizes) - 1)
        for at, size in enumerate(sizes)
    ]


def begin(made: WindowCalls, slot: int, number: int) -> None:
    made.flow.begin(slot, voice(number % 3))
    made.vocoder.begin(slot)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_of_any_length_that_share_calls_have_the_audio_that_they_have_alone(folder: Path, kind: str) -> None:
    alone, alone_calls = list[list[np.ndarray]](), calls(folder, kind, 1, together=False)
    for number in range(len(TURNS)):
        begin(alone_calls, 0, number)
        alone.append([alone_calls.run([0], [window])[0] for window in turn(number)])
    assert max(float(np.abs(sound).max(initial=0)) for sound in alone[0]) > 0.001
    chance, together = random.Random(3), calls(folder, kind, 3, together=True)
    spoil(together)
    # By slot: a turn, and the number of its next window.
    spoken: dict[int, tuple[int, int]] = {}
    checked, mixed = 0, 0
    while checked < 30:
        free = [slot for slot in range(3) if slot not in spoken]
        if free and (not spoken or chance.random() < 0.7):
            slot, number = chance.choice(free), chance.randrange(len(TURNS))
            begin(together, slot, number)
            spoken[slot] = (number, 0)
            continue
        if chance.random() < 0.1:
            # Its client interrupts it.
            del spoken[chance.choice(list(spoken))]
            continue
        slots = chance.sample(list(spoken), chance.randint(1, len(spoken)))
        windows = [turn(spoken[slot][0])[spoken[slot][1]] for slot in slots]
        mixed += len({(len(window.codes), window.last) for window in windows}) > 1
        for slot, window, sound in zip(slots, windows, together.run(slots, windows), strict=True):
            number, at = spoken[slot]
            np.testing.assert_allclose(sound, alone[number][at], rtol=0, atol=1e-6)
            checked += 1
            if window.last:
                del spoken[slot]
            else:
                spoken[slot] = (number, at + 1)
    assert mixed > 5


def test_one_more_stream_adds_no_operator_to_a_call(folder: Path) -> None:
    made, counted = calls(folder, "causal", 6, together=True), list[list[str]]()
    whole = CodeWindow([1] * 28, False)
    for slot in range(6):
        begin(made, slot, 0)
        # Streams of other ages.
        made.run([slot], [turn(1 + slot % 2)[0]])
        for _ in range(slot % 3):
            made.run([slot], [whole])
    for slots in ([0], [1, 2, 3, 4], [0, 1, 2, 5], [5]):
        # The pass of this number of streams is made in its first call.
        made.run(slots, [whole] * len(slots))
        with Operators() as operators:
            made.run(slots, [whole] * len(slots))
        counted.append(operators.names)
    assert all(names == counted[0] for names in counted)
    # A graph cannot replay what depends on values that the host has read.
    assert not [name for name in counted[0] if any(part in name for part in ("local_scalar", "nonzero", "masked_sel"))]
    with Operators() as operators:
        made.passes[4].compute()
    # Besides the pass, one copy of the numbers, and the conversion from float64.
    assert len(counted[0]) - len(operators.names) <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_can_be_captured(folder: Path, kind: str) -> None:
    made = calls(folder, kind, 2, together=True)
    for slot in range(2):
        begin(made, slot, slot)
    first = turn(0)[0]
    made.run([0, 1], [first] * 2)
    table, passes = made.vocoder.table, made.passes[2]
    # The self-check of a capture computes a pass without streams again and again.
    with torch.inference_mode():
        alone = SoundPass(made.flow, made.vocoder, 2)
        again = [alone.compute() for _ in range(2)]
    for one, other in zip(*again, strict=True):
        assert torch.equal(one, other)
    for slots in ([0, 1], [1, 0]):
        made.run(slots, [first] * 2)
    # A graph reads and writes the tensors that it was captured with.
    assert made.passes[2] is passes
    assert made.vocoder.table is table
    assert table[:2].isfinite().all()
    assert table[:2].std() > 0
