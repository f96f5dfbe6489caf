"""Frames to embeddings: the SigLIP2 encoder of MiniCPM-o on images of any shape, and its resampler to 64 embeddings an image.

Large images may be cut into slices that are seen each by itself beside the whole (LLaVA-UHD, arXiv:2403.11703).
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

# Patches a side that the resampler has places for; more are made when they are met.
PLACES = 70


class PatchResampler(nn.Module):
    """A fixed number of queries look at an image's patches once. Parameter names are the checkpoint's."""

    def __init__(self, queries: int, width: int, seen: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(queries, width))
        self.kv_proj = nn.Linear(seen, width, bias=False) if seen != width else nn.Identity()
        self.attn = nn.MultiheadAttention(width, width // 128)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(width, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(torch.zeros(width, width))

    def forward(self, x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """x [rows * columns, seen] to [queries, width]."""
        values = self.ln_kv(self.kv_proj(x))
        keys = values + _places(values.shape[-1], rows, columns).to(values)
        found = self.attn(self.ln_q(self.query)[:, None], keys[:, None], values[:, None], need_weights=False)[0][:, 0]
        out: torch.Tensor = self.ln_post(found) @ self.proj
        return out


def _places(width: int, rows: int, columns: int) -> torch.Tensor:
    """Sines and cosines of where each patch lies: [rows * columns, width], half of it for the column, half for the row."""
    rates = 1.0 / 10000 ** (np.arange(width // 4, dtype=np.float32) / (width / 4.0))

    def along(count: int) -> np.ndarray:
        angles = np.arange(count, dtype=np.float32)[:, None] * rates
        return np.concatenate([np.sin(angles), np.cos(angles)], -1)

    shape = (rows, columns, width // 2)
    both = [np.broadcast_to(along(columns)[None], shape), np.broadcast_to(along(rows)[:, None], shape)]
    return torch.from_numpy(np.concatenate(both, -1).reshape(rows * columns, width)).float()


class VisionEncoder(nn.Module):
    """Parameter names are the checkpoint's."""

    def __init__(self, config: Idefics2VisionConfig, width: int, queries: int, scale: int, *, drop_last: bool) -> None:
        super().__init__()
        encoder: Any = Idefics2VisionTransformer
        self.vpm = encoder._from_config(config, attn_implementation="sdpa")
        if drop_last:
            self.vpm.encoder.layers = self.vpm.encoder.layers[:-1]
        self.resampler = PatchResampler(queries, width, config.hidden_size)
        vision: Any = config
        self._patch, self._scale = int(vision.patch_size), scale
        self._side = int(vision.image_size) // self._patch

    @torch.inference_mode()
    def look(self, image: Image.Image, max_slices: int) -> list[torch.Tensor]:
        """Of an image and, where it is large, of up to `max_slices` slices: [queries, width] each."""
        return [self._look(part) for part in slices(image.convert("RGB"), max_slices, self._scale, self._patch)]

    def _look(self, image: Image.Image) -> torch.Tensor:
        table = self.vpm.embeddings
        like = table.patch_embedding.weight
        pixels = torch.from_numpy(np.asarray(image, np.float32) / 255.0 * 2.0 - 1.0).permute(2, 0, 1)
        rows, columns = pixels.shape[1] // self._patch, pixels.shape[2] // self._patch
        patches = table.patch_embedding(pixels[None].to(like.device, like.dtype)).flatten(2).transpose(1, 2)
        places = (self._nearest(rows)[:, None] * self._side + self._nearest(columns)).flatten().to(like.device)
        x = patches + table.position_embedding(places)
        x = self.vpm.post_layernorm(self.vpm.encoder(inputs_embeds=x, attention_mask=None).last_hidden_state)
        out: torch.Tensor = self.resampler(x[0], rows, columns)
        return out

    def _nearest(self, count: int) -> torch.Tensor:
        """Which of the encoder's places `count` patches take, spread evenly (NaViT, arXiv:2307.06304)."""
        bounds = torch.arange(1 / self._side, 1.0, 1 / self._side)
        return torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / count), bounds, right=True)


def slices(image: Image.Image, most: int, scale: int, patch: int) -> list[Image.Image]:
    """The image at about scale x scale pixels, then its slices from the upper left on, if it is large; sides are multiples of `patch`."""
    grid = _grid(image.size, most, scale)
    if grid is None:
        return [image.resize(_fit(image.size, scale, patch, grow=True), Image.Resampling.BICUBIC)]
    across, down = grid
    whole = image.resize(_fit(image.size, scale, patch), Image.Resampling.BICUBIC)
    one = (_multiple(image.width, across) / across, _multiple(image.height, down) / down)
    width, height = _fit(one, scale, patch, grow=True)
    fine = image.resize((width * across, height * down), Image.Resampling.BICUBIC)
    boxes = [(x, y, x + width, y + height) for y in range(0, fine.height, height) for x in range(0, fine.width, width)]
    return [whole, *(fine.crop(box) for box in boxes)]


def _grid(size: tuple[int, int], most: int, scale: int) -> tuple[int, int] | None:
    """Slices across and down: about as many as the image is larger than the scale, in the grid nearest to its shape."""
    wanted = min(math.ceil(size[0] * size[1] / (scale * scale)), most)
    if wanted <= 1:
        return None
    shape = math.log(size[0] / size[1])
    counts = [n for n in (wanted - 1, wanted, wanted + 1) if 1 < n <= most]
    grids = [(m, n // m) for n in counts for m in range(1, n + 1) if n % m == 0]
    return min(grids, key=lambda g: abs(shape - math.log(g[0] / g[1])))


def _multiple(length: float, of: int) -> int:
    return max(round(length / of) * of, of)


def _fit(size: tuple[float, float], scale: int, patch: int, *, grow: bool = False) -> tuple[int, int]:
    width, height = size
    if grow or width * height > scale * scale:
        ratio = width / height
        height = int(scale / math.sqrt(ratio))
        width = int(height * ratio)
    return _multiple(width, patch), _multiple(height, patch)
