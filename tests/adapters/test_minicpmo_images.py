"""MiniCPM-o's vision encoder: images and slices of many sessions in one pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Idefics2VisionConfig

from antiphon.adapters.minicpmo.vision_encoder import ImagePatches, VisionEncoder
from tests.engine.local.operators import MetaOperators

torch.set_num_threads(1)
WIDTH, NUM_QUERIES, SIDE = 128, 8, 112
# Height and width in pixels, and the limit of slices. Their numbers of patches differ.
IMAGES = [((75, 100), 1), ((300, 200), 4), ((1, 900), 1), ((112, 112), 1), ((60, 400), 9)]


def encoder_of(dtype: torch.dtype = torch.float64, device: str = "cpu") -> VisionEncoder:
    torch.manual_seed(0)
    config = Idefics2VisionConfig(
        hidden_size=48,
        image_size=140,
        intermediate_size=96,
        num_attention_heads=4,
        num_hidden_layers=2,
        patch_size=14,
        initializer_range=0.2,
    )
    made = VisionEncoder(config, WIDTH, NUM_QUERIES, SIDE, drop_last=False)
    for parameter in made.resampler.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made.to(device, dtype).eval()


def patches(encoder: VisionEncoder, number: int) -> list[ImagePatches]:
    size, max_slices = IMAGES[number]
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)
    return encoder.prepare(Image.fromarray(pixels), max_slices)


@torch.inference_mode()
def published_rows(encoder: VisionEncoder, image: ImagePatches) -> torch.Tensor:
    """Return the rows of one image: `transformers` places and transforms its patches, without padding or masks."""
    across, down = (int(numbers.max()) + 1 for numbers in image.places[1:])
    squares = image.pixels.reshape(down, across, 3, 14, 14).transpose(2, 0, 3, 1, 4)
    pixels = torch.from_numpy(squares.reshape(1, 3, down * 14, across * 14)) / 255.0 * 2.0 - 1.0
    seen = encoder.vpm(pixels.to(encoder.resampler.proj.dtype)).last_hidden_state
    rates = 1.0 / 10000 ** (np.arange(WIDTH // 4, dtype=np.float32) / (WIDTH / 4))
    rows, columns = np.divmod(np.arange(down * across), across)
    angles = [np.float32(numbers)[:, None] * np.float32(rates) for numbers in (columns, rows)]
    positions = np.concatenate([part for angle in angles for part in (np.sin(angle), np.cos(angle))], -1)
    found: torch.Tensor = encoder.resampler(seen, torch.from_numpy(positions)[None].to(seen), None)
    return found[0]


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_an_image_has_the_rows_of_the_published_transformer(dtype: torch.dtype, near: float) -> None:
    encoder = encoder_of(dtype)
    for image in patches(encoder, 1):
        (found,) = encoder.encode([image])
        expected = published_rows(encoder, image)
        torch.testing.assert_close(found, expected, rtol=0.0, atol=near * float(expected.abs().max()))


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_images_and_slices_in_one_pass_have_the_rows_that_each_has_alone(dtype: torch.dtype, near: float) -> None:
    encoder = encoder_of(dtype)
    parts = [part for number in range(len(IMAGES)) for part in patches(encoder, number)]
    assert len({part.count for part in parts}) > 3
    alone = [encoder.encode([part])[0] for part in parts]
    for order in (range(len(parts)), reversed(range(len(parts)))):
        numbers = list(order)
        for number, found in zip(numbers, encoder.encode([parts[n] for n in numbers]), strict=True):
            own = alone[number]
            torch.testing.assert_close(found, own, rtol=0.0, atol=near * float(own.abs().max()))
            assert found.untyped_storage().nbytes() == own.numel() * own.element_size()


@pytest.mark.parametrize("numbers", [[0], [0, 3]], ids=["equal", "unequal"])
def test_a_pass_of_many_images_reads_nothing_and_has_the_operators_of_a_pass_of_few(numbers: list[int]) -> None:
    # Tensors of the meta device have no values: reading one on the host raises.
    encoder, counts = encoder_of(torch.bfloat16, "meta"), []
    few = [part for number in numbers for part in patches(encoder, number)]
    for given in (few * 2, few * 8):
        with MetaOperators() as operators:
            found = encoder.encode(given)
        assert [rows.shape for rows in found] == [(NUM_QUERIES, WIDTH)] * len(given)
        # The copy of each image's rows.
        counts.append(len(operators.names) - len(given))
    assert counts[0] == counts[1]
