"""Qwen's vision encoders: pictures of many sessions in one pass have the rows that `transformers` gives each alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.adapters.vlm.qwen_vl import MODELS
from antiphon.modeling.qwen_vision import PreparedPicture, QwenVisionEncoder
from tests.adapters import tiny_vlm
from tests.engine.local.operators import MetaOperators

torch.set_num_threads(1)
# Height and width in pixels. Their numbers of patches differ, and the windows at their edges are not full.
SIZES = [(64, 64), (100, 37), (200, 90), (64, 64), (16, 16), (48, 120)]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm.write(tmp_path_factory.mktemp(request.param), request.param)


def model_of(folder: Path, dtype: torch.dtype) -> Any:
    model: Any = MODELS[folder.name[:-1]].from_pretrained(folder, dtype=dtype)
    return model.eval().model


def encoder_of(folder: Path, dtype: torch.dtype = torch.float64, device: str = "cpu") -> QwenVisionEncoder:
    model = model_of(folder, dtype).to(device)
    return QwenVisionEncoder(folder, model, model.config.vision_config)


def pictures(encoder: QwenVisionEncoder, sizes: list[tuple[int, int]]) -> list[PreparedPicture]:
    rng = np.random.default_rng(0)
    return [encoder.prepare(rng.integers(0, 256, (*size, 3), np.uint8)) for size in sizes]


@torch.inference_mode()
def published_rows(model: Any, picture: PreparedPicture) -> torch.Tensor:
    """Return the rows of one picture by the attention of `transformers`, a call for each segment."""
    assert model.visual.config._attn_implementation == "sdpa"
    found = model.get_image_features(torch.from_numpy(picture.patches), torch.tensor([(1, *picture.grid)]))
    layers = getattr(found, "deepstack_features", None) or ()
    return torch.cat([found.pooler_output[0], *(layer[0] for layer in layers)], -1)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_pictures_in_one_pass_have_the_rows_of_the_published_encoder(
    folder: Path, dtype: torch.dtype, near: float
) -> None:
    published, encoder = model_of(folder, dtype), encoder_of(folder, dtype)
    given = pictures(encoder, SIZES)
    assert len({len(picture.patches) for picture in given}) > 3
    expected = [published_rows(published, picture) for picture in given]
    for found in (encoder.look(given), [encoder.look([picture])[0] for picture in given]):
        for rows, own, picture in zip(found, expected, given, strict=True):
            assert float((rows.rows - own).abs().max() / own.abs().max()) < near
            assert rows.positions == picture.positions
            assert len(picture.positions) == len(rows.rows)


def test_rows_do_not_share_memory_with_those_of_other_pictures(folder: Path) -> None:
    encoder = encoder_of(folder)
    for found in encoder.look(pictures(encoder, SIZES[:2])):
        assert found.rows.untyped_storage().nbytes() == found.rows.numel() * found.rows.element_size()


@pytest.mark.parametrize("sizes", [[(64, 64)], [(64, 64), (48, 120)]], ids=["equal", "unequal"])
def test_a_pass_of_many_pictures_reads_nothing_and_has_the_operators_of_a_pass_of_few(
    folder: Path, sizes: list[tuple[int, int]]
) -> None:
    # Tensors of the meta device have no values: reading one on the host raises.
    encoder = encoder_of(folder, device="meta")
    counts = []
    for given in (pictures(encoder, sizes), pictures(encoder, sizes * 4)):
        with MetaOperators() as operators:
            found = encoder.look(given)
        assert [len(each.rows) for each in found] == [len(picture.positions) for picture in given]
        # The copy of each picture's rows.
        counts.append(len(operators.names) - len(given))
    assert counts[0] == counts[1]
