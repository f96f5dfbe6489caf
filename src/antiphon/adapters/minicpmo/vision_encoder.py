"""Frames to embeddings: MiniCPM-o's SigLIP2 encoder for images of any shape, and a resampler to 64 embeddings each.

A large image may be cut into slices, which are encoded in addition to the whole image (LLaVA-UHD, arXiv:2403.11703).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import nn
from transformers import Idefics2VisionConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer


@dataclass(frozen=True, slots=True, eq=False)
class ImagePatches:
    """The square patches of an image or a slice, row by row from the upper left.

    `pixels`: uint8 [patches, 3 * side * side], in the order of the patch embedding's weights: colour, y, x. `places`:
    int64 [3, patches], for each patch its position in the encoder's table, its column and its row.
    """

    pixels: npt.NDArray[np.uint8]
    places: npt.NDArray[np.int64]

    @property
    def count(self) -> int:
        """The number of patches."""
        return len(self.pixels)


class PatchResampler(nn.Module):
    """Learned queries that attend once to the patches of an image. Parameters have their names in the checkpoint."""

    def __init__(self, num_queries: int, width: int, patch_width: int) -> None:
        """`width`: of the output embeddings. `patch_width`: of the input patches."""
        super().__init__()
        self.query = nn.Parameter(torch.zeros(num_queries, width))
        self.kv_proj = nn.Linear(patch_width, width, bias=False) if patch_width != width else nn.Identity()
        self.attn = nn.MultiheadAttention(width, width // 128)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(width, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(torch.zeros(width, width))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """Return the embeddings [n, num_queries, width] of n images' patches, [n, patches, patch_width].

        `positions`: the embeddings of the patches' positions, [n, patches, width]. `padding`: bool [n, patches], the
        patches that are not part of an image; None: all are.
        """
        values = self.ln_kv(self.kv_proj(x))
        keys = (values + positions).transpose(0, 1)
        query = self.ln_q(self.query)[:, None].expand(-1, len(x), -1)
        found = self.attn(query, keys, values.transpose(0, 1), key_padding_mask=padding, need_weights=False)[0]
        out: torch.Tensor = self.ln_post(found.transpose(0, 1)) @ self.proj
        return out


class VisionEncoder(nn.Module):
    """The vision transformer and its resampler. Parameters have their names in the checkpoint."""

    def __init__(
        self, config: Idefics2VisionConfig, width: int, num_queries: int, slice_side: int, *, drop_last: bool
    ) -> None:
        """`width`: the decoder's width. `slice_side`: pixels of a slice's side. `drop_last`: skip the last layer."""
        super().__init__()
        encoder: Any = Idefics2VisionTransformer
        self.vpm = encoder._from_config(config, attn_implementation="sdpa")
        if drop_last:
            self.vpm.encoder.layers = self.vpm.encoder.layers[:-1]
        self.resampler = PatchResampler(num_queries, width, config.hidden_size)
        vision: Any = config
        self._width, self._patch, self._slice_side = width, int(vision.patch_size), slice_side
        # The number of the encoder's positions along each side.
        self._num_positions = int(vision.image_size) // self._patch

    def prepare(self, image: Image.Image, max_slices: int) -> list[ImagePatches]:
        """Return the patches of an image and then of its slices.

        An image of more than about `slice_side` ** 2 pixels has up to `max_slices` slices; with 0 or 1 it has none.
        Takes milliseconds of CPU time. Thread-safe: it runs no matrix products of torch.
        """
        return [self._cut(part) for part in slices(image.convert("RGB"), max_slices, self._slice_side, self._patch)]

    def _cut(self, image: Image.Image) -> ImagePatches:
        side = self._patch
        rows, columns = image.height // side, image.width // side
        squares = np.asarray(image, np.uint8).reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3)
        down, across = np.divmod(np.arange(rows * columns), columns)
        table = self._nearest(rows)[down] * self._num_positions + self._nearest(columns)[across]
        return ImagePatches(squares.reshape(rows * columns, -1), np.stack([table, across, down]))

    @torch.inference_mode()
    def encode(self, images: Sequence[ImagePatches]) -> list[torch.Tensor]:
        """Return the embeddings, [num_queries, width], of each image or slice, in one pass. In the model's thread.

        Images are padded to the most patches, and masked. So the embeddings depend neither on the padding nor on other
        images, except for rounding.
        """
        counts = np.array([image.count for image in images])
        most = int(counts.max())
        pixels = np.zeros((len(images), most, images[0].pixels.shape[1]), np.uint8)
        places = np.zeros((3, len(images), most), np.int64)
        for i, image in enumerate(images):
            pixels[i, : image.count], places[:, i, : image.count] = image.pixels, image.places
        sines = _sines(int(places[1:].max()) + 1, self._width // 4)
        table, across, down = self._on_device(places)
        seen = self._on_device(np.arange(most) < counts[:, None]) if counts.min() < most else None
        x = self._transformed(self._on_device(pixels), table, seen)
        along = self._on_device(sines).to(x.dtype)
        positions = torch.cat([along[across], along[down]], -1)
        out = self.resampler(x, positions, None if seen is None else ~seen)
        # A session may keep its embeddings for long. They must not keep those of the other sessions alive.
        return [rows.clone() for rows in out] if len(images) > 1 else [out[0]]

    def _on_device(self, numbers: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self.resampler.proj.device, non_blocking=True)

    def _transformed(self, pixels: torch.Tensor, table: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """Return the transformer's output [n, patches, width]. `seen`: the patches that are part of an image."""
        embeddings, transformer = self.vpm.embeddings, self.vpm.encoder
        kernel = embeddings.patch_embedding
        scaled = (pixels.float() / 255.0 * 2.0 - 1.0).to(kernel.weight.dtype)
        x = nn.functional.linear(scaled, kernel.weight.flatten(1), kernel.bias) + embeddings.position_embedding(table)
        mask = None if seen is None else seen[:, None, None]
        out: torch.Tensor = self.vpm.post_layernorm(transformer(inputs_embeds=x, attention_mask=mask).last_hidden_state)
        return out

    def _nearest(self, count: int) -> npt.NDArray[np.int64]:
        """Return the encoder positions of `count` patches, spread evenly (NaViT, arXiv:2307.06304)."""
        bounds = torch.arange(1 / self._num_positions, 1.0, 1 / self._num_positions)
        found = torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / count), bounds, right=True)
        return found.numpy()


