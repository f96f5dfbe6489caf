"""The vocoder of MiniCPM-o's token2wav: equal to the published code, for many streams at once.

The golden audio is that of the packages minicpmo-utils 1.0.7 (causal) and stepaudio2-minicpmo 0.1.1 (overlapping), in
float64 (`make_golden_hift.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.adapters.minicpmo.token2wav.hift import CausalHift, WindowHift, load_hift, noise_table
from antiphon.adapters.minicpmo.token2wav.vocoder import WINDOW_FRAMES, HiftSlots
from antiphon.errors import ModelError
from tests.adapters import tiny_hift as tiny
from tests.engine.local.operators import Operators

KINDS = ("causal", "overlapping")


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    """Return the arrays of the golden file."""
    return dict(np.load(tiny.GOLDEN))


def fields(kind: str) -> dict[str, Any]:
    """Return the fields of `hift` in config.yaml, with a narrow predictor of F0."""
    own = tiny.CAUSAL_FIELDS if kind == "causal" else tiny.FIELDS
    return own | {"f0_predictor": {"in_channels": 80, "cond_channels": tiny.F0_WIDTH, "num_class": 1}}


def loaded(golden: dict[str, Any], kind: str, dtype: torch.dtype = torch.float64) -> CausalHift | WindowHift:
    """Return the tiny vocoder of a kind, with the golden table of noise."""
    weights = tiny.weights(json.loads(str(golden["names"]))[kind])
    hift = load_hift(weights, fields(kind), torch.device("cpu"), causal=kind == "causal", dtype=dtype)
    hift.m_source.set_noise(tiny.noise(causal=kind == "causal"))
    return hift


class Streams:
    """Runs the golden streams over slots, and collects their audio by stream."""

    def __init__(self, slots: HiftSlots) -> None:
        self.slots, self.made = slots, dict[int, list[torch.Tensor]]()
        self._at: dict[int, int] = {}
        self._places: dict[int, int] = {}

    def begin(self, stream: int, slot: int) -> None:
        """Begin a stream in a slot."""
        self.slots.begin(slot)
        self.made[stream], self._at[stream], self._places[stream] = [], 0, slot

    def next(self, stream: int) -> tuple[int, bool]:
        """Return the length of a stream's next window, and whether it is the last one."""
        windows, at = tiny.STREAMS[stream], self._at[stream]
        return windows[at], at == len(windows) - 1

    def run(self, streams: Sequence[int]) -> None:
        """Vocode the next window of each stream, which have equal lengths."""
        (length, last), mel = self.next(streams[0]), []
        for stream in streams:
            begin = sum(tiny.STREAMS[stream][: self._at[stream]])
            mel.append(tiny.mel(stream)[:, begin : begin + length])
            self._at[stream] += 1
        dtype = self.slots.table.dtype
        audio = self.slots.run([self._places[s] for s in streams], torch.stack(mel).to(dtype), last)
        for stream, part in zip(streams, audio, strict=True):
            self.made[stream].append(part.clone())

    def audio(self, stream: int) -> torch.Tensor:
        """Return all audio of a stream."""
        return torch.cat(self.made[stream])


def random_run(streams: Streams, numbers: Sequence[int], num_slots: int, seed: int) -> None:
    """Run streams that join, leave and take each other's slots at random."""
    random = np.random.default_rng(seed)
    waiting, free, alive = list(random.permutation(numbers)), list(range(num_slots)), dict[int, int]()
    while waiting or alive:
        while waiting and free and random.random() < 0.6:
            stream, slot = int(waiting.pop()), free.pop(int(random.integers(len(free))))
            streams.begin(stream, slot)
            alive[stream] = slot
        if not alive:
            continue
        first = int(random.choice(list(alive)))
        wanted = streams.next(first)
        together = [s for s in alive if streams.next(s) == wanted and (s == first or random.random() < 0.8)]
        streams.run(together)
        if wanted[1]:
            free += [alive.pop(s) for s in together]


def usual(golden: dict[str, Any], kind: str) -> list[int]:
    """Return the numbers of the streams that the published code of a kind has vocoded."""
    return [s for s in range(len(tiny.STREAMS)) if f"{kind}{s}" in golden]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_streams_that_share_calls_and_slots_sound_as_published(golden: dict[str, Any], kind: str, seed: int) -> None:
    numbers = usual(golden, kind)
    slots = HiftSlots(loaded(golden, kind), 3)
    slots.table.fill_(float("nan"))
    slots.exact.fill_(float("nan"))
    streams = Streams(slots)
    random_run(streams, numbers, 3, seed)
    for stream in numbers:
        assert [len(part) for part in streams.made[stream]] == golden[f"{kind}{stream}_samples"].tolist()
        # The published code clips later.
        expected = torch.from_numpy(golden[f"{kind}{stream}"]).clamp(-1, 1)
        torch.testing.assert_close(streams.audio(stream)[:: tiny.STEP], expected, rtol=0, atol=1e-8)
