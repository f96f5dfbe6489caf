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

KINDS = ("causal", "overlapping")


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    """Return the arrays of the golden file."""
    return dict(np.load(tiny.GOLDEN))


def fields(kind: str) -> dict[str, Any]:
    """Return the fields of `hift` in config.yaml, with a narrow predictor of F0."""
    own = tiny.CAUSAL_FIELDS if kind == "causal" else tiny.FIELDS
    return own | {"f0_predictor": {"in_channels": 80, "cond_channels": tiny.F0_WIDTH, "num_class": 1}}


def loaded(
    golden: dict[str, Any], kind: str, dtype: torch.dtype = torch.float64, loud: float = 0.0
) -> CausalHift | WindowHift:
    """Return the tiny vocoder of a kind, with the golden table of noise. `loud`: added to the log magnitudes."""
    weights = tiny.weights(json.loads(str(golden["names"]))[kind])
    weights["conv_post.bias"][:9] += loud
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
            self.made[stream].append(part)

    def audio(self, stream: int) -> torch.Tensor:
        """Return all audio of a stream."""
        return torch.cat(self.made[stream])


def random_run(streams: Streams, numbers: Sequence[int], num_slots: int, seed: int) -> int:
    """Run streams that join, are interrupted, and take each other's slots at random. Interrupted ones begin again.

    Returns the number of interruptions.
    """
    random, interrupted = np.random.default_rng(seed), 0
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
        elif random.random() < 0.2:
            interrupted += 1
            free.append(alive.pop(first))
            waiting.insert(0, first)
    return interrupted


def usual(kind: str) -> list[int]:
    """Return the numbers of the streams that the published code of a kind has vocoded."""
    return [s for s in range(len(tiny.STREAMS)) if kind == "causal" or tiny.is_overlapping(s)]


def check(streams: Streams, golden: dict[str, Any], kind: str, atol: float) -> None:
    """Compare all audio of the streams with the golden audio."""
    for stream, parts in streams.made.items():
        compare(parts, golden, f"{kind}{stream}", atol)


