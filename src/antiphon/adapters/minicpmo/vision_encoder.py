"""Frames to embeddings: MiniCPM-o's SigLIP2 encoder for images of any shape, and a resampler to 64 embeddings each.

A large image may be cut into slices, which are encoded in addition to the whole image (LLaVA-UHD, arXiv:2403.11703).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import Idefics2VisionConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer


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

    def forward(self, x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Return the embeddings [num_queries, width] of one image's patches, [rows * columns, patch_width].

        The patches are in row-major order from the upper left. Their positions are computed in each call, so any number
        of rows and columns is allowed.
        """
        values = self.ln_kv(self.kv_proj(x))
        keys = values + _position_embeddings(values.shape[-1], rows, columns).to(values)
        found = self.attn(self.ln_q(self.query)[:, None], keys[:, None], values[:, None], need_weights=False)[0][:, 0]
        out: torch.Tensor = self.ln_post(found) @ self.proj
        return out


def _position_embeddings(width: int, rows: int, columns: int) -> torch.Tensor:
    """Return the sines and cosines of patch positions, [rows * columns, width]: for the column, then for the row."""
    rates = 1.0 / 10000 ** (np.arange(width // 4, dtype=np.float32) / (width / 4.0))

    def along(count: int) -> np.ndarray:
        angles = np.arange(count, dtype=np.float32)[:, None] * rates
        return np.concatenate([np.sin(angles), np.cos(angles)], -1)

    shape = (rows, columns, width // 2)
    both = [np.broadcast_to(along(columns)[None], shape), np.broadcast_to(along(rows)[:, None], shape)]
    return torch.from_numpy(np.concatenate(both, -1).reshape(rows * columns, width)).float()


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
        self._patch, self._slice_side = int(vision.patch_size), slice_side
        # The number of the encoder's positions along each side.
        self._num_positions = int(vision.image_size) // self._patch

    @torch.inference_mode()
    def encode(self, image: Image.Image, max_slices: int) -> list[torch.Tensor]:
        """Return the embeddings, [num_queries, width], of an image and then of its slices, one tensor each.

        An image of more than about `slice_side` ** 2 pixels has up to `max_slices` slices; with 0 or 1 it has none.
        Each tensor is one pass of the encoder. Called in the model's thread.
        """
        return [self._encode(part) for part in slices(image.convert("RGB"), max_slices, self._slice_side, self._patch)]

    def _encode(self, image: Image.Image) -> torch.Tensor:
        table = self.vpm.embeddings
        like = table.patch_embedding.weight
        pixels = torch.from_numpy(np.asarray(image, np.float32) / 255.0 * 2.0 - 1.0).permute(2, 0, 1)
        rows, columns = pixels.shape[1] // self._patch, pixels.shape[2] // self._patch
        patches = table.patch_embedding(pixels[None].to(like.device, like.dtype)).flatten(2).transpose(1, 2)
        positions = (self._nearest(rows)[:, None] * self._num_positions + self._nearest(columns)).flatten()
        x = patches + table.position_embedding(positions.to(like.device))
        x = self.vpm.post_layernorm(self.vpm.encoder(inputs_embeds=x, attention_mask=None).last_hidden_state)
        out: torch.Tensor = self.resampler(x[0], rows, columns)
        return out

    def _nearest(self, count: int) -> torch.Tensor:
        """Return the encoder positions of `count` patches, spread evenly (NaViT, arXiv:2307.06304)."""
        bounds = torch.arange(1 / self._num_positions, 1.0, 1 / self._num_positions)
        return torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / count), bounds, right=True)


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