def _sines(count: int, rates: int) -> npt.NDArray[np.float32]:
    """Return the sines and then the cosines of `count` positions along a side, float32 [count, 2 * rates]."""
    speeds = 1.0 / 10000 ** (np.arange(rates, dtype=np.float32) / float(rates))
    angles = np.arange(count, dtype=np.float32)[:, None] * speeds.astype(np.float32)
    return np.concatenate([np.sin(angles), np.cos(angles)], -1)


def slices(image: Image.Image, max_slices: int, slice_side: int, patch: int) -> list[Image.Image]:
    """Return the images to encode: the whole image, scaled to about `slice_side` ** 2 pixels, then its slices.

    The slices are in row-major order from the upper left, at a higher resolution than the whole. An image that is not
    larger than one slice has none. Every side is a multiple of `patch` pixels, so aspect ratios are only approximate.
    """
    grid = _grid(image.size, max_slices, slice_side)
    if grid is None:
        return [image.resize(_fit(image.size, slice_side, patch, grow=True), Image.Resampling.BICUBIC)]
    across, down = grid
    whole = image.resize(_fit(image.size, slice_side, patch), Image.Resampling.BICUBIC)
    one = (_multiple(image.width, across) / across, _multiple(image.height, down) / down)
    width, height = _fit(one, slice_side, patch, grow=True)
    fine = image.resize((width * across, height * down), Image.Resampling.BICUBIC)
    boxes = [(x, y, x + width, y + height) for y in range(0, fine.height, height) for x in range(0, fine.width, width)]
    return [whole, *(fine.crop(box) for box in boxes)]


def _grid(size: tuple[int, int], max_slices: int, slice_side: int) -> tuple[int, int] | None:
    """Return the slices across and down, or None for no slices.

    The number of slices is about the image's area divided by that of a slice. Of the grids with such a number, the one
    with the nearest aspect ratio is returned.
    """
    wanted = min(math.ceil(size[0] * size[1] / (slice_side * slice_side)), max_slices)
    if wanted <= 1:
        return None
    shape = math.log(size[0] / size[1])
    counts = [n for n in (wanted - 1, wanted, wanted + 1) if 1 < n <= max_slices]
    grids = [(m, n // m) for n in counts for m in range(1, n + 1) if n % m == 0]
    return min(grids, key=lambda g: abs(shape - math.log(g[0] / g[1])))


def _multiple(length: float, of: int) -> int:
    return max(round(length / of) * of, of)


def _fit(size: tuple[float, float], slice_side: int, patch: int, *, grow: bool = False) -> tuple[int, int]:
    width, height = size
    if grow or width * height > slice_side * slice_side:
        ratio = width / height
        height = int(slice_side / math.sqrt(ratio))
        width = int(height * ratio)
    return _multiple(width, patch), _multiple(height, patch)