def compare(parts: Sequence[torch.Tensor], golden: dict[str, Any], name: str, atol: float) -> None:
    """Compare the audio of a stream's windows with golden audio."""
    assert [len(part) for part in parts] == golden[f"{name}_samples"].tolist()
    # The published code clips later.
    expected = torch.from_numpy(golden[name]).clamp(-1, 1)
    torch.testing.assert_close(torch.cat(list(parts))[:: tiny.STEP].double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("seed", [4, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_streams_that_share_calls_and_slots_sound_as_published(golden: dict[str, Any], kind: str, seed: int) -> None:
    slots = HiftSlots(loaded(golden, kind), 3)
    # Free slots, and the row that fills up calls, may hold anything.
    slots.table.fill_(torch.nan)
    slots.exact.fill_(torch.nan)
    streams = Streams(slots)
    assert random_run(streams, usual(kind), 3, seed)
    assert sorted(streams.made) == usual(kind)
    check(streams, golden, kind, 1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_audio_in_float32_is_close_to_the_published_one(golden: dict[str, Any], kind: str) -> None:
    slots = HiftSlots(loaded(golden, kind, torch.float32), 1)
    assert slots.table.dtype == torch.float32
    # Phases, and the predictor of F0, are exact.
    assert slots.exact.dtype == torch.float64
    streams = Streams(slots)
    for stream in usual(kind):
        streams.begin(stream, 0)
        for _ in tiny.STREAMS[stream]:
            streams.run([stream])
    check(streams, golden, kind, 2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_is_not_finite_harms_no_other(golden: dict[str, Any], kind: str) -> None:
    slots = HiftSlots(loaded(golden, kind), 3)
    made: list[torch.Tensor] = []
    for slot in range(3):
        slots.begin(slot)
    for i, part in enumerate(tiny.mel(1).double()[None].split(list(tiny.STREAMS[1]), 2)):
        first, own, third = slots.run([0, 1, 2], torch.cat((part * torch.nan, part, part.abs() * torch.inf)), i == 2)
        made.append(own)
        assert not first.isfinite().all()
        assert not third.isfinite().all()
    compare(made, golden, f"{kind}1", 1e-8)
    # The next streams of their slots do not read what they left.
    streams = Streams(slots)
    streams.begin(3, 0)
    for _ in tiny.STREAMS[3]:
        streams.run([3])
    check(streams, golden, kind, 1e-8)


def test_phases_do_not_drift_in_float32(golden: dict[str, Any]) -> None:
    slots = HiftSlots(loaded(golden, "causal", torch.float32), 1)
    slots.begin(0)
    for number in range(6):
        slots.run([0], tiny.mel(number % 2)[None, :, :WINDOW_FRAMES], False)
    phases = slots.exact[0, -9:]
    assert 0 <= phases.min() < phases.max() < 1
    # Each harmonic has as many cycles as the first one has, times its number.
    apart = phases - phases[0] * torch.arange(1, 10)
    assert (apart - apart.round()).abs().max() < 5e-5


@pytest.mark.parametrize("kind", KINDS)
def test_loud_audio_is_limited_as_published(golden: dict[str, Any], kind: str) -> None:
    streams = Streams(HiftSlots(loaded(golden, kind, loud=tiny.LOUD), 1))
    streams.begin(tiny.LOUD_STREAM, 0)
    for _ in tiny.STREAMS[tiny.LOUD_STREAM]:
        streams.run([tiny.LOUD_STREAM])
    compare(streams.made[tiny.LOUD_STREAM], golden, f"{kind}_loud", 1e-6)
    assert 0.99 <= torch.cat(streams.made[tiny.LOUD_STREAM]).abs().max() <= 1


def test_noise_is_reproducible(golden: dict[str, Any]) -> None:
    made = []
    for _ in range(2):
        weights = tiny.weights(json.loads(str(golden["names"]))["causal"])
        slots = HiftSlots(load_hift(weights, fields("causal"), torch.device("cpu"), causal=True), 1)
        slots.begin(0)
        made.append(slots.run([0], tiny.mel(5)[None], True)[0])
    assert torch.equal(*made)
    assert made[0].dtype == torch.float32
    even, normal = (noise_table(causal=causal, harmonics=2) for causal in (True, False))
    assert even.shape == normal.shape == (60 * 24_000, 2)
    assert 0 <= even.min() < 0.01 < 0.99 < even.max() < 1
    assert normal.std() == pytest.approx(1, abs=0.01)


def test_older_names_of_the_weight_norm_are_read(golden: dict[str, Any]) -> None:
    names = json.loads(str(golden["names"]))["overlapping"]
    weights, older = tiny.weights(names), dict[str, torch.Tensor]()
    for name, weight in weights.items():
        name = name.replace("parametrizations.weight.original0", "weight_g")
        older["generator." + name.replace("parametrizations.weight.original1", "weight_v")] = weight
    loads = [
        load_hift(w, fields("overlapping"), torch.device("cpu"), causal=False).state_dict() for w in (weights, older)
    ]
    assert loads[0].keys() == loads[1].keys()
    assert all(torch.equal(weight, loads[1][name]) for name, weight in loads[0].items())
    assert not any("original" in name or "_v" in name for name in loads[0])


@pytest.mark.parametrize(
    ("changed", "dropped", "reason"),
    [
        ({"upsample_rates": [8, 5, 2]}, "", "480 samples"),
        ({"conv_pre_look_right": 3}, "", "eight mel frames"),
        ({"base_channels": "many"}, "", "base_channels"),
        ({"base_channels": 32}, "", "size mismatch"),
        ({}, "conv_post.bias", "conv_post.bias"),
        ({}, "conv_pre.parametrizations.weight.original1", "conv_pre"),
    ],
)
def test_a_vocoder_of_another_kind_does_not_load(
    golden: dict[str, Any], changed: dict[str, Any], dropped: str, reason: str
) -> None:
    weights = tiny.weights(json.loads(str(golden["names"]))["causal"])
    weights.pop(dropped, None)
    with pytest.raises(ModelError, match=reason):
        load_hift(weights, fields("causal") | changed, torch.device("cpu"), causal=True)
