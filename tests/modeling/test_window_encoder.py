"""Windows in one padded pass have the rows that `transformers` computes for each alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.qwen3_asr.configuration_qwen3_asr import Qwen3ASREncoderConfig
from transformers.models.qwen3_asr.modeling_qwen3_asr import Qwen3ASREncoder

from antiphon.modeling.sound.window_encoder import PASS_WINDOWS, MelWindow, WindowEncoder, WindowPass
from tests.engine.local.operators import Operators

BINS = 16
CONFIG: Any = Qwen3ASREncoderConfig(
    num_mel_bins=BINS,
    encoder_layers=2,
    encoder_attention_heads=2,
    encoder_ffn_dim=24,
    d_model=16,
    n_window=50,
    n_window_infer=800,
    output_dim=16,
    downsample_hidden_size=4,
)
# Every remainder of the three convolutions, and the edges of chunks.
LENGTHS = [*range(1, 18), *(100 * n + more for n in range(1, 8) for more in (-1, 0, 1)), 415, 799, 800]
RNG = np.random.default_rng(4)
CHUNKS = RNG.standard_normal((8, BINS, 100)).astype(np.float32)
FLOOR = -0.5


def parts(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return an encoder of `transformers` and a projection, with random weights."""
    torch.manual_seed(3)
    tower: Any = Qwen3ASREncoder(CONFIG)
    tower = tower.to(dtype).eval()
    with torch.no_grad():
        for weights in tower.parameters():
            weights.copy_(torch.randn(weights.shape) * (weights[0].numel() if weights.dim() > 1 else 4) ** -0.5)
    return tower, torch.nn.Linear(16, 12).to(dtype)


def encoder(dtype: torch.dtype = torch.float32, *, together: bool = True) -> WindowEncoder:
    made = WindowEncoder(*parts(dtype))
    made.together = together
    return made


def window(length: int, shift: int = 0) -> MelWindow:
    """A window of a number of frames. What follows them is not zero."""
    return MelWindow(np.roll(CHUNKS, shift, 0), length, FLOOR)


@torch.inference_mode()
def published(tower: Any, projection: Any, given: MelWindow) -> torch.Tensor:
    frames = np.maximum(np.concatenate(list(given.chunks), 1)[:, : given.num_frames], np.float32(FLOOR))
    padded = np.pad(frames, ((0, 0), (0, -given.num_frames % 100)))[None]
    mask = (torch.arange(padded.shape[2]) < given.num_frames)[None].long()
    found = tower(torch.from_numpy(padded).to(tower.conv2d1.weight.dtype), mask)
    rows: torch.Tensor = projection(found.last_hidden_state)
    return rows


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-5)])
@pytest.mark.parametrize("together", [True, False])
def test_at_every_edge_of_a_chunk_the_rows_are_those_of_transformers(
    dtype: torch.dtype, tolerance: float, together: bool
) -> None:
    made, (tower, projection) = encoder(dtype, together=together), parts(dtype)
    windows = [window(length, number) for number, length in enumerate(LENGTHS)]
    for given, rows in zip(windows, made.encode(windows), strict=True):
        expected = published(tower, projection, given)
        assert len(rows) == made.rows(given.num_frames)
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(rows, expected, rtol=0, atol=tolerance, msg=str(given.num_frames))


def test_passes_of_any_number_of_windows_have_the_rows_of_each() -> None:
    made = encoder(torch.float64)
    alone = [made.encode([window(length)])[0] for length in LENGTHS]
    for count in (0, 1, 2, 4, 5, 16, 17, 64, 70):
        numbers = [n % len(LENGTHS) for n in range(count)]
        found = made.encode([window(LENGTHS[n]) for n in numbers])
        for number, rows in zip(numbers, found, strict=True):
            torch.testing.assert_close(rows, alone[number], rtol=0, atol=1e-8)


def test_when_a_window_is_no_number_then_the_others_and_later_passes_are_not_affected() -> None:
    made = encoder()
    broken = MelWindow(np.full_like(CHUNKS, np.nan), 800)
    expected = made.encode([window(330)])[0]
    found = made.encode([broken, window(330), broken])
    assert found[0].isnan().all()
    torch.testing.assert_close(found[1], expected, rtol=0, atol=1e-5)
    # The chunks that the broken windows left behind are beyond the end of these.
    for rows in made.encode([window(330)] * 3):
        torch.testing.assert_close(rows, expected, rtol=0, atol=1e-5)


def test_when_a_replay_overwrites_the_rows_of_a_pass_then_those_returned_before_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, compute, kept = encoder(), WindowPass.compute, dict[int, torch.Tensor]()

    def replayed(one: WindowPass) -> torch.Tensor:
        found = compute(one)
        return kept.setdefault(len(found), torch.empty_like(found)).copy_(found)

    expected = made.encode([window(330)])[0]
    monkeypatch.setattr(WindowPass, "compute", replayed)
    found = made.encode([window(330)])[0]
    made.encode([window(800, 1)])
    assert torch.equal(found, expected)


def test_the_operators_are_the_same_for_one_window_and_for_many() -> None:
    made, lists = encoder(), []
    for count in PASS_WINDOWS:
        single = WindowPass(made, count)
        with torch.inference_mode(), Operators() as recorded:
            single.compute()
        lists.append(recorded.names)
    assert all(names == lists[0] for names in lists)
    outside = []
    for count in (1, 64):
        with Operators() as recorded:
            made.encode([window(LENGTHS[n % len(LENGTHS)]) for n in range(count)])
        outside.append(len(recorded.names) - len(lists[0]))
    assert outside[0] == outside[1] <= 8


def test_a_pass_depends_on_no_value_on_the_device() -> None:
    made = encoder()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        assert WindowPass(made, 4).compute().shape == (4, 104, 12)
